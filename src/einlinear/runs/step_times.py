"""StepTimes: the measured time of a training step of each model, as a value and as a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, quote
from einlinear.files.fields import field_types, typed
from einlinear.files.seals import sealed, unsealed
from einlinear.files.whole import as_path, checked_reading, write_whole
from einlinear.runs.config import RunConfig
from einlinear.runs.record import RunRecord
from einlinear.runs.shape import step_key
from einlinear.show.numbers import amount, counted, short
from einlinear.show.tables import text_table

TIMES_SCHEMA = 1
"""The format of a file of times."""
LEAST_ROUNDS = 5
"""Of intervals at the level of 90 %; with fewer, low and high are only the range of the rounds."""


@dataclass(frozen=True, slots=True)
class ModelTime:
    """The time of a training step of one model.

    key: `step_key` of its runs.
    label: the structure and what else sets the model apart.
    seconds: median over rounds of the seconds of a step, with its interval from low to high.
    units: tokens, pixels, samples or images in a step, by the name of `unit`.
    """

    key: str
    label: str
    width: int
    seconds: float
    low: float
    high: float
    units: int
    unit: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time of a training step of each model of some runs, measured in turns.

    rows: one for each distinct model, batch and optimizer.
    measured: when, as a date and time in UTC.
    rounds: how often each model had its turn.
    machine: facts about the machine, with versions and the number of threads.
    """

    rows: tuple[ModelTime, ...]
    measured: str
    rounds: int
    machine: dict[str, Any]

    def __post_init__(self) -> None:
        for row in self.rows:
            if not (0 < row.low <= row.seconds <= row.high and isfinite(row.high)):
                raise EinlinearError(
                    what=f"a step of {quote(row.label)} takes {quote(row.seconds)} seconds, from "
                    f"{quote(row.low)} to {quote(row.high)}",
                    rule="a time is a finite number above 0, within its interval",
                    fix="measure the models again with einlinear time",
                )
        keys = {row.key for row in self.rows}
        if not self.rows or len(keys) < len(self.rows):
            raise EinlinearError(
                what=f"{len(self.rows)} times have {len(keys)} different keys",
                rule="there is one time, or more, and one for each model",
                fix="measure the models again with einlinear time",
            )

    def find(self, config: RunConfig) -> ModelTime | None:
        """The time of the model of a run; None if it was not measured."""
        key = step_key(config)
        return next((row for row in self.rows if row.key == key), None)

    def seconds_of(self, config: RunConfig) -> float:
        """Seconds of a training step of a run; refuses a run whose model was not measured."""
        found = self.find(config)
        if found is None:
            raise EinlinearError(
                what=f"the times have no model of run {config.id}: {config.structure}, width "
                f"{config.width}, {config.optimizer}, batch_size {config.batch_size}",
                rule="all models whose seconds are compared are measured together, in turns",
                fix="einlinear time DIR --out steps.json, with every directory of these runs",
            )
        return found.seconds

    @property
    def origin(self) -> str:
        """When and on what the times were measured, as part of a sentence."""
        threads = self.machine.get("threads", "?")
        processor = self.machine.get("processor_model") or self.machine.get("processor", "?")
        on = f"{processor}, {self.machine.get('capability', '?')}"
        return (
            f"measured on {self.measured[:10]} in {counted(self.rounds, 'round')} ({on}, "
            f"{threads} {'thread' if threads == 1 else 'threads'}, "
            f"einlinear {self.machine.get('einlinear', '?')}, "
            f"torch {self.machine.get('torch', '?')})"
        )

    def table(self, width: int | None = None) -> str:
        """All models with the milliseconds of a step and, of five rounds or more, intervals."""
        has_intervals = self.rounds >= LEAST_ROUNDS
        cells = [
            (
                row.label,
                str(row.width),
                short(1e3 * row.seconds),
                f"{short(1e3 * row.low)} - {short(1e3 * row.high)}" if has_intervals else "–",
                f"{amount(row.units / row.seconds)} {row.unit}s",
            )
            for row in self.rows
        ]
        head = ("model", "width", "ms/step", "from - to", "per second")
        return text_table(head, cells, width=width)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.origin}"

    def save(self, path: str | Path) -> None:
        """Write the file that `read_step_times` reads, atomically."""
        values = {
            "schema": TIMES_SCHEMA,
            "measured": self.measured,
            "rounds": self.rounds,
            "machine": self.machine,
            "rows": [asdict(row) for row in self.rows],
        }
        write_whole(as_path(path, "path"), sealed(values))


def read_step_times(path: str | Path) -> StepTimes:
    """Read the steps.json that `einlinear time` has written."""
    path = as_path(path, "times")
    rule = "times are read from the file that einlinear time has written, unchanged"
    fix = "measure the models again: einlinear time DIR --out steps.json"
    errors = (OSError, ValueError, ArithmeticError, TypeError, RecursionError)
    with checked_reading(path, rule=rule, fix=fix, errors=errors):
        values = unsealed(path.read_bytes().decode())
        schema = values.pop("schema", None)
        if schema != TIMES_SCHEMA or type(schema) is not int:
            raise ValueError(f"its schema is {quote(schema)}, not {TIMES_SCHEMA}")
        hints = field_types(StepTimes)
        if values.keys() != hints.keys():
            raise ValueError(f"it has the fields {quote(sorted(values))}")
        return StepTimes(**{name: typed(hint, values[name], name) for name, hint in hints.items()})


def trained_threads(records: Iterable[RunRecord]) -> tuple[int, ...]:
    """The numbers of threads that runs were trained with, each once; without those not known."""
    found = {record.environment.get("threads") for record in records}
    return tuple(sorted(number for number in found if type(number) is int and number > 0))


def as_step_times(times: StepTimes | str | Path | None) -> StepTimes | None:
    """Read times that are given as a path; return others as they are."""
    return times if times is None or isinstance(times, StepTimes) else read_step_times(times)
