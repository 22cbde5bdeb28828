"""Whether the residuals of a law are noise, or say that the points do not follow it."""

from __future__ import annotations

from itertools import pairwise
from math import exp

import numpy as np

from einlinear.studies.law import Laws
from einlinear.studies.observations import Floats, Ints, Observations, codes
from einlinear.studies.resample import Problem

Thirds = tuple[float, float, float]
Beside = tuple[Ints, Floats, Floats]  # places in the data, log losses, and those of the law

_SURE = 4.0  # a bend is one if it is so many standard errors
_LEAST = 0.015  # and this share of the loss or more: less is no matter
_DOUBT = 5.0  # of noise by few degrees of freedom: exp(5 / n) is about what Student's t asks for
_OF_MEDIANS = 0.37  # share of the degrees of freedom that a median has
_FEW_GROUPS = 4  # with fewer, what neighbouring groups differ by does not tell the noise


def in_thirds(residual: Floats) -> Thirds:
    """Means of residuals in the first, the middle and the last third of points sorted by compute.

    With fewer than three points the middle is what is left between the ends.
    """
    ends = [round(k * len(residual) / 3) for k in range(4)]
    parts = [residual[a : max(b, a + 1)] for a, b in pairwise(ends)]
    first, middle, last = (float(part.mean()) if len(part) else 0.0 for part in parts)
    return first, middle, last


def is_systematic(residual: Floats, run: Ints, group: Ints) -> bool:
    """Whether residuals bend: the middle third is off the two ends, by more than noise of runs.

    A law of the right form leaves residuals that are noise. One of the wrong form, or with a linf
    that others ask for, is too low at both ends and too high between them, or the other way round.
    So

        bend = first + last - 2 middle

    of means in the thirds is the measure.
    Checked by: test_residuals.py::test_noise_is_not_systematic.

    Args:
        residual: of log loss, sorted by compute.
        run: its run, of each.
        group: equal for runs that differ in their seed only.
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
    """The deviation of runs of one group, or of groups from their neighbours, and its freedom."""
    runs, groups = codes(run), codes(group)
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
    # A slow bend hardly counts in second differences, nor a single step in their median.
    second = np.diff(of_group, 2)
    return float(1.4826 * np.median(np.abs(second)) / 6**0.5), _OF_MEDIANS * len(second)


def beside(problem: Problem, found: Laws, data: Observations, structure: int) -> Beside:
    """All points of a structure but those of a stray run, by compute, and the law there."""
    here = (data.structure == problem.structures[structure]) & (data.compute > 0)
    stray = problem.strays[structure]
    if stray is not None:
        here &= (data.run != data.run[stray]) | (data.seed != data.seed[stray])
    place = np.flatnonzero(here)
    place = place[np.argsort(data.compute[place], kind="stable")]
    x = np.log(data.compute[place]) - problem.centre[structure]
    law = Laws(*(column[:, structure] for column in found.columns))
    return place, np.log(data.loss[place]), law.log_loss(x)[0]


def undercut(near: Beside, data: Observations, used: Ints) -> float:
    """How far points are below a law; before its points the first steps of runs do not matter."""
    place, y, law = near
    is_late = data.compute[place] >= data.compute[used[0]]
    return float(np.max((law - y)[is_late], initial=0.0))


def overshoot(near: Beside, data: Observations, used: Ints) -> float:
    """How far the lowest loss so far is above a law beyond its points.

    The largest size goes on where a larger one would be better, so it ends above the law. So do
    the sizes inside: what these are above it at their ends is taken off.
    """
    place, y, law = near
    is_beyond = data.compute[place] > data.compute[used[-1]]
    if not is_beyond.any():
        return 0.0
    above = float((np.minimum.accumulate(y) - law)[is_beyond].max())
    size = codes(data.size[np.concatenate([used, place])])
    ends = [
        float((np.minimum.accumulate(y[own]) - law[own])[-1])
        for own in (size[len(used) :] == one for one in np.unique(size[: len(used)]))
        if own.any()
    ]
    return max(0.0, above - max(0.0, float(np.median(ends or [0.0]))))
