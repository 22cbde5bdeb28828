"""What a report shows, as values: runs and their points, studies, what could not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from einlinear.structures.taxonomy import Taxonomy
from einlinear.studies.config import RunConfig
from einlinear.studies.numbers import FLOPS_PER_MAC
from einlinear.studies.observations import is_warm
from einlinear.studies.record import LayerRouting, RunRecord

State = Literal["finished", "diverged", "failed", "running", "stopped", "unreadable"]
Kind = Literal["sweep", "runs", "run", "table"]


@dataclass(frozen=True, slots=True)
class ShownPoint:
    """One evaluation: step, loss, what was spent by the name of the measure, loads of experts."""

    step: int | None
    loss: float | None
    spent: Mapping[str, float]
    routing: tuple[LayerRouting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One run as every figure, table and sentence has it; None is what is not known.

    structure: with the experts, as observations label it.
    exponents: the taxonomy of the structure without its experts.
    group: equal for runs that differ in their seed only.
    size: equal for runs of one size of model; None is the group.
    macs: multiply-adds of a forward pass, per unit.
    message: of a run that failed, the last line it wrote; log is more of that.
    written: when its last file was written, in seconds since 1970.
    """

    id: str
    structure: str
    exponents: Taxonomy | None
    state: State
    curve: tuple[ShownPoint, ...]
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
    steps: int | None = None
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

    @property
    def flops(self) -> int | None:
        """FLOPs of training, per unit."""
        return None if self.macs is None else FLOPS_PER_MAC * self.macs

    @property
    def has_result(self) -> bool:
        """Whether it ended by itself, so that its points count in fits."""
        return self.state in ("finished", "diverged")

    @property
    def loss(self) -> float | None:
        """The last loss of a run that has finished."""
        return self.curve[-1].loss if self.state == "finished" and self.curve else None

    @property
    def best_loss(self) -> float | None:
        """The lowest loss of the curve; None if there is none."""
        return min((p.loss for p in self.curve if p.loss is not None), default=None)

    @property
    def data(self) -> str | None:
        """The fingerprint of the data it was trained on; None before there is a record."""
        return None if self.record is None else str(self.environment.get("data"))

    def counts(self, point: ShownPoint) -> bool:
        """Whether fits count a point of a run that has ended by itself: not in the warm-up."""
        return self.config is None or is_warm(self.config, point.step or 0)

    def spent(self, measure: str) -> float:
        """What was spent up to the last point; 0 if that is not known."""
        return self.curve[-1].spent.get(measure, 0.0) if self.curve else 0.0


@dataclass(frozen=True, slots=True)
class ShownStudy:
    """A study that was run: its name, the name of its file, the text of it."""

    name: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was found: runs, studies, and files with what of them could not be read, and why."""

    source: Path
    kind: Kind
    title: str
    runs: tuple[ShownRun, ...]
    studies: tuple[ShownStudy, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, that with the most runs first."""
        names = [run.task for run in self.runs]
        return tuple(sorted(dict.fromkeys(names), key=lambda name: -names.count(name)))
