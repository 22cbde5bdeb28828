"""Claims: which process trains a run. A claim is a file, kept alive by a heartbeat.

A run's directory holds claim-000001, claim-000002, ...; the highest counts. A process takes a run
over by creating the next file, which only one process can do. Only its owner changes a claim, in
place: a process that lists the directory at that moment could miss a file that is replaced.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from stat import S_ISREG
from threading import Event, Thread
from time import monotonic
from typing import Any
from uuid import uuid4

from einlinear.errors import cannot_write
from einlinear.files.whole import parse_object
from einlinear.runs.directory import is_locked

BEAT_SECONDS = 1.0
STALE_SECONDS = 30.0
"""A claim that has not changed for this long, by the observer's clock, has lost its owner."""

_RELEASED = 0  # the modification time of a released claim
_NAME = "claim-"
_MOST_BYTES = 1 << 16  # read from a claim; owners write a few hundred
_UNKNOWN = {"done": None, "total": None, "loss": None, "seconds_left": None}


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its machine, its pid, its start time by the machine's clock, and a token."""

    host: str
    pid: int
    started: str | None
    token: str


@dataclass(frozen=True, slots=True)
class Sight:
    """The claim on a run as it was seen: its number and modification time; 0, 0 for no claim."""

    number: int = 0
    changed: int = 0


