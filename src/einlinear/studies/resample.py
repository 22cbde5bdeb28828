"""Samples of runs and seeds: the points of each that count, and the laws fitted to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from einlinear.errors import EinlinearError
from einlinear.studies.law import (
    Bools,
    Laws,
    Points,
    Sharing,
    candidates,
    first_fit,
    least_squares,
    near_hull,
    on_frontier,
    robust_fit,
)
from einlinear.studies.observations import Floats, Ints, Names, Observations

Selection = Literal["frontier", "inner", "all", "hull"]

CHUNK = 300_000  # numbers of an array; samples are fitted in parts of this size


@dataclass(frozen=True, eq=False)
class Column:
    """The points of one structure, sorted by compute and then loss.

    index: where they stand in the observations.
    x, y: logarithms of compute and loss.
    run, group: number of the run of each point, and of its group.
    members: the runs of each group, filled up with 0; sizes says how many there are.
    """

    index: Ints
    x: Floats
    y: Floats
    run: Ints
    group: Ints
    members: Ints
    sizes: Ints

    @property
    def num_runs(self) -> int:
        """How many runs the structure has."""
        return int(self.sizes.sum())

    def take(self, keep: Bools) -> Column:
        """Some of the points; runs and groups stay."""
        parts = (self.index[keep], self.x[keep], self.y[keep], self.run[keep], self.group[keep])
        return Column(*parts, self.members, self.sizes)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is fitted, and how.

    centre: mean of x of the points that count, by structure; laws are written around it.
    tolerance: how far above the hull points still count.
    """

    structures: tuple[str, ...]
    columns: tuple[Column, ...]
    centre: Floats
    selection: Selection
    sharing: Sharing
    linf: float
    tolerance: float

    @property
    def is_paper(self) -> bool:
        """Whether the paper's recipe is asked for."""
        return self.selection == "hull"


def make_column(observations: Observations, structure: str) -> Column:
    """The points of one structure that have some compute."""
    index = np.flatnonzero((observations.structure == structure) & (observations.compute > 0))
    if not len(index):
        raise EinlinearError(
            what=f"{structure!r} has no point of some compute",
            rule="frontiers and power laws are made of points with compute above 0",
            fix="train longer, or leave the structure out",
        )
    x, y = np.log(observations.compute[index]), np.log(observations.loss[index])
    order = np.lexsort((y, x))
    index = index[order]
    run, firsts = _codes(observations.run[index])
    group, _ = _codes(observations.group[index][firsts])
    sizes = np.bincount(group)
    members = np.zeros((len(sizes), sizes.max()), dtype=np.int64)
    by_group = np.argsort(group, kind="stable")
    place = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members[group[by_group], place] = by_group
    return Column(index, x[order], y[order], run, group[run], members, sizes)


def _codes(values: Names) -> tuple[Ints, Ints]:
    """A number for each value, and where each number comes first."""
    listed = values.tolist()
    number = {value: code for code, value in enumerate(dict.fromkeys(listed))}
    codes = np.fromiter(map(number.__getitem__, listed), np.int64, len(listed))
    firsts = np.empty(len(number), dtype=np.int64)
    firsts[codes[::-1]] = np.arange(len(codes))[::-1]  # of several the one written last stays
    return codes, firsts


def _may_count(column: Column) -> Bools:
    """Which points may be on a frontier of a sample: none behind a point of its own run."""
    order = np.lexsort((column.y, column.x, column.run))
    rank = np.searchsorted(np.sort(column.y), column.y)  # equal losses have one rank
    # Each run starts below all runs before it, so one running minimum serves for all.
    falling = rank[order] - column.run[order] * float(len(order) + 1)
    alone = np.zeros(len(order), dtype=bool)
    alone[order] = on_frontier(falling)
    keep = np.zeros(len(order), dtype=bool)
    keep[alone] = candidates(column.y[alone])
    return keep


def selected(column: Column, weight: Floats, problem: Problem) -> Floats:
    """The weights of samples x points, 0 for points that do not count."""
    if problem.selection == "all":
        return weight
    if problem.selection != "hull":
        front = on_frontier(np.where(weight > 0, column.y, np.inf))
        return weight * (_inner(front, column.group) if problem.selection == "inner" else front)
    above = np.log(np.exp(column.y) - problem.linf)
    counts = np.zeros_like(weight)
    for row, mine in zip(counts, weight, strict=True):
        held = np.flatnonzero(mine > 0)
        near = held[near_hull(column.x[held], above[held], problem.tolerance)]
        row[near] = mine[near]
    return counts


def _inner(front: Bools, group: Ints) -> Bools:
    """The frontier without the groups at its two ends, which no neighbour has overtaken there."""
    first = front.argmax(-1)
    last = front.shape[-1] - 1 - front[..., ::-1].argmax(-1)
    return np.asarray(front & (group != group[first][:, None]) & (group != group[last][:, None]))


def draw(column: Column, random: np.random.Generator, samples: int) -> Floats:
    """How often each run is in each sample: groups are drawn, and in each of them its seeds."""
    groups, most = column.members.shape
    drawn = random.integers(0, groups, (samples, groups))
    sizes = column.sizes[drawn][..., None]
    seed = (random.random((samples, groups, most)) * sizes).astype(np.int64)
    run = column.members[drawn[..., None], seed] + (
        np.arange(samples)[:, None, None] * column.num_runs
    )
    chosen = run[np.broadcast_to(np.arange(most) < sizes, run.shape)]
    counts = np.bincount(chosen, minlength=samples * column.num_runs)
    return counts.reshape(samples, column.num_runs).astype(float)


