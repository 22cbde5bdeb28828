"""The directory of a run: config.json, metrics.jsonl, checkpoints; record.json, which is last."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from einlinear.errors import EinlinearError, cannot_write
from einlinear.files import parse_json, parse_object, write_whole
from einlinear.studies.config import RunConfig
from einlinear.studies.record import RunRecord

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class BusyError(EinlinearError):
    """Another process writes to the directory of a run now."""


def is_locked(path: Path) -> bool:
    """Whether a process trains in a directory now, as far as its file system tells."""
    if fcntl is None:  # pragma: no cover
        return False
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class RunDirectory:
    """The files of one run. Only one process at a time may write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._metrics: IO[bytes] | None = None

    def read_record(self) -> RunRecord | None:
        """The record of a finished run; None if there is none yet."""
        return read_record(self.path) if (self.path / "record.json").exists() else None

    def read_config(self) -> RunConfig | None:
        """The config that the directory belongs to; None if there is none yet."""
        path = self.path / "config.json"
        return RunConfig.from_dict(_read_json(path), str(path)) if path.exists() else None

    def check(self, config: RunConfig) -> None:
        """Refuse a directory that belongs to another run."""
        held = self.read_config()
        if held is not None and held.id != config.id:
            old, new = held.as_dict(), config.as_dict()
            differ = [f"{k} {old[k]!r}, not {new[k]!r}" for k in new if new[k] != old[k]]
            raise EinlinearError(
                what=f"{self.path} holds another run: {', '.join(differ[:4])}",
                rule="a directory holds one run, whose settings do not change",
                fix="choose another directory, or give the same settings",
            )

    def open(self, config: RunConfig) -> None:
        """Write the config, and take the directory for this process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.path / "metrics.jsonl").open("ab")
        except OSError as error:
            raise cannot_write(self.path / "metrics.jsonl", error) from error
        self._lock()
        self._check_alone(config)
        self.keep_config(config)

    def keep_config(self, config: RunConfig) -> None:
        """Say which run the directory belongs to, unless it says so already."""
        if not (self.path / "config.json").exists():
            write_whole(self.path / "config.json", config.to_json().encode())

    def _check_alone(self, config: RunConfig) -> None:
        """Look again, now that no other process writes: one may have come and gone."""
        self.check(config)
        if (self.path / "record.json").exists():
            raise EinlinearError(
                what=f"another process has just finished the run in {self.path}",
                rule="a run that has finished is not trained again",
                fix="give the same command again: it shows the record",
            )

    def _lock(self) -> None:
        if fcntl is None:  # pragma: no cover
            return
        assert self._metrics is not None, "the metrics are open"
        try:
            fcntl.flock(self._metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BusyError(
                what=f"another process is training in {self.path}",
                rule="one process at a time writes to the directory of a run",
                fix="wait until it has ended, or choose another directory",
            ) from None
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Give the directory free."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def append(self, values: Mapping[str, Any]) -> None:
        """One line of metrics."""
        assert self._metrics is not None, "the directory is open"
        try:
            self._metrics.write(json.dumps(values).encode() + b"\n")
            self._metrics.flush()
        except OSError as error:
            raise cannot_write(self.path / "metrics.jsonl", error) from error

    def metrics_position(self) -> int:
        """The length of the metrics, which are on the disk when this returns."""
        assert self._metrics is not None, "the directory is open"
        try:
            os.fsync(self._metrics.fileno())
            return self._metrics.tell()
        except OSError as error:
            raise cannot_write(self.path / "metrics.jsonl", error) from error

    def rewind(self, position: int) -> None:
        """Forget the metrics after a position: those steps are done again."""
        assert self._metrics is not None, "the directory is open"
        try:
            self._metrics.truncate(position)
            self._metrics.seek(position)
        except OSError as error:
            raise cannot_write(self.path / "metrics.jsonl", error) from error

    def metrics_size(self) -> int:
        """The length of the metrics, a line that was cut off included."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def write_record(self, record: RunRecord) -> None:
        """The record, whole, after everything else."""
        write_whole(self.path / "record.json", json.dumps(record.as_dict(), indent=1).encode())


def read_record(path: str | Path) -> RunRecord:
    """The record of a finished run, from its directory or from its record.json."""
    path = Path(path)
    path = path if path.suffix == ".json" else path / "record.json"
    return RunRecord.from_dict(_read_json(path), str(path))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of the metrics of a run, from its directory."""
    whole, _, _ = (Path(path) / "metrics.jsonl").read_bytes().rpartition(b"\n")
    return [parse_json(line) for line in whole.splitlines()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            rule="it is a file that a run has written",
            fix="name the directory of a run; if the file is damaged, delete it and train again",
        ) from error
