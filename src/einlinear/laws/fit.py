"""Find the frontier of many runs and fit power laws with intervals to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, log, nan
from numbers import Real
from typing import Literal, get_args

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.laws.law import BELOW, Laws
from einlinear.laws.observations import Observations, as_observations, numbered
from einlinear.laws.resample import (
    Problem,
    check_compute,
    check_linf,
    interval,
    make_problem,
    solve,
    solve_samples,
)
from einlinear.laws.residuals import (
    Thirds,
    beside,
    in_thirds,
    is_systematic,
    overshoot,
    undercut,
)
from einlinear.laws.selection import Selection, choose_points, make_views, on_frontier
from einlinear.runs.record import RunRecord
from einlinear.show.tables import text_table
from einlinear.structures.values import one_of, whole_number

Data = Observations | Iterable[RunRecord]
Linf = float | Literal["fitted", "shared"]
Method = Literal["robust", "paper"]
FitPoints = Literal["frontier", "inner", "all"]
Interval = tuple[float, float]
Bound = Literal["", "lowest loss", "zero"]

_OFF = 0.03  # from this share of the loss on, a law fails beyond its points
_NEAR = 2e-6  # linf is at its bound within this share


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """L = linf + b C⁻ᵃ of one structure, with intervals for linf, b and a.

    r2: share of the variance of log L that the law explains.
    rms: root mean square residual of log L; 0.01 is one per cent of the loss.
    num_points, num_runs: how many points the law was fitted to, and how many runs they belong to.
    compute_range: their smallest and largest compute; the law extrapolates beyond.
    at_bound: the bound that linf has hit: "lowest loss" (of those observed), "zero", or "" for
        none. The points ask for a linf beyond it, so they do not follow the law.
    thirds: mean residual of log L in the first, middle and last third of the points.
    is_systematic: whether the thirds bend more than the noise of runs explains.
    undercut: the most that an observed loss is below the law, in log L, from the first point of the
        fit on; a stray run does not count.
    overshoot: the most that the lowest loss so far stays above the law beyond the points, in log L,
        minus how far the sizes inside end above it.
    stray: a run far below the law and below what other runs reached; "" if there is none.
    log_b: the logarithm of b, which is 0 or infinite for very steep laws.
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
    log_b: float | None = None

    @property
    def decades(self) -> float:
        """Powers of ten between the smallest and largest compute of the points."""
        return log(self.compute_range[1] / self.compute_range[0]) / log(10)

    def is_extrapolated(self, compute: float) -> bool:
        """Whether a compute is outside the range of the points."""
        return not self.compute_range[0] <= compute <= self.compute_range[1]

    def loss(self, compute: float) -> float:
        """The loss that the law predicts for a compute."""
        if compute <= 0:
            raise EinlinearError(
                what=f"compute is {quote(compute)}",
                rule="a power law holds for compute above 0",
                fix="give a compute between {:.4g} and {:.4g}".format(*self.compute_range),
            )
        with np.errstate(over="ignore"):
            return float(self.linf + np.exp(self._log_b() - self.a * log(compute)))

    def compute(self, loss: float) -> float:
        """The compute at which the law reaches a loss; inf if never."""
        if loss <= self.linf:
            return float("inf")
        with np.errstate(over="ignore"):
            return float(np.exp((self._log_b() - log(loss - self.linf)) / self.a))

    def _log_b(self) -> float:
        return log(self.b) if self.log_b is None else self.log_b


@dataclass(frozen=True, eq=False, slots=True)
class Fit:
    """The power laws of all structures, how they were fitted, and to which points.

    level: level of the intervals.
    resamples: number of bootstrap samples behind the intervals.
    points: the observations that were fitted.
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
            what=f"there is no law for {quote(structure)}",
            rule="a fit has one law per observed structure",
            fix=f"give one of {', '.join(law.structure for law in self.laws)}",
        )

    def __str__(self) -> str:
        """A table of the laws, with intervals in brackets."""
        rows = [
            (
                law.structure,
                f"{law.a:.4g} [{law.a_interval[0]:.4g}, {law.a_interval[1]:.4g}]",
                f"{law.linf:.4g} [{law.linf_interval[0]:.4g}, {law.linf_interval[1]:.4g}]",
                f"{law.rms:.2g}",
                str(law.num_points),
                f"{law.decades:.2g}",
            )
            for law in self.laws
        ]
        head = ("structure", "a", "linf", "rms", "points", "decades")
        return "\n".join([text_table(head, rows), *self.warnings])

    @property
    def at_bound(self) -> tuple[str, ...]:
        """The structures whose linf has hit a bound, so that it is not measured."""
        return tuple(law.structure for law in self.laws if law.at_bound)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Laws not to trust, and why."""
        return tuple(f"{law.structure}: {text}" for law in self.laws for text in _warnings(law))


