"""The closest weight of any structure in a weighted norm, by alternating least squares.

A weight is linear in each of its factors, so the best factor, given the others, solves a linear
system. It is solved by conjugate gradients from where the factor is, without forming the system:
every iteration, and so every sweep over the factors, decreases the error or leaves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from einlinear.layers.projection.metric import Metric
from einlinear.layers.reference import dense_weight
from einlinear.structures.plan import Plan

_ITERATIONS = 12  # of conjugate gradients for a factor; the next sweep goes on where it stopped


def alternate(
    plan: Plan,
    weight_oi: Tensor,
    factors: dict[str, Tensor],
    metric: Metric,
    *,
    tolerance: float,
    most_sweeps: int,
) -> tuple[dict[str, Tensor], int]:
    """Better factors and the number of sweeps, for a weight of the widths without padding.

    Stops when a sweep takes off less than `tolerance` of the error.
    """
    names = [step.factor for step in plan.steps]
    found = dict(factors)
    square = metric.square(weight_oi - dense_weight(plan, [found[name] for name in names]))
    sweeps = 0
    while sweeps < most_sweeps and square > 0:
        for name in names:
            found[name] = _solve(plan, weight_oi, found, name, metric)
        sweeps += 1
        now = metric.square(weight_oi - dense_weight(plan, [found[name] for name in names]))
        before, square = square, now
        if before - square <= tolerance * before:
            break
    return found, sweeps


def _solve(
    plan: Plan, weight_oi: Tensor, factors: dict[str, Tensor], name: str, metric: Metric
) -> Tensor:
    """A factor that fits better, the others fixed: conjugate gradients on the normal equations."""

    def normal(direction: Tensor, target_oi: Tensor | None = None) -> tuple[Tensor, float]:
        """(L* M L)(d), or L* M (t - L d) with a target t, and the squared norm of what M met."""
        with torch.enable_grad():
            variable = direction.detach().requires_grad_()
            operands = {**factors, name: variable}
            made_oi = dense_weight(plan, [operands[step.factor] for step in plan.steps])
        met_oi = made_oi.detach() if target_oi is None else target_oi - made_oi.detach()
        gradient_oi = metric.gradient(met_oi)
        (back,) = torch.autograd.grad(made_oi, variable, gradient_oi)
        return back, float((met_oi * gradient_oi).sum())

    solution = factors[name].clone()
    residual, _ = normal(solution, weight_oi)
    direction = residual.clone()
    square = float(residual.square().sum())
    first = square
    for _ in range(min(_ITERATIONS, solution.numel())):
        if square <= 1e-24 * first or square == 0:
            break
        image, curvature = normal(direction)
        if curvature <= 0:
            break
        step = square / curvature
        solution += step * direction
        residual -= step * image
        before, square = square, float(residual.square().sum())
        direction = residual + (square / before) * direction
    return solution
