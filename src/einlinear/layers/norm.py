"""Weight normalisation: factors that may shrink but not grow, alone and inside the engine.

A factor M is used as s M with s = min(1, std / rms(M)). The engine takes s from the sums of squares
of the factors and applies it to the output, so that normalised factors are never written.

Legend: x_td rows of input, y_te rows of output; t is tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from einlinear.layers import compiled
from einlinear.layers.operators import batched_gradients, gradients
from einlinear.structures.plan import Plan


def normalised(weight: Tensor, std: float) -> Tensor:
    """M / max(1, rms(M) / std); the mean square is clamped before the root, so 0 gives no NaN."""
    square = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    excess = (square.square().mean() / std**2).clamp(min=1.0)
    return weight * excess.rsqrt().to(weight.dtype)


def multiply_direct(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    stds: Sequence[float] | None,
) -> Tensor:
    """W x + b by the engine, past torch's operators, and its gradients; normalised, given stds."""
    y_te: Tensor = _Direct.apply(plan, stds, x_td, bias, *factors)  # type: ignore[no-untyped-call]
    return y_te


class _Direct(torch.autograd.Function):
    """Both passes inside the engine. Second derivatives go step by step, through `normalised`."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        stds: Sequence[float] | None,
        x_td: Tensor,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        y_te, scales = compiled.forward_with_scales(plan, x_td, factors, bias, stds)
        # Frozen factors need no input, which then may be changed or given up.
        ctx.has_x = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(*([x_td] if ctx.has_x else []), *factors)
        ctx.plan, ctx.stds, ctx.scales = plan, stds, scales
        return y_te

    @staticmethod
    def backward(ctx: Any, grad_te: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        x_td, factors = (saved[0], saved[1:]) if ctx.has_x else (None, saved)
        wanted = ctx.needs_input_grad[2:]
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled() or not compiled.is_direct(grad_te, factors):
            grads = _by_steps(ctx.plan, x_td, factors, ctx.stds, grad_te)
        else:
            norm = None if ctx.stds is None else (ctx.stds, ctx.scales)
            grads = compiled.backward(ctx.plan, x_td, factors, grad_te, wanted, norm)
        kept = (grad if flag else None for grad, flag in zip(grads, wanted, strict=True))
        return None, None, *kept


def _by_steps(
    plan: Plan,
    x_td: Tensor | None,
    factors: Sequence[Tensor],
    stds: Sequence[float] | None,
    grad_te: Tensor,
) -> list[Tensor]:
    """The gradients of input, bias and factors by operations of torch."""
    if x_td is None:  # no factor's gradient is wanted
        x_td = factors[0].new_zeros(grad_te.shape[-2], plan.d_in)
    used = list(factors)
    if stds is not None:
        used = [normalised(m, std) for m, std in zip(factors, stds, strict=True)]

    def through(grads: list[Tensor]) -> list[Tensor]:
        if stds is None:
            return grads
        triples = zip(factors, stds, grads[2:], strict=True)
        return [*grads[:2], *(_through(*triple) for triple in triples)]

    if compiled.is_batched(grad_te):
        return batched_gradients(plan, [x_td, *used], grad_te, through)
    return through(gradients(plan, [x_td, *used], grad_te)[0])


def _through(weight: Tensor, std: float, grad: Tensor) -> Tensor:
    """The gradient of M, given that of s M.

    s (g - <g, M> / (n rms(M)^2) M)        without the second term where s = 1
    """
    mean = weight.square().mean()
    at_least = mean.clamp(min=std**2)
    common = (grad * weight).sum() / (weight.numel() * at_least)
    less = torch.where(mean > std**2, common, 0.0)
    return (at_least.rsqrt() * std) * (grad - less * weight)
