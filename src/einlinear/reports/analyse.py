"""Analyse the runs of a report: frontiers, laws, multipliers, and how runs ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.laws.fit import (
    FitPoints,
    Linf,
    PowerLaw,
    check_draws,
    fit_power_law,
    frontier,
    is_overshot,
)
from einlinear.laws.multiplier import LinfRow, Multiplier, compute_multiplier, linf_table
from einlinear.laws.observations import Observations
from einlinear.laws.resample import check_linf
from einlinear.reports.ends import Ends, Final, find_ends, find_finals
from einlinear.reports.shown import Gathered, ShownRun
from einlinear.reports.timed import with_times
from einlinear.runs.step_times import read_step_times

MEASURES = ("flops", "linear_flops", "seconds", "params", "units", "compute")
COMPARED = ("flops", "seconds", "compute")
"""Measures that structures are compared by, with intervals; the others only get curves."""
MISFIT = 0.02
"""The rms residual of a law, in log loss, from which it matters; seeds vary by half or less."""

_FAR_BELOW = 0.1  # losses below a law by this share show that it is wrong
_LEAST_SIZES = 2  # that must remain without the ends of a frontier


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The options of a report, as `report` describes them."""

    reference: str | None = None
    linf: Linf = "shared"
    task: str | None = None
    level: float = 0.9
    resamples: int = 500
    seed: int = 0
    times: str | Path | None = None

    def __post_init__(self) -> None:
        check_draws(self.level, self.resamples, self.seed)


@dataclass(frozen=True, slots=True)
class LawRow:
    """The law of a structure and the points it was fitted to, or why there is none."""

    structure: str
    law: PowerLaw | None
    points: FitPoints
    note: str


@dataclass(frozen=True, eq=False, slots=True)
class Measured:
    """All results for one measure of compute.

    front: the frontiers of all structures.
    multipliers: by structure; `reasons` says why one is missing.
    is_shared: whether the laws share one linf.
    own_order: for exponents that differ from the reference's with a shared linf, how they compare
        if each law has its own linf; see `compare_exponents`.
    """

    measure: str
    data: Observations
    front: Observations
    laws: Mapping[str, LawRow]
    multipliers: Mapping[str, Multiplier] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    is_shared: bool = False
    own_order: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Analysis:
    """All results of a report.

    runs: the runs of the task, on the data that most of them share.
    structures: the reference first, then from the least compute needed to the most.
    """

    gathered: Gathered
    settings: ReportSettings
    task: str
    runs: tuple[ShownRun, ...]
    structures: tuple[str, ...]
    reference: str | None
    measured: Mapping[str, Measured]
    linf_rows: tuple[LinfRow, ...]
    ends: tuple[Ends, ...]
    finals: tuple[Final, ...]

    @property
    def main(self) -> Measured | None:
        """Results by FLOPs, or by the compute of a table; None if no run has a point."""
        return self.measured.get("flops") or self.measured.get("compute")


def is_wrong(law: PowerLaw) -> bool:
    """Whether a law fails to describe its own points, or is far off beyond them."""
    return law.is_systematic or law.undercut > _FAR_BELOW or is_overshot(law)


def compare_exponents(law: PowerLaw, other: PowerLaw) -> int:
    """1 if the exponent is larger, -1 if smaller, 0 if the intervals overlap."""
    if law.a_interval[0] > other.a_interval[1]:
        return 1
    return -1 if law.a_interval[1] < other.a_interval[0] else 0


