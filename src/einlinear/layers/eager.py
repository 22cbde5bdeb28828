"""Training on the engine without torch's operators in between, which saves time in small layers.

Legend: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from einlinear.layers.engine import compiled
from einlinear.layers.norm import normalised
from einlinear.layers.opaque import only_wanted
from einlinear.layers.operators import batched_gradients
from einlinear.layers.reference import reference_gradients
from einlinear.layers.strided import contiguous
from einlinear.structures.plan import Plan


def multiply_eagerly(
    call: compiled.LayerCall, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """W x + b by the engine, differentiable; factors are normalised if the call has stds.

    Only for tensors that `compiled.is_direct` accepts, and factors and bias of the call.
    """
    return _apply(call, x, bias, *factors)


class _Eager(torch.autograd.Function):
    """Both passes inside the engine; second derivatives by the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        call: compiled.LayerCall,
        x: Tensor,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        return call.forward(x, save_call(ctx, call, x, factors))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        return saved_gradients(ctx, grad_y, _engine_gradients)


_apply = compiled.apply_directly(_Eager)


def _engine_gradients(
    ctx: Any,
    call: compiled.LayerCall,
    x: Tensor | None,
    factors: Sequence[Tensor],
    grad_y: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    return call.backward(x, factors, grad_y, wanted, ctx.scales)


def save_call(ctx: Any, call: compiled.LayerCall, x: Tensor, factors: Sequence[Tensor]) -> int:
    """Save what `saved_gradients` reads; return where the engine writes scales, 0 if it has none.

    With frozen factors the input is not needed: it may be changed or freed.
    """
    ctx.call = call
    ctx.has_x = True in ctx.needs_input_grad[3:]
    if ctx.has_x:
        ctx.save_for_backward(x, *factors)
    else:
        ctx.save_for_backward(*factors)
    ctx.scales = None if call.stds is None else array("d", call.stds)
    return 0 if ctx.scales is None else ctx.scales.buffer_info()[0]


def saved_gradients(
    ctx: Any, grad_y: Tensor, make: Callable[..., list[Tensor | None]]
) -> tuple[Tensor | None, ...]:
    """What the backward pass of a function (call, x, bias, *factors) returns.

    `make` computes the gradients from what the forward pass saved; the reference does if they are
    to be differentiated again, or if a mode or transform is watching.
    """
    saved: Sequence[Tensor] = ctx.saved_tensors
    x, factors = (saved[0], saved[1:]) if ctx.has_x else (None, saved)
    call: compiled.LayerCall = ctx.call
    wanted = ctx.needs_input_grad[1:]
    if torch.is_grad_enabled() or not compiled.is_direct(grad_y, ()):
        return None, *_slow_gradients(call, x, factors, grad_y, wanted)
    if not call.has_factors(factors):  # saved elsewhere and read back
        factors = contiguous(factors)
        call = compiled.LayerCall(call.plan, factors, None, call.stds)
    return None, *make(ctx, call, x, factors, grad_y, wanted)


def _slow_gradients(
    call: compiled.LayerCall,
    x: Tensor | None,
    factors: Sequence[Tensor],
    grad_y: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, bias and factors by the reference."""

    def make(grad_y: Tensor) -> list[Tensor]:
        grad_to = grad_y.reshape(-1, call.d_out)
        if x is None:  # only factors' gradients depend on it
            x_td = factors[0].new_zeros(grad_to.shape[0], call.d_in)
        else:
            x_td = x.reshape(-1, call.d_in)
        grad_td, *others = _reference(call.plan, x_td, factors, grad_to, call.stds)
        return [grad_td.reshape(*grad_y.shape[:-1], call.d_in), *others]

    return only_wanted(batched_gradients(make, grad_y), wanted)


def _reference(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    grad_to: Tensor,
    stds: Sequence[float] | None,
) -> list[Tensor]:
    """The gradients of input, bias and factors, through normalisation if there are stds."""
    if stds is None:
        return reference_gradients(plan, x_td, factors, grad_to)
    pairs = zip(factors, stds, strict=True)
    used = [torch.func.vjp(partial(normalised, std=std), factor) for factor, std in pairs]
    grads = reference_gradients(plan, x_td, [factor for factor, *_ in used], grad_to)
    through = [pull_back(grad) for (_, pull_back, *_), grad in zip(used, grads[2:], strict=True)]
    return [*grads[:2], *(grad for (grad,) in through)]
