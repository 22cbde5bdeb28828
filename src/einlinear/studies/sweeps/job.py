"""A job: one run of a sweep as plain data, how it ended, what its directory says of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from einlinear.errors import EinlinearError
from einlinear.studies.directory import read_record
from einlinear.studies.record import RunRecord

RUNS, STUDIES, LOG, FAILURES = "runs", "studies", "log.txt", "failures.jsonl"
End = Literal["done", "busy", "error", "killed"]


@dataclass(frozen=True, slots=True)
class Job:
    """What an executor runs: plain data, so that it can be sent anywhere.

    out: the directory of the sweep, absolute, on a disk that all machines see.
    config: of the run, as JSON has it.
    threads: of torch; None is as many as a step can use, of those that torch has there.
    folder: where paths in the config begin.
    after: number and time of change of the claim on the run that was found dead.
    """

    id: str
    out: str
    config: Mapping[str, Any]
    threads: int | None
    folder: str
    after: Sequence[int] | None = None

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return Path(self.out) / RUNS / self.id


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    done: the run has a record. busy: another process has the run. error: it raised; `text` is the
    traceback. killed: its process is gone; `text` says how.
    """

    id: str
    end: End
    text: str = ""

    @classmethod
    def from_dict(cls, values: object) -> Outcome | None:
        """An outcome as JSON has it; None if it is something else that a process has printed."""
        if not isinstance(values, Mapping) or not values.keys() <= {"id", "end", "text"}:
            return None
        name, text = values.get("id"), values.get("text", "")
        ends: tuple[End, ...] = get_args(End)
        end = next((end for end in ends if end == values.get("end")), None)
        if end is None or not isinstance(name, str) or not isinstance(text, str):
            return None
        return cls(name, end, text)


def finished(directory: Path) -> RunRecord | None:
    """The record of a run, whose id names its directory; None if none is there that can be read."""
    try:
        record = read_record(directory)
    except EinlinearError:
        return None
    return record if record.id == directory.name else None


def all_finished(out: Path, ids: Iterable[str]) -> dict[str, RunRecord]:
    """The records of a sweep's runs, by id, of those that have one."""
    read = ((name, finished(out / RUNS / name)) for name in ids)
    return {name: record for name, record in read if record is not None}


def keep_failure(directory: Path, kind: str, text: str) -> None:
    """Add a failure to those of a run, as far as the disk allows."""
    path = directory / FAILURES
    try:
        held = path.read_bytes() if path.exists() else b""
        cut_off = b"\n" if held and not held.endswith(b"\n") else b""
        count = (held + cut_off).count(b"\n")
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = {"attempt": count + 1, "time": time, "error": text, "kind": kind}
        with path.open("ab") as file:
            file.write(cut_off + json.dumps(line).encode() + b"\n")
    except OSError:
        pass  # the outcome still says what happened
