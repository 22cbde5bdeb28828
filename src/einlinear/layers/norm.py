"""Weight normalisation: factors that may shrink but not grow, of one layer or of many experts.

A factor M is used as s M with s = min(1, std / rms(M)). Experts have a scale s each: it multiplies
the weights of their tokens, so normalised factors are never written. If the rms is over all experts
together, they share one scale, which multiplies the weights of all tokens.

Legend: f factors, e experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normalised(weight: Tensor, std: float) -> Tensor:
    """M / max(1, rms(M) / std); the mean square is clamped before the root, so 0 gives no NaN."""
    square = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    excess = (square.square().mean() / std**2).clamp(min=1.0)
    return weight * excess.rsqrt().to(weight.dtype)


def expert_scales(factors: Sequence[Tensor], stds: Sequence[float]) -> Tensor:
    """The scale of each factor of each expert: min(1, std / rms)."""
    rows = []
    for factor, std in zip(factors, stds, strict=True):
        numbers = factor.flatten(1)
        dtype = torch.promote_types(factor.dtype, torch.float32)
        norms = torch.linalg.vector_norm(numbers, dim=1, dtype=dtype)
        excess = norms / (std * numbers.shape[1] ** 0.5)
        rows.append(excess.clamp(min=1.0).reciprocal())
    return torch.stack(rows)


def common_scales(squares_f: Tensor, numbers: Sequence[int], stds: Sequence[float]) -> Tensor:
    """The scale of each factor that all experts share: min(1, std / rms); differentiable.

    Args:
        squares_f: the sum of squares of each factor, over all experts.
        numbers: how many numbers each factor has, over all experts.
        stds: the standard deviation of each factor.
    """
    limits = [number * std**2 for number, std in zip(numbers, stds, strict=True)]
    return (squares_f / _numbers_like(squares_f, limits)).clamp(min=1.0).rsqrt()


def normalised_experts(factors: Sequence[Tensor], stds: Sequence[float]) -> list[Tensor]:
    """The normalised factors of all experts; differentiable."""
    scales_fe = expert_scales(factors, stds)
    return [
        factor * scales_e.view(-1, *[1] * (factor.dim() - 1)).to(factor.dtype)
        for factor, scales_e in zip(factors, scales_fe, strict=True)
    ]


def expert_shrinkage(factors: Sequence[Tensor], stds: Sequence[float], scales_fe: Tensor) -> Tensor:
    """1 / (n rms²) of each factor of each expert where it is scaled down, else 0.

    The gradient of a factor M through its scale s is -c / (n rms(M)²) M where s < 1. c is the
    gradient of the experts' product with respect to M, times M; it is the same for all factors of
    an expert, since its matrix is linear in each.
    """
    numbers = [factor[0].numel() * std**2 for factor, std in zip(factors, stds, strict=True)]
    shrink_fe = scales_fe.square() / _numbers_like(scales_fe, numbers).unsqueeze(-1)
    return torch.where(scales_fe < 1, shrink_fe, 0.0)


def _numbers_like(tensor: Tensor, numbers: Sequence[float]) -> Tensor:
    """Numbers in a tensor of the same dtype and device, filled in there.

    A tensor made of a list is copied to a GPU, and the program waits for the copy.
    """
    return torch.stack([tensor.new_full((), number) for number in numbers])
