"""How a plan is multiplied: the variants and the choice between them.

Legend: x_td rows of input, y_te rows of output; t is tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from einlinear.errors import EinlinearError, quote
from einlinear.layers import compiled, operators
from einlinear.layers.cost import cheapest, cheapest_cached
from einlinear.layers.strided import padded
from einlinear.structures.plan import Plan

ALL_VARIANTS = ("einsum", "strided", "dense", "engine")
_PORTABLE, _ELSEWHERE = ALL_VARIANTS[:3], ("einsum", "dense")
VARIANTS = ALL_VARIANTS if compiled.IS_AVAILABLE else _PORTABLE
"""The variants there are here: the engine only where it was compiled."""


def multiply(
    plan: Plan,
    x_td: Tensor,
    factors: Sequence[Tensor],
    variant: str,
    bias: Tensor | None = None,
) -> Tensor:
    """W x + b for rows of input, by one of the variants; factors in the order of the plan's steps.

    einsum:  one torch.einsum per step; the reference, and best where steps are plain matrices.
    strided: batched multiplies in place, blocked over tokens.
    dense:   the matrix W itself, made anew, for widths so small that structure does not pay.
    engine:  the compiled engine, on the CPU, in float32, float64 and bfloat16.
    """
    if variant == "einsum":
        y_te = einsum_steps(plan, padded(x_td, plan.d_in_padded), factors)[:, : plan.d_out]
        return y_te if bias is None else y_te + bias
    if variant == "dense":
        return linear(x_td, dense_weight(plan, factors), bias)
    if variant in VARIANTS:
        return operators.run(plan, x_td, factors, bias, variant)
    raise EinlinearError(
        what=f"there is no variant {quote(variant)}",
        rule=f"a variant is one of {', '.join(VARIANTS)}",
        fix="leave the choice to the layer, or name one of them; einlinear doctor says whether "
        "there is an engine",
    )


def einsum_steps(plan: Plan, x_td: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """One einsum per step, tokens outermost throughout, from the padded width to the padded one."""
    z = x_td.reshape(x_td.shape[0], *plan.x_shape)
    for step, factor in zip(plan.steps, factors, strict=True):
        z = torch.einsum(step.equation, z, factor)
    return z.reshape(x_td.shape[0], plan.d_out_padded)


def dense_weight(plan: Plan, factors: Sequence[Tensor]) -> Tensor:
    """The matrix, laid out as nn.Linear.weight: outputs x inputs."""
    eye = torch.eye(plan.d_in, plan.d_in_padded, dtype=factors[0].dtype, device=factors[0].device)
    return einsum_steps(plan, eye, factors)[:, : plan.d_out].t()


def fitting_variants(device: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The variants worth choosing from on a device and in a dtype."""
    if device != "cpu":
        return _ELSEWHERE
    return ALL_VARIANTS if compiled.IS_AVAILABLE and dtype in compiled.DTYPES else _PORTABLE


def choose_variant(
    plan: Plan, num_tokens: int, device: str, dtype: torch.dtype, *, has_backward: bool = True
) -> str:
    """The variant that should be fastest, by a model of what each costs on a CPU.

    On other devices einsum, or dense where the matrix costs less than the steps.
    """
    variants = fitting_variants(device, dtype)
    choose = cheapest if torch.compiler.is_compiling() else cheapest_cached
    return choose(plan, num_tokens, variants, has_backward)
