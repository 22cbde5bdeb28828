"""Claims: who runs a run now. Taken by making a file, kept by a heartbeat, lost with the owner.

A run's directory holds claim-000001, claim-000002, ...; the highest counts. To take a run over is
to make the next one, which only one process can. Only its owner ever changes a claim, and it does
so in place: a file that is replaced may be missed by who lists the directory at that moment.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from stat import S_ISREG
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import uuid4

from einlinear.errors import cannot_write
from einlinear.files import parse_object
from einlinear.studies.directory import is_locked

BEAT_SECONDS = 1.0
STALE_SECONDS = 30.0
"""A claim that has not changed for so long, by the clock of who looks, has lost its owner."""

_RELEASED = 0  # the time of change of a claim that was given back
_NAME = "claim-"
_MOST_BYTES = 1 << 16  # of a claim; owners write a few hundred
_NOT_TOLD = {"done": None, "total": None, "loss": None, "seconds_left": None}


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its machine, its number, when it began by the machine's clock, and a token."""

    host: str
    pid: int
    started: str | None
    token: str


@dataclass(frozen=True, slots=True)
class Sight:
    """The claim on a run as it was seen: its number, and when it changed; 0, 0 if none is there."""

    number: int = 0
    changed: int = 0


class Claim:
    """A run that this process has taken. It beats until it is given back."""

    def __init__(self, path: Path, owner: Owner, handle: int) -> None:
        self.path, self.owner = path, owner
        self._handle, self._length = handle, 0
        self._state: Mapping[str, Any] = _NOT_TOLD
        self._lost, self._end = Event(), Event()
        self._looked = monotonic()
        self._thread = Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Claim:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self.release()

    def report(self, state: Mapping[str, Any]) -> None:
        """What the next beat says of the run."""
        self._state = dict(state)

    def is_lost(self) -> bool:
        """Whether another process has taken the run: this one was taken for dead."""
        # A process that was paused knows nothing yet when it goes on.
        if monotonic() - self._looked > 2 * BEAT_SECONDS:
            self.look()
        return self._lost.is_set()

    def look(self) -> bool:
        """Whether this is still the claim that counts, by looking now."""
        try:
            is_own = _path(self.path.parent, _last(self.path.parent)) == self.path
            if not is_own or not os.path.samestat(os.fstat(self._handle), self.path.lstat()):
                self._lost.set()
        except FileNotFoundError:
            self._lost.set()
        except OSError:
            pass  # a disk that does not answer now; look again at the next beat
        self._looked = monotonic()
        return not self._lost.is_set()

    def write(self) -> None:
        """Say who has the run and how far it is; a full disk stops no heart."""
        told = json.dumps(asdict(self.owner) | dict(self._state)).encode()
        padding = b" " * (self._length - len(told))  # so that no end of an older text is left
        try:
            os.lseek(self._handle, 0, os.SEEK_SET)
            self._length = max(self._length, os.write(self._handle, told + padding))
        except OSError:
            pass
        self._set_time(None)

    def release(self) -> None:
        """Give the run back: others may take it at once."""
        if self._handle >= 0:
            self._set_time((_RELEASED, _RELEASED))
            self._close()

    def remove(self) -> None:
        """Take all claims away, once the run has its record."""
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
        try:
            os.utime(self._handle if os.utime in os.supports_fd else self.path, times)
        except OSError:
            pass  # a claim that is gone, or cannot be reached, is nobody's


class Watch:
    """Tells claims with a living owner from those without, by looking more than once.

    On this machine a process that is gone is known at once. Elsewhere a claim is dead when it has
    not changed for STALE_SECONDS: no clocks of two machines are compared. A process that is only
    paused still has its lock on the files of the run.
    """

    def __init__(self, stale_seconds: float = STALE_SECONDS) -> None:
        self._stale = stale_seconds
        self._seen: dict[Path, tuple[Sight, float]] = {}

    def free(self, directory: Path) -> Sight | None:
        """What `take` needs to take a run; None while somebody alive has it, as far as is known."""
        now = monotonic()  # before looking: who is paused in between must not think it has waited
        try:
            sight = _look(directory)
        except FileNotFoundError:
            return None  # it went away while it was looked at
        except OSError:
            return Sight()  # whoever tries to take it can say why that is not possible
        if sight.changed == _RELEASED or _is_gone(read_claim(_path(directory, sight.number))):
            return sight
        seen, since = self._seen.get(directory, (None, 0.0))
        if seen != sight:
            self._seen[directory] = sight, now
            return None
        return None if now - since < self._stale or is_locked(directory) else sight


def take(directory: Path, after: Sight) -> Claim | None:
    """Claim a run that was seen free; None if it is not as it was seen, or another is faster."""
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
    # Two others may have come, and the first of them gone, since the look above.
    if not claim.look():
        claim.release()
        return None
    _remove_all(directory, below=after.number + 1)
    return claim


def remove_dead_claims(directory: Path) -> None:
    """Remove the claims on a run that has its record, if their owner is known to have ended."""
    if Watch().free(directory) is not None:
        _remove_all(directory)


def read_claim(path: Path) -> dict[str, Any]:
    """What a claim says; nothing if it cannot be read now, or is none that an owner has made."""
    try:
        if not S_ISREG(path.lstat().st_mode):
            return {}  # to open a pipe would wait for ever
        with path.open("rb") as file:
            return parse_object(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return {}


def claimed(directory: Path) -> dict[str, Any]:
    """What the claim on a run says; nothing if there is none."""
    try:
        return read_claim(_path(directory, _last(directory)))
    except OSError:
        return {}


@cache
def host_name() -> str:
    """A name of the machine, one for each time it was started and each space of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # pragma: no cover - only Linux has these
        return platform.node()


def _is_gone(claim: Mapping[str, Any]) -> bool:
    """Whether the owner is known to have ended: only of a process of this machine."""
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
    """When a process began, in ticks since the machine did; None where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]  # a zombie runs nothing


def _look(directory: Path) -> Sight:
    """The claim that counts; raises FileNotFoundError if it goes away meanwhile."""
    number = _last(directory)
    if not number:
        return Sight()
    # Of the file itself: a link to nothing is a claim without an owner, not one that went away.
    return Sight(number, _path(directory, number).lstat().st_mtime_ns)


def _last(directory: Path) -> int:
    """The number of the claim that counts, 0 if there is none."""
    return max(_numbers(directory), default=0)


def _numbers(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [name[len(_NAME) :] for name in names if name.startswith(_NAME)]
    numbers = [int(number) for number in found if number.isascii() and number.isdecimal()]
    # Only names that an owner makes: "claim-7" is no claim, and there is no claim-000007 either.
    return [number for number in numbers if _path(directory, number).name in names]


def _path(directory: Path, number: int) -> Path:
    return directory / f"{_NAME}{number:06d}"


def _remove_all(directory: Path, below: float = inf) -> None:
    """Remove claims, as far as that is possible: those that stay do not count, or not for long."""
    try:
        numbers = _numbers(directory)
    except OSError:
        return
    for number in numbers:
        if number < below:
            try:
                _path(directory, number).unlink(missing_ok=True)
            except OSError:
                pass