class Claim:
    """A run that this process has taken. The heartbeat runs until the claim is released."""

    def __init__(self, path: Path, owner: Owner, handle: int) -> None:
        self.path, self.owner = path, owner
        self._handle, self._length = handle, 0
        self._state: Mapping[str, Any] = _UNKNOWN
        self._lost, self._end = Event(), Event()
        self._looked = monotonic()
        self._thread = Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self.release()

    def report(self, state: Mapping[str, Any]) -> None:
        """Set the progress that the next heartbeat writes."""
        self._state = dict(state)

    def is_lost(self) -> bool:
        """Whether another process has taken the run, because this one seemed dead."""
        # The heartbeat of a process that was paused has not looked yet.
        if monotonic() - self._looked > 2 * BEAT_SECONDS:
            self.look()
        return self._lost.is_set()

    def look(self) -> bool:
        """Look at the directory: is this still the claim that counts?"""
        try:
            is_own = _path(self.path.parent, _last(self.path.parent)) == self.path
            if not is_own or not os.path.samestat(os.fstat(self._handle), self.path.lstat()):
                self._lost.set()
        except FileNotFoundError:
            self._lost.set()
        except OSError:
            pass  # the disk does not answer now; look again at the next heartbeat
        self._looked = monotonic()
        return not self._lost.is_set()

    def write(self) -> None:
        """Write the owner and the progress. Write errors do not stop the heartbeat."""
        text = json.dumps(asdict(self.owner) | dict(self._state)).encode()
        padding = b" " * (self._length - len(text))  # overwrites the end of a longer text
        with suppress(OSError):
            os.lseek(self._handle, 0, os.SEEK_SET)
            self._length = max(self._length, os.write(self._handle, text + padding))
        self._set_time(None)

    def release(self) -> None:
        """Release the run, so that others may take it at once."""
        if self._handle >= 0:
            self._set_time((_RELEASED, _RELEASED))
            self._close()

    def remove(self) -> None:
        """Remove all claims, once the run has its record."""
        self._stop()
        self._close()
        _remove_all(self.path.parent)

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS) and self.look():
            self.write()

    def _stop(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _set_time(self, times: tuple[int, int] | None) -> None:
        with suppress(OSError):  # a claim that is gone or out of reach belongs to nobody
            os.utime(self._handle if os.utime in os.supports_fd else self.path, times)


class Watch:
    """Finds claims whose owner is dead, by looking more than once.

    A dead process of this machine is noticed at once. A claim of another machine is dead if it has
    not changed for STALE_SECONDS, so that clocks of two machines are never compared. A process
    that is only paused still holds its lock on the files of the run.
    """

    def __init__(self, stale_seconds: float = STALE_SECONDS) -> None:
        self._stale = stale_seconds
        self._seen: dict[Path, tuple[Sight, float]] = {}

    def free(self, directory: Path) -> Sight | None:
        """Return what `take` needs to take a run; None while its owner may be alive."""
        now = monotonic()  # before looking: a pause in between must not count as waiting
        try:
            sight = _look(directory)
        except FileNotFoundError:
            return None  # the claim has just been removed
        except OSError:
            return Sight()  # `take` will report why it cannot be taken
        if sight.changed == _RELEASED or _is_gone(read_claim(_path(directory, sight.number))):
            return sight
        seen, since = self._seen.get(directory, (None, 0.0))
        if seen != sight:
            self._seen[directory] = sight, now
            return None
        return None if now - since < self._stale or is_locked(directory) else sight


def take(directory: Path, after: Sight) -> Claim | None:
    """Claim a free run; None if its claim has changed, or another process was faster."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(directory, error) from error
    path = _path(directory, after.number + 1)
    try:
        if _look(directory) != after:
            return None
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    except (FileExistsError, FileNotFoundError):
        return None
    except OSError as error:
        raise cannot_write(path, error) from error
    owner = Owner(host_name(), os.getpid(), _start_time(os.getpid()), uuid4().hex)
    claim = Claim(path, owner, handle)
    claim.write()
    # Since the look above, two others may have come and the first of them gone.
    if not claim.look():
        claim.release()
        return None
    _remove_all(directory, below=after.number + 1)
    return claim


def remove_dead_claims(directory: Path) -> None:
    """Remove the claims on a finished run if their owner is known to be dead."""
    if Watch().free(directory) is not None:
        _remove_all(directory)


def read_claim(path: Path) -> dict[str, Any]:
    """Read a claim; returns an empty dict if it cannot be read, or was not made by an owner."""
    try:
        if not S_ISREG(path.lstat().st_mode):
            return {}  # opening a pipe would wait forever
        with path.open("rb") as file:
            return parse_object(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}


def claimed(directory: Path) -> dict[str, Any]:
    """Read the claim on a run; returns an empty dict if there is none."""
    try:
        return read_claim(_path(directory, _last(directory)))
    except OSError:
        return {}


@cache
def host_name() -> str:
    """A name of this machine, unique to each boot and each pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # pragma: no cover - only Linux has these
        return platform.node()


def _is_gone(claim: Mapping[str, Any]) -> bool:
    """Whether the owner is a process of this machine that is known to be dead."""
    pid = claim.get("pid")
    if os.name != "posix" or claim.get("host") != host_name():
        return False
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return _start_time(pid) != claim.get("started")


def _start_time(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]  # a zombie is dead


def _look(directory: Path) -> Sight:
    """The claim that counts; raises FileNotFoundError if it is removed meanwhile."""
    number = _last(directory)
    if not number:
        return Sight()
    # lstat: a dangling link is a claim without an owner, not a removed one.
    return Sight(number, _path(directory, number).lstat().st_mtime_ns)


def _last(directory: Path) -> int:
    """The number of the claim that counts; 0 for none."""
    return max(_numbers(directory), default=0)


def _numbers(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [name[len(_NAME) :] for name in names if name.startswith(_NAME)]
    numbers = [int(number) for number in found if number.isascii() and number.isdecimal()]
    # Only names that an owner makes: "claim-7" is not a claim.
    return [number for number in numbers if _path(directory, number).name in names]


def _path(directory: Path, number: int) -> Path:
    return directory / f"{_NAME}{number:06d}"


def _remove_all(directory: Path, below: float = inf) -> None:
    """Remove claims where possible; those that stay do not count, or not for long."""
    with suppress(OSError):
        for number in _numbers(directory):
            if number < below:
                with suppress(OSError):
                    _path(directory, number).unlink()
