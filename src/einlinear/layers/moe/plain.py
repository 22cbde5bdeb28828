"""Many experts by plain matrix multiplies, as an exported program holds them: see `export.plain`.

How many rows an expert has is known only when the program runs, so every expert has its own
multiplies, and only the active experts of a token are computed.

Legend: as in `assignment`; factors are stacked along a first axis of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from einlinear.layers.export.plain import multiply_plainly
from einlinear.layers.moe.assignment import Assignment
from einlinear.layers.norm import normalised_experts
from einlinear.structures.plan import Plan

_FILLING = 2  # rows of zeros: AOTInductor cannot multiply rows that may turn out to be only one


def multiply_experts_plainly(
    plan: Plan,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    assignment: Assignment,
    *,
    bias: Tensor | None = None,
    stds: Sequence[float] = (),
) -> Tensor:
    """The row of every pair times the matrix of its expert, times its weight."""
    used = normalised_experts(factors, stds) if stds else factors
    rows_pd = x_rd.index_select(0, assignment.tokens_p) if assignment.x_by_token else x_rd
    ends_e = assignment.ends_e
    lengths: list[int] = torch.diff(ends_e, prepend=ends_e.new_zeros(1)).tolist()
    made = []
    for expert, (part, length) in enumerate(
        zip(rows_pd.split(lengths), lengths, strict=True)  # type: ignore[no-untyped-call]
    ):
        own = [factor[expert] for factor in used]
        made.append(multiply_plainly(plan, pad(part, (0, 0, 0, _FILLING)), own)[:length])
    y_ro = torch.cat(made)
    if assignment.w_p is not None:
        y_ro = y_ro * assignment.w_p.unsqueeze(-1).to(y_ro.dtype)
    if assignment.y_by_token:
        y_to = y_ro.new_zeros(assignment.num_tokens, plan.d_out)
        y_ro = y_to.index_add(0, assignment.tokens_p, y_ro)
    return y_ro if bias is None else y_ro + bias
