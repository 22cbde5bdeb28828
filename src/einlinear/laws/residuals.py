"""Tell whether the residuals of a law are noise or show that the points do not follow it."""

from __future__ import annotations

from itertools import pairwise
from math import exp

import numpy as np

from einlinear.laws.law import Laws
from einlinear.laws.observations import Floats, Ints, Observations, numbered
from einlinear.laws.resample import Problem

Thirds = tuple[float, float, float]
Beside = tuple[Ints, Floats, Floats]  # positions in the data, log losses, and the law's log losses

_SURE = 4.0  # a bend counts from this many standard errors
_LEAST = 0.015  # and from this share of the loss; less does not matter
_DOUBT = 5.0  # for few degrees of freedom: exp(5 / n) is close to Student's t
_OF_MEDIANS = 0.37  # share of the degrees of freedom that a median keeps
_FEW_GROUPS = 4  # with fewer, differences between neighbouring groups do not show the noise


def in_thirds(residual: Floats) -> Thirds:
    """Mean residuals in the first, middle and last third of points sorted by compute.

    With fewer than three points, the middle is what remains between the ends.
    """
    ends = [round(k * len(residual) / 3) for k in range(4)]
    parts = [residual[a : max(b, a + 1)] for a, b in pairwise(ends)]
    first, middle, last = (float(part.mean()) if len(part) else 0.0 for part in parts)
    return first, middle, last


def is_systematic(residual: Floats, run: Ints, group: Ints) -> bool:
    """Whether residuals bend: the middle third departs from the two ends by more than noise.

    A law of the right form leaves noise. A law of the wrong form, or with a linf dictated by other
    structures, is too low at both ends and too high in the middle, or the other way round. The
    measure is

        bend = first + last - 2 middle

    of the means in the thirds. Residuals are of log loss, and sorted by compute.
    Checked by: test_residuals.py::test_noise_is_not_systematic.
    """
    noise, freedom = _noise(residual, run, group)
    if not freedom or len(residual) < 3:
        return False
    first, middle, last = in_thirds(residual)
    ends = [round(k * len(residual) / 3) for k in range(4)]
    counts = [len(np.unique(run[a:b])) for a, b in pairwise(ends)]
    error = noise * sum(k / n for k, n in zip((1, 4, 1), counts, strict=True)) ** 0.5
    least = max(_LEAST, _SURE * exp(_DOUBT / freedom) * error)
    return bool(abs(first + last - 2 * middle) > least)


def _noise(residual: Floats, run: Ints, group: Ints) -> tuple[float, float]:
    """The noise of runs within groups, or of groups among neighbours, and its freedom."""
    runs, groups = numbered(run), numbered(group)
    of_run = np.bincount(runs, residual) / np.bincount(runs)
    home = np.zeros(len(of_run), dtype=np.int64)
    home[runs] = groups
    sizes = np.bincount(home)
    of_group = np.bincount(home, of_run) / sizes
    free = len(of_run) - len(of_group)
    if free:
        return float(np.sqrt(((of_run - of_group[home]) ** 2).sum() / free)), free
    if len(of_group) < _FEW_GROUPS:
        return 0.0, 0
    # Second differences hardly see a slow bend, and their median hardly sees a single step.
    second = np.diff(of_group, 2)
    return float(1.4826 * np.median(np.abs(second)) / 6**0.5), _OF_MEDIANS * len(second)


def beside(problem: Problem, found: Laws, data: Observations, structure: int) -> Beside:
    """All points of a structure, by compute, except a stray run's, and the law at each."""
    here = (data.structure == problem.structures[structure]) & (data.compute > 0)
    stray = problem.strays[structure]
    if stray is not None:
        here &= (data.run != data.run[stray]) | (data.seed != data.seed[stray])
    place = np.flatnonzero(here)
    place = place[np.argsort(data.compute[place], kind="stable")]
    x = np.log(data.compute[place]) - problem.centre[structure]
    law = Laws(*(column[:, structure] for column in found))
    return place, np.log(data.loss[place]), law.log_loss(x)[0]


def undercut(near: Beside, data: Observations, used: Ints) -> float:
    """How far points are below a law, from its first point on; earlier steps do not matter."""
    place, y, law = near
    is_late = data.compute[place] >= data.compute[used[0]]
    return float(np.max((law - y)[is_late], initial=0.0))


def overshoot(near: Beside, data: Observations, used: Ints) -> float:
    """How far the lowest loss so far stays above a law beyond its points.

    The largest size keeps training where a larger one would be better, so it ends above the law.
    The sizes inside do the same; how far they end above the law is subtracted.
    """
    place, y, law = near
    is_beyond = data.compute[place] > data.compute[used[-1]]
    if not is_beyond.any():
        return 0.0
    above = float((np.minimum.accumulate(y) - law)[is_beyond].max())
    size = numbered(data.size[np.concatenate([used, place])])
    ends = [
        float((np.minimum.accumulate(y[own]) - law[own])[-1])
        for own in (size[len(used) :] == one for one in np.unique(size[: len(used)]))
        if own.any()
    ]
    return max(0.0, above - max(0.0, float(np.median(ends or [0.0]))))
