"""The multiply by one einsum per step: what every other variant is checked against.

It can be differentiated any number of times, batched and traced, so the fast variants use it for
second derivatives and vmap.

Legend for layers/: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from einlinear.layers.strided import padded
from einlinear.structures.plan import Plan


def einsum_steps(plan: Plan, x_td: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """One einsum per step, from the padded input width to the padded output width."""
    return _tensors(plan, x_td, factors)[-1].reshape(x_td.shape[0], plan.d_out_padded)


def _tensors(plan: Plan, x_td: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """The padded input and what each step makes of it, with the axes of the plan."""
    tensors = [x_td.reshape(x_td.shape[0], *plan.x_shape)]
    for step, factor in zip(plan.steps, factors, strict=False):
        tensors.append(torch.einsum(step.equation, tensors[-1], factor))
    return tensors


def multiply_by_einsum(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """W x + b for rows of input."""
    y_to = einsum_steps(plan, padded(x_td, plan.d_in_padded), factors)[:, : plan.d_out]
    return y_to if bias is None else y_to + bias


def dense_weight(plan: Plan, factors: Sequence[Tensor]) -> Tensor:
    """The matrix, laid out like nn.Linear.weight: outputs x inputs."""
    eye = torch.eye(plan.d_in, plan.d_in_padded, dtype=factors[0].dtype, device=factors[0].device)
    return einsum_steps(plan, eye, factors)[:, : plan.d_out].t()


def reference_gradients(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], grad_to: Tensor
) -> list[Tensor]:
    """The gradients of input, bias and factors, which you can differentiate again.

    Written out, since autograd cannot run inside an operator.
    """
    tensors = _tensors(plan, padded(x_td, plan.d_in_padded), factors[:-1])
    y_shape = [plan.sizes[edge] for edge in plan.y_edges]
    grad = padded(grad_to, plan.d_out_padded).reshape(grad_to.shape[0], *y_shape)
    grads: list[Tensor] = []
    for step, factor, z in reversed(list(zip(plan.steps, factors, tensors, strict=True))):
        before, word, after = step.equation.replace("->", ",").split(",")
        weights = f"{before},{after}->{word}".replace("...", "Z")  # Z: the tokens, summed
        grads.append(torch.einsum(weights, z, grad))
        grad = torch.einsum(f"{after},{word}->{before}", grad, factor)
    return [grad.flatten(1)[:, : plan.d_in], grad_to.sum(0), *reversed(grads)]
