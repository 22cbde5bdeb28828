"""How far a sweep is, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from einlinear.studies.record import RunRecord


@dataclass(frozen=True, slots=True)
class Running:
    """A run under way; loss and seconds_left are None until it has told them."""

    id: str
    label: str
    done: int
    total: int
    loss: float | None
    seconds_left: float | None
    is_elsewhere: bool


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """How far a sweep is. `last` are the runs that have ended since it was last told.

    finished and diverged have records; share is that of the work that is done, by time.
    """

    total: int
    finished: int
    diverged: int
    failed: int
    running: tuple[Running, ...]
    share: float
    seconds_left: float
    last: tuple[RunRecord | Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that failed whenever it was tried: what the last attempt said, and its directory."""

    id: str
    label: str
    text: str
    directory: Path

    @property
    def reason(self) -> str:
        """What went wrong, in a line: the end of a traceback, the beginning of anything else."""
        lines = self.text.strip().splitlines() or [""]
        return lines[-1 if lines[0].startswith("Traceback") else 0]


OnProgress = Callable[[SweepProgress], None]
