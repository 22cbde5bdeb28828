"""Resample runs and seeds, and fit laws to the samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.laws.law import (
    BELOW,
    Laws,
    SampleBatch,
    Sharing,
    first_fit,
    least_squares,
    robust_fit,
    take_samples,
)
from einlinear.laws.observations import Bools, Floats, Ints, Observations, numbered
from einlinear.laws.selection import (
    Selection,
    StructureView,
    choose_points,
    lowest_median,
    make_views,
)
from einlinear.show.numbers import counted

FEW_GROUPS = 6  # with fewer, every sample resamples seeds, see `draw`
_LARGEST = 100 * float(np.log(10)) + 1e-9  # logarithm of the largest number a law is fitted to
STRAY = 0.05  # a run is a stray only if it is below the law by more than this share
_MOST_VALUES = 300_000  # samples are fitted in batches of at most this many numbers
FIXES = {
    "inner": 'add runs of other sizes, or give points="frontier"',
    "frontier": "add runs of other sizes, or give linf",
    "all": "add runs of other sizes, or give linf",
    "hull": "add runs of other sizes, or give a larger tolerance",
}


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one structure that have points in the fit, and their groups.

    run: the number of each point's run.
    members: the runs of each group, padded with 0; `sizes` says how many are real.
    """

    run: Ints
    members: Ints
    sizes: Ints

    @property
    def count(self) -> int:
        """How many runs there are."""
        return int(self.sizes.sum())


@dataclass(frozen=True, eq=False)
class Problem:
    """What is fitted, and how.

    index: positions in the observations of the points that are fitted, by structure.
    points: the same points as one sample with weights of 1.
    runs: by structure.
    centre: mean x of the points, by structure; laws are expressed around it.
    lowest: the end of every interval of linf: the lowest loss of the structure, or of all if they
        share linf; infinite where points scatter to both sides of the law.
    strays: position of a point of the run that was set aside, or None; see `find_stray`.
    """

    structures: tuple[str, ...]
    index: tuple[Ints, ...]
    points: SampleBatch
    runs: tuple[Runs, ...]
    centre: Floats
    sharing: Sharing
    linf: float
    is_paper: bool
    lowest: Floats
    strays: tuple[int | None, ...]


def make_problem(
    observations: Observations,
    selection: Selection,
    sharing: Sharing,
    linf: float = 0.0,
    tolerance: float = 0.05,
) -> Problem:
    """Select the points and set the bounds of linf."""
    structures, views = observations.structures, make_views(observations)
    check_compute(structures, views)
    _check_range(structures, views)
    if sharing == "given":
        check_linf(linf, float(np.exp(min(view.y.min() for view in views))))
    chosen = tuple(choose_points(view, selection, linf, tolerance) for view in views)
    shape = (1, len(chosen), max(1, *(len(view.x) for view in chosen)))
    most = np.exp([view.y.max() for view in views])  # scattered points may be below linf
    highest = _joined(most, sharing)[None]
    points = SampleBatch(np.zeros(shape), np.zeros(shape), np.zeros(shape), highest)
    centre = np.array([view.x.mean() if len(view.x) else 0.0 for view in chosen])
    for s, view in enumerate(chosen):
        here = (0, s, slice(len(view.x)))
        points.x[here], points.y[here] = view.x - centre[s], view.y
        points.weight[here] = 1
    problem = Problem(
        structures,
        tuple(view.index for view in chosen),
        points,
        tuple(map(_make_runs, chosen)),
        centre,
        sharing,
        linf,
        selection == "hull",
        lowest=np.full(len(chosen), np.inf),
        strays=(None,) * len(chosen),
    )
    _check_enough(problem, selection)
    if sharing == "given" or selection == "all":
        return problem
    return _bounded(problem, views, chosen)


def _bounded(
    problem: Problem, views: tuple[StructureView, ...], chosen: tuple[StructureView, ...]
) -> Problem:
    """Add the bounds of linf.

    The law of a frontier must be able to reach every observed loss, including those of sizes that
    are not in the fit or in a sample. If the law asks for a linf above the lowest loss, that loss
    is the bound. Otherwise the bound is the lowest median over the seeds of a group, because a
    single seed may be below linf by luck. Bounds ignore a stray run; otherwise one bad number would
    move all laws that share linf.
    """
    inner = [lowest_median(view) for view in chosen]
    free = _with_bound(problem, np.array(inner))
    laws = first_fit(free.points, free.linf, free.sharing)[0]
    kept, places = [], []
    for s, (view, some) in enumerate(zip(views, chosen, strict=True)):
        law = Laws(*(np.asarray(v[0, s]) for v in laws))
        stray = find_stray(view, some, law, problem.centre[s])
        kept.append(view if stray is None else view.take(view.run != view.run[stray]))
        places.append(None if stray is None else int(view.index[stray]))
    lowest = _joined(np.exp([float(view.y.min()) for view in kept]), problem.sharing)
    medians = np.array([lowest_median(*pair) for pair in zip(kept, inner, strict=True)])
    is_beyond = laws.linf[0] > BELOW * lowest
    found = _with_bound(problem, np.where(is_beyond, lowest, medians))
    return replace(found, lowest=lowest, strays=tuple(places))


