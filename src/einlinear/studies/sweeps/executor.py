"""Executor: where jobs run. Each way to run them is a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from einlinear.studies.sweeps.job import Job, Outcome


class Executor(Protocol):
    """A place for jobs. It neither retries nor orders them; the sweep does."""

    @property
    def slots(self) -> int:
        """How many jobs can run at once, now."""

    def start(self, job: Job) -> None:
        """Begin a job; called only while fewer than `slots` jobs run."""

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Jobs that have ended since the last call; waits so long for one, if there is none."""

    def close(self) -> None:
        """Stop what still runs, and let everything go."""
