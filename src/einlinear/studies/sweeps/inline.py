"""Jobs in this very process, one after the other: for looking at one closely."""

from __future__ import annotations

from collections.abc import Sequence
from time import sleep

from einlinear.studies.sweeps.job import Job, Outcome
from einlinear.studies.sweeps.run_job import run_job


class InlineExecutor:
    """Runs a job as soon as it is asked how it ended; what runs print is seen."""

    slots = 1

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def start(self, job: Job) -> None:
        """Keep a job for `ended`."""
        self._jobs.append(job)

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """The outcomes of all jobs that were started."""
        if not self._jobs:
            sleep(seconds)
        jobs, self._jobs = self._jobs, []
        return [run_job(job, is_alone=False) for job in jobs]

    def close(self) -> None:
        """Nothing is left behind."""
