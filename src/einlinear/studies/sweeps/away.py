"""A job on a machine that may be another: only where the directory of the sweep can be seen."""

from __future__ import annotations

import platform
from pathlib import Path

from einlinear.errors import EinlinearError
from einlinear.studies.sweeps.job import STUDIES, Job, Outcome


def run_away(job: Job) -> Outcome:
    """Run a job if this machine sees the directory of its sweep; an error otherwise."""
    if (Path(job.out) / STUDIES).is_dir():
        from einlinear.studies.sweeps.run_job import run_job  # torch, which only workers need

        return run_job(job)
    error = EinlinearError(
        what=f"there is no {Path(job.out) / STUDIES} on the machine {platform.node()}",
        rule="all machines that run jobs of a sweep see its directory, under the same path",
        fix="give the sweep a directory on a disk that all of them share",
    )
    return Outcome(job.id, "error", f"{error}\n")


def missing_package(name: str, extra: str) -> EinlinearError:
    """What to raise where a package that only one kind of executor needs is not there."""
    return EinlinearError(
        what=f"the package {name} is not installed",
        rule=f"a sweep on {extra.capitalize()} needs it, here and where the runs are trained",
        fix=f'pip install "einlinear[{extra}]"',
    )
