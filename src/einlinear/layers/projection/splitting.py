"""Factors of any structure by splitting a weight, one factor after the other, with SVDs.

The weight, with one axis per edge at X or Y, is split into the first factor and the rest: the axes
that both have select a block, those of the first factor are its rows, the others its columns, and
the edges that join the two are its rank. The SVD of every block is the best split. The rest is
split in the same way. For two factors, whatever their edges, this is the closest weight of the
structure in the Frobenius norm: truncated SVD for low rank, [V93] for Kronecker products, blockwise
SVD for Monarch and BTT. For chains of more factors it is TT-SVD [O11], near the best; for others a
start for alternating least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from einlinear.structures.plan import Plan


def split_weight(plan: Plan, weight_oi: Tensor) -> dict[str, Tensor]:
    """The factors, by name, with the axes of the plan, from a weight of the padded widths."""
    axes = [*plan.y_edges, *plan.x_edges]
    rest = weight_oi.reshape([plan.sizes[edge] for edge in axes])
    factors: dict[str, Tensor] = {}
    names = sorted(plan.factor_edges)
    for i, name in enumerate(names[:-1]):
        found, axes, rest = _peel(plan, rest, axes, name, names[i + 1 :])
        factors[name] = found
    last = names[-1]
    factors[last] = _arranged(rest, axes, plan.factor_edges[last])
    return factors


def _peel(
    plan: Plan, tensor: Tensor, axes: Sequence[str], name: str, others: Sequence[str]
) -> tuple[Tensor, list[str], Tensor]:
    """One factor, and the axes and the tensor that remain for the others."""
    sizes = plan.sizes
    later = set(others)
    batch = [edge for edge in axes if name in edge and later & set(edge)]
    rows = [edge for edge in axes if name in edge and not later & set(edge)]
    columns = [edge for edge in axes if name not in edge]
    ranks = [
        edge
        for edge in plan.factor_edges[name]
        if edge not in axes and not set("XY") & set(edge) and later & set(edge)
    ]
    shape = [prod(sizes[edge] for edge in group) for group in (batch, rows, columns)]
    blocks = _arranged(tensor, axes, (*batch, *rows, *columns)).reshape(shape)
    left, right = truncated(blocks, prod(sizes[edge] for edge in ranks))
    factor = left.reshape([sizes[edge] for edge in (*batch, *rows, *ranks)])
    remaining = [*batch, *ranks, *columns]
    rest = right.reshape([sizes[edge] for edge in remaining])
    found = _arranged(factor, (*batch, *rows, *ranks), plan.factor_edges[name])
    return found, remaining, rest


def truncated(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """L and R with L R the closest matrices of a rank, for a batch of them.

    The singular values are divided equally between the two; a rank that no matrix of this shape can
    have is filled with zeros.
    """
    u, s, vh = torch.linalg.svd(blocks, full_matrices=False)
    kept = min(rank, s.shape[-1])
    root = s[..., :kept].sqrt()
    left = blocks.new_zeros(*blocks.shape[:-1], rank)
    right = blocks.new_zeros(*blocks.shape[:-2], rank, blocks.shape[-1])
    left[..., :kept] = u[..., :kept] * root.unsqueeze(-2)
    right[..., :kept, :] = root.unsqueeze(-1) * vh[..., :kept, :]
    return left, right


def _arranged(tensor: Tensor, axes: Sequence[str], order: Sequence[str]) -> Tensor:
    """A tensor with its axes in another order."""
    return tensor.permute([axes.index(edge) for edge in order])
