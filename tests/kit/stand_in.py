"""A stand-in for a GPU: the meta device, whose tensors have no numbers that anyone could read.

A program that does not wait for a GPU reads no number from it: no `.item()`, no `.tolist()`, no
branch on a tensor, no shape that depends on numbers, no copy to the CPU. On the meta device all of
these raise. Copies to the device are recorded, because one from a plain list, or without
non_blocking, waits too. Inside the operators of the package, which torch does not look into, the
same holds: their bodies run on the meta device, instead of what torch.compile takes for them.
"""

from contextlib import contextmanager

import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from einlinear.layers.moe import operators
from einlinear.models.mup import muon
from einlinear.training.devices.distributed import Place

DEVICE = torch.device("meta")
PLACE = Place(0, 1, DEVICE)
_LISTS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class WaitedError(Exception):
    """The program has done what would wait for a GPU."""


class Bodies(TorchDispatchMode):
    """Runs the bodies of our operators, and refuses copies to the device that wait."""

    def __init__(self):
        super().__init__()
        self.copies = 0
        self.bodies = {
            torch.ops.einlinear.experts.default: operators._experts,
            torch.ops.einlinear.experts_gradients.default: operators._experts_gradients,
        }

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function in self.bodies:
            with torch._C._EnableTorchFunction(), Lists(), self:
                return self.bodies[function](*arguments, **options)
        if function in _COPIES:
            self.check(function, arguments, options)
        return function(*arguments, **options)

    def check(self, function, arguments, options):
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        target = tensors[0].device if len(tensors) > 1 else options.get("device", DEVICE)
        source = tensors[-1]
        if source.device.type == "cpu" and torch.device(target) == DEVICE:
            waits = not (options.get("non_blocking") or arguments[len(tensors) :] == (True,))
            if waits and source.dim():
                raise WaitedError(f"{function} copies {tuple(source.shape)} from the CPU")
            self.copies += 1


class Lists(TorchFunctionMode):
    """Refuses tensors that are made of lists on the device."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function in _LISTS:
            like = arguments[0].device if function is torch.Tensor.new_tensor else "cpu"
            if torch.device(options.get("device") or like) == DEVICE:
                raise WaitedError(f"{function.__name__} makes a tensor of a list")
        return function(*arguments, **options)


@contextmanager
def watched():
    """Within the block, what would wait for a GPU raises; yields what counts the copies to it."""
    known = optimizer._get_fused_kernels_supported_devices
    fused = muon._FUSED
    optimizer._get_fused_kernels_supported_devices = lambda: [*known(), DEVICE.type]
    muon._FUSED = (*fused, DEVICE.type)
    try:
        with Lists(), Bodies() as bodies:
            yield bodies
    finally:
        optimizer._get_fused_kernels_supported_devices, muon._FUSED = known, fused
