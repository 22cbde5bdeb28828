"""Scaling laws: the frontier of many runs, and power laws with intervals fitted to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, isnan, log, nan
from numbers import Real
from typing import Literal

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.structures.values import whole_number
from einlinear.studies.law import BELOW, Laws, Sharing
from einlinear.studies.observations import Floats, Observations, as_observations, codes
from einlinear.studies.record import RunRecord
from einlinear.studies.resample import (
    Problem,
    check_compute,
    check_linf,
    interval,
    make_problem,
    solve,
    solve_samples,
)
from einlinear.studies.residuals import (
    Thirds,
    beside,
    in_thirds,
    is_systematic,
    overshoot,
    undercut,
)
from einlinear.studies.selection import Selection, choose, make_tables, on_frontier

Data = Observations | Iterable[RunRecord]
Linf = float | Literal["fitted", "shared"]
Method = Literal["robust", "paper"]
Choice = Literal["frontier", "inner", "all"]
Interval = tuple[float, float]
Bound = Literal["", "lowest loss", "zero"]

_OFF = 0.03  # a law that losses beyond its points are off by so much does not hold there
_NEAR = 2e-6  # share of a loss within which linf is at its bound


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """L = linf + b C^-a of one structure, with the intervals of its three numbers.

    r2: share of the variance of log L that the law explains.
    rms: of the residuals of log L; 0.01 is one per cent of the loss.
    num_points, num_runs: how many points were used, and of how many runs.
    compute_range: their least and most compute; the law is extrapolated beyond.
    at_bound: the bound that linf sits on: the "lowest loss" of those observed, or "zero"; "" if on
        none. The points ask for a linf beyond it, so they do not follow the law.
    thirds: mean residuals of log L in the first, middle and last third of the points.
    is_systematic: whether they bend more than the noise of runs explains.
    undercut: the most that an observed loss is below the law, in log L, from the least compute of
        the points on; a stray run does not count.
    overshoot: the most that the lowest loss so far is above the law beyond the points, in log L,
        less what sizes inside are above it where they end.
    stray: a run that is far below the law and what other runs have reached; "" if there is none.
    """

    structure: str
    linf: float
    b: float
    a: float
    linf_interval: Interval
    b_interval: Interval
    a_interval: Interval
    r2: float
    rms: float
    num_points: int
    num_runs: int
    compute_range: Interval
    at_bound: Bound = ""
    thirds: Thirds = (0.0, 0.0, 0.0)
    is_systematic: bool = False
    undercut: float = 0.0
    overshoot: float = 0.0
    stray: str = ""

    @property
    def decades(self) -> float:
        """Powers of ten between the least and the most compute of the points."""
        return log(self.compute_range[1] / self.compute_range[0]) / log(10)

    def is_extrapolated(self, compute: float) -> bool:
        """Whether some compute is outside that of the points."""
        return not self.compute_range[0] <= compute <= self.compute_range[1]

    def loss(self, compute: float) -> float:
        """The loss that the law gives for some compute."""
        if compute <= 0:
            raise EinlinearError(
                what=f"compute is {quote(compute)}",
                rule="a power law holds for compute above 0",
                fix="give some between {:.4g} and {:.4g}".format(*self.compute_range),
            )
        return float(self.linf + np.exp(log(self.b) - self.a * log(compute)))

    def compute(self, loss: float) -> float:
        """The compute at which the law reaches a loss; infinite if never."""
        if loss <= self.linf:
            return float("inf")
        with np.errstate(over="ignore"):
            return float(np.exp((log(self.b) - log(loss - self.linf)) / self.a))


@dataclass(frozen=True, eq=False, slots=True)
class Fit:
    """The power laws of all structures, how they were found, and the points they were fitted to.

    level: of the intervals.
    resamples: how many samples of the runs they come from.
    points: the observations that counted.
    """

    laws: tuple[PowerLaw, ...]
    method: Method
    linf: Linf
    level: float
    resamples: int
    points: Observations

    def __getitem__(self, structure: str) -> PowerLaw:
        for law in self.laws:
            if law.structure == structure:
                return law
        raise EinlinearError(
            what=f"there is no law of {quote(structure)}",
            rule="a fit has a law for every structure observed",
            fix=f"give one of {', '.join(law.structure for law in self.laws)}",
        )

    def __str__(self) -> str:
        """A table of the laws, with the intervals in brackets."""
        width = max(9, *(len(law.structure) for law in self.laws))
        lines = [f"{'structure':{width}}  {'a':24} {'linf':24} {'rms':8} points  decades"]
        for law in self.laws:
            a = f"{law.a:.4g} [{law.a_interval[0]:.4g}, {law.a_interval[1]:.4g}]"
            linf = f"{law.linf:.4g} [{law.linf_interval[0]:.4g}, {law.linf_interval[1]:.4g}]"
            row = f"{law.structure:{width}}  {a:24} {linf:24} {law.rms:<8.2g} "
            lines.append(row + f"{law.num_points:<7} {law.decades:.2g}")
        return "\n".join([*lines, *self.warnings])

    @property
    def at_bound(self) -> tuple[str, ...]:
        """The structures whose linf sits on a bound, so that it is not measured."""
        return tuple(law.structure for law in self.laws if law.at_bound)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Which laws not to trust, and why."""
        found = []
        for law in self.laws:
            if law.at_bound:
                found.append(
                    f"{law.structure}: linf is at its bound ({law.at_bound}), so it is not measured"
                )
            if law.is_systematic:
                first, middle, last = (f"{percent(value):+.1f} %" for value in law.thirds)
                found.append(
                    f"{law.structure}: the points are off the law by {first}, {middle}, {last} in "
                    "the first, middle and last third, more than their noise"
                )
            if is_undercut(law):
                found.append(
                    f"{law.structure}: losses were reached that are below the law, by up to "
                    f"{-percent(-law.undercut):.2g} %"
                )
            if is_overshot(law):
                found.append(
                    f"{law.structure}: beyond the points losses stay above the law, by up to "
                    f"{percent(law.overshoot):.2g} %"
                )
            if law.stray:
                found.append(
                    f"{law.structure}: the run {law.stray} is far below the law and all other "
                    "runs; no bound of linf counts it"
                )
        return tuple(found)


