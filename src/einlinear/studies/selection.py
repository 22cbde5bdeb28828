"""Which points count: the frontier, the frontier over seeds without its ends, and the hull."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from einlinear.studies.observations import Floats, Ints, Observations, codes

Bools = NDArray[np.bool_]
Selection = Literal["frontier", "inner", "all", "hull"]

NEAR = float(np.log(2))  # points of one place differ in compute by less than this
EQUAL = 1e-12  # logarithms that differ by less are equal


@dataclass(frozen=True, eq=False)
class Table:
    """The points of one structure that have some compute, sorted by compute and then loss.

    index: where they stand in the observations.
    x, y: logarithms of compute and loss.
    run, group, size: their numbers; runs of one name with different seeds are different runs.
    """

    index: Ints
    x: Floats
    y: Floats
    run: Ints
    group: Ints
    size: Ints

    def take(self, keep: Bools) -> Table:
        """Some of the points, in the same order."""
        numbers = (self.run[keep], self.group[keep], self.size[keep])
        return Table(self.index[keep], self.x[keep], self.y[keep], *numbers)


_made: WeakKeyDictionary[Observations, tuple[Table, ...]] = WeakKeyDictionary()


def make_tables(data: Observations) -> tuple[Table, ...]:
    """The points of every structure, in the order of `data.structures`; made once for each data."""
    tables = _made.get(data)
    if tables is None:
        tables = _made[data] = tuple(_tables(data))
    return tables


def _tables(data: Observations) -> Iterator[Table]:
    structure, run = codes(data.structure), codes(data.run)
    _, seed = np.unique(data.seed, return_inverse=True)
    run = run * (int(seed.max()) + 1) + seed
    group, size = codes(data.group), codes(data.size)
    with np.errstate(divide="ignore"):
        x, y = np.log(data.compute), np.log(data.loss)
    order = np.lexsort((y, x, structure))
    ends = np.searchsorted(structure[order], np.arange(len(data.structures) + 1))
    for start, stop in pairwise(ends.tolist()):
        index = order[start:stop]
        index = index[data.compute[index] > 0]
        yield Table(index, x[index], y[index], run[index], group[index], size[index])


def choose(table: Table, selection: Selection, linf: float, tolerance: float) -> Table:
    """The points that count for a law."""
    if selection == "all":
        return table
    table = table.take(_lowest_of_run(table))
    if selection == "hull":
        return table.take(near_hull(table.x, np.log(np.exp(table.y) - linf), tolerance))
    place = places(table)
    x, y, group, size = _medians(table, place)
    order = np.lexsort((y, x))
    front = order[on_frontier(y[order])]
    front = front[~_is_undercut(front, x, y, group)]
    if selection == "inner" and len(front):
        ends = size[front[[0, -1]]]
        front = front[~np.isin(size[front], ends)]
    return table.take(np.isin(place, front))


def on_frontier(loss: Floats) -> Bools:
    """Whether each of points, sorted by compute and then loss, is lower than all before it."""
    before = np.concatenate([[np.inf], np.minimum.accumulate(loss)[:-1]])
    return np.asarray(loss < before[: len(loss)])


def _lowest_of_run(table: Table) -> Bools:
    """Whether each point is the lowest of its run at its compute."""
    order = np.lexsort((table.y, table.x, table.run))
    keep = np.empty(len(order), dtype=bool)
    keep[order] = _is_new(table.run[order], table.x[order])
    return keep


def places(table: Table) -> Ints:
    """A number for each point, equal for what the seeds of a group have done at one moment.

    In a group those are points of equal compute. Where seeds do not share their values of compute,
    as in seconds, they are points of equal order, if these are within a factor of two. Otherwise
    each point is a place of its own.
    """
    x, run, group = table.x, table.run, table.group
    _, group = np.unique(group, return_inverse=True)
    count = np.arange(len(x))

    order = np.lexsort((x, group))
    is_new = _is_new(group[order], x[order])
    by_compute = np.empty_like(count)
    by_compute[order] = np.cumsum(is_new) - 1
    distinct = np.bincount(group[order][is_new])

    order = np.lexsort((x, run))
    first = np.flatnonzero(_is_new(run[order]))
    rank = np.empty_like(count)
    rank[order] = count - np.repeat(first, np.diff(np.append(first, len(x))))
    most = np.zeros(len(distinct), dtype=np.int64)
    np.maximum.at(most, group, rank + 1)

    order = np.lexsort((x, rank, group))
    first = np.flatnonzero(_is_new(group[order], rank[order]))
    last = np.append(first, len(x))[1:] - 1
    is_far = x[order[last]] - x[order[first]] >= NEAR
    is_loose = np.zeros(len(distinct), dtype=bool)
    is_loose[group[order[first]][is_far]] = True
    by_rank = np.empty_like(count)
    by_rank[order] = np.repeat(np.arange(len(first)), last - first + 1)

    is_grid = (distinct <= most)[group]
    apart = np.where(is_loose[group], 2 * len(x) + count, len(x) + by_rank)
    return np.unique(np.where(is_grid, by_compute, apart), return_inverse=True)[1]


def _is_new(*columns: NDArray[np.generic]) -> Bools:
    """Whether each of sorted rows differs from the one before it."""
    changed = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.concatenate([np.ones(min(1, len(columns[0])), dtype=bool), changed])


def _is_undercut(front: Ints, x: Floats, y: Floats, group: Ints) -> Bools:
    """Whether the curve of another group is lower at each of some places, between its points.

    Runs are evaluated at few moments. Where those of close sizes take turns, all of them would be
    on the frontier, also those that are never the best choice.
    """
    order = np.lexsort((x, group))
    first = np.flatnonzero(_is_new(group[order]))
    lower = np.zeros(len(front), dtype=bool)
    for curve in np.split(order, first[1:]):
        if len(curve) > 1:
            ends = {"left": np.inf, "right": np.inf}
            at = np.interp(x[front], x[curve], y[curve], **ends)
            lower |= (at < y[front] - EQUAL) & (group[front] != group[curve[0]])
    return lower


def _medians(table: Table, place: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    """Compute, median of the losses, group and size of each place."""
    order = np.lexsort((table.y, place))
    first = np.flatnonzero(_is_new(place[order]))
    count = np.diff(np.append(first, len(place)))
    middle = [table.y[order[first + k]] for k in ((count - 1) // 2, count // 2)]
    x = np.bincount(place, table.x) / count
    return x, (middle[0] + middle[1]) / 2, table.group[order[first]], table.size[order[first]]


def lowest_median(table: Table, known: float = np.inf) -> float:
    """The lowest loss, of medians over the seeds of each group at one moment; or what is known."""
    lowest = np.full(int(table.group.max()) + 1, np.inf)
    np.minimum.at(lowest, table.group, table.y)
    table = table.take(lowest[table.group] < np.log(known))  # other groups cannot be lower
    if not len(table.x):
        return known
    table = table.take(_lowest_of_run(table))
    return min(known, float(np.exp(_medians(table, places(table))[1].min())))


def near_hull(x: Floats, y: Floats, tolerance: float) -> Bools:
    """Whether sorted points stand on, or within a tolerance above, the lower hull of the frontier.

    Ref: [P24], as its experiments did it. Departure: the hull is that of the frontier's points, so
    that it does not rise again at the end, and nothing beyond its last point counts as near.
    """
    hull: list[tuple[float, float]] = []
    front = on_frontier(y)
    for point in zip(x[front].tolist(), y[front].tolist(), strict=True):
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    if not hull:
        return np.zeros(x.shape, dtype=bool)
    corner_x, corner_y = np.array(hull).T
    gap = y - np.interp(x, corner_x, corner_y)
    return np.asarray((gap <= np.log1p(tolerance) + 1e-12) & (x <= corner_x[-1]))


def _is_above(
    middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]
) -> bool:
    """Whether the middle point is on or above the line between the others."""
    (mx, my), (lx, ly), (rx, ry) = middle, left, right
    return (my - ly) * (rx - lx) >= (ry - ly) * (mx - lx)
