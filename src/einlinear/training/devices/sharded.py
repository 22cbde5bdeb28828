"""A model sharded over devices by FSDP2; a module of its own because FSDP2 loads slowly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from einlinear.training.devices.distributed import Place, Spread


class Sharded(Spread):
    """A model of which every device holds a shard; blocks are gathered when they are used."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        super().__init__(model)
        mesh = init_device_mesh(place.device.type, (place.count,))
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        """Skip the exchange before the last part."""
        assert isinstance(self.module, FSDPModule), "fully_shard changes the class of a module"
        self.module.set_requires_gradient_sync(is_last)
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a tensor from all devices; every process must call this."""
        return super().whole(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def like(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Shard a tensor like another one."""
        if not isinstance(other, DTensor):
            return super().like(tensor, other)
        tensor = tensor.to(other.device_mesh.device_type)
        return distribute_tensor(tensor, other.device_mesh, other.placements)

    def local(self, tensor: Tensor) -> Tensor:
        """The shard of this process."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
