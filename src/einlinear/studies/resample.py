"""Samples of runs and seeds, and the laws fitted to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.studies.law import (
    BELOW,
    Laws,
    Points,
    Sharing,
    first_fit,
    highest_linf,
    least_squares,
    robust_fit,
)
from einlinear.studies.observations import Floats, Ints, Observations, codes
from einlinear.studies.selection import (
    Bools,
    Selection,
    Table,
    choose,
    lowest_median,
    make_tables,
)

FEW_GROUPS = 6  # with fewer, seeds are drawn in every sample, see `draw`
_LARGEST = 100 * float(np.log(10)) + 1e-9  # logarithm of what a law is fitted to
STRAY = 0.05  # a run that is less below a law than this share has not gone astray
CHUNK = 300_000  # numbers of an array; samples are fitted in parts of this size
FIXES = {
    "inner": 'add runs of other sizes, or give points="frontier"',
    "frontier": "add runs of other sizes, or give linf",
    "all": "add runs of other sizes, or give linf",
    "hull": "add runs of other sizes, or give a larger tolerance",
}


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one structure that have points that count, and their groups.

    run: number of the run of each point.
    members: the runs of each group, filled up with 0; sizes says how many there are.
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

    index: where the points that count stand in the observations, by structure.
    points: the same as one sample, each of weight 1.
    runs: by structure.
    centre: mean of x of the points, by structure; laws are written around it.
    lowest: what no interval of linf goes beyond: the lowest loss of a structure, or of all if they
        share linf; infinite where points scatter to both sides of the law.
    strays: where a point of the run that was set aside for that stands, or None; see `find_stray`.
    """

    structures: tuple[str, ...]
    index: tuple[Ints, ...]
    points: Points
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
    """The problem with every point that counts."""
    structures, tables = observations.structures, make_tables(observations)
    check_compute(structures, tables)
    _check_range(structures, tables)
    if sharing == "given":
        check_linf(linf, float(np.exp(min(table.y.min() for table in tables))))
    chosen = tuple(choose(table, selection, linf, tolerance) for table in tables)
    shape = (1, len(chosen), max(1, *(len(table.x) for table in chosen)))
    most = np.exp([table.y.max() for table in tables])  # scattering points may be below linf
    highest = (np.full_like(most, most.min()) if sharing == "shared" else most)[None]
    points = Points(np.zeros(shape), np.zeros(shape), np.zeros(shape), highest)
    centre = np.array([table.x.mean() if len(table.x) else 0.0 for table in chosen])
    for s, table in enumerate(chosen):
        here = (0, s, slice(len(table.x)))
        points.x[here], points.y[here] = table.x - centre[s], table.y
        points.weight[here] = 1
    problem = Problem(
        structures,
        tuple(table.index for table in chosen),
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
    return _bounded(problem, tables, chosen)


def _bounded(problem: Problem, tables: tuple[Table, ...], chosen: tuple[Table, ...]) -> Problem:
    """The same with the bounds of linf.

    The law of a frontier must be able to reach what was reached, also by sizes that do not count in
    the fit, and in samples that lack them. If the law asks for a linf above the lowest loss, it is
    bound by that. In samples of other laws it is by medians over the seeds of each group: a single
    one may be below linf by luck. No bound counts a stray run, or one bad number would move all
    laws that share linf.
    """
    inner = [lowest_median(table) for table in chosen]
    free = _with_bound(problem, np.array(inner))
    laws = first_fit(free.points, free.linf, free.sharing)[0]
    strays = [
        find_stray(
            table, some, Laws(*(np.asarray(v[0, s]) for v in laws.columns)), problem.centre[s]
        )
        for s, (table, some) in enumerate(zip(tables, chosen, strict=True))
    ]
    kept = [
        table if stray is None else table.take(table.run != table.run[stray])
        for table, stray in zip(tables, strays, strict=True)
    ]
    lowest = np.exp([float(table.y.min()) for table in kept])
    if problem.sharing == "shared":
        lowest = np.full_like(lowest, lowest.min())
    medians = np.array([lowest_median(*pair) for pair in zip(kept, inner, strict=True)])
    is_beyond = laws.linf[0] > BELOW * lowest
    found = _with_bound(problem, np.where(is_beyond, lowest, medians))
    places = [
        None if stray is None else int(table.index[stray])
        for table, stray in zip(tables, strays, strict=True)
    ]
    return replace(found, lowest=lowest, strays=tuple(places))


def _with_bound(problem: Problem, lowest: Floats) -> Problem:
    highest = highest_linf(lowest, problem.sharing)[None]
    return replace(problem, points=replace(problem.points, highest=highest))


def find_stray(table: Table, chosen: Table, law: Laws, centre: float) -> int | None:
    """The place of the lowest point of the one run that is far below a law, if there is one.

    It is below by 5 % and by six times what the points that count are off, and another run has
    spent as much or more: of the run that went furthest nothing says that it is wrong.
    """
    off = chosen.y - law.log_loss(chosen.x - centre)
    below = law.log_loss(table.x - centre) - table.y
    is_far = below > max(STRAY, 6 * float(np.sqrt(np.mean(off**2))))
    is_far &= table.x >= chosen.x[0]
    runs = np.unique(table.run[is_far])
    if len(runs) != 1:
        return None
    place = int(np.where(is_far, below, -np.inf).argmax())
    others = table.x[table.run != runs[0]]
    return place if len(others) and others.max() >= table.x[place] else None


def check_compute(structures: tuple[str, ...], tables: tuple[Table, ...]) -> None:
    """Refuse a structure that has no point of some compute."""
    for structure, table in zip(structures, tables, strict=True):
        if not len(table.x):
            raise EinlinearError(
                what=f"{quote(structure)} has no point of some compute",
                rule="frontiers and power laws are made of points with compute above 0",
                fix="train longer, or leave the structure out",
            )


def _check_range(structures: tuple[str, ...], tables: tuple[Table, ...]) -> None:
    """Refuse numbers whose ratios and powers no float can hold."""
    for structure, table in zip(structures, tables, strict=True):
        for name, logs in (("compute", table.x), ("loss", table.y)):
            far = float(logs[np.abs(logs).argmax()])
            if abs(far) > _LARGEST:
                raise EinlinearError(
                    what=f"{structure!r} has a {name} of {np.exp(far):.3g}",
                    rule="a power law is fitted to numbers from 1e-100 to 1e100",
                    fix="leave the point out, or give another unit",
                )


def check_linf(linf: float, lowest: float) -> None:
    """Refuse a linf that some loss is not above."""
    if not 0 <= linf < lowest:
        raise EinlinearError(
            what=f"linf is {linf:g}, the lowest loss is {lowest:g}",
            rule="linf is 0 or more, and below all losses",
            fix="give a lower linf",
        )


def _make_runs(table: Table) -> Runs:
    run = codes(table.run)  # by compute, so that draws do not hang on the order of rows
    firsts = np.unique(run, return_index=True)[1]
    group = codes(table.group[firsts])
    sizes = np.bincount(group)
    members = np.zeros((len(sizes), max(1, *sizes, 1)), dtype=np.int64)
    by_group = np.argsort(group, kind="stable")
    place = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members[group[by_group], place] = by_group
    return Runs(run, members, sizes)


def draw(runs: Runs, random: np.random.Generator, samples: int) -> Floats:
    """How often each run is in each sample: groups are drawn, and in every second one their seeds.

    Groups that are drawn bring the noise of their seeds along, so that drawing both counts it
    twice; but groups alone do not tell how the best of close sizes was chosen by that noise, and a
    few of them tell too little of anything. Then all samples draw seeds, too.
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


def _drawn(problem: Problem, random: np.random.Generator, samples: int) -> Points:
    """The points of samples, weighted by how often their runs were drawn, without those of 0."""
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
    points = Points(np.zeros(shape), np.zeros(shape), np.zeros(shape), highest)
    here = (sample, structure, to)
    points.x[here], points.y[here] = one.x[0, structure, place], one.y[0, structure, place]
    points.weight[here] = weight[sample, structure, place]
    return points


def _distinct(points: Points) -> Ints:
    """How many values of compute the points have, of samples x structures; they are sorted."""
    has = points.weight > 0
    x = np.where(has, points.x, -np.inf)
    before = np.maximum.accumulate(x, axis=-1)[..., :-1]
    return np.asarray(has[..., 0] + (has[..., 1:] & (x[..., 1:] > before)).sum(-1))


def _least(problem: Problem) -> int:
    return 2 if problem.sharing == "given" else 3


def _can_fit(problem: Problem, points: Points) -> Bools:
    """Whether samples have what laws and their spread need, of samples x structures."""
    enough = _distinct(points) >= _least(problem)
    if problem.sharing == "shared":
        enough = np.broadcast_to(enough.all(-1, keepdims=True), enough.shape)
    return np.asarray(enough & np.array([runs.count > 1 for runs in problem.runs]))


def _check_enough(problem: Problem, selection: Selection) -> None:
    ends = "; sizes at the ends of the frontier do not count" if selection == "inner" else ""
    for structure, count in zip(problem.structures, _distinct(problem.points)[0], strict=True):
        if count < _least(problem):
            noun = "point" if count == 1 else "points"
            given = "given" if problem.sharing == "given" else "fitted"
            raise EinlinearError(
                what=f"{quote(structure)} has {count} {noun} at different compute that count",
                rule=f"a power law with linf {given} needs {_least(problem)} or more{ends}",
                fix=FIXES[selection],
            )


def solve(problem: Problem) -> tuple[Laws, Floats]:
    """The laws of all runs, and the residuals beyond which points count less."""
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
                rule="L = linf + b C^-a has an a above 0",
                fix="check that compute is not constant, or add runs with more of it",
            )
    return found


def solve_samples(
    problem: Problem, found: tuple[Laws, Floats], samples: int, seed: int
) -> Iterator[tuple[Points, Laws]]:
    """Points and laws of samples drawn from runs and seeds, in parts; nan where no law can be.

    A structure with one run has none: nothing says how another would differ.
    """
    random = np.random.default_rng(seed)
    laws, bend = found
    members = sum(runs.members.size for runs in problem.runs)
    part = max(1, CHUNK // max(problem.points.x.size, members))
    for first in range(0, samples, part):
        count = min(part, samples - first)
        points = _drawn(problem, random, count)
        start = laws.rows(np.zeros(count, dtype=np.int64))
        if problem.is_paper:
            fitted = least_squares(points, start.linf)
        else:
            bends = np.broadcast_to(bend, start.linf.shape)
            fitted = robust_fit(points, start, bends, problem.sharing)
        has = _can_fit(problem, points)
        values = (np.where(has, v, np.nan) for v in (fitted.linf, fitted.scale, fitted.a))
        yield points, Laws(*values)


def interval(samples: Floats, level: float) -> tuple[Floats, Floats]:
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
