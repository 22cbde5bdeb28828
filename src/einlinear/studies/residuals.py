"""Whether the residuals of a law are noise, or say that the points do not follow it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from einlinear.studies.observations import Floats, Ints, codes

Thirds = tuple[float, float, float]

_SURE = 3.0  # an end is off if it is so many standard errors from 0
_LEAST = 0.005  # and by this share of the loss or more: less is no matter
_FEW_GROUPS = 6  # with fewer, what neighbouring groups differ by does not tell the noise


def in_thirds(residual: Floats) -> Thirds:
    """Means of residuals in the first, the middle and the last third of points sorted by compute.

    With fewer than three points the middle is what is left between the ends.
    """
    ends = [round(k * len(residual) / 3) for k in range(4)]
    parts = [residual[a : max(b, a + 1)] for a, b in pairwise(ends)]
    first, middle, last = (float(part.mean()) if len(part) else 0.0 for part in parts)
    return first, middle, last


def is_systematic(residual: Floats, run: Ints, group: Ints) -> bool:
    """Whether a law is off at both ends of its points, by more than the noise of runs.

    A law of the right form leaves residuals that are noise: those of neighbouring sizes have any
    sign. Residuals that are off at both ends have a bend that the law cannot follow.
    Checked by: test_residuals.py::test_noise_is_not_systematic.

    Args:
        residual: of log loss, sorted by compute.
        run: its run, of each.
        group: equal for runs that differ in their seed only.
    """
    noise = _noise(residual, run, group)
    third = len(residual) // 3
    if noise is None or not third:
        return False
    first, _, last = in_thirds(residual)
    counts = [len(np.unique(run[part])) for part in (slice(third), slice(-third, None))]
    return all(
        abs(end) > max(_LEAST, _SURE * noise / count**0.5)
        for end, count in zip((first, last), counts, strict=True)
    )


def _noise(residual: Floats, run: Ints, group: Ints) -> float | None:
    """The deviation of runs of one group, or of groups from their neighbours; None if not known."""
    runs, groups = codes(run), codes(group)
    of_run = np.bincount(runs, residual) / np.bincount(runs)
    home = np.zeros(len(of_run), dtype=np.int64)
    home[runs] = groups
    sizes = np.bincount(home)
    of_group = np.bincount(home, of_run) / sizes
    free = len(of_run) - len(of_group)
    if free:
        return float(np.sqrt(((of_run - of_group[home]) ** 2).sum() / free))
    if len(of_group) < _FEW_GROUPS:
        return None
    # A slow bend hardly counts in second differences, nor a single step in their median.
    return float(1.4826 * np.median(np.abs(np.diff(of_group, 2))) / 6**0.5)
