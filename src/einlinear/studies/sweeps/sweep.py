"""sweep: all runs of a study, planned, run where there is room, survived."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.files import write_whole
from einlinear.studies.directory import RunDirectory, is_locked
from einlinear.studies.record import RunRecord
from einlinear.studies.sweeps.claims import remove_dead_claims
from einlinear.studies.sweeps.driver import Driver
from einlinear.studies.sweeps.executor import Executor
from einlinear.studies.sweeps.job import RUNS, STUDIES, Job, all_finished
from einlinear.studies.sweeps.local import LocalExecutor
from einlinear.studies.sweeps.placing import ExecutorName, Placing, opened, place
from einlinear.studies.sweeps.plan import PlannedRun, PlanRequest, makespan
from einlinear.studies.sweeps.progress import Failure, OnProgress
from einlinear.studies.sweeps.study import Study, as_study


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep will do.

    runs: all runs of the study, with what each costs and about how long it takes.
    records: of runs that have one, by id.
    placing, slots: where, and how many at once; None where only a cluster can tell.
    """

    study: Study
    out: Path
    runs: tuple[PlannedRun, ...]
    records: Mapping[str, RunRecord]
    placing: Placing
    slots: int | None

    @property
    def finished(self) -> frozenset[str]:
        """Ids of runs that have a record."""
        return frozenset(self.records)

    @property
    def repeats(self) -> int:
        """Combinations of the study that are the same run as another, such as btt and monarch."""
        return len(self.study.cells) - len(self.runs)

    @property
    def seconds_left(self) -> float:
        """About how long it takes to run what has no record; one by one if slots are None."""
        left = [run.seconds for run in self.runs if run.id not in self.records]
        return makespan(left, self.slots or 1)

    @property
    def flops(self) -> int:
        """Of all runs, forward and backward."""
        return sum(run.flops for run in self.runs)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep gave: records in the order of the plan, and runs that failed."""

    plan: SweepPlan
    records: tuple[RunRecord, ...]
    failures: tuple[Failure, ...]


def sweep(
    study: Study | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    executor: ExecutorName = "local",
    processes: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    slurm: Mapping[str, str] | None = None,
    on_plan: Callable[[SweepPlan], None] | None = None,
    on_progress: OnProgress | None = None,
) -> SweepResult:
    """Train all runs of a study that have no record yet.

    It may be killed at any moment: the same call again loses nothing and repeats nothing that has
    finished. Several calls on one directory, also of other machines that see it, share the runs.
    A run that fails is tried once more, then reported. One that diverges is a result.

    Args:
        study: a Study, its settings by name, or a TOML file.
        out: directory of the sweep; run ID goes to out/runs/ID.
        executor: local processes, inline (this process), ray, or slurm.
        processes: how many runs at once; by the machine unless given, on Ray by its room.
        threads: of each run; by the size of a step and the machine unless given.
        address: of a Ray cluster; one is started on this machine unless given.
        slurm: settings of Slurm jobs by name.
        on_plan: called before the first run.
        on_progress: called twice a second.
    """
    study = as_study(study)
    given = Placing(executor, processes, threads, address, dict(slurm or {}))
    placing = place(study, given)
    out = sweep_directory(out)
    with opened(placing, out) as where:
        plan = plan_sweep(study, out, placing, where)
        prepare_directory(study, out)
        if on_plan is not None:
            on_plan(plan)
        return run_sweep(plan, where, on_progress or (lambda _: None))


def prepare_directory(study: Study, out: str | Path) -> Path:
    """Make the directory of a sweep, with the study in it, of which a plan could be made."""
    out = sweep_directory(out)
    path, text = out / STUDIES / f"{study.id}.toml", study.to_toml().encode()
    if not _holds(path, text):
        try:
            write_whole(path, text)
        except EinlinearError:
            if not path.exists():  # else another sweep has just written it
                raise
    return out


def sweep_directory(out: str | Path) -> Path:
    """The whole path of a directory in which a sweep can be; nothing is written."""
    out = Path(out).absolute()
    if out.exists() and not out.is_dir():
        raise EinlinearError(
            what=f"{out} is a file",
            rule="a sweep has a directory of its own, with a folder for every run",
            fix="choose another path",
        )
    if (out / "record.json").exists() or (out / "metrics.jsonl").exists():
        raise EinlinearError(
            what=f"{out} is the directory of a single run",
            rule="a sweep has a directory of its own, with a folder for every run",
            fix="choose another directory",
        )
    return out


def plan_sweep(
    study: Study, out: Path, placing: Placing, executor: Executor | None = None
) -> SweepPlan:
    """What a sweep will do; runs are timed for a few seconds, nothing is written.

    Where processes of this machine wait for jobs, one of them makes the plan, else one is started
    for it: torch takes seconds to load, and a run that is timed may need all memory.
    """
    is_here = placing.executor in ("local", "inline")
    request = PlanRequest(study.as_dict(), str(out), placing.threads, is_here=is_here)
    if isinstance(executor, LocalExecutor):
        runs = executor.plan(request)
    else:
        is_inline = placing.executor == "inline"
        runs = _plan_here(request) if is_inline else _plan_apart(request, placing.most_threads)
    records = all_finished(out, (run.id for run in runs))
    slots = placing.processes if executor is None else executor.slots
    return SweepPlan(study, out, runs, records, placing, slots)


def run_sweep(plan: SweepPlan, executor: Executor, on_progress: OnProgress) -> SweepResult:
    """Run what has no record, on an executor."""
    folder, threads = os.getcwd(), plan.placing.threads
    jobs = [
        (run, Job(run.id, str(plan.out), run.config.as_dict(), threads, folder))
        for run in plan.runs
    ]
    records, failures = Driver(jobs, executor, on_progress, plan.records).to_the_end()
    for name in records:
        _remove_leftovers(plan.out / RUNS / name)
    return SweepResult(
        plan=plan,
        records=tuple(records[run.id] for run in plan.runs if run.id in records),
        failures=tuple(failures[run.id] for run in plan.runs if run.id in failures),
    )


def _remove_leftovers(path: Path) -> None:
    """Remove what a process that was killed right after it had written a record has left."""
    directory = RunDirectory(path)
    if directory.checkpoints.exists() and not is_locked(path):
        directory.remove_checkpoints()
    remove_dead_claims(path)


def _plan_apart(request: PlanRequest, most_threads: int | None) -> tuple[PlannedRun, ...]:
    planner = LocalExecutor(1, request.threads or most_threads or 1)
    try:
        return planner.plan(request)
    finally:
        planner.close()


def _plan_here(request: PlanRequest) -> tuple[PlannedRun, ...]:
    from einlinear.studies.sweeps.planner import make_plan

    return make_plan(request)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False
