"""The compiled variant: tensors handed to the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

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
except AttributeError:  # pragma: no cover - a version of torch where they have other names
    _CAN_BE_DIRECT = False


def is_direct(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether the engine may read these tensors itself, past torch's operators, to save time."""
    if not _CAN_BE_DIRECT or torch.compiler.is_compiling():
        return False
    dtype = x.dtype
    for tensor in (x, *tensors):
        is_plain = type(tensor) in _PLAIN and tensor.dtype == dtype and not tensor.is_neg()
        if not (is_plain and tensor.layout is torch.strided):
            return False
    return (
        x.is_cpu
        and dtype in DTYPES
        and _num_modes() == 0
        and _num_function_modes() == 0
        and _transform() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def forward(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None = None,
) -> Tensor:
    """W x + b for rows of input; factors are normalised here if given stds."""
    x_td, factors = rows(x_td), contiguous(factors)
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