def _warnings(law: PowerLaw) -> Iterator[str]:
    if law.at_bound:
        yield f"linf is at its bound ({law.at_bound}), so it is not measured"
    if law.is_systematic:
        yield (
            f"the points are off the law by {percent_thirds(law)} in the first, middle and last "
            "third, more than noise explains"
        )
    if is_undercut(law):
        most = -percent_of_loss(-law.undercut)
        yield f"some losses are below the law, by up to {most:.2g} %"
    if is_overshot(law):
        most = percent_of_loss(law.overshoot)
        yield f"beyond its points, losses stay above the law by up to {most:.2g} %"
    if law.stray:
        yield (
            f"run {law.stray} is far below the law and all other runs; the bounds of linf ignore it"
        )


def percent_of_loss(log_ratio: float) -> float:
    """A difference of log losses as a percentage of the loss."""
    with np.errstate(over="ignore"):
        return float(100 * np.expm1(log_ratio))


def percent_thirds(law: PowerLaw) -> str:
    """The mean residuals in the three thirds of the points of a law."""
    return ", ".join(f"{percent_of_loss(value):+.1f} %" for value in law.thirds)


def is_undercut(law: PowerLaw) -> bool:
    """Whether losses are below the law by far more than its residuals."""
    return law.undercut > max(_OFF, 4 * law.rms)


def is_overshot(law: PowerLaw) -> bool:
    """Whether losses beyond the points stay above the law by far more than its residuals."""
    return law.overshoot > max(_OFF, 4 * law.rms)


def frontier(
    observations: Data, *, hull: bool = False, linf: float = 0.0, tolerance: float = 0.05
) -> Observations:
    """The points that no other point of the same structure beats with as much compute or less.

    Of identical points, the first is kept.

    Args:
        observations: observations, or records, which are compared by training FLOPs.
        hull: use the paper's recipe instead: points on the lower convex hull of log C and
            log(L - linf), and points less than `tolerance` above it.
        linf: the limit to subtract for the hull.
        tolerance: tolerance of the hull; the paper used 0.02 to 0.05.
    """
    data = as_observations(observations)
    _check_tolerance(tolerance)
    views = make_views(data)
    check_compute(data.structures, views)
    if not hull:
        return data.take(np.concatenate([t.index[on_frontier(t.y)] for t in views]))
    _check_linf_type(linf)
    check_linf(linf, float(data.loss.min()))
    return data.take(
        np.concatenate([choose_points(t, "hull", linf, tolerance).index for t in views])
    )


def fit_power_law(
    observations: Data,
    *,
    linf: Linf = "fitted",
    points: FitPoints = "inner",
    method: Method = "robust",
    tolerance: float = 0.05,
    level: float = 0.9,
    resamples: int = 500,
    seed: int = 0,
) -> Fit:
    """Fit the power law L = linf + b C⁻ᵃ of each structure, with intervals.

    Minimises the Huber cost of log L - log(linf + b C⁻ᵃ): residuals are relative to the
    loss, and outliers count little. Intervals are percentiles over bootstrap samples of the runs
    with fitted points: groups are resampled, in every second sample also the seeds within them, and
    the law is fitted again.
    Checked by: test_intervals.py::test_intervals_of_curves_cover.

    Args:
        observations: observations, or records, which are compared by training FLOPs.
        linf: "fitted" for each structure, "shared" by all, or a number.
        points: "frontier": the frontier of medians over seeds, with all seeds at its points;
            "inner": the same without the sizes at its two ends, which train beyond the range where
            they are the best choice; or "all".
        method: "robust", or "paper" for the hull and ordinary least squares at a given linf.
        tolerance: tolerance of the paper's hull.
        level: level of the intervals.
        resamples: bootstrap samples for the intervals; 0 for no intervals.
        seed: random seed of the samples.
    """
    data = as_observations(observations)
    check_draws(level, resamples, seed)
    problem = pose(data, linf, points, method, tolerance)
    found = solve(problem)
    parts = [laws for _, laws in solve_samples(problem, found, resamples, seed)]
    laws = _make_laws(problem, found[0], parts, level, data)
    return Fit(laws, method, linf, level, resamples, data.take(np.concatenate(problem.index)))


