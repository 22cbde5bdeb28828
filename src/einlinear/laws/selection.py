"""Select the points that count: the frontier, the frontier without its ends, or the hull."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from einlinear.laws.observations import Bools, Floats, Ints, Observations, numbered

Selection = Literal["frontier", "inner", "all", "hull"]

NEAR = float(np.log(2))  # points of one moment differ in log compute by less than this
EQUAL = 1e-12  # logarithms that differ by less count as equal


@dataclass(frozen=True, eq=False)
class StructureView:
    """A numeric view of the observations of one structure, sorted by compute and then loss.

    Every sample sorts, takes logarithms and compares names; the view does each of these once.

    index: positions in the observations; rows with zero compute are left out.
    x, y: logarithms of compute and loss.
    run, group, size: numbers for their names; runs with different seeds are different runs.
    """

    index: Ints
    x: Floats
    y: Floats
    run: Ints
    group: Ints
    size: Ints

    def take(self, keep: Bools) -> StructureView:
        """The points where a mask is true, in the same order."""
        numbers = (self.run[keep], self.group[keep], self.size[keep])
        return StructureView(self.index[keep], self.x[keep], self.y[keep], *numbers)


_made: WeakKeyDictionary[Observations, tuple[StructureView, ...]] = WeakKeyDictionary()


def make_views(data: Observations) -> tuple[StructureView, ...]:
    """One view per structure, in the order of `data.structures`; cached for each data."""
    views = _made.get(data)
    if views is None:
        views = _made[data] = tuple(_make_views(data))
    return views


def _make_views(data: Observations) -> Iterator[StructureView]:
    structure, run = numbered(data.structure), numbered(data.run)
    _, seed = np.unique(data.seed, return_inverse=True)
    run = run * (int(seed.max()) + 1) + seed
    group, size = numbered(data.group), numbered(data.size)
    with np.errstate(divide="ignore"):
        x, y = np.log(data.compute), np.log(data.loss)
    order = np.lexsort((y, x, structure))
    ends = np.searchsorted(structure[order], np.arange(len(data.structures) + 1))
    for start, stop in pairwise(ends.tolist()):
        index = order[start:stop]
        index = index[data.compute[index] > 0]
        yield StructureView(index, x[index], y[index], run[index], group[index], size[index])


def choose_points(
    view: StructureView, selection: Selection, linf: float, tolerance: float
) -> StructureView:
    """The points that a law is fitted to."""
    if selection == "all":
        return view
    view = view.take(_lowest_of_run(view))
    if selection == "hull":
        return view.take(near_hull(view.x, np.log(np.exp(view.y) - linf), tolerance))
    place = places(view)
    x, y, group, size = _medians(view, place)
    order = np.lexsort((y, x))
    front = order[on_frontier(y[order])]
    front = front[~_is_undercut(front, x, y, group)]
    if selection == "inner" and len(front):
        ends = size[front[[0, -1]]]
        front = front[~np.isin(size[front], ends)]
    return view.take(np.isin(place, front))


def on_frontier(loss: Floats) -> Bools:
    """Whether each point, sorted by compute and then loss, is lower than all before it."""
    before = np.concatenate([[np.inf], np.minimum.accumulate(loss)[:-1]])
    return np.asarray(loss < before[: len(loss)])


def _lowest_of_run(view: StructureView) -> Bools:
    """Whether each point is the lowest of its run at its compute."""
    order = np.lexsort((view.y, view.x, view.run))
    keep = np.empty(len(order), dtype=bool)
    keep[order] = _is_new(view.run[order], view.x[order])
    return keep


def places(view: StructureView) -> Ints:
    """A number for each point; the seeds of a group share it at the same moment of training.

    The same moment means equal compute. Where seeds do not share their values of compute, such as
    seconds, it means the same rank within the run, if those points are within a factor of two.
    Otherwise every point gets a number to itself.
    """
    x, run, group = view.x, view.run, view.group
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
    """Whether each sorted row differs from the one before it."""
    changed = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.concatenate([np.ones(min(1, len(columns[0])), dtype=bool), changed])


def _is_undercut(front: Ints, x: Floats, y: Floats, group: Ints) -> Bools:
    """Whether the curve of another group, interpolated between its points, is lower.

    Runs are evaluated at few moments. If the evaluations of similar sizes alternate, all of them
    would be on the frontier, even sizes that are never the best choice.
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


def _medians(view: StructureView, place: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    """Compute, median loss, group and size of each place."""
    order = np.lexsort((view.y, place))
    first = np.flatnonzero(_is_new(place[order]))
    count = np.diff(np.append(first, len(place)))
    middle = [view.y[order[first + k]] for k in ((count - 1) // 2, count // 2)]
    x = np.bincount(place, view.x) / count
    return x, (middle[0] + middle[1]) / 2, view.group[order[first]], view.size[order[first]]


def lowest_median(view: StructureView, known: float = np.inf) -> float:
    """The lowest median loss over the seeds of a group at one moment, and at most `known`."""
    lowest = np.full(int(view.group.max()) + 1, np.inf)
    np.minimum.at(lowest, view.group, view.y)
    view = view.take(lowest[view.group] < np.log(known))  # other groups cannot be lower
    if not len(view.x):
        return known
    view = view.take(_lowest_of_run(view))
    return min(known, float(np.exp(_medians(view, places(view))[1].min())))


def near_hull(x: Floats, y: Floats, tolerance: float) -> Bools:
    """Whether sorted points are on, or within a tolerance above, the lower hull of the frontier.

    Ref: [P24], as in its experiments. Departure: this is the hull of the frontier only, so it does
    not rise again at the end, and no point beyond its last one counts as near.
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
    """Whether the middle point is on or above the line through the other two."""
    (mx, my), (lx, ly), (rx, ry) = middle, left, right
    return (my - ly) * (rx - lx) >= (ry - ly) * (mx - lx)
