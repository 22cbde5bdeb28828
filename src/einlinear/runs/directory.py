"""The directory of a run: config.json, metrics.jsonl, checkpoints and, last, record.json.

A run that keeps its state for a longer run has it in frozen/, as a checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, cannot_write, quote, reason
from einlinear.files.fields import typed
from einlinear.files.seals import SEAL, check_file, sealed, unseal_
from einlinear.files.whole import checked_reading, parse_object, write_whole
from einlinear.runs.config import RunConfig
from einlinear.runs.record import NewerError, RunRecord

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, MODEL, RECORD = "config.json", "metrics.jsonl", "model.safetensors", "record.json"

_WRITTEN = "it is a file that a run has written"

# What a killed process leaves behind. The last patterns are temporary files of safetensors, which
# earlier versions used to write.
_HALF_WRITTEN = [f"{MODEL}.part", f"{RECORD}.part", "checkpoints/*.part", "frozen/*.part"]
_HALF_WRITTEN += [".tmp??????", "checkpoints/.tmp??????"]


class BusyError(EinlinearError):
    """Another process is writing to the directory of the run."""


class DamagedError(EinlinearError):
    """A file of a finished run is missing, or has changed since it was written."""


def is_locked(path: Path) -> bool:
    """Whether a process is training in a directory, as far as its file system can tell."""
    if fcntl is None:  # pragma: no cover
        return False
    try:
        with (path / METRICS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


class RunDirectory:
    """The files of one run. Only one process at a time may write.

    `replaced` is the record of a finished run that is trained again because its other files were
    damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.frozen = self.path / "frozen"
        self.replaced: RunRecord | None = None
        self._metrics: FileIO | None = None
        self._lines = bytearray()  # the metrics so far

    def read_record(self) -> RunRecord | None:
        """The record of a finished run; None if there is none yet."""
        return read_record(self.path) if (self.path / RECORD).exists() else None

    def read_finished(self, config: RunConfig) -> RunRecord | None:
        """The record of a finished run, checked with its model; None if there is none yet."""
        if not (self.path / RECORD).exists():
            return None
        record, seals = _read_record(self.path / RECORD)
        if record.id != config.id:
            raise damaged(self.path, f"{self.path / RECORD} belongs to another run, {record.id}")
        if config.save_model:
            _check_file(self.path, MODEL, seals)
        try:
            _check_file(self.path, METRICS, seals)
        except DamagedError as error:
            warnings.warn(f"{error.what}; the record is not damaged", stacklevel=3)
        return record

    def read_config(self) -> RunConfig | None:
        """The config that the directory belongs to; None if there is none yet."""
        path = self.path / CONFIG
        if not path.exists():
            return None
        errors = (OSError, ValueError, ArithmeticError, TypeError, RecursionError)
        fix = "if it is damaged, delete it and give the command of the run again"
        with checked_reading(path, rule=_WRITTEN, fix=fix, errors=errors):
            return RunConfig.from_dict(parse_object(path.read_text(encoding="utf-8")), str(path))

    def owner(self) -> RunConfig | None:
        """The config of the run that the directory belongs to; None if there is none yet.

        config.json has no checksum. A record with valid checksums of itself and its model takes
        precedence.
        """
        record = held = None
        with suppress(EinlinearError):  # a damaged record tells nothing
            record = self.read_record()
        if record is None:
            return self.read_config()
        with suppress(EinlinearError):
            held = self.read_config()
        if held is None:
            return record.config
        if held.id != record.id:
            with suppress(DamagedError):
                self.read_finished(record.config)
                return record.config
        return held

    def check(self, config: RunConfig) -> None:
        """Refuse a directory that belongs to another run, or in which a file is something else."""
        for name in (CONFIG, METRICS, MODEL, RECORD):
            path = self.path / name
            if path.is_dir() or path.is_fifo() or path.is_socket():
                raise EinlinearError(
                    what=f"{path} is not a file",
                    rule=f"a run keeps its {name} in the directory",
                    fix="move it away, or choose another directory",
                )
        held = self.owner()
        if held is not None and held.id != config.id:
            pairs = [(f.name, getattr(held, f.name), getattr(config, f.name)) for f in fields(held)]
            differ = [f"{k} {quote(old)}, not {quote(new)}" for k, old, new in pairs if old != new]
            raise EinlinearError(
                what=f"{self.path} holds another run: {', '.join(differ[:4])}",
                rule="a directory holds one run, whose settings cannot change",
                fix="choose another directory, or give the same settings; "
                f"if only {CONFIG} was changed, delete it",
            )

    def open(self, config: RunConfig) -> None:
        """Lock the directory for this process, and write the config."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that `close` has nothing to write and cannot fail.
            self._metrics = FileIO(self.path / METRICS, "a")
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error
        self._lock()
        self._check_alone(config)
        self.remove_leftovers()
        self.keep_config(config)

    def keep_config(self, config: RunConfig) -> None:
        """Write config.json, unless it is there already."""
        path = self.path / CONFIG
        if path.exists():
            with suppress(EinlinearError):
                held = self.read_config()
                if held is not None and held.id == config.id:
                    return
            warnings.warn(f"{path} is damaged; writing it again", stacklevel=3)
        write_whole(path, config.to_json().encode())

    def _check_alone(self, config: RunConfig) -> None:
        """Check again under the lock: another process may have trained here in the meantime.

        A damaged finished run is trained again. An unreadable record is renamed now; a record
        without its model stays until there is a new one.
        """
        self.check(config)
        try:
            record = self.read_record()
        except DamagedError:
            put_aside(self.path / RECORD, "unreadable")
            return
        if record is None:
            return
        try:
            self.read_finished(config)
        except DamagedError:
            if record.id == config.id:
                self.replaced = record
            else:
                put_aside(self.path / RECORD, "unreadable")
            return
        raise EinlinearError(
            what=f"another process has just finished the run in {self.path}",
            rule="a finished run is not trained again",
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
                fix="wait until it ends, or choose another directory",
            ) from None
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Release the directory. Never raises, so that it hides no other error."""
        if self._metrics is not None:
            with suppress(OSError):
                self._metrics.close()
            self._metrics = None

    def append(self, values: Mapping[str, Any]) -> None:
        """Write a line of metrics."""
        line = json.dumps(values).encode() + b"\n"
        self._put(line)
        self._lines += line

    def metrics(self) -> str:
        """All lines of metrics so far."""
        return self._lines.decode()

    def rewind(self, lines: str = "") -> bool:
        """Go back to the metrics of a checkpoint; returns whether the file was undamaged.

        If not, rewrites it. Removes later lines, of steps that will be repeated.
        """
        assert self._metrics is not None, "the directory is open"
        self._lines = bytearray(lines.encode())
        try:
            with (self.path / METRICS).open("rb") as file:  # a damaged file may be much longer
                is_whole = file.read(len(self._lines)) == self._lines
            self._metrics.truncate(len(self._lines) if is_whole else 0)
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error
        if not is_whole:
            self._put(self._lines)
        return is_whole

    def _put(self, data: bytes | bytearray) -> None:
        assert self._metrics is not None, "the directory is open"
        rest = memoryview(data)
        try:
            while rest:  # a nearly full disk takes a part
                rest = rest[self._metrics.write(rest) :]
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error

    def write_record(self, record: RunRecord, model: str | None = None) -> None:
        """Write the record atomically, after everything else, with checksums of the other files.

        `model` is the checksum of the weights file.
        """
        seals = {} if model is None else {MODEL: model}
        if self._metrics is not None:
            try:
                os.fsync(self._metrics.fileno())
            except OSError as error:
                raise cannot_write(self.path / METRICS, error) from error
            seals[METRICS] = sha256(self._lines).hexdigest()
        if self.replaced is not None:
            put_aside(self.path / RECORD, "replaced")
        write_whole(self.path / RECORD, sealed({**record.as_dict(), "files": seals}))

    def remove_leftovers(self) -> None:
        """Remove files that killed processes left half written."""
        _remove(path for pattern in _HALF_WRITTEN for path in self.path.glob(pattern))
        for folder in (self.checkpoints, self.frozen):
            weights = folder.glob("step-*.safetensors")
            _remove(path for path in weights if not path.with_suffix(".json").exists())

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints and half-written files of a run that has ended; keep frozen/."""
        _remove(self.checkpoints.glob("step-*.json"))  # first the files that make them valid
        _remove(self.checkpoints.glob("step-*"))
        self.remove_leftovers()
        with suppress(OSError):  # it does not exist, or holds something else
            self.checkpoints.rmdir()


def read_record(path: str | Path) -> RunRecord:
    """The record of a finished run, from its directory or from its record.json."""
    path = Path(path)
    return _read_record(path if path.suffix == ".json" else path / RECORD)[0]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines of metrics in the directory of a run.

    Checks the checksum if the run has finished.
    """
    path = Path(path)
    if (path / RECORD).exists():
        _check_file(path, METRICS, _read_record(path / RECORD)[1])
    whole, _, _ = (path / METRICS).read_bytes().rpartition(b"\n")
    return [parse_object(line) for line in whole.splitlines()]


