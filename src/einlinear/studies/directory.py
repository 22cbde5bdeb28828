"""The directory of a run: config.json, metrics.jsonl, checkpoints; record.json, which is last."""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, cannot_write, quote
from einlinear.files import parse_object, write_whole
from einlinear.studies.config import RunConfig
from einlinear.studies.fields import typed
from einlinear.studies.record import NewerError, RunRecord
from einlinear.studies.seals import SEAL, check_file, sealed, unseal_

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, MODEL, RECORD = "config.json", "metrics.jsonl", "model.safetensors", "record.json"

# What a process that was killed leaves behind. The last is the name that safetensors gave to files
# under way, before runs wrote them by themselves.
_HALF_WRITTEN = [f"{MODEL}.part", f"{RECORD}.part", "checkpoints/*.part"]
_HALF_WRITTEN += [".tmp??????", "checkpoints/.tmp??????"]


class BusyError(EinlinearError):
    """Another process writes to the directory of a run now."""


class DamagedError(EinlinearError):
    """A file of a run that has finished is missing, or not as it was written."""


def is_locked(path: Path) -> bool:
    """Whether a process trains in a directory now, as far as its file system tells."""
    if fcntl is None:  # pragma: no cover
        return False
    try:
        with (path / METRICS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class RunDirectory:
    """The files of one run. Only one process at a time may write.

    `replaced` is the record of a run that had finished and is trained again, because other files
    of it were damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.replaced: RunRecord | None = None
        self._metrics: FileIO | None = None
        self._lines = bytearray()  # the metrics so far

    def read_record(self) -> RunRecord | None:
        """The record of a finished run; None if there is none yet."""
        return read_record(self.path) if (self.path / RECORD).exists() else None

    def read_finished(self, config: RunConfig) -> RunRecord | None:
        """The record of a finished run, whose model is whole; None if there is none yet."""
        if not (self.path / RECORD).exists():
            return None
        record, seals = _read_record(self.path / RECORD)
        if record.id != config.id:
            raise damaged(self.path, f"{self.path / RECORD} is that of another run, {record.id}")
        _check_file(self.path, MODEL, seals)
        try:
            _check_file(self.path, METRICS, seals)
        except DamagedError as error:
            warnings.warn(f"{error.what}; the record is whole", stacklevel=3)
        return record

    def read_config(self) -> RunConfig | None:
        """The config that the directory belongs to; None if there is none yet."""
        path = self.path / CONFIG
        if not path.exists():
            return None
        try:
            return RunConfig.from_dict(parse_object(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError, ArithmeticError, TypeError, RecursionError) as error:
            if isinstance(error, EinlinearError):
                raise
            raise _cannot_read(
                path, error, "if it is damaged, delete it and give the command of the run again"
            ) from error

    def owner(self) -> RunConfig | None:
        """The config of the run that the directory belongs to; None if there is none yet.

        config.json has no seal. A record that holds its own, and that of the model beside it, is
        believed before it.
        """
        record = None
        with suppress(EinlinearError):  # a record that is damaged says nothing
            record = self.read_record()
        try:
            held = self.read_config()
        except EinlinearError:
            if record is None:
                raise
            held = None
        if record is None or held is None:
            return held if record is None else record.config
        if held.id != record.id:
            with suppress(DamagedError):
                self.read_finished(record.config)
                return record.config
        return held

    def check(self, config: RunConfig) -> None:
        """Refuse a directory that belongs to another run, or in which something is no file."""
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
            old, new = held.as_dict(), config.as_dict()
            differ = [f"{k} {quote(old[k])}, not {quote(new[k])}" for k in new if new[k] != old[k]]
            raise EinlinearError(
                what=f"{self.path} holds another run: {', '.join(differ[:4])}",
                rule="a directory holds one run, whose settings do not change",
                fix="choose another directory, or give the same settings; "
                f"if only {CONFIG} was changed, delete it",
            )

    def open(self, config: RunConfig) -> None:
        """Write the config, and take the directory for this process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Without a buffer there is nothing left to be written, and to fail, in `close`.
            self._metrics = FileIO(self.path / METRICS, "a")
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error
        self._lock()
        self._check_alone(config)
        self.remove_leftovers()
        self.keep_config(config)

    def keep_config(self, config: RunConfig) -> None:
        """Say which run the directory belongs to, unless it says so already."""
        path = self.path / CONFIG
        if path.exists():
            with suppress(EinlinearError):
                held = self.read_config()
                if held is not None and held.id == config.id:
                    return
            warnings.warn(f"{path} is damaged; it is written again", stacklevel=3)
        write_whole(path, config.to_json().encode())

    def _check_alone(self, config: RunConfig) -> None:
        """Look again, now that no other process writes: one may have come and gone.

        What has finished and is damaged is trained again. A record that cannot be read is put aside
        now; one that lacks its model stays until the next is there.
        """
        self.check(config)
        try:
            record = self.read_record()
        except DamagedError:
            self._put_aside("unreadable")
            return
        if record is None:
            return
        try:
            self.read_finished(config)
        except DamagedError:
            if record.id == config.id:
                self.replaced = record
            else:
                self._put_aside("unreadable")
            return
        raise EinlinearError(
            what=f"another process has just finished the run in {self.path}",
            rule="a run that has finished is not trained again",
            fix="give the same command again: it shows the record",
        )

    def _put_aside(self, word: str) -> None:
        """Give a record that cannot stay another name; nothing is lost."""
        count = len(list(self.path.glob(f"{RECORD}.{word}-*")))
        aside = self.path / f"{RECORD}.{word}-{count + 1}"
        try:
            (self.path / RECORD).replace(aside)
        except OSError as error:
            raise cannot_write(aside, error) from error

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
        """Release the directory. Never raises: an error that is on its way says more."""
        if self._metrics is not None:
            with suppress(OSError):
                self._metrics.close()
            self._metrics = None

    def append(self, values: Mapping[str, Any]) -> None:
        """One line of metrics."""
        line = json.dumps(values).encode() + b"\n"
        self._put(line)
        self._lines += line

    def metrics(self) -> str:
        """All lines of metrics so far."""
        return self._lines.decode()

    def rewind(self, lines: str = "") -> bool:
        """Go back to the metrics of a checkpoint; says whether the file had them as they were.

        If not, they are written again. Lines after them are of steps that are done again.
        """
        assert self._metrics is not None, "the directory is open"
        self._lines = bytearray(lines.encode())
        try:
            with (self.path / METRICS).open("rb") as file:  # which may be much longer, by damage
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
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._metrics.write(rest) :]
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from error

    def write_record(self, record: RunRecord, model: str | None = None) -> None:
        """The record, whole, after everything else; with the checksums of what is beside it.

        Args:
            record: of the run.
            model: checksum of the file of weights; None if there is none.
        """
        seals = {} if model is None else {MODEL: model}
        if self._metrics is not None:
            try:
                os.fsync(self._metrics.fileno())
            except OSError as error:
                raise cannot_write(self.path / METRICS, error) from error
            seals[METRICS] = sha256(self._lines).hexdigest()
        if self.replaced is not None:
            self._put_aside("replaced")
        write_whole(self.path / RECORD, sealed({**record.as_dict(), "files": seals}))

    def remove_leftovers(self) -> None:
        """Remove what processes that were killed have left half written."""
        found = [path for pattern in _HALF_WRITTEN for path in self.path.glob(pattern)]
        for path in self.checkpoints.glob("step-*.safetensors"):
            if not path.with_suffix(".json").exists():
                found.append(path)
        _remove(found)

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints, and what is half written, of a run that has ended."""
        _remove(self.checkpoints.glob("step-*.json"))  # first what makes them checkpoints
        _remove(self.checkpoints.glob("step-*"))
        self.remove_leftovers()
        with suppress(OSError):  # there is none, or it holds something else
            self.checkpoints.rmdir()


def read_record(path: str | Path) -> RunRecord:
    """The record of a finished run, from its directory or from its record.json."""
    path = Path(path)
    return _read_record(path if path.suffix == ".json" else path / RECORD)[0]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of the metrics of a run, from its directory.

    Those of a finished run are checked by their seal.
    """
    path = Path(path)
    if (path / RECORD).exists():
        _check_file(path, METRICS, _read_record(path / RECORD)[1])
    whole, _, _ = (path / METRICS).read_bytes().rpartition(b"\n")
    return [parse_object(line) for line in whole.splitlines()]


