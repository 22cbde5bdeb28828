"""What follows from the runs: frontiers, laws, multipliers, and what stands against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.studies.fit import (
    Choice,
    Linf,
    PowerLaw,
    check_draws,
    fit_power_law,
    frontier,
    is_overshot,
)
from einlinear.studies.multiplier import LinfRow, Multiplier, compute_multiplier, linf_table
from einlinear.studies.observations import Observations, plain_label
from einlinear.studies.reports.ends import Ends, find_ends
from einlinear.studies.reports.shown import Gathered, ShownRun
from einlinear.studies.resample import check_linf

MEASURES = ("flops", "linear_flops", "seconds", "params", "units", "compute")
COMPARED = ("flops", "seconds", "compute")
"""Measures by which structures are compared, with intervals; the others only have curves."""
MISFIT = 0.02
"""Of a law, in log loss, where it begins to matter; noise of seeds is a tenth to a half of it."""

_FAR_BELOW = 0.1  # losses that are below a law by such a share are bad news
_LEAST_SIZES = 2  # of which points must be left without the ends of a frontier


@dataclass(frozen=True, slots=True)
class Settings:
    """How a report is made.

    reference: what others are compared with; dense, or what has the most runs, unless given.
    linf: of the laws: "shared" by all, "fitted" for each, or a number.
    task: whose runs are analysed; that with the most runs unless given.
    level, resamples, seed: of the intervals.
    """

    reference: str | None = None
    linf: Linf = "shared"
    task: str | None = None
    level: float = 0.9
    resamples: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        check_draws(self.level, self.resamples, self.seed)


@dataclass(frozen=True, slots=True)
class LawRow:
    """The law of a structure and the points it was fitted to, or why there is none."""

    structure: str
    law: PowerLaw | None
    points: Choice
    note: str


@dataclass(frozen=True, eq=False, slots=True)
class Measured:
    """Everything by one measure of compute.

    front: the frontiers of all structures.
    multipliers: by structure; `reasons` says why one is missing.
    is_shared: whether the laws share one linf.
    own_order: how exponents compare with the reference's where each law has a linf of its own, of
        those that differ with a shared one; see `compare_exponents`.
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

    runs: of the task, and of its data that the most runs have.
    structures: the reference first, then by how little compute they need.
    main: the measure by which structures are compared first; None where no run has a point.
    """

    gathered: Gathered
    settings: Settings
    task: str
    runs: tuple[ShownRun, ...]
    structures: tuple[str, ...]
    reference: str | None
    measured: Mapping[str, Measured]
    linf_rows: tuple[LinfRow, ...]
    ends: tuple[Ends, ...]

    @property
    def main(self) -> Measured | None:
        """By FLOPs, or by the compute of a table."""
        return self.measured.get("flops") or self.measured.get("compute")


def is_wrong(law: PowerLaw) -> bool:
    """Whether a law does not describe the points: its own, or by far those beyond them."""
    return law.is_systematic or law.undercut > _FAR_BELOW or is_overshot(law)


def compare_exponents(law: PowerLaw, other: PowerLaw) -> int:
    """1 if the exponent is larger by the intervals, -1 if smaller, 0 if that cannot be told."""
    if law.a_interval[0] > other.a_interval[1]:
        return 1
    return -1 if law.a_interval[1] < other.a_interval[0] else 0


def analyse(gathered: Gathered, settings: Settings) -> Analysis:
    """Everything that the runs of one task say."""
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
    order = sorted(names, key=lambda name: _rank(name, reference, main))
    return Analysis(
        gathered=gathered,
        settings=settings,
        task=task,
        runs=runs,
        structures=tuple(order),
        reference=reference,
        measured=measured,
        linf_rows=() if main is None else _linf_rows(main, reference),
        ends=()
        if main is None
        else tuple(find_ends(main.data, main.front, name) for name in order),
    )


def _rank(name: str, reference: str | None, main: Measured | None) -> tuple[bool, float]:
    found = None if main is None else main.multipliers.get(name)
    known = found is not None and not isnan(found.median)
    return name != reference, -found.median if found is not None and known else 1e9


def _choose_task(gathered: Gathered, task: str | None) -> str:
    tasks = gathered.tasks
    if task is not None and task not in tasks:
        raise EinlinearError(
            what=f"there are no runs of the task {quote(task)}",
            rule="a report is about one task that was run",
            fix=f"give one of {', '.join(tasks)}",
        )
    return task if task is not None else (tasks or ("",))[0]


def _of_one_data(runs: Sequence[ShownRun]) -> tuple[ShownRun, ...]:
    """Runs on the data that most of them have, and those of which it is not known yet."""
    data = [run.data for run in runs if run.data is not None]
    most = max(data, key=data.count, default=None)
    return tuple(run for run in runs if run.data in (most, None))


def _choose_reference(
    runs: Sequence[ShownRun], names: Sequence[str], reference: str | None
) -> str | None:
    if reference is not None:
        spelled = {plain_label(name): name for name in reversed(names)}
        if reference in names or plain_label(reference) in spelled:
            return reference if reference in names else spelled[plain_label(reference)]
        raise EinlinearError(
            what=f"the reference is {quote(reference)}, which was not run",
            rule="structures are compared with one of them",
            fix=f"give one of {', '.join(names)}",
        )
    if "dense" in names:
        return "dense"
    counts = [run.structure for run in runs if run.has_result]
    return max(names, key=counts.count, default=None)


def observe(runs: Sequence[ShownRun], measure: str) -> Observations | None:
    """All points that count of runs that ended by themselves; None if there are none."""
    rows = [
        (
            run.id,
            point.spent[measure],
            point.loss,
            run.structure,
            run.seed,
            run.group,
            run.size or run.group,
        )
        for run in runs
        if run.has_result
        for point in run.curve
        if run.counts(point)
        and measure in point.spent
        and point.loss is not None
        and 0 < point.loss < float("inf")
        and point.spent[measure] > 0
    ]
    if not rows:
        return None
    run, spent, loss, structure, seed, group, size = zip(*rows, strict=True)
    return Observations(
        run=np.array(run, dtype=object),
        compute=np.array(spent, dtype=float),
        loss=np.array(loss, dtype=float),
        structure=np.array(structure, dtype=object),
        seed=np.array(seed, dtype=np.int64),
        group=np.array(group, dtype=object),
        size=np.array(size, dtype=object),
    )


def _measure(
    measure: str, data: Observations, reference: str | None, settings: Settings
) -> Measured:
    """Laws of all structures that have enough points, multipliers of those that are compared."""
    is_compared = measure in COMPARED
    resamples = settings.resamples if is_compared else 0
    choices: dict[str, Choice] = {}
    notes: dict[str, str] = {}
    for name in data.structures:
        choice, notes[name] = _choose_points(data.of(name), settings.linf)
        if choice is not None:
            choices[name] = choice
    if reference in choices and choices[reference] == "frontier":
        choices = dict.fromkeys(choices, "frontier")
    fitter = _Fitter(data, reference if reference in choices else None, settings, resamples)
    fitter.fit(choices, is_compared)
    rows = {
        name: LawRow(
            name,
            fitter.laws.get(name),
            fitter.points.get(name, "inner"),
            fitter.notes.get(name) or _note(name, fitter, choices, notes),
        )
        for name in data.structures
    }
    reasons = (
        {}
        if not is_compared
        else {
            name: rows[name].note or "the reference has no law"
            for name in data.structures
            if name != reference and name not in fitter.multipliers
        }
    )
    front = frontier(data)
    is_shared = settings.linf == "shared"
    own = fitter.own_order() if is_shared and is_compared and measure != "seconds" else {}
    return Measured(measure, data, front, rows, fitter.multipliers, reasons, is_shared, own)


def _note(
    name: str, fitter: _Fitter, choices: Mapping[str, Choice], notes: Mapping[str, str]
) -> str:
    """What is to be said about the points of a law."""
    if name in choices and fitter.points.get(name) == "frontier" and not notes[name]:
        return "the whole frontier counts, as for the reference, which has few sizes"
    return notes[name]


def _choose_points(data: Observations, linf: Linf) -> tuple[Choice | None, str]:
    """Which points of a structure a law can be fitted to, and what is to be said about it."""
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
        is_count = " has " in error.what
        return None, f"only {error.what.rsplit(' has ', 1)[-1]}" if is_count else error.what
    return "frontier", "few sizes: the ends of the frontier count, which makes the law too flat"


class _Fitter:
    """The laws and multipliers of structures, joint where their points are chosen alike."""

    def __init__(
        self, data: Observations, reference: str | None, settings: Settings, resamples: int
    ) -> None:
        self.data, self.reference, self.settings = data, reference, settings
        self.draws: dict[str, Any] = {
            "level": settings.level,
            "resamples": resamples,
            "seed": settings.seed,
        }
        self.laws: dict[str, PowerLaw] = {}
        self.points: dict[str, Choice] = {}
        self.multipliers: dict[str, Multiplier] = {}
        self.notes: dict[str, str] = {}

    def fit(self, choices: Mapping[str, Choice], is_compared: bool) -> None:
        """Inner points first; then, with the linf that those share, structures without any."""
        linf = self.settings.linf
        for points in ("inner", "frontier"):
            names = [name for name, choice in choices.items() if choice == points]
            if names:
                self._fit_alike(names, points, linf, is_compared)
            if linf == "shared" and self.laws:
                linf = next(iter(self.laws.values())).linf

    def _fit_alike(
        self, names: Sequence[str], points: Choice, linf: Linf, is_compared: bool
    ) -> None:
        draws = self.draws
        try:
            found = fit_power_law(self._of(names), linf=linf, points=points, **draws)
            self.laws |= {law.structure: law for law in found.laws}
            self.points |= dict.fromkeys(names, points)
            here = self.reference
            if is_compared and here is not None and set(names) - {here}:
                both = self._of([here, *(name for name in names if name != here)])
                self.multipliers |= compute_multiplier(
                    both, here, linf=linf, points=points, **draws
                )
        except EinlinearError as error:
            self.notes |= dict.fromkeys(names, error.what)

    def own_order(self) -> dict[str, int]:
        """How exponents compare with a linf of each law, where they differ with a shared one."""
        here = self.laws.get(self.reference or "")
        if here is None:
            return {}
        names = [n for n, law in self.laws.items() if compare_exponents(law, here)]
        try:
            alone = {name: self._alone(name) for name in [here.structure, *names] if names}
        except EinlinearError:
            return {}
        return {name: compare_exponents(alone[name], alone[here.structure]) for name in names}

    def _alone(self, name: str) -> PowerLaw:
        points = self.points[name]
        return fit_power_law(self._of([name]), linf="fitted", points=points, **self.draws).laws[0]

    def _of(self, names: Sequence[str]) -> Observations:
        return self.data.take(np.isin(self.data.structure.astype(str), list(names)))


def _linf_rows(main: Measured, reference: str | None) -> tuple[LinfRow, ...]:
    """The laws at several linf, of structures whose points are chosen as the reference's."""
    row = None if reference is None else main.laws.get(reference)
    if row is None or row.law is None:
        return ()
    names = [n for n, r in main.laws.items() if r.law is not None and r.points == row.points]
    data = main.data.take(np.isin(main.data.structure.astype(str), names))
    try:
        return linf_table(data, reference=row.structure, points=row.points)
    except EinlinearError:
        return ()
