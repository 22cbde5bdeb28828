"""calibrate: how well losses that are hidden from the surrogate are predicted from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np

from einlinear.bench.replay.tables import RunTable
from einlinear.laws.observations import Bools, Floats, Ints
from einlinear.searches.decide import Choice, views
from einlinear.searches.draws import LEVEL, interval_of
from einlinear.searches.surrogate import Belief, Idea, mixed_ideas

Hidden = Literal["largest size", "last rungs"]
"""What is hidden: all runs of the largest size of each structure, or the ends of all runs."""

HIDDEN: tuple[Hidden, ...] = get_args(Hidden)
_LAST = 2  # rungs of each run that are hidden
_SAMPLE = 500  # of each belief, for their mixture


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of how many hidden losses of a structure the interval held the loss."""

    structure: str
    held: int
    count: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one belief says of hidden losses; without bend and centre, what the mixture says.

    bend: how much all curves may bend alike. centre: whether differences between structures grow
        from the middle of the runs on, or settle towards the target.
    bias: the mean of log(loss / predicted loss); above 0, losses are worse than predicted.
    error: the root of the mean square of the same.
    spread: the mean width of the intervals, in log losses.
    """

    hidden: Hidden
    bend: float | None
    centre: Literal["runs", "target"] | None
    held: int
    count: int
    bias: float
    error: float
    spread: float
    structures: tuple[Coverage, ...]


def calibrate(table: RunTable, hidden: Hidden) -> tuple[Calibration, ...]:
    """Hide losses, predict them with 90 % intervals, and count how many of those hold.

    Returns one row for each of the four beliefs that an answer mixes, and one for the mixture.
    Losses of one run have much of their noise in common, so counts vary more than those of
    independent losses. Empty if a table has nothing to hide.
    """
    reached = _shown(table, hidden)
    order = [int(k) for k in np.flatnonzero((reached >= 0).any((1, 2)))]
    cells = _hidden_cells(table, reached)
    cells = cells[np.isin(cells[:, 0], order)]
    if not len(cells):
        return ()
    seen = np.log(table.loss[tuple(cells.T)])
    ideas = mixed_ideas(table.target.anchor)
    beliefs = [table.fit(order, reached, **idea._asdict()) for idea in ideas]
    found = [_predicted(table, belief, order, reached, cells) for belief in beliefs]
    wide = NormalDist().inv_cdf((1 + LEVEL) / 2)
    rows = []
    for idea, (mean, spread) in zip(ideas, found, strict=True):
        ends = mean - wide * spread, mean + wide * spread
        rows.append(_row(table, hidden, idea, cells[:, 0], seen - mean, seen, ends))
    random = np.random.default_rng(0)
    noise = random.standard_normal((len(found), _SAMPLE, len(cells)))
    drawn = np.concatenate(
        [mean + spread * own for (mean, spread), own in zip(found, noise, strict=True)]
    )
    low, high = np.array([interval_of(column) for column in drawn.T]).T
    away = seen - np.mean([mean for mean, _ in found], axis=0)
    rows.append(_row(table, hidden, None, cells[:, 0], away, seen, (low, high)))
    return tuple(rows)


def _shown(table: RunTable, hidden: Hidden) -> Ints:
    """The rungs up to which losses are shown."""
    if hidden == "last rungs":
        return np.asarray(np.maximum(table.last - _LAST, -1))
    largest = (table.longest >= 0).sum(1) - 1
    shown: Ints = table.last.copy()
    for candidate, level in enumerate(largest):
        if level > 0:
            shown[candidate, level] = -1
    return shown


def _hidden_cells(table: RunTable, reached: Ints) -> Ints:
    """Candidate, level, rung and seed of losses beyond what is shown."""
    rung = np.arange(table.rungs)[None, None, :, None]
    is_hidden = (rung > reached[:, :, None]) & (rung <= table.last[:, :, None])
    return np.asarray(np.argwhere(is_hidden), np.int64)


def _predicted(
    table: RunTable, belief: Belief, order: Sequence[int], reached: Ints, cells: Ints
) -> tuple[Floats, Floats]:
    """Means and standard deviations of log losses, with all noise.

    What a run has shown so far tells of the noise that it shares with what it has not.
    """
    numbers = table.run_numbers(order, reached)
    place = {candidate: k for k, candidate in enumerate(order)}

    def usual(at: Ints) -> Floats:
        """Log losses without the noise of runs; an unknown seed has no effect."""
        candidate, level, rung, seed = at.T
        number = np.array([place[int(c)] for c in candidate])
        effects = np.append(belief.mean[len(belief.mean) - belief.seeds :], np.zeros(table.seeds))
        found = belief.loss(number, table.m[candidate, level], table.t[rung])
        return np.asarray(np.log(found) + effects[seed])

    shown = _hidden_cells(table, np.full_like(reached, -1))
    shown = shown[shown[:, 2] <= reached[shown[:, 0], shown[:, 1], shown[:, 3]]]
    away = np.log(table.loss[tuple(shown.T)]) - usual(shown)
    run = numbers[shown[:, 0], shown[:, 1], shown[:, 3]]
    of_run = belief.runs.weight * np.bincount(run, away) / np.bincount(run)
    own = numbers[cells[:, 0], cells[:, 1], cells[:, 3]]
    mean = usual(cells) + np.where(own >= 0, of_run[own], 0.0)
    options = [
        Choice(
            place[int(c)],
            int(level),
            int(rung),
            int(seed),
            inf,
            float(table.m[c, level]),
            float(table.t[rung]),
            int(number),
        )
        for (c, level, rung, seed), number in zip(cells, own, strict=True)
    ]
    rows, noise = views(belief, options)
    variance = np.einsum("ij,ij->i", rows @ belief.covariance, rows) + np.diag(noise)
    return mean, np.sqrt(variance)


def _row(
    table: RunTable,
    hidden: Hidden,
    idea: Idea | None,
    candidates: Ints,
    away: Floats,
    seen: Floats,
    ends: tuple[Floats, Floats],
) -> Calibration:
    is_held: Bools = (ends[0] <= seen) & (seen <= ends[1])
    structures = tuple(
        Coverage(
            table.candidates[c].label,
            int(is_held[candidates == c].sum()),
            int((candidates == c).sum()),
        )
        for c in np.unique(candidates)
    )
    return Calibration(
        hidden=hidden,
        bend=None if idea is None else idea.bend,
        centre=None if idea is None else "runs" if idea.centre == (0.0, 0.0) else "target",
        held=int(is_held.sum()),
        count=len(seen),
        bias=float(away.mean()),
        error=float(np.sqrt((away**2).mean())),
        spread=float((ends[1] - ends[0]).mean()),
        structures=structures,
    )
