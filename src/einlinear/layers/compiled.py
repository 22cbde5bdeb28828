"""The compiled variant: tensors handed to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
    return (
        dtype in DTYPES
        and _num_modes() == 0
        and (_num_function_modes() == 0 or _only_sets_the_device())
        and _transform() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def _only_sets_the_device() -> bool:
    """Whether torch.set_default_device, which concerns only new tensors, is all that watches."""
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(isinstance(mode, DeviceContext) for mode in stack)


def is_usable(x: Tensor) -> bool:
    """Whether the engine can multiply such rows here."""
    return IS_AVAILABLE and x.is_cpu and x.dtype in DTYPES


@lru_cache(maxsize=16384)
def _shapes(plan: Plan) -> list[torch.Size]:
    shapes = plan.factor_shapes
    return [torch.Size(shapes[step.factor]) for step in plan.steps]


def _check(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], others: Sequence[tuple[Tensor, torch.Size]]
) -> None:
    """Raise unless everything is what the engine will take it for: it reads bare addresses."""
    wanted = [(x_td, torch.Size((x_td.shape[0], plan.d_in)))]
    wanted += [*zip(factors, _shapes(plan), strict=True), *others]
    dtype = x_td.dtype
    for tensor, shape in wanted:
        is_right = tensor.is_cpu and tensor.dtype == dtype and tensor.shape == shape
        if not is_right or (tensor.data_ptr() == 0 and tensor.numel()):
            raise EinlinearError(
                what=f"the engine was given {tuple(tensor.shape)}, {tensor.dtype}, on "
                f"{tensor.device}" + ("" if tensor.numel() == 0 or not is_right else ", no memory"),
                rule=f"here it takes {tuple(shape)}, {dtype}, in the memory of the CPU",
                fix="give input, factors and bias the dtype and device of each other, and the "
                "shapes of the plan",
            )


def forward(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None = None,
) -> Tensor:
    """W x + b for rows of input; factors are normalised here if given stds."""
    _check(plan, x_td, factors, [] if bias is None else [(bias, torch.Size((plan.d_out,)))])
    x_td, factors = rows(x_td), contiguous(factors)
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    tokens = x_td.shape[0]
    y_te = x_td.new_empty(tokens, plan.d_out)
    engine.forward(
        plan,
        _NAMES[x_td.dtype],
        tokens,
        x_td.data_ptr(),
        x_td.stride(0),
        [factor.data_ptr() for factor in factors],
        0 if bias is None else bias.data_ptr(),
        y_te.data_ptr(),
        plan.d_out,
        stds=stds,
        threads=torch.get_num_threads(),
    )
    return y_te


def backward(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    grad_te: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, bias and factors, as far as wanted."""
    _check(plan, x_td, factors, [(grad_te, torch.Size((x_td.shape[0], plan.d_out)))])
    x_td, grad_te = rows(x_td), rows(grad_te)
    factors = contiguous(factors)
    shapes = [x_td.shape, (plan.d_out,), *(factor.shape for factor in factors)]
    grads = [
        x_td.new_empty(shape) if flag else None for shape, flag in zip(shapes, wanted, strict=True)
    ]
    grad_x, grad_bias, *grad_factors = (0 if grad is None else grad.data_ptr() for grad in grads)
    engine.backward(
        plan,
        _NAMES[x_td.dtype],
        x_td.shape[0],
        x_td.data_ptr(),
        x_td.stride(0),
        [factor.data_ptr() for factor in factors],
        grad_te.data_ptr(),
        grad_te.stride(0),
        grad_x,
        plan.d_in,
        grad_factors,
        grad_bias,
        threads=torch.get_num_threads(),
    )
    return grads
