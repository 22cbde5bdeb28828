"""How ratios of compute move with how laws are fitted, and whether widths trained long enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from einlinear.laws.fit import Fit, FitPoints, Linf, fit_power_law
from einlinear.laws.observations import Floats, Observations
from einlinear.reproductions.findings import samples
from einlinear.reproductions.findings.samples import LawSamples, draw_laws, points_for

LEVEL_LOSS = 0.003
"""Losses that differ by less than this share, about the noise of a run, are level."""

LIMITS = (0.0, 0.3, 0.6, 0.8)
"""Values of linf to try, as shares of the lowest loss."""


def fit_all(data: Observations) -> Fit:
    """The laws of all structures, with one linf."""
    return fit_power_law(
        data,
        linf="shared",
        points=points_for(data),
        level=samples.SURE,
        resamples=samples.RESAMPLES,
    )


def other_fits(data: Observations) -> tuple[LawSamples, ...]:
    """The laws with other values of linf, and with the sizes at the ends of frontiers."""
    lowest, points = float(data.loss.min()), points_for(data)
    choices: list[tuple[Linf, FitPoints]] = [(share * lowest, points) for share in LIMITS]
    choices.append(("shared", "frontier"))
    return tuple(draw_laws(data, linf, chosen, samples=0) for linf, chosen in choices)


def log_line_residuals(data: Observations) -> Mapping[str, float]:
    """Residuals, in log loss, of L = p - q log C at the points of the laws, by structure."""
    points = fit_power_law(data, linf="shared", points=points_for(data), resamples=0).points
    found = {}
    for name in data.structures:
        own = points.of(name)
        x, y = np.log(own.compute), own.loss
        line = np.polyval(np.polyfit(x, y, 1), x)
        found[name] = float(np.sqrt(np.mean(np.log(y / line) ** 2)))
    return found


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
        if compute:
            at.setdefault(compute, []).append(loss)
    seeds = max(map(len, at.values()))
    kept = sorted((c, float(np.median(found))) for c, found in at.items() if len(found) == seeds)
    x, y = np.array(kept).T
    return np.log(x), y
