"""Ratios of compute between layers, from the records of one study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from einlinear.errors import EinlinearError
from einlinear.laws.fit import Fit, FitPoints, fit_power_law
from einlinear.laws.multiplier import compute_multiplier
from einlinear.laws.observations import Observations
from einlinear.reproductions.findings.verdicts import Ratio

LEVEL, RESAMPLES = 0.9, 1000
_LEAST_SIZES = 2  # that remain without the two ends of a frontier
_NEAR = 1e-4  # shares of compute that do not count
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
    """How many times less compute each of the names needs than the reference.

    All laws share one linf. The sizes at the two ends of a frontier are left out if two or more
    remain of every structure.
    """
    names = [name for name in names if name != reference]
    part = of_names(data, [reference, *names])
    options = {"points": points_for(part), "level": LEVEL, "resamples": RESAMPLES}
    found = compute_multiplier(part, reference, **options)  # type: ignore[arg-type]
    return {
        name: Ratio(
            name,
            reference,
            found[name].median,
            *found[name].median_interval,
            found[name].mean_is_extrapolated,
        )
        for name in names
    }


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
        data, linf="shared", points=points_for(data), level=LEVEL, resamples=RESAMPLES
    )


def over_limits(data: Observations, names: Sequence[str], reference: str) -> dict[str, Limits]:
    """How the ratios move with linf."""
    names = [name for name in names if name != reference]
    part = of_names(data, [reference, *names])
    points = points_for(part)
    found: dict[str, list[float]] = {name: [] for name in names}
    for share in LIMITS:
        linf = share * float(part.loss.min())
        rows = compute_multiplier(part, reference, linf=linf, points=points, resamples=0)
        for name in names:
            found[name].append(rows[name].median)
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

    A width is overtaken if the lowest median loss of a larger width, at the compute at which the
    width ends or before, is no higher.
    """
    found = {}
    for name in data.structures:
        own = data.of(name)
        widths = sorted(set(own.more["width"].tolist()))
        early = []
        for width in widths[:-1]:
            end, loss = _last(own.take(own.more["width"] == width))
            before = (own.more["width"] > width) & (own.compute <= end * (1 + _NEAR))
            is_overtaken = before.any() and _lowest(own.take(before)) <= loss
            early += [] if is_overtaken else [int(width)]
        found[name] = Overtaking(name, len(widths), tuple(early))
    return found


def _last(data: Observations) -> tuple[float, float]:
    """The largest compute, and the median loss there over seeds."""
    end = float(data.compute.max())
    return end, float(np.median(data.loss[data.compute == end]))


def _lowest(data: Observations) -> float:
    """The lowest median over seeds."""
    at: dict[float, list[float]] = {}
    for compute, loss in zip(data.compute.tolist(), data.loss.tolist(), strict=True):
        at.setdefault(compute, []).append(loss)
    return min((float(np.median(losses)) for losses in at.values()), default=nan)
