"""The multiply by plain matrix multiplies and reshapes: what an exported program holds.

A program made by torch.export is read by others: ONNX, AOTInductor, ExecuTorch. They know torch's
own operators, not ours, and few of them know einsum. So while torch exports, a layer is traced this
way, whatever its variant, and the program runs where einlinear is not installed.

Legend: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from einlinear.layers.strided import padded
from einlinear.structures.plan import Plan

_TOKENS = "t"  # the axis of tokens, among those of a plan


def is_exporting() -> bool:
    """Whether torch.export or torch.onnx is tracing; False in torch 2.6, which cannot tell."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def multiply_plainly(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """W x + b for rows of input: per step one matrix multiply, batched if axes are shared."""
    # A size of -1 stands for the tokens: sizes are then constants of the program.
    z = padded(x_td, plan.d_in_padded).reshape(-1, *plan.x_shape)
    axes: tuple[str, ...] = (_TOKENS, *plan.layouts[0])
    for step, factor in zip(plan.steps, factors, strict=True):
        outer, inner = [_sizes(plan, edges) for edges in (step.batch, (*step.kept, *step.new))]
        k, n = prod(_sizes(plan, step.contracted)), prod(_sizes(plan, step.new))
        count = [prod(outer)] if outer else []
        z = _permuted(z, axes, (*step.batch, _TOKENS, *step.kept, *step.contracted))
        z = z.reshape(*count, -1, k) @ factor.reshape(*count, k, n)
        z = z.reshape(*outer, -1, *inner)
        axes = (*step.batch, _TOKENS, *step.kept, *step.new)
    y_to = _permuted(z, axes, (_TOKENS, *plan.y_edges)).reshape(-1, plan.d_out_padded)
    y_to = y_to if plan.d_out == plan.d_out_padded else y_to[:, : plan.d_out]
    return y_to if bias is None else y_to + bias


def _sizes(plan: Plan, edges: Sequence[str]) -> list[int]:
    return [plan.sizes[edge] for edge in edges]


def _permuted(tensor: Tensor, axes: tuple[str, ...], wanted: tuple[str, ...]) -> Tensor:
    """A tensor with its axes in another order; the tensor itself if the order is the same."""
    return tensor if axes == wanted else tensor.permute([axes.index(axis) for axis in wanted])