def pose(
    data: Observations, linf: Linf, points: FitPoints, method: Method, tolerance: float
) -> Problem:
    """Check the arguments of `fit_power_law` and set up the problem."""
    _check_tolerance(tolerance)
    one_of(method, "method", get_args(Method))
    one_of(points, "points", get_args(FitPoints))
    _check_linf_type(linf)
    selection: Selection = "hull" if method == "paper" else points
    if not isinstance(linf, str):
        return make_problem(data, selection, "given", float(linf), tolerance)
    if method == "paper":
        raise EinlinearError(
            what=f'method is "paper", linf {quote(linf)}',
            rule="the paper's recipe subtracts a given linf",
            fix="give a number, such as linf=0.0, and look at linf_table",
        )
    return make_problem(data, selection, linf)


def _make_laws(
    problem: Problem, found: Laws, parts: list[Laws], level: float, data: Observations
) -> tuple[PowerLaw, ...]:
    points, log_b = problem.points, found.scale + found.a * problem.centre
    residuals = points.y - found.log_loss(points.x)
    none = [Laws(*[np.full(log_b.shape, nan)] * 3)]
    columns = zip(*(parts or none), strict=True)
    linf, scale, a = map(np.concatenate, columns)
    with np.errstate(over="ignore"):
        b, of_all = np.exp(scale + a * problem.centre), np.exp(log_b)
    ends = np.array([interval(samples, level) for samples in (linf, b, a)])
    ends[0] = np.minimum(ends[0], BELOW * problem.lowest)
    laws = []
    for s, structure in enumerate(problem.structures):
        index = problem.index[s]
        count = len(index)
        y, residual = points.y[0, s, :count], residuals[0, s, :count]
        of_linf, of_b, of_a = map(tuple, ends[:, :, s].tolist())
        variance = float(((y - y.mean()) ** 2).sum())
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
                r2=1 - float((residual**2).sum()) / variance if variance else nan,
                rms=float(np.sqrt(np.mean(residual**2))),
                num_points=count,
                num_runs=problem.runs[s].count,
                compute_range=(least, most),
                at_bound=_bound(problem, float(found.linf[0, s]), s),
                thirds=in_thirds(residual),
                is_systematic=is_systematic(
                    residual, problem.runs[s].run, numbered(data.group[index])
                ),
                undercut=undercut(near, data, index),
                overshoot=overshoot(near, data, index),
                stray="" if problem.strays[s] is None else str(data.run[problem.strays[s]]),
                log_b=float(log_b[0, s]),
            )
        )
    return tuple(laws)


def _bound(problem: Problem, linf: float, structure: int) -> Bound:
    """The bound that a fitted linf has hit."""
    bounds = problem.points.highest[0, structure], BELOW * problem.lowest[structure]
    highest = float(min(bounds))
    if problem.sharing == "given":
        return ""
    if linf <= _NEAR * highest:
        return "zero"
    return "lowest loss" if linf >= (1 - _NEAR) * highest else ""


def check_draws(level: float, resamples: int, seed: int) -> None:
    """Refuse a level outside (0, 1), and counts that are not whole numbers."""
    if not (isinstance(level, Real) and 0 < level < 1):
        raise EinlinearError(
            what=f"level is {quote(level)}", rule="level is between 0 and 1", fix="give level=0.9"
        )
    whole_number(resamples, "resamples", 0)
    whole_number(seed, "seed", 0)


def _check_linf_type(linf: object) -> None:
    if isinstance(linf, bool) or not (isinstance(linf, Real) or linf in ("fitted", "shared")):
        raise EinlinearError(
            what=f"linf is {quote(linf)}",
            rule="linf is 'fitted', 'shared' or a number",
            fix="give linf='fitted'",
        )


def _check_tolerance(tolerance: float) -> None:
    if not (isinstance(tolerance, Real) and isfinite(tolerance) and tolerance >= 0):
        raise EinlinearError(
            what=f"tolerance is {quote(tolerance)}",
            rule="tolerance is a share above the hull, 0 or more",
            fix="give tolerance=0.05",
        )