def _check_file(path: Path, name: str, seals: Mapping[str, str]) -> None:
    """Refuse a file of a finished run that is missing, or not as it was written."""
    try:
        if name in seals:
            check_file(path / name, seals[name])
        else:  # an old run
            (path / name).stat()
    except (FileNotFoundError, ValueError) as error:
        raise damaged(path, f"cannot read {path / name}: {_reason(error)}") from error
    except OSError as error:  # it may be whole
        raise _cannot_read(path / name, error, "make the file readable, and try again") from error


def _read_record(path: Path) -> tuple[RunRecord, dict[str, str]]:
    """A record, and the checksums of the files beside it."""
    try:
        values = parse_object(path.read_text(encoding="utf-8"))
        if values.get("schema") != 1 or SEAL in values:
            unseal_(values)
        seals = values.get("files", {})
        return RunRecord.from_dict(values, str(path)), typed(dict[str, str], seals, "files")
    except OSError as error:
        raise _cannot_read(path, error, "name the directory of a run that has finished") from error
    except NewerError:
        raise
    except EinlinearError as error:
        raise damaged(path.parent, error.what) from error
    except ValueError as error:
        raise damaged(path.parent, f"cannot read {path}: {error}") from error


def damaged(path: Path, what: str) -> DamagedError:
    """What to raise where a file of a finished run is damaged."""
    config, out = (shlex.quote(str(part)) for part in (path / CONFIG, path))
    return DamagedError(
        what=what,
        rule="the files of a run that has finished are as the run has written them",
        fix=f"train the run again: einlinear train --config {config} --out {out}",
    )


def _cannot_read(path: Path, error: Exception, fix: str) -> EinlinearError:
    return EinlinearError(
        what=f"cannot read {path}: {_reason(error)}",
        rule="it is a file that a run has written",
        fix=fix,
    )


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def _remove(paths: Iterable[Path]) -> None:
    """Remove files, as far as that is possible."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)