def _check_file(path: Path, name: str, seals: Mapping[str, str]) -> None:
    """Refuse a file of a finished run that is missing or has changed."""
    fix = "make the file readable, and try again"  # it may be undamaged
    with checked_reading(path / name, rule=_WRITTEN, fix=fix):
        try:
            if name in seals:
                check_file(path / name, seals[name])
            else:  # an old run
                (path / name).stat()
        except (FileNotFoundError, ValueError) as error:
            raise damaged(path, f"cannot read {path / name}: {reason(error)}") from error


def _read_record(path: Path) -> tuple[RunRecord, dict[str, str]]:
    """A record, and the checksums of the other files."""
    fix = "give the directory of a finished run"
    with checked_reading(path, rule=_WRITTEN, fix=fix, errors=(OSError,)):
        raw = path.read_bytes()
    try:
        values = parse_object(raw.decode())
        if values.get("schema") != 1 or SEAL in values:
            unseal_(values)
        seals = values.get("files", {})
        return RunRecord.from_dict(values, str(path)), typed(dict[str, str], seals, "files")
    except NewerError:
        raise
    except EinlinearError as error:
        raise damaged(path.parent, error.what) from error
    except ValueError as error:
        raise damaged(path.parent, f"cannot read {path}: {error}") from error


def damaged(path: Path, what: str) -> DamagedError:
    """The error for a damaged file of a finished run."""
    config, out = (shlex.quote(str(part)) for part in (path / CONFIG, path))
    return DamagedError(
        what=what,
        rule="the files of a finished run do not change",
        fix=f"train the run again: einlinear train --config {config} --out {out}",
    )


def _remove(paths: Iterable[Path]) -> None:
    """Remove files as far as possible."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def put_aside(path: Path, word: str) -> None:
    """Rename a file that cannot stay, so that nothing is lost: record.json.unreadable-1."""
    count = len(list(path.parent.glob(f"{path.name}.{word}-*")))
    aside = path.with_name(f"{path.name}.{word}-{count + 1}")
    try:
        path.replace(aside)
    except OSError as error:
        raise cannot_write(aside, error) from error