def percent(log_ratio: float) -> float:
    """A difference of log losses, as a percentage of the loss."""
    with np.errstate(over="ignore"):
        return float(100 * np.expm1(log_ratio))


def is_undercut(law: PowerLaw) -> bool:
    """Whether losses are below the law by more than it misses its own points, and than noise."""
    return law.undercut > max(_OFF, 4 * law.rms)


def is_overshot(law: PowerLaw) -> bool:
    """Whether losses beyond the points stay above the law, by more than it misses its own."""
    return law.overshoot > max(_OFF, 4 * law.rms)


def frontier(
    observations: Data, *, hull: bool = False, linf: float = 0.0, tolerance: float = 0.05
) -> Observations:
    """The points that no other of the same structure beats with as much compute or less.

    Of points that are equal in both the first stays.

    Args:
        observations: or records, whose compute is then FLOPs of training.
        hull: the paper's recipe instead: points on the lower convex hull of log C and
            log(L - linf), and points less than `tolerance` above it.
        linf: for the hull only.
        tolerance: for the hull only; the paper used 0.02 to 0.05.
    """
    data = as_observations(observations)
    _check_tolerance(tolerance)
    tables = make_tables(data)
    check_compute(data.structures, tables)
    if not hull:
        return data.take(np.concatenate([t.index[on_frontier(t.y)] for t in tables]))
    _check_number(linf)
    check_linf(linf, float(data.loss.min()))
    return data.take(np.concatenate([choose(t, "hull", linf, tolerance).index for t in tables]))


def fit_power_law(
    observations: Data,
    *,
    linf: Linf = "fitted",
    points: Choice = "inner",
    method: Method = "robust",
    tolerance: float = 0.05,
    level: float = 0.9,
    resamples: int = 500,
    seed: int = 0,
) -> Fit:
    """The power law L = linf + b C^-a of each structure, with intervals.

    Minimised is Huber's cost of log L - log(linf + b C^-a): a residual is a share of the loss, and
    a run that went wrong counts little. Intervals are percentiles over samples of the runs with
    points that count: groups are drawn again, in every second sample also seeds in each of them,
    and the law is found anew.
    Checked by: test_fit_intervals.py::test_intervals_of_curves_cover.

    Args:
        observations: or records, whose compute is then FLOPs of training.
        linf: "fitted" for each structure, "shared" by all, or a number.
        points: "frontier", of the medians over the seeds of each group: all seeds count where it
            is; "inner", without the sizes at its two ends, which go beyond where they are the best
            choice; or "all".
        method: "robust", or "paper": the hull and ordinary least squares at a given linf.
        tolerance: of the paper's hull.
        level: of the intervals.
        resamples: samples for the intervals; 0 is no intervals.
        seed: of the samples.
    """
    data = as_observations(observations)
    check_draws(level, resamples, seed)
    problem = pose(data, linf, points, method, tolerance)
    found = solve(problem)
    parts = [laws for _, laws in solve_samples(problem, found, resamples, seed)]
    laws = _make_laws(problem, found[0], parts, level, data)
    return Fit(laws, method, linf, level, resamples, data.take(np.concatenate(problem.index)))


