"""Ratios of compute between layers, from the records of one study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from einlinear.errors import EinlinearError
from einlinear.laws.fit import Fit, FitPoints, fit_power_law
from einlinear.laws.multiplier import Multiplier, compute_multiplier
from einlinear.laws.observations import Floats, Observations
from einlinear.reproductions.findings.verdicts import Ratio

SURE, RESAMPLES = 0.9, 1000
_LEAST_SIZES = 2  # that remain without the two ends of a frontier
LEVEL_LOSS = 0.003
"""Losses that differ by less than this share, about the noise of a run, are level."""
EARLIER = 10.0
"""Ratios are also given where the reference has spent this many times less compute."""

LIMITS = (0.0, 0.3, 0.6, 0.8)
"""Values of linf to try, as shares of the lowest loss."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How a ratio moves with linf: its lowest and highest value over `LIMITS`."""

    name: str
    low: float
    high: float


def of_names(data: Observations, names: Sequence[str]) -> Observations:
    """The points of some structures."""
    return data.take(np.isin(data.structure.astype(str), list(names)))


def ratios(data: Observations, names: Sequence[str], reference: str) -> dict[str, Ratio]:
    """How many times less compute each of the names needs than the reference, at the end.

    Power laws of different exponents cross, so that a ratio depends on the loss. It is taken at the
    lowest loss that both have reached, where most compute was spent, and for comparison where the
    reference needs a tenth of that compute. All laws share one linf. The sizes at the two ends of a
    frontier are left out if two or more remain of every structure.
    """
    names = [name for name in names if name != reference]
    part = of_names(data, [reference, *names])
    points = points_for(part)
    laws = fit_power_law(part, linf="shared", points=points, resamples=0)
    places = {name: _common_losses(laws, name, reference) for name in names}
    losses = sorted({loss for pair in places.values() for loss in pair})
    found = compute_multiplier(
        part, reference, points=points, losses=losses, level=SURE, resamples=RESAMPLES
    )
    return {
        name: Ratio(name, reference, *_at(found[name], losses.index(last)),
                    before=_at(found[name], losses.index(first)),
                    compute=laws[reference].compute(last))
        for name, (first, last) in places.items()
    }  # fmt: skip


def _common_losses(laws: Fit, name: str, reference: str) -> tuple[float, float]:
    """The loss that both reached last, and the one that the reference had at a tenth of it."""
    losses = [laws.points.of(each).loss for each in (name, reference)]
    law = laws[reference]
    last = max(float(loss.min()) for loss in losses)
    first = min(float(loss.max()) for loss in losses)
    return max(last, min(first, law.loss(law.compute(last) / EARLIER))), last


def _at(found: Multiplier, place: int) -> tuple[float, float, float]:
    values = (found.values, found.low, found.high)
    value, low, high = (float(column[place]) for column in values)
    return value, low, high


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


def fit_all(data: Observations) -> Fit:
    """The laws of all structures, with one linf."""
    return fit_power_law(
        data, linf="shared", points=points_for(data), level=SURE, resamples=RESAMPLES
    )


def crossing(laws: Fit, name: str, reference: str) -> float | None:
    """The compute at which two laws meet, within a factor of a thousand beyond their points."""
    first, second = laws[name], laws[reference]
    least = min(first.compute_range[0], second.compute_range[0])
    most = max(first.compute_range[1], second.compute_range[1])
    grid = np.geomspace(least, 1000 * most, 2000).tolist()
    is_below = np.array([first.loss(compute) < second.loss(compute) for compute in grid])
    changes = np.flatnonzero(is_below[1:] != is_below[:-1])
    return float(grid[int(changes[-1]) + 1]) if len(changes) else None


def over_limits(data: Observations, names: Sequence[str], reference: str) -> dict[str, Limits]:
    """How the ratios at the end move with linf."""
    names = [name for name in names if name != reference]
    part = of_names(data, [reference, *names])
    points = points_for(part)
    found: dict[str, list[float]] = {name: [] for name in names}
    for share in LIMITS:
        laws = fit_power_law(part, linf=share * float(part.loss.min()), points=points, resamples=0)
        for name in names:
            last = _common_losses(laws, name, reference)[1]
            found[name].append(laws[reference].compute(last) / laws[name].compute(last))
    return {name: Limits(name, min(values), max(values)) for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class Overtaking:
    """Whether every size of a structure was trained until a larger one overtook it.

    early: sizes, by width, that ended before that.
    """

    structure: str
    sizes: int
    early: tuple[int, ...]


def overtakings(data: Observations) -> dict[str, Overtaking]:
    """For every structure, the widths that no larger one overtook.

    A width is overtaken if a larger one has no higher loss when it has spent as much compute as the
    width spent in all, between evaluations by interpolation; less than `LEVEL_LOSS` above counts as
    no higher. Losses are medians over seeds.
    """
    found = {}
    for name in data.structures:
        own = data.of(name)
        widths = sorted(set(own.more["width"].tolist()))
        curves = {width: _median_curve(own.take(own.more["width"] == width)) for width in widths}
        early = []
        for place, width in enumerate(widths[:-1]):
            (x, y), larger = curves[width], [curves[w] for w in widths[place + 1 :]]
            lowest = min(np.interp(x[-1], *c, left=np.inf) for c in larger)
            early += [] if lowest <= (1 + LEVEL_LOSS) * y[-1] else [int(width)]
        found[name] = Overtaking(name, len(widths), tuple(early))
    return found


def _median_curve(data: Observations) -> tuple[Floats, Floats]:
    """The logarithm of compute, and the median loss over seeds, where all seeds have one."""
    at: dict[float, list[float]] = {}
    for compute, loss in zip(data.compute.tolist(), data.loss.tolist(), strict=True):
        at.setdefault(compute, []).append(loss)
    kept = sorted((compute, float(np.median(losses))) for compute, losses in at.items() if compute)
    x, y = np.array(kept).T
    return np.log(x), y
