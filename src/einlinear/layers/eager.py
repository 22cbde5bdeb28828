"""Training on the engine without torch's operators in between, which saves time in small layers.

Legend: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from einlinear.layers.engine import compiled
from einlinear.layers.norm import normalised
from einlinear.layers.opaque import only_wanted
from einlinear.layers.operators import batched_gradients
from einlinear.layers.reference import reference_gradients
from einlinear.structures.plan import Plan


def multiply_eagerly(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None,
) -> Tensor:
    """W x + b by the engine, differentiable; factors are normalised if given stds.

    Only for tensors that `compiled.is_direct` accepts.
    """
    y_to: Tensor = _Eager.apply(plan, stds, x_td, bias, *factors)  # type: ignore[no-untyped-call]
    return y_to


class _Eager(torch.autograd.Function):
    """Both passes inside the engine; second derivatives by the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        stds: Sequence[float] | None,
        x_td: Tensor,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        y_to, scales = compiled.compiled_forward(plan, x_td, factors, bias, stds)
        # With frozen factors the input is not needed: it may be changed or freed.
        ctx.has_x = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(*([x_td] if ctx.has_x else []), *factors)
        ctx.plan, ctx.stds, ctx.scales = plan, stds, scales
        return y_to

    @staticmethod
    def backward(ctx: Any, grad_to: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        x_td, factors = (saved[0], saved[1:]) if ctx.has_x else (None, saved)
        wanted = ctx.needs_input_grad[2:]
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled() or not compiled.is_direct(grad_to, factors):
            if x_td is None:  # only factors' gradients depend on it
                x_td = factors[0].new_zeros(grad_to.shape[-2], ctx.plan.d_in)
            grads = batched_gradients(
                lambda grad: _slow_gradients(ctx.plan, x_td, factors, grad, ctx.stds), grad_to
            )
        else:
            norm = None if ctx.stds is None else (ctx.stds, ctx.scales)
            grads = compiled.compiled_backward(ctx.plan, x_td, factors, grad_to, wanted, norm)
        return None, None, *only_wanted(grads, wanted)


def _slow_gradients(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    grad_to: Tensor,
    stds: Sequence[float] | None,
) -> list[Tensor]:
    """The gradients of input, bias and factors by the reference."""
    if stds is None:
        return reference_gradients(plan, x_td, factors, grad_to)
    pairs = zip(factors, stds, strict=True)
    used = [torch.func.vjp(partial(normalised, std=std), factor) for factor, std in pairs]
    grads = reference_gradients(plan, x_td, [factor for factor, *_ in used], grad_to)
    through = [pull_back(grad) for (_, pull_back, *_), grad in zip(used, grads[2:], strict=True)]
    return [*grads[:2], *(grad for (grad,) in through)]
