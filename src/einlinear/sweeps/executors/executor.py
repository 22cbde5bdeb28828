"""Executor: where jobs run. One module for each kind; the simplest one, InlineExecutor, is here."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Protocol

from einlinear.errors import EinlinearError
from einlinear.sweeps.job import STUDIES, Job, Outcome


class Executor(Protocol):
    """A place for jobs. It neither retries nor orders them; the sweep does."""

    @property
    def slots(self) -> int:
        """How many jobs can run at once right now."""

    def start(self, job: Job) -> None:
        """Start a job. Called only while fewer than `slots` jobs are running."""

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Return jobs that ended since the last call, waiting up to `seconds` for the first."""

    def close(self) -> None:
        """Stop running jobs and release all resources."""


class InlineExecutor:
    """Runs jobs in this process, one after the other, and shows what they print. For debugging."""

    slots = 1

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def start(self, job: Job) -> None:
        """Keep a job for `ended`."""
        self._jobs.append(job)

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Run all jobs that were started and return their outcomes."""
        from einlinear.sweeps.run_job import run_job  # loads torch

        if not self._jobs:
            sleep(seconds)
        jobs, self._jobs = self._jobs, []
        return [run_job(job, is_alone=False) for job in jobs]

    def close(self) -> None:
        """Do nothing: no job outlives `ended`."""


def run_remotely(job: Job) -> Outcome:
    """Run a job on a machine of a cluster, which must see the directory of the sweep."""
    if (Path(job.out) / STUDIES).is_dir():
        from einlinear.sweeps.run_job import run_job  # loads torch, which only workers need

        return run_job(job)
    error = EinlinearError(
        what=f"there is no {Path(job.out) / STUDIES} on the machine {platform.node()}",
        rule="all machines that run jobs of a sweep see its directory, under the same path",
        fix="put the sweep in a directory on a disk that all of them share",
    )
    return Outcome(job.id, "error", f"{error}\n")


def missing_package(name: str, extra: str) -> EinlinearError:
    """The error for a missing package that only one executor needs."""
    return EinlinearError(
        what=f"the package {name} is not installed",
        rule=f"a sweep on {extra.capitalize()} needs it, here and where the runs are trained",
        fix=f'pip install "einlinear[{extra}]"',
    )