def _joined(values: Floats, sharing: Sharing) -> Floats:
    """One value for each structure; the lowest for all if they share linf."""
    return np.full_like(values, values.min()) if sharing == "shared" else values


def _with_bound(problem: Problem, lowest: Floats) -> Problem:
    """Bound linf just below the lowest losses."""
    highest = _joined(BELOW * lowest, problem.sharing)[None]
    return replace(problem, points=problem.points._replace(highest=highest))


def find_stray(view: StructureView, chosen: StructureView, law: Laws, centre: float) -> int | None:
    """The position of the lowest point of the one run that is far below the law, if there is one.

    Far means 5 % and six times the rms residual of the fitted points. Another run must have spent
    as much or more: nothing contradicts the run that went furthest.
    """
    off = chosen.y - law.log_loss(chosen.x - centre)
    below = law.log_loss(view.x - centre) - view.y
    is_far = below > max(STRAY, 6 * float(np.sqrt(np.mean(off**2))))
    is_far &= view.x >= chosen.x[0]
    runs = np.unique(view.run[is_far])
    if len(runs) != 1:
        return None
    place = int(np.where(is_far, below, -np.inf).argmax())
    others = view.x[view.run != runs[0]]
    return place if len(others) and others.max() >= view.x[place] else None


def check_compute(structures: tuple[str, ...], views: tuple[StructureView, ...]) -> None:
    """Refuse a structure without any point of nonzero compute."""
    for structure, view in zip(structures, views, strict=True):
        if not len(view.x):
            raise EinlinearError(
                what=f"{quote(structure)} has no point with compute above 0",
                rule="frontiers and power laws need points with compute above 0",
                fix="train longer, or leave the structure out",
            )


def _check_range(structures: tuple[str, ...], views: tuple[StructureView, ...]) -> None:
    """Refuse numbers whose ratios and powers overflow."""
    for structure, view in zip(structures, views, strict=True):
        for name, logs in (("compute", view.x), ("loss", view.y)):
            far = float(logs[np.abs(logs).argmax()])
            if abs(far) > _LARGEST:
                raise EinlinearError(
                    what=f"{structure!r} has a {name} of {np.exp(far):.3g}",
                    rule="a power law is fitted to numbers from 1e-100 to 1e100",
                    fix="drop the point, or use another unit",
                )


def check_linf(linf: float, lowest: float) -> None:
    """Refuse a linf that is not below every loss."""
    if not 0 <= linf < lowest:
        raise EinlinearError(
            what=f"linf is {linf:g}, the lowest loss is {lowest:g}",
            rule="linf is 0 or more, and below all losses",
            fix=f"give a number from 0 to below {lowest:g}",
        )


def _make_runs(view: StructureView) -> Runs:
    run = numbered(view.run)  # by compute, so that samples do not depend on the order of rows
    firsts = np.unique(run, return_index=True)[1]
    group = numbered(view.group[firsts])
    sizes = np.bincount(group)
    members = np.zeros((len(sizes), max(1, *sizes, 1)), dtype=np.int64)
    by_group = np.argsort(group, kind="stable")
    place = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members[group[by_group], place] = by_group
    return Runs(run, members, sizes)


def draw(runs: Runs, random: np.random.Generator, samples: int) -> Floats:
    """How often each run is in each sample; resamples groups, and seeds in every second sample.

    A resampled group carries the noise of its seeds, so resampling both counts that noise twice.
    But groups alone miss how noise decides which of several similar sizes looks best. With few
    groups, every sample resamples seeds as well.
    """
    groups, most = runs.members.shape
    drawn = random.integers(0, groups, (samples, groups))
    sizes = runs.sizes[drawn][..., None]
    seed = (random.random((samples, groups, most)) * sizes).astype(np.int64)
    if groups >= FEW_GROUPS:
        seed[::2] = np.arange(most)
    run = runs.members[drawn[..., None], seed] + np.arange(samples)[:, None, None] * runs.count
    chosen = run[np.broadcast_to(np.arange(most) < sizes, run.shape)]
    counts = np.bincount(chosen, minlength=samples * runs.count)
    return counts.reshape(samples, runs.count).astype(float)


