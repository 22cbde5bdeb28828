"""Draws: many possible laws of all candidates, what they predict, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from einlinear.laws.observations import Floats, Ints

LEVEL = 0.9
"""Of all intervals."""

_REACH = np.log(4.0)  # models at the target are at most four times as large as at its anchor
_FARTHEST = 50.0  # logarithms beyond mean nothing


class Draws(NamedTuple):
    """Laws of draws x candidates.

    anchor: draws x 2, m and t from which all bend alike; centre: the same for own bends.
    bend: draws x 3, how far log losses leave the law, by the squares of the distances to the anchor
        in m and in t, and by their product in between.
    own_bend: draws x candidates x 3, the same for each candidate, by the distances to the centre.
    """

    linf: Floats
    anchor: Floats
    centre: Floats
    bend: Floats
    a: Floats
    b: Floats
    alpha: Floats
    beta: Floats
    own_bend: Floats

    @classmethod
    def joined(cls, parts: Iterable[Draws]) -> Draws:
        """The draws of several beliefs about the same candidates."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def take(self, candidates: Ints | slice | list[int]) -> Draws:
        """The laws of some candidates."""
        return Draws(*self[:4], *(column[:, candidates] for column in self[4:]))

    def best(self, cost: Cost) -> tuple[Floats, Floats]:
        """The loss at a cost, and the m at which the law alone has its lowest there."""
        e = cost.exponent
        room = cost.log_total - cost.log_step
        ratio = np.log(self.alpha / (e * self.beta)) + self.a - self.b + self.beta * room
        m = np.clip(ratio / (self.alpha + e * self.beta), *cost.sizes)
        return self.at(m, cost.steps(m)), m

    def at(self, m: Floats, t: Floats) -> Floats:
        """The loss at a size and a number of steps."""
        law = self.linf[:, None] + _exp(self.a - self.alpha * m) + _exp(self.b - self.beta * t)
        return np.asarray(law * _exp(self.bent(m, t)))

    def bent(self, m: Floats, t: Floats) -> Floats:
        """How far log losses leave the law."""
        common = _quadratic(self.bend[:, None], m - self.anchor[:, :1], t - self.anchor[:, 1:])
        own = _quadratic(self.own_bend, m - self.centre[:, :1], t - self.centre[:, 1:])
        return common + own

    def cost_of(self, loss: Floats, cost: Cost) -> Floats:
        """The logarithm of the cost at which the law alone has a loss, at the best sizes."""
        above = np.maximum(loss - self.linf[:, None], 1e-12)
        e = cost.exponent
        # At the best m, e beta times the second term equals alpha times the first.
        share = self.alpha / (e * self.beta)
        first = np.log(above / (1 + share))
        m = (self.a - first) / self.alpha
        t = (self.b - first - np.log(share)) / self.beta
        return np.asarray(t + e * m + cost.log_step)

    def multipliers(self, cost: Cost, reference: int = 0) -> Floats:
        """The cost of one candidate for the losses of all at a cost, relative to it.

        The reference bends at every cost as it does at this one.
        """
        loss, _ = self.best(cost)
        own = self.take([reference])
        usual, m = own.best(cost)
        straight = _exp(-own.bent(m, cost.steps(m)))
        more = own.cost_of(loss * straight, cost) - own.cost_of(usual * straight, cost)
        return _exp(more)


@dataclass(frozen=True, slots=True)
class Cost:
    """What may be spent, and what a step costs: exp(log_step + exponent m), for each candidate.

    anchor: m and t at about the best size. sizes: the lowest and the highest m.
    """

    log_total: float
    log_step: Floats | float = 0.0
    exponent: Floats | float = 1.0
    anchor: tuple[float, float] = (0.0, 0.0)
    sizes: tuple[float, float] = (-inf, inf)

    def steps(self, m: Floats) -> Floats:
        """The logarithm of the steps that are paid for at a size."""
        return np.asarray(self.log_total - self.log_step - self.exponent * m)


def _exp(values: Floats) -> Floats:
    """The exponential; what is so far away that it means nothing stays finite."""
    return np.asarray(np.exp(np.clip(values, -_FARTHEST, _FARTHEST)))


def interval_of(values: Floats) -> tuple[float, float]:
    """The interval that holds most of the draws of a number."""
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _quadratic(weights: Floats, m: Floats, t: Floats) -> Floats:
    return np.asarray(weights[..., 0] * m**2 + weights[..., 1] * m * t + weights[..., 2] * t**2)


def target_beyond(log_total: float, m: Floats, t: Floats) -> Cost:
    """A target beyond runs of sizes `m` and steps `t`, both growing.

    Its anchor is as far beyond the largest size as beyond the most steps.
    """
    beyond = (log_total - m[-1] - t[-1]) / 2
    anchor = float(m[-1] + beyond), float(t[-1] + beyond)
    return Cost(log_total, anchor=anchor, sizes=(float(m[0]), anchor[0] + _REACH))
