"""What a report shows, as values: runs, studies, and the checks that their numbers pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from einlinear.errors import quote
from einlinear.laws.observations import StructureLabel, is_warm
from einlinear.runs.config import RunConfig
from einlinear.runs.record import Point, RunRecord
from einlinear.runs.step_times import StepTimes
from einlinear.searches.answer import Answer, LeaderboardRow
from einlinear.show.numbers import FLOPS_PER_MAC, NONE, amount, duration, short
from einlinear.structures.taxonomy import Taxonomy

RunState = Literal["finished", "diverged", "failed", "running", "stopped", "unreadable"]
SourceKind = Literal["sweep", "runs", "run", "table"]
LaneState = Literal["leader", "open", "stopped", "diverged", "failed"]

LEAST, MOST = 1e-100, 1e100
"""The range of nonzero numbers in a report; beyond it logarithms and ratios break down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One run, as every figure, table and sentence sees it; None means unknown.

    label: the structure and what else sets the layers apart.
    name: what figures and tables call it instead; "" for the label.
    exponents: the taxonomy of the structure, without experts.
    curve: the evaluations of the run; those of a table have a loss and perhaps a step.
    spent: what had been spent at each of them, by the name of the measure.
    group: the same for runs that differ only in their seed.
    size: the same for runs with the same model size; None means the group.
    macs: multiply-adds of the forward pass, per unit.
    steps_done: None if the steps of the curve are unknown.
    message: the last line that a failed run wrote; `log` holds more of it.
    written: when its last file was written, in seconds since 1970.
    """

    id: str
    label: StructureLabel
    exponents: Taxonomy | None
    state: RunState
    curve: tuple[Point, ...]
    spent: Mapping[str, tuple[float, ...]]
    group: str
    size: str | None = None
    seed: int = 0
    task: str = ""
    width: int | None = None
    depth: int | None = None
    experts: str = ""
    unit: str = "unit"
    params: int | None = None
    macs: int | None = None
    steps_done: int | None = None
    seconds: float | None = None
    units_per_second: float | None = None
    peak_bytes: int | None = None
    seconds_left: float | None = None
    message: str = ""
    log: str = ""
    written: float | None = None
    config: RunConfig | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    record: RunRecord | None = None
    name: str = ""

    @property
    def structure(self) -> str:
        """The name that figures, tables and fits group runs by: the label as text, or `name`."""
        return self.name or str(self.label)

    @property
    def flops(self) -> int | None:
        """Training FLOPs per unit."""
        return None if self.macs is None else FLOPS_PER_MAC * self.macs

    @property
    def has_result(self) -> bool:
        """Whether the run ended by itself, so that fits use its points."""
        return self.state in ("finished", "diverged")

    @property
    def loss(self) -> float | None:
        """The final loss of a finished run."""
        return self.curve[-1].loss if self.state == "finished" and self.curve else None

    @property
    def best_loss(self) -> float | None:
        """The lowest loss of the curve; None if there is none."""
        return min((p.loss for p in self.curve if p.loss is not None), default=None)

    @property
    def data(self) -> str | None:
        """The fingerprint of the training data; None before there is a record."""
        return None if self.record is None else str(self.environment.get("data"))

    def counts(self, point: Point) -> bool:
        """Whether fits may use a point: it is not in the warm-up."""
        return self.config is None or is_warm(self.config, point.step)

    def step(self, point: Point) -> int | None:
        """The step of a point, if known."""
        return None if self.steps_done is None else point.step

    def total(self, measure: str) -> float:
        """What had been spent at the last point; 0 if unknown."""
        return self.spent[measure][-1] if self.spent.get(measure) else 0.0


class RunColumn(NamedTuple):
    """One column of the table of runs, in runs.csv and on the page.

    name: in runs.csv.
    title: on the page, where % is the unit; "" if the page does not have it.
    value: the value of a run, None if unknown.
    text: the value as the page shows it.
    """

    name: str
    title: str
    value: Callable[[ShownRun], Any]
    text: Callable[[Any], str] = str
    is_number: bool = True


def _exponent(name: str) -> Callable[[ShownRun], Any]:
    return lambda run: None if run.exponents is None else getattr(run.exponents, name)


_whole = "{:,}".format
_loss = partial(short, digits=4)
RUN_COLUMNS = (
    RunColumn("run", "run", attrgetter("id"), is_number=False),
    RunColumn("status", "status", attrgetter("state"), is_number=False),
    RunColumn("structure", "structure", attrgetter("structure"), is_number=False),
    RunColumn("omega", "ω", _exponent("omega")),
    RunColumn("psi", "ψ", _exponent("psi")),
    RunColumn("nu", "ν", _exponent("nu")),
    RunColumn("task", "task", attrgetter("task"), is_number=False),
    RunColumn("width", "width", attrgetter("width"), _whole),
    RunColumn("depth", "depth", attrgetter("depth"), _whole),
    RunColumn("experts", "experts", attrgetter("experts"), lambda text: text or NONE),
    RunColumn("seed", "seed", attrgetter("seed")),
    RunColumn("params", "parameters", attrgetter("params"), amount),
    RunColumn("macs_per_unit", "", attrgetter("macs")),
    RunColumn("training_flops_per_unit", "training FLOPs / %", attrgetter("flops"), amount),
    RunColumn("steps", "steps", attrgetter("steps_done"), _whole),
    RunColumn("compute", "compute", lambda run: run.total("compute") or None, short),
    RunColumn("loss", "loss", attrgetter("loss"), _loss),
    RunColumn("best_loss", "best loss", attrgetter("best_loss"), _loss),
    RunColumn("seconds", "time", attrgetter("seconds"), duration),
    RunColumn("units_per_second", "%s / s", attrgetter("units_per_second"), amount),
    RunColumn("peak_bytes", "memory", attrgetter("peak_bytes"), lambda size: f"{amount(size)}B"),
    RunColumn("message", "", attrgetter("message")),
)


@dataclass(frozen=True, slots=True)
class ShownStudy:
    """A study that was run: its name, and the name and text of its file."""

    name: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """A run as a decision of a search.

    number: from 1, in the order in which the search chose its runs.
    why: "" if the search did not write it down.
    flops: what it cost, without the run that it goes on from.
    spent: FLOPs of the search before it.
    rate: its learning rate relative to the usual one.
    """

    run: ShownRun
    number: int
    why: str
    flops: float
    spent: float
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Lane:
    """A candidate of a search: its row of the leaderboard, if any, its runs, and how it ended.

    stopped_after: the number of the last run that the search chose before it stopped the candidate;
        None for one that leads or may still win.
    """

    name: str
    row: LeaderboardRow | None
    state: LaneState
    runs: tuple[ChosenRun, ...]
    ending: str
    stopped_after: int | None = None


@dataclass(frozen=True, slots=True)
class ShownSearch:
    """A search: its answer, and its candidates that were trained, the best first."""

    answer: Answer
    lanes: tuple[Lane, ...]

    @property
    def num_runs(self) -> int:
        """How many runs the search chose."""
        return sum(len(lane.runs) for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was found: runs, studies, and files that could not be read, with the reasons.

    search: None if the directory is not that of a search, or the search has no answer yet.
    times: what seconds come from; None for the clocks of the runs.
    """

    source: Path
    kind: SourceKind
    title: str
    runs: tuple[ShownRun, ...]
    studies: tuple[ShownStudy, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    search: ShownSearch | None = None
    times: StepTimes | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, starting with the one that has the most runs."""
        names = [run.task for run in self.runs]
        return tuple(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))


def is_shown(value: float) -> bool:
    """Whether a number is 0 or in the range of a report; also for ints that no float can hold."""
    return value == 0 or LEAST <= value <= MOST


def check_shown_config(config: RunConfig) -> None:
    """Raise a ValueError for settings that a report cannot show."""
    if abs(config.seed) >= 2**63:
        raise ValueError(f"its seed is {quote(config.seed)}, not below 2⁶³")
    _check(config, "width", "depth", "steps", "warmup", "num_experts", "num_active")


def check_shown_record(record: RunRecord) -> None:
    """Raise a ValueError for numbers that a report cannot show."""
    check_shown_config(record.config)
    _check(record, "steps_done", "peak_bytes")
    _check(record.counts, *type(record.counts).__dataclass_fields__)
    check_shown_curve(record.curve)


def check_shown_curve(points: Sequence[Point]) -> None:
    """Raise a ValueError for a curve that a report cannot show."""
    for point in points:
        _check(point, "step", "units", "macs", "seconds", "data_seconds", "rate")
        _check(point, "loss", "train_loss")
        for layer in point.routing:
            if not layer.load:
                raise ValueError(f"a layer of experts is {quote(layer)}")
            _check(layer, "entropy")
            for load in layer.load:
                _check_number("load", load)
    shapes = {tuple((r.layer, len(r.load)) for r in p.routing) for p in points if p.routing}
    if len(shapes) > 1:
        raise ValueError("its layers of experts differ from point to point")


def _check(value: object, *names: str) -> None:
    for name in names:
        _check_number(name, getattr(value, name))


def _check_number(name: str, value: float | None) -> None:
    if value is not None and not is_shown(value):
        raise ValueError(f"its {name} is {quote(value)}, not 0, nor {LEAST:g} to {MOST:g}")