def _drawn(problem: Problem, random: np.random.Generator, samples: int) -> SampleBatch:
    """The points of samples, weighted by how often their runs were drawn."""
    one = problem.points
    weight = np.zeros((samples, *one.x.shape[1:]))
    for s in sorted(range(len(problem.runs)), key=lambda s: str(problem.structures[s])):
        runs = problem.runs[s]
        weight[:, s, : len(runs.run)] = draw(runs, random, samples)[:, runs.run]
    sizes = np.count_nonzero(weight, axis=-1).ravel()
    sample, structure, place = np.nonzero(weight)
    to = np.arange(len(place)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shape = (samples, len(problem.runs), int(sizes.max()))
    highest = np.repeat(one.highest, samples, axis=0)
    points = SampleBatch(np.zeros(shape), np.zeros(shape), np.zeros(shape), highest)
    here = (sample, structure, to)
    points.x[here], points.y[here] = one.x[0, structure, place], one.y[0, structure, place]
    points.weight[here] = weight[sample, structure, place]
    return points


def _distinct(points: SampleBatch) -> Ints:
    """The number of distinct values of compute, which are sorted: samples x structures."""
    has = points.weight > 0
    x = np.where(has, points.x, -np.inf)
    before = np.maximum.accumulate(x, axis=-1)[..., :-1]
    return np.asarray(has[..., 0] + (has[..., 1:] & (x[..., 1:] > before)).sum(-1))


def _least(problem: Problem) -> int:
    return 2 if problem.sharing == "given" else 3


def _can_fit(problem: Problem, points: SampleBatch) -> Bools:
    """Whether samples have enough points and runs for a law: samples x structures."""
    enough = _distinct(points) >= _least(problem)
    if problem.sharing == "shared":
        enough = np.broadcast_to(enough.all(-1, keepdims=True), enough.shape)
    return np.asarray(enough & np.array([runs.count > 1 for runs in problem.runs]))


def _check_enough(problem: Problem, selection: Selection) -> None:
    ends = "; sizes at the ends of the frontier do not count" if selection == "inner" else ""
    for structure, count in zip(problem.structures, _distinct(problem.points)[0], strict=True):
        if count < _least(problem):
            given = "given" if problem.sharing == "given" else "fitted"
            usable = counted(count, "usable point")
            raise EinlinearError(
                what=f"{quote(structure)} has {usable} at different compute",
                rule=f"a power law with linf {given} needs {_least(problem)} or more{ends}",
                fix=FIXES[selection],
            )


def solve(problem: Problem) -> tuple[Laws, Floats]:
    """The laws of all runs, and the residual beyond which points count less."""
    points = problem.points
    if problem.is_paper:
        linf = np.full((1, len(problem.structures)), problem.linf)
        found = least_squares(points, linf), np.full(linf.shape, np.inf)
    else:
        found = first_fit(points, problem.linf, problem.sharing)
    for structure, a in zip(problem.structures, found[0].a[0], strict=True):
        if not a > 0:
            raise EinlinearError(
                what=f"the loss of {quote(structure)} does not fall with compute: a is {a:.3g}",
                rule="L = linf + b C⁻ᵃ needs an a above 0",
                fix="check that compute is not constant, or add runs with more compute",
            )
    return found


def solve_samples(
    problem: Problem, found: tuple[Laws, Floats], samples: int, seed: int
) -> Iterator[tuple[SampleBatch, Laws]]:
    """Yield batches of samples and their laws; nan where a sample allows no law.

    A structure with a single run has no samples: nothing shows how a second run would differ.
    """
    random = np.random.default_rng(seed)
    laws, bend = found
    members = sum(runs.members.size for runs in problem.runs)
    part = max(1, _MOST_VALUES // max(problem.points.x.size, members))
    for first in range(0, samples, part):
        count = min(part, samples - first)
        points = _drawn(problem, random, count)
        start = take_samples(laws, np.zeros(count, dtype=np.int64))
        if problem.is_paper:
            fitted = least_squares(points, start.linf)
        else:
            bends = np.broadcast_to(bend, start.linf.shape)
            fitted = robust_fit(points, start, bends, problem.sharing)
        has = _can_fit(problem, points)
        yield points, Laws(*(np.where(has, v, np.nan) for v in fitted))


def interval(samples: Floats, level: float) -> tuple[Floats, Floats]:
    """The percentiles of samples along the first axis, ignoring nan; nan if all are."""
    is_empty = np.isnan(samples).all(axis=0)
    tails = [(1 - level) / 2, (1 + level) / 2]
    filled = np.where(is_empty, 0.0, samples)
    ends = np.nanquantile(filled, tails, axis=0, method="nearest")
    low, high = np.where(is_empty, np.nan, ends)
    return low, high
