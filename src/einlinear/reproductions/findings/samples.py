"""LawSamples: the laws of all layers of a study, and of many bootstrap samples of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np

from einlinear.errors import EinlinearError
from einlinear.laws.fit import FitPoints, Linf, fit_power_law, pose
from einlinear.laws.law import Laws
from einlinear.laws.observations import Floats, Observations
from einlinear.laws.resample import interval, solve, solve_samples
from einlinear.reproductions.findings.verdicts import Ratio

SURE, RESAMPLES = 0.9, 1000
EARLIER = 10.0
"""Ratios are also given where the reference has spent this many times less compute."""

_FAR = 1000.0
_LEAST_SIZES = 2  # that remain without the two ends of a frontier


@dataclass(frozen=True, eq=False)
class LawSamples:
    """Laws with one linf, drawn jointly: in a sample, all layers have the runs of that sample.

    found, drawn: laws of all runs (1 x layers), and of the samples (samples x layers).
    centre: the logarithm of compute around which a law is expressed, by layers.
    lowest, highest: the ends of the fitted losses, by layers.
    least, most: the ends of the compute of the fitted points, by layers.
    points: "inner" if the sizes at both ends of every frontier are left out.
    """

    names: tuple[str, ...]
    found: Laws
    drawn: Laws
    centre: Floats
    lowest: Floats
    highest: Floats
    least: Floats
    most: Floats
    points: FitPoints

    def ratio(self, name: str, reference: str) -> Ratio:
        """How many times less compute `name` needs than the reference, for the same loss.

        Laws of different exponents cross, so that the ratio depends on the loss. It is taken at the
        lowest fitted loss that both have, and for comparison where the reference needs a tenth of
        that compute, or as near to it as both go.
        """
        a, b = self.names.index(name), self.names.index(reference)
        last = float(max(self.lowest[a], self.lowest[b]))
        spent = float(self._log_compute(self.found, last)[0, b])
        first = min(float(min(self.highest[a], self.highest[b])), self._loss(b, spent))
        return Ratio(
            name,
            reference,
            *self._between(a, b, last),
            before=self._between(a, b, max(first, last)),
            loss=last,
            compute=exp(spent),
        )

    def common_loss(self) -> float:
        """The lowest fitted loss that all layers have."""
        return float(self.lowest.max())

    def log_ratios(self, reference: str, loss: float) -> tuple[Floats, Floats]:
        """Logarithms of all ratios at a loss: of all runs, and samples x layers."""
        b = self.names.index(reference)
        own, drawn = (self._log_compute(laws, loss) for laws in (self.found, self.drawn))
        return own[0, b] - own[0], drawn[:, b, None] - drawn

    def crossing(self, name: str, reference: str) -> float | None:
        """The compute at which two laws meet; None if not within a factor of a thousand of both.

        With one linf, b C⁻ᵃ and b' C⁻ᵃ' meet at log C = (log b - log b') / (a - a').
        """
        a, b = self.names.index(name), self.names.index(reference)
        log_b = self.found.scale[0] + self.found.a[0] * self.centre
        slopes = float(self.found.a[0, a] - self.found.a[0, b])
        if not slopes:
            return None
        at = float(log_b[a] - log_b[b]) / slopes
        ends = np.log([self.least[[a, b]].min() / _FAR, self.most[[a, b]].max() * _FAR])
        return exp(at) if ends[0] <= at <= ends[1] else None

    def exponents_apart(self, name: str, reference: str) -> tuple[float, float, float]:
        """The difference of two exponents, with its interval."""
        a, b = self.names.index(name), self.names.index(reference)
        low, high = interval(self.drawn.a[:, a] - self.drawn.a[:, b], SURE)
        return float(self.found.a[0, a] - self.found.a[0, b]), float(low), float(high)

    def _between(self, a: int, b: int, loss: float) -> tuple[float, float, float]:
        own, drawn = self.log_ratios(self.names[b], loss)
        low, high = interval(drawn[:, a], SURE)
        return exp(own[a]), float(np.exp(low)), float(np.exp(high))

    def _log_compute(self, laws: Laws, loss: float) -> Floats:
        with np.errstate(invalid="ignore"):
            return np.asarray(laws.log_compute(np.array([loss]))[..., 0] + self.centre)

    def _loss(self, layers: int, log_compute: float) -> float:
        """The loss of a law at a tenth of a compute."""
        return self._law(layers, log_compute - float(np.log(EARLIER)))

    def _law(self, layers: int, log_compute: float) -> float:
        x = log_compute - self.centre[layers]
        linf, scale, a = (float(column[0, layers]) for column in self.found)
        return linf + exp(scale - a * x)


def draw_laws(
    data: Observations, linf: Linf = "shared", points: FitPoints | None = None, samples: int = -1
) -> LawSamples:
    """Fit the laws of all layers together, and those of bootstrap samples of their runs."""
    points = points_for(data) if points is None else points
    problem = pose(data, linf, points, "robust", 0.05)
    found = solve(problem)
    count = RESAMPLES if samples < 0 else samples
    parts = [laws for _, laws in solve_samples(problem, found, count, seed=0)]
    drawn = Laws(*map(np.concatenate, zip(*(parts or [found[0]]), strict=True)))
    losses = [data.loss[index] for index in problem.index]
    compute = [data.compute[index] for index in problem.index]
    return LawSamples(
        problem.structures,
        found[0],
        drawn,
        problem.centre,
        np.array([loss.min() for loss in losses]),
        np.array([loss.max() for loss in losses]),
        np.array([spent.min() for spent in compute]),
        np.array([spent.max() for spent in compute]),
        points,
    )


def points_for(data: Observations) -> FitPoints:
    """Inner points if every structure has enough sizes for that, else the whole frontier."""
    for name in data.structures:
        try:
            inner = fit_power_law(data.of(name), points="inner", resamples=0).points
        except EinlinearError:
            return "frontier"
        if len(set(inner.size.tolist())) < _LEAST_SIZES:
            return "frontier"
    return "inner"
