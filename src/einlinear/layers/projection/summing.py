"""The closest sum of weights of several plans, by projecting each onto what the others leave.

The first term is the one that comes closest alone; the others follow, each projected onto what is
left. Then all are improved in turns. A step that would not decrease the error is not taken, so the
sum is never farther than the best of its terms alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.project import ROUNDING, prepared, project
from einlinear.layers.reference import dense_weight
from einlinear.structures.plan import Plan


@dataclass(frozen=True, slots=True)
class SumProjection:
    """The factors of every term, and how close their sum is to the dense weight.

    `error` is the share of the squared norm that is lost, as in Projection. `rounds` counts the
    passes over all terms after the first.
    """

    factors: tuple[dict[str, Tensor], ...]
    error: float
    rounds: int


def project_sum(
    plans: Sequence[Plan],
    weight_oi: Tensor,
    metric: Metric | None = None,
    *,
    damping: float = 1e-3,
    tolerance: float = 1e-3,
    most_rounds: int = 50,
) -> SumProjection:
    """Return the factors of terms whose sum is close to a dense weight, computed in float64.

    Alternation finds a sum from which no term alone can improve, not always the closest one. It
    stops when a round takes off less than `tolerance` of the error, or leaves none.

    Args:
        plans: the plans of the terms, of the same widths.
        weight_oi: the dense weight, laid out like nn.Linear.weight.
        metric: what errors count; the Frobenius norm if left out.
        damping: what is added to the diagonals of the moments, as a share of their mean.
        tolerance: the improvement at which to stop.
        most_rounds: how many rounds to do at most.
    """
    weight_oi = weight_oi.detach().double()
    whole_metric = prepared(metric or Metric(), damping)
    whole = whole_metric.square(weight_oi)
    alone = [project(plan, weight_oi, metric, damping=damping) for plan in plans]
    first = min(range(len(plans)), key=lambda i: alone[i].error)
    factors = [
        {name: f * (i == first) for name, f in p.factors.items()} for i, p in enumerate(alone)
    ]
    made = [_dense(plan, own) for plan, own in zip(plans, factors, strict=True)]
    square = whole_metric.square(weight_oi - sum(made))

    def improve_(i: int, is_new: bool) -> None:
        nonlocal square
        if square <= ROUNDING * whole:
            return
        found = project(
            plans[i],
            weight_oi - sum(made) + made[i],
            metric,
            damping=damping,
            start=None if is_new else factors[i],
            most_sweeps=50 if is_new else 1,
        )
        new_oi = _dense(plans[i], found.factors)
        error = whole_metric.square(weight_oi - sum(made) + made[i] - new_oi)
        if error < square:
            factors[i], made[i], square = found.factors, new_oi, error

    for i in range(len(plans)):
        if i != first:
            improve_(i, is_new=True)
    rounds = 0
    while rounds < most_rounds and square > ROUNDING * whole:
        before = square
        for i in range(len(plans)):
            improve_(i, is_new=False)
        rounds += 1
        if before - square <= tolerance * before:
            break
    return SumProjection(tuple(factors), square / whole if whole > 0 else 0.0, rounds)


def _dense(plan: Plan, factors: dict[str, Tensor]) -> Tensor:
    return dense_weight(plan, [factors[step.factor] for step in plan.steps])
