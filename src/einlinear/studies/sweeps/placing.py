"""Where a sweep runs: how many processes with how many threads, and the executor for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from einlinear.errors import EinlinearError, quote
from einlinear.structures.values import whole_number
from einlinear.studies.sweeps.executor import Executor
from einlinear.studies.sweeps.local import LocalExecutor
from einlinear.studies.sweeps.study import Study
from einlinear.studies.workers import count_processes

ExecutorName = Literal["local", "inline", "ray", "slurm"]

_MOST_QUEUED = 64  # jobs of Slurm at once, unless more are asked for


@dataclass(frozen=True, slots=True)
class Placing:
    """Where runs go.

    Args:
        executor: local processes, this process (inline), Ray, or Slurm.
        processes: how many runs at once; chosen by `place` unless given, but for Ray, where it is
            the most that may be, and all that there is room for unless given.
        threads: of each run. Unless given, local and inline runs choose by the size of a step.
        address: of a Ray cluster; one is started on this machine unless given.
        slurm: settings of Slurm jobs by name, such as {"partition": "cpu", "time": "120"}.
        gpus: of this machine.
        most_threads: of a local run that chooses for itself; chosen by `place`.
    """

    executor: ExecutorName = "local"
    processes: int | None = None
    threads: int | None = None
    address: str | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    most_threads: int | None = None

    def __post_init__(self) -> None:
        if self.executor not in get_args(ExecutorName):
            raise EinlinearError(
                what=f"executor is {quote(self.executor)}",
                rule=f"executor is one of {', '.join(get_args(ExecutorName))}",
                fix='give "local", or leave it out',
            )
        for name in ("processes", "threads"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, 1)
        if self.executor == "local" and self.processes is not None:
            count_processes(self.processes)
        if self.executor == "inline" and (self.processes or 1) > 1:
            raise EinlinearError(
                what=f"processes are {self.processes}, the executor inline",
                rule="inline runs are trained one after the other, in this process",
                fix='give executor="local", or leave processes out',
            )
        belongs = {"address": "ray", "slurm": "slurm"}
        for name, executor in belongs.items():
            if getattr(self, name) and self.executor != executor:
                raise EinlinearError(
                    what=f"{name} is {quote(getattr(self, name))}, the executor {self.executor}",
                    rule=f"{name} is a setting of {executor}",
                    fix=f'give executor="{executor}", or leave {name} out',
                )


def place(study: Study, placing: Placing) -> Placing:
    """The same with processes, threads and GPUs chosen for the runs of a study.

    Small models gain little from a second thread: as many processes as there are cores, of one
    thread each. Where there are fewer runs than cores, they share the cores out, and each uses as
    many of its share as its steps can use; there are never more processes than runs. All depends on
    the config of a run and on the whole study, not on the runs that are left: a run has the same
    threads, and so the same rounding, when a sweep goes on. A GPU has one process.
    """
    if placing.executor == "ray":
        return replace(placing, threads=placing.threads or 1)
    num_runs = len(study.cells)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus, most = 0, _MOST_QUEUED  # of Slurm, which knows its machines
    threads, share = placing.threads, None
    if placing.executor == "inline":
        most = 1
    elif placing.executor == "local":
        is_used = any(cell.settings.get("device") != "cpu" for cell in study.cells)
        gpus = count_gpus() if is_used else 0
        most = gpus or cores or 1
        share = max(1, (cores or 1) // (placing.processes or min(num_runs, most)))
    else:
        threads = threads or 1
    return replace(
        placing,
        processes=min(num_runs, placing.processes or most),
        threads=threads,
        gpus=gpus,
        most_threads=share,
    )


@contextmanager
def opened(placing: Placing, out: Path) -> Iterator[Executor]:
    """The executor of a placing in which everything is chosen; closed at the end."""
    executor = _make(placing, out)
    try:
        yield executor
    finally:
        executor.close()


def _make(placing: Placing, out: Path) -> Executor:
    if placing.executor == "inline":
        from einlinear.studies.sweeps.inline import InlineExecutor  # torch takes a while to load

        return InlineExecutor()
    processes, threads = placing.processes, placing.threads or placing.most_threads
    assert threads is not None, "`place` has chosen"
    if placing.executor == "ray":  # it and Slurm load packages that are extras
        from einlinear.studies.sweeps.on_ray import RayExecutor

        return RayExecutor(placing.address, threads, most=processes)
    assert processes is not None, "`place` has chosen"
    if placing.executor == "local":
        return LocalExecutor(processes, threads, placing.gpus)
    from einlinear.studies.sweeps.on_slurm import SlurmExecutor

    return SlurmExecutor(out / "slurm", processes, threads, placing.slurm)


def count_gpus() -> int:
    """How many GPUs of this machine may be used; their driver says it sooner than torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