def analyse(gathered: Gathered, settings: ReportSettings) -> Analysis:
    """Analyse the runs of one task."""
    if settings.times is not None:
        gathered = with_times(gathered, read_step_times(settings.times))
    task = _choose_task(gathered, settings.task)
    runs = _of_one_data([run for run in gathered.runs if run.task == task])
    names = list(dict.fromkeys(run.structure for run in runs))
    reference = _choose_reference(runs, names, settings.reference)
    measured = {}
    for measure in MEASURES:
        data = observe(runs, measure)
        if data is not None:
            if not isinstance(settings.linf, str):
                check_linf(settings.linf, float(data.loss.min()))
            measured[measure] = _measure(measure, data, reference, settings)
    main = measured.get("flops") or measured.get("compute")
    found = {} if main is None else main.multipliers
    medians = {name: one.median for name, one in found.items() if not isnan(one.median)}
    order = sorted(names, key=lambda name: (name != reference, -medians.get(name, -1e9)))
    return Analysis(
        gathered=gathered,
        settings=settings,
        task=task,
        runs=runs,
        structures=tuple(order),
        reference=reference,
        measured=measured,
        linf_rows=() if main is None else _linf_rows(main, reference),
        ends=tuple(find_ends(main.data, main.front, name) for name in order if main),
        finals=find_finals(runs, order),
    )


def _choose_task(gathered: Gathered, task: str | None) -> str:
    tasks = gathered.tasks
    if task is not None and task not in tasks:
        raise EinlinearError(
            what=f"there are no runs of the task {quote(task)}",
            rule="a report is about one task, which must have runs",
            fix=f"give one of {', '.join(tasks)}",
        )
    return task if task is not None else (tasks or ("",))[0]


def _of_one_data(runs: Sequence[ShownRun]) -> tuple[ShownRun, ...]:
    """The runs on the most common data set, and those whose data is not known yet."""
    data = [run.data for run in runs if run.data is not None]
    most = max(data, key=data.count, default=None)
    return tuple(run for run in runs if run.data in (most, None))


def _choose_reference(
    runs: Sequence[ShownRun], names: Sequence[str], reference: str | None
) -> str | None:
    if reference is not None:
        labels = {run.structure: run.label for run in runs}
        alike = [n for n, label in labels.items() if n == reference or label.matches(reference)]
        if alike:  # the exact spelling first
            return reference if reference in alike else alike[0]
        raise EinlinearError(
            what=f"the reference is {quote(reference)}, which was not run",
            rule="the reference is one of the structures that were run",
            fix=f"give one of {', '.join(names)}",
        )
    if "dense" in names:
        return "dense"
    counts = [run.structure for run in runs if run.has_result]
    return max(names, key=counts.count, default=None)


def observe(runs: Sequence[ShownRun], measure: str) -> Observations | None:
    """The points of runs that ended by themselves, without warm-up; None if there are none."""
    rows = [
        (run.id, spent, point.loss, structure, run.seed, run.group, run.size or run.group)
        for run in runs
        if run.has_result and measure in run.spent
        for structure in [run.structure]
        for point, spent in zip(run.curve, run.spent[measure], strict=True)
        if run.counts(point) and spent > 0
        if point.loss is not None and 0 < point.loss < float("inf")
    ]
    return Observations(*map(list, zip(*rows, strict=True))) if rows else None  # type: ignore[arg-type]


def _measure(
    measure: str, data: Observations, reference: str | None, settings: ReportSettings
) -> Measured:
    """Laws of all structures with enough points, and multipliers if the measure has them."""
    is_compared = measure in COMPARED
    resamples = settings.resamples if is_compared else 0
    choices: dict[str, FitPoints] = {}
    notes: dict[str, str] = {}
    for name in data.structures:
        choice, notes[name] = _choose_points(data.of(name), settings.linf)
        if choice is not None:
            choices[name] = choice
    if reference in choices and choices[reference] == "frontier":
        choices = dict.fromkeys(choices, "frontier")
        alike = "fitted to the whole frontier, like the reference, which has few sizes"
        notes |= {name: notes[name] or alike for name in choices}
    fitter = _Fitter(data, reference if reference in choices else None, settings, resamples)
    fitter.fit(choices, is_compared)
    rows = {
        name: LawRow(name, fitter.laws.get(name), fitter.points.get(name, "inner"), note)
        for name, note in (notes | fitter.notes).items()
    }
    reasons = {
        name: rows[name].note or "the reference has no law"
        for name in data.structures
        if is_compared and name != reference and name not in fitter.multipliers
    }
    is_shared = settings.linf == "shared"
    own = fitter.own_order() if is_shared and is_compared and measure != "seconds" else {}
    return Measured(
        measure, data, frontier(data), rows, fitter.multipliers, reasons, is_shared, own
    )