def _gather(problem: Problem, weights: list[Floats]) -> Points:
    """The points that count, put together without the others between them."""
    samples = len(weights[0])
    most = max(int((weight > 0).sum(-1).max()) for weight in weights)
    shape = (samples, len(weights), max(most, 1))
    is_frontier = problem.selection != "all"
    points = Points(np.zeros(shape), np.zeros(shape), np.zeros(shape), is_frontier)
    for s, (column, weight) in enumerate(zip(problem.columns, weights, strict=True)):
        row, place = np.nonzero(weight)
        sizes = np.bincount(row, minlength=samples)
        to = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        points.x[row, s, to] = column.x[place] - problem.centre[s]
        points.y[row, s, to] = column.y[place]
        points.weight[row, s, to] = weight[row, place]
    return points


def all_points(problem: Problem) -> Points:
    """The points of all runs that count, as one sample."""
    weights = [selected(c, np.ones((1, len(c.x))), problem) for c in problem.columns]
    return _gather(problem, weights)


def used(problem: Problem) -> Ints:
    """Where the points that count stand in the observations."""
    parts = [c.index[selected(c, np.ones((1, len(c.x))), problem)[0] > 0] for c in problem.columns]
    return np.concatenate(parts)


def make_problem(
    observations: Observations,
    selection: Selection,
    sharing: Sharing,
    linf: float = 0.0,
    tolerance: float = 0.05,
) -> Problem:
    """The problem with every point that may count, its centres in place."""
    structures = observations.structures
    columns = [make_column(observations, structure) for structure in structures]
    if selection in ("frontier", "inner"):
        columns = [column.take(_may_count(column)) for column in columns]
    lowest = min(float(np.exp(column.y.min())) for column in columns)
    if sharing == "given" and not 0 <= linf < lowest:
        raise EinlinearError(
            what=f"linf is {linf:g}, the lowest loss is {lowest:g}",
            rule="linf is 0 or more, and below all losses",
            fix="give a lower linf",
        )
    zero = np.zeros(len(columns))
    settings = (selection, sharing, linf, tolerance)
    problem = Problem(structures, tuple(columns), zero, *settings)
    points = all_points(problem)
    _check_enough(problem, points)
    centre = (points.weight * points.x).sum(-1)[0] / points.weight.sum(-1)[0]
    return Problem(structures, tuple(columns), centre, *settings)


def _enough(problem: Problem, points: Points) -> Bools:
    """Whether a sample has the points that a law needs, of samples x structures."""
    has = points.weight > 0
    x = np.where(has, points.x, np.nan)
    spread = np.where(has, x, -np.inf).max(-1) > np.where(has, x, np.inf).min(-1)
    enough = (has.sum(-1) >= _least(problem)) & spread
    if problem.sharing == "shared":
        return np.broadcast_to(enough.all(-1, keepdims=True), enough.shape)
    return np.asarray(enough)


def _least(problem: Problem) -> int:
    return 2 if problem.sharing == "given" else 3


def _check_enough(problem: Problem, points: Points) -> None:
    for s, structure in enumerate(problem.structures):
        count = int((points.weight[0, s] > 0).sum())
        if count < _least(problem):
            given = "given" if problem.sharing == "given" else "fitted"
            raise EinlinearError(
                what=f"{structure!r} has {count} points that count",
                rule=f"a power law with linf {given} needs {_least(problem)} or more",
                fix="add runs of other sizes, or give linf",
            )


def solve(problem: Problem) -> tuple[Laws, float]:
    """The laws of all runs, and the residual beyond which points count less."""
    points = all_points(problem)
    if problem.is_paper:
        return least_squares(points, np.full((1, len(problem.columns)), problem.linf)), np.inf
    return first_fit(points, problem.linf, problem.sharing)


def solve_samples(
    problem: Problem, found: tuple[Laws, float], samples: int, seed: int
) -> Iterator[tuple[Points, Laws]]:
    """Points and laws of samples drawn from runs and seeds, in parts; nan where no law can be."""
    random = np.random.default_rng(seed)
    laws, bend = found
    sizes = [max(len(c.x), c.members.size) for c in problem.columns]
    part = max(1, CHUNK // sum(sizes))
    for first in range(0, samples, part):
        count = min(part, samples - first)
        weights = [selected(c, draw(c, random, count)[:, c.run], problem) for c in problem.columns]
        points = _gather(problem, weights)
        start = laws.rows(np.zeros(count, dtype=np.int64))
        if problem.is_paper:
            fitted = least_squares(points, start.linf)
        else:
            fitted = robust_fit(points, start, bend, problem.sharing)
        enough = _enough(problem, points)
        values = (np.where(enough, v, np.nan) for v in (fitted.linf, fitted.scale, fitted.a))
        yield points, Laws(*values)


def interval(samples: NDArray[np.float64], level: float) -> tuple[Floats, Floats]:
    """Percentiles of samples along their first axis, without those that are nan."""
    flat = samples.reshape(len(samples), -1)
    ends = np.full((2, flat.shape[1]), np.nan)
    for place, values in enumerate(flat.T):
        known = values[~np.isnan(values)]
        if len(known):
            tails = [(1 - level) / 2, (1 + level) / 2]
            ends[:, place] = np.quantile(known, tails, method="nearest")
    low, high = ends.reshape(2, *samples.shape[1:])
    return low, high
