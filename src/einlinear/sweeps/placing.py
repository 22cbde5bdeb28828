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

    devices: of each run; None is one, for which Slurm is asked for no GPU.
    gpus: of this machine; of a job of Slurm.
    most_threads: of a local run that chooses its threads.
    """

    executor: ExecutorName = "local"
    processes: int | None = None
    threads: int | None = None
    address: str | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None
    gpus: int = 0
    most_threads: int | None = None

    def __post_init__(self) -> None:
        if self.executor not in get_args(ExecutorName):
            raise EinlinearError(
                what=f"executor is {quote(self.executor)}",
                rule=f"executor is one of {', '.join(get_args(ExecutorName))}",
                fix='use "local", or leave it out',
            )
        for name in ("processes", "threads", "devices"):
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
        if self.executor == "inline" and self.num_devices > 1:
            raise EinlinearError(
                what=f"devices are {self.devices}, the executor inline",
                rule="inline runs are trained in this process, on one device",
                fix='use executor="local", or leave devices out',
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

    @property
    def num_devices(self) -> int:
        """How many devices each run has."""
        return self.devices or 1


def place(study: Study, placing: Placing, num_runs: int | None = None) -> Placing:
    """Return the placing with processes, threads and GPUs chosen for the runs of a study.

    There is one run at once per GPU, or else per core, but no more than runs; with several devices
    for each run, one per so many GPUs or cores. Small models gain little
    from a second thread, so each process has one. If there are fewer runs than cores, the runs
    share the cores, and each uses as many of its share as its steps can use. The choice depends on
    the whole study, not on the runs that are left, so that a resumed run has the same threads and
    the same rounding. `num_runs` replaces the number of runs of the study.
    """
    devices = placing.num_devices
    _check_batches(study, devices)
    if placing.executor == "ray":
        return replace(placing, threads=placing.threads or 1)
    num_runs = num_runs or len(study.cells)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus, most = 0, _MOST_QUEUED  # Slurm knows its machines
    threads, share = placing.threads, None
    is_used = any(cell.settings.get("device") != "cpu" for cell in study.cells)
    if placing.executor == "inline":
        most = 1
    elif placing.executor == "local":
        gpus = count_gpus() if is_used else 0
        if 0 < gpus < devices:
            raise EinlinearError(
                what=f"devices are {devices}, and this machine has {gpus}",
                rule="a run has all its GPUs on one machine",
                fix=f"use {gpus} devices or fewer",
            )
        most = max(1, (gpus or cores or 1) // devices)
        share = max(1, (cores or 1) // (devices * (placing.processes or min(num_runs, most))))
    else:
        threads = threads or 1
        gpus = placing.devices or 0 if is_used else 0
    return replace(
        placing,
        processes=min(num_runs, placing.processes or most),
        threads=threads,
        gpus=gpus,
        most_threads=share,
    )


def _check_batches(study: Study, devices: int) -> None:
    """Refuse batches that cannot be divided evenly among the devices of a run."""
    for config in (cell.config for cell in study.cells):
        parts = devices * config.accumulation
        if devices > 1 and config.batch_size % parts:
            raise EinlinearError(
                what=f"devices are {devices}, and a run has a batch_size of {config.batch_size} "
                f"and an accumulation of {config.accumulation}",
                rule="all devices compute parts of the same size",
                fix=f"give a batch_size that is a multiple of {parts}",
            )


def opened(placing: Placing, out: Path) -> closing[Executor]:
    """Open the executor of a placing that `place` has completed; close it at the end."""
    return closing(_make(placing, out))


def _make(placing: Placing, out: Path) -> Executor:
    if placing.executor == "inline":
        return InlineExecutor()
    processes, threads = placing.processes, placing.threads or placing.most_threads
    devices, gpus = placing.num_devices, placing.gpus
    assert threads is not None, "`place` has chosen"
    if placing.executor == "ray":  # Ray and Slurm need optional packages
        from einlinear.sweeps.executors.ray import RayExecutor

        return RayExecutor(placing.address, threads, devices=devices, most=processes)
    assert processes is not None, "`place` has chosen"
    if placing.executor == "local":
        return LocalExecutor(processes, threads, gpus, devices)
    from einlinear.sweeps.executors.slurm import SlurmExecutor

    folder, cpus = out / "slurm", threads * devices
    return SlurmExecutor(folder, processes, cpus, placing.slurm, gpus=gpus)


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