def _choose_points(data: Observations, linf: Linf) -> tuple[FitPoints | None, str]:
    """Which points of a structure a law can be fitted to, and what to say about them."""
    alone: Linf = "fitted" if linf == "shared" else linf
    try:
        inner = fit_power_law(data, linf=alone, points="inner", resamples=0)
        if len(set(inner.points.size.tolist())) >= _LEAST_SIZES:
            return "inner", ""
    except EinlinearError:
        pass
    try:
        fit_power_law(data, linf=alone, points="frontier", resamples=0)
    except EinlinearError as error:
        return None, error.what
    return "frontier", "few sizes: the fit includes the ends of the frontier and is too flat"


class _Fitter:
    """Laws and multipliers, fitted jointly for structures whose points are chosen alike."""

    def __init__(
        self, data: Observations, reference: str | None, settings: ReportSettings, resamples: int
    ) -> None:
        self.data, self.reference, self.settings = data, reference, settings
        draws = {"level": settings.level, "resamples": resamples, "seed": settings.seed}
        self.draws: dict[str, Any] = draws
        self.laws: dict[str, PowerLaw] = {}
        self.points: dict[str, FitPoints] = {}
        self.multipliers: dict[str, Multiplier] = {}
        self.notes: dict[str, str] = {}

    def fit(self, choices: Mapping[str, FitPoints], is_compared: bool) -> None:
        """Fit inner points first; then the other structures, with the linf that those share."""
        linf = self.settings.linf
        for points in ("inner", "frontier"):
            names = [name for name, choice in choices.items() if choice == points]
            if names:
                self._fit_alike(names, points, linf, is_compared)
            if linf == "shared" and self.laws:
                linf = next(iter(self.laws.values())).linf

    def _fit_alike(
        self, names: Sequence[str], points: FitPoints, linf: Linf, is_compared: bool
    ) -> None:
        options = {"linf": linf, "points": points, **self.draws}
        try:
            found = fit_power_law(_of(self.data, names), **options)
            self.laws |= {law.structure: law for law in found.laws}
            self.points |= dict.fromkeys(names, points)
            here = self.reference
            if is_compared and here is not None and set(names) - {here}:
                both = _of(self.data, [here, *names])
                self.multipliers |= compute_multiplier(both, here, **options)
        except EinlinearError as error:
            self.notes |= dict.fromkeys(names, error.what)

    def own_order(self) -> dict[str, int]:
        """How exponents that differ with a shared linf compare if each law has its own."""
        here = self.laws.get(self.reference or "")
        if here is None:
            return {}
        names = [n for n, law in self.laws.items() if compare_exponents(law, here)]
        alone = {}
        try:
            for name in [here.structure, *names] if names else []:
                options = {"points": self.points[name], **self.draws}
                alone[name] = fit_power_law(_of(self.data, [name]), **options)[name]
        except EinlinearError:
            return {}
        return {name: compare_exponents(alone[name], alone[here.structure]) for name in names}


def _of(data: Observations, names: Sequence[str]) -> Observations:
    """The points of some structures."""
    return data.take(np.isin(data.structure.astype(str), names))


def _linf_rows(main: Measured, reference: str | None) -> tuple[LinfRow, ...]:
    """Laws at several linf, for structures whose points are chosen like the reference's."""
    row = None if reference is None else main.laws.get(reference)
    if row is None or row.law is None:
        return ()
    names = [n for n, r in main.laws.items() if r.law is not None and r.points == row.points]
    try:
        return linf_table(_of(main.data, names), reference=row.structure, points=row.points)
    except EinlinearError:
        return ()
