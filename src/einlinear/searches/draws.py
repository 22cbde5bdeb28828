"""Draws: many possible laws of all candidates, what they predict, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from einlinear.laws.observations import Floats


class Draws(NamedTuple):
    """Laws of draws x candidates."""

    linf: Floats
    a: Floats
    b: Floats
    alpha: Floats
    beta: Floats

    @classmethod
    def joined(cls, parts: Iterable[Draws]) -> Draws:
        """The draws of several beliefs about the same candidates."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def best(self, cost: Cost) -> tuple[Floats, Floats]:
        """The lowest loss at a cost, and the m at which it is reached."""
        e = cost.exponent
        room = cost.log_total - cost.log_step
        ratio = np.log(self.alpha / (e * self.beta)) + self.a - self.b + self.beta * room
        m = ratio / (self.alpha + e * self.beta)
        return self.at(m, cost.steps(m)), m

    def at(self, m: Floats, t: Floats) -> Floats:
        """The loss at a size and a number of steps."""
        return np.asarray(
            self.linf[:, None] + np.exp(self.a - self.alpha * m) + np.exp(self.b - self.beta * t)
        )

    def cost_of(self, loss: Floats, cost: Cost) -> Floats:
        """The logarithm of the cost at which a loss is reached, at the best sizes."""
        above = np.maximum(loss - self.linf[:, None], 1e-12)
        e = cost.exponent
        # At the best m, e beta times the second term equals alpha times the first.
        share = self.alpha / (e * self.beta)
        first = np.log(above / (1 + share))
        m = (self.a - first) / self.alpha
        t = (self.b - first - np.log(share)) / self.beta
        return np.asarray(t + e * m + cost.log_step)


@dataclass(frozen=True, slots=True)
class Cost:
    """What may be spent, and what a step costs: exp(log_step + exponent m), for each candidate."""

    log_total: float
    log_step: Floats | float = 0.0
    exponent: Floats | float = 1.0

    def steps(self, m: Floats) -> Floats:
        """The logarithm of the steps that are paid for at a size."""
        return np.asarray(self.log_total - self.log_step - self.exponent * m)


def anchor_of(target: Cost, m: float, t: float) -> tuple[float, float]:
    """A place that costs what the target does, from the largest size and the most steps on."""
    beyond = (target.log_total - m - t) / 2
    return m + beyond, t + beyond
