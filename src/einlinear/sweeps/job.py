"""Job: one run of a sweep as plain data; its outcome; the files of its directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from einlinear.errors import EinlinearError
from einlinear.runs.directory import read_record
from einlinear.runs.record import RunRecord

RUNS, STUDIES, LOG, FAILURES = "runs", "studies", "log.txt", "failures.jsonl"
End = Literal["done", "busy", "error", "killed"]


@dataclass(frozen=True, slots=True)
class Job:
    """One run for an executor: plain data, so that it can be sent anywhere.

    out: the directory of the sweep, absolute, on a disk that all machines see.
    config: of the run, as a JSON object.
    threads: of torch; None lets the run use as many as its steps can use.
    folder: the working directory, for relative paths in the config.
    after: number and modification time of the dead claim on the run.
    thaw: id of a shorter run of the same directory from which this one goes on.
    devices: processes of the run, each with a GPU of its own if there are any.
    """

    id: str
    out: str
    config: Mapping[str, Any]
    threads: int | None
    folder: str
    after: Sequence[int] | None = None
    thaw: str | None = None
    devices: int = 1

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return Path(self.out) / RUNS / self.id

    @property
    def source(self) -> Path | None:
        """The directory of the shorter run from which this one goes on."""
        return None if self.thaw is None else Path(self.out) / RUNS / self.thaw


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    done: the run has a record. busy: another process has the run. error: it raised; `text` is the
    traceback. killed: its process died; `text` says how.
    """

    id: str
    end: End
    text: str = ""

    @classmethod
    def from_dict(cls, values: object) -> Outcome | None:
        """Read an outcome from a JSON object; None if it is anything else."""
        if not isinstance(values, Mapping) or not all(isinstance(v, str) for v in values.values()):
            return None
        has_all = {"id", "end"} <= values.keys() <= {"id", "end", "text"}
        return cls(**values) if has_all and values["end"] in get_args(End) else None


def finished(directory: Path) -> RunRecord | None:
    """The record of a run, whose id names its directory; None if it is missing or unreadable."""
    try:
        record = read_record(directory)
    except EinlinearError:
        return None
    return record if record.id == directory.name else None


def all_finished(out: Path, ids: Iterable[str]) -> dict[str, RunRecord]:
    """The records of the finished runs of a sweep, by id."""
    read = ((name, finished(out / RUNS / name)) for name in ids)
    return {name: record for name, record in read if record is not None}


def step_seconds(record: RunRecord) -> float:
    """Mean seconds per step of a finished run; 0 if unknown."""
    return record.seconds / record.steps_done if record.steps_done else 0.0


def last_step(directory: Path) -> int:
    """The step of the newest checkpoint of a run, 0 if there is none."""
    steps = (path.stem.partition("-")[2] for path in directory.glob("checkpoints/step-*.json"))
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def keep_failure(directory: Path, kind: str, text: str) -> None:
    """Append a failure to failures.jsonl of a run. Write errors are ignored."""
    path = directory / FAILURES
    with suppress(OSError):  # the outcome still reports it
        held = path.read_bytes() if path.exists() else b""
        cut_off = b"\n" if held and not held.endswith(b"\n") else b""
        count = (held + cut_off).count(b"\n")
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"attempt": count + 1, "time": time, "error": text, "kind": kind}
        with path.open("ab") as file:
            file.write(cut_off + json.dumps(line).encode() + b"\n")
