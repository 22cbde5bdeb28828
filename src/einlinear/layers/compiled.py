"""The compiled variant: tensors handed to the engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from einlinear.errors import EinlinearError
from einlinear.layers import engine
from einlinear.layers.strided import contiguous, rows
from einlinear.structures.plan import Plan

IS_AVAILABLE = engine.is_available()

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
DTYPES = frozenset(_NAMES)
_PLAIN = (Tensor, Parameter)

# Whether something of torch watches or changes every operator: modes, transforms, tracing.
# These are not part of torch's public names; without them everything goes through operators.
try:
    _num_modes = torch._C._len_torch_dispatch_stack
    _num_function_modes = torch._C._len_torch_function_stack
    _transform = torch._C._functorch.peek_interpreter_stack
    _tracing = torch._C._get_tracing_state
    _has_storage = torch._C._has_storage
    _CAN_BE_DIRECT = forward_ad._current_level < 0
    from torch.utils._device import DeviceContext
except (
    AttributeError,
    ImportError,
):  # pragma: no cover - a version of torch where they have other names
    _CAN_BE_DIRECT = False


def is_direct(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether the engine may read these tensors itself, past torch's operators, to save time."""
    if not _CAN_BE_DIRECT or torch.compiler.is_compiling():
        return False
    dtype = x.dtype
    for tensor in (x, *tensors):
        is_plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.dtype == dtype
        if not is_plain or tensor.is_neg() or tensor.layout is not torch.strided:
            return False
        if not _has_storage(tensor):  # batched by is_grads_batched, which no transform shows
            return False
    return (
        dtype in DTYPES
        and _num_modes() == 0
        and (_num_function_modes() == 0 or _only_sets_the_device())
        and _transform() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def is_batched(tensor: Tensor) -> bool:
    """Whether autograd's own way of batching gradients (is_grads_batched) made the tensor."""
    if not _CAN_BE_DIRECT or torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def _only_sets_the_device() -> bool:
    """Whether torch.set_default_device, which concerns only new tensors, is all that watches."""
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in stack)


def is_usable(x: Tensor) -> bool:
    """Whether the engine can multiply such rows here."""
    return IS_AVAILABLE and x.is_cpu and x.dtype in DTYPES


class _Sizes:
    """The shapes of a plan's factors and bias, laid out once."""

    def __init__(self, plan: Plan):
        shapes = plan.factor_shapes
        self.plan = plan
        self.factors = [torch.Size(shapes[step.factor]) for step in plan.steps]
        self.bias = torch.Size((plan.d_out,))


# By identity: hashing a plan takes longer than a small layer. Holding the plan keeps its id.
_sizes: dict[int, _Sizes] = {}
_MOST_SIZES = 4096


def _sizes_of(plan: Plan) -> _Sizes:
    if len(_sizes) >= _MOST_SIZES:
        _sizes.clear()
    return _sizes.setdefault(id(plan), _Sizes(plan))


def name_of(dtype: torch.dtype) -> str:
    """What the engine calls a dtype."""
    return _NAMES[dtype]


