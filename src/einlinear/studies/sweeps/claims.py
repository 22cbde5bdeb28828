"""Claims: who runs a run now. Taken by making a file, kept by a heartbeat, lost with the owner.

A run's directory holds claim-000001, claim-000002, ...; the highest counts. To take a run over is
to make the next one, which only one process can. Only its owner ever changes a claim.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Any
from uuid import uuid4

from einlinear.errors import cannot_write

BEAT_SECONDS = 1.0
STALE_SECONDS = 30.0
"""A claim that has not changed for so long, by the clock of who looks, has lost its owner."""

_RELEASED = 0  # the time of change of a claim that was given back


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its machine, its number, when it began by the machine's clock, and a token."""

    host: str
    pid: int
    started: str | None
    token: str


class Claim:
    """A run that this process has taken. It beats until it is given back."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self.lost = Event()
        self._state: Mapping[str, Any] = {}
        self._end = Event()
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
        self._end.set()
        self._thread.join()
        self.release()

    def report(self, state: Mapping[str, Any]) -> None:
        """What the next beat says of the run."""
        self._state = dict(state)

    def release(self) -> None:
        """Give the run back: others may take it at once."""
        try:
            os.utime(self.path, (_RELEASED, _RELEASED))
        except OSError:
            pass  # a claim that is gone, or cannot be reached, is nobody's

    def remove(self) -> None:
        """Take all claims away, once the run has its record."""
        self._end.set()
        self._thread.join()
        for path in _claims(self.path.parent):
            path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            if _current(self.path.parent) != self.path:
                self.lost.set()
                return
            self._write()

    def _write(self) -> None:
        part = self.path.with_name(f".{self.path.name}.{self.owner.token}")
        try:
            part.write_text(json.dumps(asdict(self.owner) | dict(self._state)), encoding="utf-8")
            part.replace(self.path)
        except OSError:  # a full disk stops no heart
            try:
                os.utime(self.path)
                part.unlink(missing_ok=True)
            except OSError:
                pass


class Watch:
    """Tells claims with a living owner from those without, by looking more than once.

    On this machine a process that is gone is known at once. Elsewhere a claim is dead when it has
    not changed for STALE_SECONDS: no clocks of two machines are compared.
    """

    def __init__(self, stale_seconds: float = STALE_SECONDS) -> None:
        self._stale = stale_seconds
        self._seen: dict[Path, tuple[int, float]] = {}

    def is_taken(self, directory: Path, dead: str | None = None) -> bool:
        """Whether somebody alive holds a run, as far as can be told now.

        `dead` is a claim, as `claim_on` tells it, that somebody else has found dead.
        """
        path = _current(directory)
        if path is None:
            return False
        changed = _changed(path)
        if changed in (None, _RELEASED) or dead == f"{path.name} {changed}":
            return False
        if _is_gone(read_claim(path)):
            return False
        seen, since = self._seen.get(path, (None, 0.0))
        if seen != changed:
            since = monotonic()
            self._seen[path] = changed, since
        return monotonic() - since < self._stale

    def take(self, directory: Path, dead: str | None = None) -> Claim | None:
        """Claim a run for this process; None if somebody else has it."""
        if self.is_taken(directory, dead):
            return None
        held = _current(directory)
        number = 1 if held is None else int(held.name.partition("-")[2]) + 1
        path = directory / f"claim-{number:06d}"
        owner = Owner(host_name(), os.getpid(), _start_time(os.getpid()), uuid4().hex)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return None
        except OSError as error:
            raise cannot_write(path, error) from error
        with os.fdopen(handle, "wb") as file:
            try:
                file.write(json.dumps(asdict(owner)).encode())
                file.flush()
            except OSError:
                pass  # the file is the claim; what it says helps only to see a death sooner
        for old in _claims(directory)[:-1]:
            old.unlink(missing_ok=True)
        return Claim(path, owner)


def read_claim(path: Path) -> dict[str, Any]:
    """What a claim says; nothing if it cannot be read now."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError):
        return {}


def claimed(directory: Path) -> dict[str, Any]:
    """What the claim on a run says; nothing if there is none."""
    path = _current(directory)
    return {} if path is None else read_claim(path)


def claim_on(directory: Path) -> str | None:
    """Which claim counts, at its last beat, for others to know it again; None if there is none."""
    path = _current(directory)
    return None if path is None else f"{path.name} {_changed(path)}"


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
    if os.name != "posix" or claim.get("host") != host_name() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
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


def _claims(directory: Path) -> list[Path]:
    """All claims on a run, the one that counts last."""
    return sorted(directory.glob("claim-[0-9][0-9][0-9][0-9][0-9][0-9]"))


def _changed(path: Path) -> int | None:
    """When a claim was last changed; None if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _current(directory: Path) -> Path | None:
    found = _claims(directory)
    return found[-1] if found else None