def pose(
    data: Observations, linf: Linf, points: Choice, method: Method, tolerance: float
) -> Problem:
    """The problem that the arguments of `fit_power_law` stand for."""
    _check_tolerance(tolerance)
    _check_choice("method", method, ("robust", "paper"))
    _check_choice("points", points, ("frontier", "inner", "all"))
    if isinstance(linf, str):
        _check_choice("linf", linf, ("fitted", "shared"), " or a number")
        if method == "paper":
            raise EinlinearError(
                what=f'method is "paper", linf {quote(linf)}',
                rule="the paper's recipe subtracts a linf that is given",
                fix="give a number, such as linf=0.0, and look at linf_table",
            )
        sharing: Sharing = "shared" if linf == "shared" else "fitted"
        value = 0.0
    else:
        _check_number(linf)
        sharing, value = "given", float(linf)
    selection: Selection = "hull" if method == "paper" else points
    return make_problem(data, selection, sharing, value, tolerance)


def _make_laws(
    problem: Problem, found: Laws, parts: list[Laws], level: float, data: Observations
) -> tuple[PowerLaw, ...]:
    points, log_b = problem.points, found.scale + found.a * problem.centre
    residuals = points.y - found.log_loss(points.x)
    none = [Laws(*[np.full(log_b.shape, nan)] * 3)]
    linf = np.concatenate([part.linf for part in parts or none])
    a = np.concatenate([part.a for part in parts or none])
    scale = np.concatenate([part.scale for part in parts or none])
    with np.errstate(over="ignore"):
        b, of_all = np.exp(scale + a * problem.centre), np.exp(log_b)
    ends = [interval(samples, level) for samples in (linf, b, a)]
    laws = []
    for s, structure in enumerate(problem.structures):
        index = problem.index[s]
        count = len(index)
        y, residual = points.y[0, s, :count], residuals[0, s, :count]
        of_linf, of_b, of_a = [(float(low[s]), float(high[s])) for low, high in ends]
        of_linf = _clipped(of_linf, BELOW * float(problem.lowest[s]))
        near = beside(problem, found, data, s)
        least, most = data.compute[index[[0, -1]]].tolist()
        laws.append(
            PowerLaw(
                structure,
                float(found.linf[0, s]),
                float(of_all[0, s]),
                float(found.a[0, s]),
                of_linf,
                of_b,
                of_a,
                r2=_explained(y, residual),
                rms=float(np.sqrt(np.mean(residual**2))),
                num_points=count,
                num_runs=problem.runs[s].count,
                compute_range=(least, most),
                at_bound=_bound(problem, float(found.linf[0, s]), s),
                thirds=in_thirds(residual),
                is_systematic=is_systematic(
                    residual, problem.runs[s].run, codes(data.group[index])
                ),
                undercut=undercut(near, data, index),
                overshoot=overshoot(near, data, index),
                stray="" if problem.strays[s] is None else str(data.run[problem.strays[s]]),
            )
        )
    return tuple(laws)


def _clipped(ends: Interval, highest: float) -> Interval:
    """An interval that ends at a bound; of nan if it was."""
    low, high = (end if isnan(end) else min(end, highest) for end in ends)
    return low, high


def _bound(problem: Problem, linf: float, structure: int) -> Bound:
    """The bound that a fitted linf sits on."""
    highest = float(problem.points.highest[0, structure])
    highest = min(highest, BELOW * float(problem.lowest[structure]))
    if problem.sharing == "given":
        return ""
    if linf <= _NEAR * highest:
        return "zero"
    return "lowest loss" if linf >= (1 - _NEAR) * highest else ""


def _explained(y: Floats, residual: Floats) -> float:
    total = float(((y - y.mean()) ** 2).sum())
    return 1 - float((residual**2).sum()) / total if total else nan


def check_draws(level: float, resamples: int, seed: int) -> None:
    """Refuse a level that is no share, and numbers that are not whole."""
    if not (isinstance(level, Real) and 0 < level < 1):
        raise EinlinearError(
            what=f"level is {quote(level)}", rule="level is between 0 and 1", fix="give level=0.9"
        )
    whole_number(resamples, "resamples", 0)
    whole_number(seed, "seed", 0)


def _check_number(linf: object) -> None:
    if isinstance(linf, bool) or not isinstance(linf, Real):
        _check_choice("linf", linf, ("fitted", "shared"), " or a number")


def _check_tolerance(tolerance: float) -> None:
    if not (isinstance(tolerance, Real) and isfinite(tolerance) and tolerance >= 0):
        raise EinlinearError(
            what=f"tolerance is {quote(tolerance)}",
            rule="tolerance is a share of 0 or more above the hull",
            fix="give tolerance=0.05",
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        raise EinlinearError(
            what=f"{name} is {quote(value)}",
            rule=f"{name} is one of {', '.join(choices)}{more}",
            fix=f'give {name}="{choices[0]}"',
        )