def address_of(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> int:
    """Where the tensor is, if it is what the engine will take it for: it reads bare addresses."""
    address = tensor.data_ptr()
    is_right = tensor.shape == shape and tensor.dtype == dtype and tensor.is_cpu
    if not is_right or (address == 0 and tensor.numel()):
        raise EinlinearError(
            what=f"the engine was given {tuple(tensor.shape)}, {tensor.dtype}, on "
            f"{tensor.device}" + (", no memory" if is_right else ""),
            rule=f"here it takes {tuple(shape)}, {dtype}, in the memory of the CPU",
            fix="give input, factors and bias the dtype and device of each other, and the "
            "shapes of the plan",
        )
    return address


class Inference:
    """A layer's call without gradients, with all that can be known of its parameters beforehand."""

    def __init__(
        self,
        plan: Plan,
        factors: Sequence[Tensor],
        bias: Tensor | None,
        stds: Sequence[float] | None,
    ):
        sizes = _sizes.get(id(plan)) or _sizes_of(plan)
        self.plan, self.stds = plan, stds
        self.dtype, self.width = factors[0].dtype, torch.Size((plan.d_in,))
        # Not held: parameters that the layer has given up must go.
        self._known = [ref(tensor) for tensor in (factors if bias is None else [*factors, bias])]
        self._shapes = [*sizes.factors, sizes.bias]
        self.factors_at = [
            address_of(factor, shape, self.dtype)
            for factor, shape in zip(factors, sizes.factors, strict=True)
        ]
        self.bias_at = 0 if bias is None else address_of(bias, sizes.bias, self.dtype)
        self._addresses = [*self.factors_at, self.bias_at]
        self._doubles = array("d", stds or ())
        self.stds_at = self._doubles.buffer_info()[0] if stds else 0
        # Kept by the layer: what it found for numbers of tokens, given its choices.
        self.variants: dict[int, str] = {}
        self.choices: dict[str, str] = {}

    @staticmethod
    def fits(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> bool:
        """Whether such a call can be prepared at all."""
        tensors = factors if bias is None else [*factors, bias]
        return is_direct(x, tensors) and all(tensor.is_contiguous() for tensor in tensors)

    def is_current(
        self, factors: Sequence[Tensor], bias: Tensor | None, stds: Sequence[float] | None
    ) -> bool:
        """Whether the parameters are the same, in the same place, and of the same form."""
        tensors = factors if bias is None else [*factors, bias]
        if stds is not self.stds or len(tensors) != len(self._known):
            return False
        for tensor, known, shape, address in zip(
            tensors, self._known, self._shapes, self._addresses, strict=False
        ):
            if (
                tensor is not known()
                or tensor.data_ptr() != address
                or tensor.dtype != self.dtype
                or tensor.shape != shape
                or not tensor.is_contiguous()
            ):
                return False
        return True

    def __call__(self, x_td: Tensor) -> Tensor:
        """W x + b for rows of input of the layer's dtype and width."""
        plan, tokens, x_td = self.plan, x_td.shape[0], rows(x_td)
        y_te = x_td.new_empty(tokens, plan.d_out)
        engine.forward(
            plan,
            _NAMES[self.dtype],
            tokens,
            x_td.data_ptr(),
            x_td.stride(0),
            self.factors_at,
            self.bias_at,
            y_te.data_ptr(),
            plan.d_out,
            stds_at=self.stds_at,
            threads=torch.get_num_threads(),
        )
        return y_te


def forward(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None = None,
) -> Tensor:
    """W x + b for rows of input; factors are normalised here if given stds."""
    return forward_with_scales(plan, x_td, factors, bias, stds)[0]


def forward_with_scales(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None,
) -> tuple[Tensor, tuple[float, ...] | None]:
    """The same, with what normalisation multiplied every factor by."""
    sizes = _sizes.get(id(plan)) or _sizes_of(plan)
    x_td, factors, dtype = rows(x_td), contiguous(factors), x_td.dtype
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    tokens = x_td.shape[0]
    addresses = [
        address_of(factor, shape, dtype)
        for factor, shape in zip(factors, sizes.factors, strict=True)
    ]
    x_at = address_of(x_td, torch.Size((tokens, plan.d_in)), dtype)
    bias_at = 0 if bias is None else address_of(bias, sizes.bias, dtype)
    y_te = x_td.new_empty(tokens, plan.d_out)
    scales = engine.forward(
        plan,
        _NAMES[dtype],
        tokens,
        x_at,
        x_td.stride(0),
        addresses,
        bias_at,
        y_te.data_ptr(),
        plan.d_out,
        stds=stds,
        threads=torch.get_num_threads(),
    )
    return y_te, scales


def backward(
    plan: Plan,
    x_td: Tensor | None,
    factors: Sequence[Tensor],
    grad_te: Tensor,
    wanted: Sequence[bool],
    norm: tuple[Sequence[float], Sequence[float]] | None = None,
) -> list[Tensor | None]:
    """The gradients of input, bias and factors, as far as wanted.

    norm: the stds of the factors and the scales of the forward pass, if it normalised.
    x_td may be None where no factor's gradient is wanted.
    """
    sizes = _sizes.get(id(plan)) or _sizes_of(plan)
    grad_te, factors, dtype = rows(grad_te), contiguous(factors), grad_te.dtype
    tokens = grad_te.shape[0]
    x_shape = torch.Size((tokens, plan.d_in))
    x_td = None if x_td is None else rows(x_td)
    addresses = [
        address_of(factor, shape, dtype)
        for factor, shape in zip(factors, sizes.factors, strict=True)
    ]
    x_at = 0 if x_td is None else address_of(x_td, x_shape, dtype)
    grad_at = address_of(grad_te, torch.Size((tokens, plan.d_out)), dtype)
    shapes = [x_shape, sizes.bias, *sizes.factors]
    grads = [
        grad_te.new_empty(shape) if flag else None
        for shape, flag in zip(shapes, wanted, strict=True)
    ]
    grad_x, grad_bias, *grad_factors = (0 if grad is None else grad.data_ptr() for grad in grads)
    engine.backward(
        plan,
        _NAMES[dtype],
        tokens,
        x_at,
        plan.d_in if x_td is None else x_td.stride(0),
        addresses,
        grad_at,
        grad_te.stride(0),
        grad_x,
        plan.d_in,
        grad_factors,
        grad_bias,
        stds=None if norm is None else norm[0],
        scales=None if norm is None else norm[1],
        threads=torch.get_num_threads(),
    )
    return grads
