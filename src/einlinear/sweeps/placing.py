"""Placing: where a sweep runs, with how many processes and threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from einlinear.data.workers import count_processes
from einlinear.errors import EinlinearError, quote
from einlinear.structures.values import whole_number
from einlinear.sweeps.executors.executor import Executor, InlineExecutor
from einlinear.sweeps.executors.local import LocalExecutor
from einlinear.sweeps.study import Study

ExecutorName = Literal["local", "inline", "ray", "slurm"]

_MOST_QUEUED = 64  # Slurm jobs at once, by default


@dataclass(frozen=True, slots=True)
class Placing:
    """Where runs are trained: the arguments of `sweep`, and what `place` sets.

    gpus: of this machine.
    most_threads: of a local run that chooses its threads.
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
                fix='use "local", or leave it out',
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
                fix='use executor="local", or leave processes out',
            )
        belongs = {"address": "ray", "slurm": "slurm"}
        for name, executor in belongs.items():
            given = getattr(self, name)
            if given and self.executor != executor:
                is_table = isinstance(given, Mapping)
                shown = " ".join(f"{k}={v}" for k, v in given.items()) if is_table else given
                raise EinlinearError(
                    what=f"{name} is {quote(shown)}, the executor {self.executor}",
                    rule=f"{name} is a setting of the executor {executor}",
                    fix=f'use executor="{executor}", or leave {name} out',
                )


def place(study: Study, placing: Placing) -> Placing:
    """Return the placing with processes, threads and GPUs chosen for the runs of a study.

    There is one process per GPU, or else per core, but no more than runs. Small models gain little
    from a second thread, so each process has one. If there are fewer runs than cores, the runs
    share the cores, and each uses as many of its share as its steps can use. The choice depends on
    the whole study, not on the runs that are left, so that a resumed run has the same threads and
    the same rounding.
    """
    if placing.executor == "ray":
        return replace(placing, threads=placing.threads or 1)
    num_runs = len(study.cells)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus, most = 0, _MOST_QUEUED  # Slurm knows its machines
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


def opened(placing: Placing, out: Path) -> closing[Executor]:
    """Open the executor of a placing that `place` has completed; close it at the end."""
    return closing(_make(placing, out))


def _make(placing: Placing, out: Path) -> Executor:
    if placing.executor == "inline":
        return InlineExecutor()
    processes, threads = placing.processes, placing.threads or placing.most_threads
    assert threads is not None, "`place` has chosen"
    if placing.executor == "ray":  # Ray and Slurm need optional packages
        from einlinear.sweeps.executors.ray import RayExecutor

        return RayExecutor(placing.address, threads, most=processes)
    assert processes is not None, "`place` has chosen"
    if placing.executor == "local":
        return LocalExecutor(processes, threads, placing.gpus)
    from einlinear.sweeps.executors.slurm import SlurmExecutor

    return SlurmExecutor(out / "slurm", processes, threads, placing.slurm)


def count_gpus() -> int:
    """Count the usable GPUs of this machine, without loading torch."""
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
