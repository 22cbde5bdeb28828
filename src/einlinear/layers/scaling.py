"""How a factor is initialised and how fast it learns, from its fan-in and fan-out."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from einlinear.structures.plan import Plan


@dataclass(frozen=True, slots=True)
class Scaling:
    """What structure-aware muP needs to know of one parameter.

    init_std: standard deviation at the start; 0 for a parameter that starts at a constant.
    num_factors: how many factors the layer multiplies; the rate of each is divided by it.
    """

    fan_in: int
    fan_out: int
    init_std: float
    num_factors: int = 1


def init_std(fan_in: int, fan_out: int) -> float:
    """The standard deviation of a fresh factor, which keeps the spectral norm near sqrt(out / in).

        sqrt(min(fan_in, fan_out)) / fan_in

    Ref: [P24 App. C].  Checked by: test_linear.py::test_initial_weights_have_the_planned_deviation.
    """
    return sqrt(min(fan_in, fan_out)) / fan_in


def factor_scaling(plan: Plan) -> dict[str, Scaling]:
    """The scaling of every factor of a plan."""
    return {
        step.factor: Scaling(
            fan_in=step.fan_in,
            fan_out=step.fan_out,
            init_std=init_std(step.fan_in, step.fan_out),
            num_factors=len(plan.steps),
        )
        for step in plan.steps
    }
