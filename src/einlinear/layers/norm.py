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
from einlinear.layers.operators import gradients
from einlinear.structures.plan import Plan


def normalised(weight: Tensor, std: float) -> Tensor:
    """M / max(1, rms(M) / std); the mean square is clamped before the root, so 0 gives no NaN."""
    square = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    excess = (square.square().mean() / std**2).clamp(min=1.0)
    return weight * excess.rsqrt().to(weight.dtype)


def multiply_normalised(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], bias: Tensor | None, stds: Sequence[float]
) -> Tensor:
    """W x + b by the engine, past torch's operators, with factors normalised, and its gradients."""
    y_te: Tensor = _Normalised.apply(plan, stds, x_td, bias, *factors)  # type: ignore[no-untyped-call]
    return y_te


class _Normalised(torch.autograd.Function):
    """Both passes inside the engine. Second derivatives go step by step, through `normalised`."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        stds: Sequence[float],
        x_td: Tensor,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        y_te, scales = compiled.forward_with_scales(plan, x_td, factors, bias, stds)
        ctx.save_for_backward(x_td, *factors)
        ctx.plan, ctx.stds, ctx.scales = plan, stds, scales
        return y_te

    @staticmethod
    def backward(ctx: Any, grad_te: Tensor) -> tuple[Any, ...]:
        x_td, *factors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled() or not compiled.is_direct(grad_te, ()):
            used = [normalised(m, std) for m, std in zip(factors, ctx.stds, strict=True)]
            found, _ = gradients(ctx.plan, [x_td, *used], grad_te)
            triples = zip(factors, ctx.stds, found[2:], strict=True)
            grads = [*found[:2], *(_through(*triple) for triple in triples)]
        else:
            norm = ctx.stds, ctx.scales
            grads = compiled.backward(ctx.plan, x_td, factors, grad_te, wanted, norm)
        kept = (grad if flag else None for grad, flag in zip(grads, wanted, strict=True))
        return None, None, *kept


def _through(weight: Tensor, std: float, grad: Tensor) -> Tensor:
    """The gradient of M, given that of s M.

    s (g - <g, M> / (n rms(M)^2) M)        without the second term where s = 1
    """
    mean = weight.square().mean()
    at_least = mean.clamp(min=std**2)
    common = (grad * weight).sum() / (weight.numel() * at_least)
    less = torch.where(mean > std**2, common, 0.0)
    return (at_least.rsqrt() * std) * (grad - less * weight)
