"""sweep: plan and train all runs of a study."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.files.whole import write_whole
from einlinear.runs.directory import RunDirectory, is_locked
from einlinear.runs.record import RunRecord
from einlinear.runs.sources import collect_records
from einlinear.sweeps.claims import remove_dead_claims
from einlinear.sweeps.driver import Driver, Failure, OnSweepProgress
from einlinear.sweeps.executors.executor import Executor
from einlinear.sweeps.executors.local import LocalExecutor
from einlinear.sweeps.job import RUNS, STUDIES, Job, all_finished, last_step, step_seconds
from einlinear.sweeps.placing import ExecutorName, Placing, opened, place
from einlinear.sweeps.plan import PlannedRun, PlanRequest, makespan
from einlinear.sweeps.restore import can_restore, restore
from einlinear.sweeps.study import Study, as_study, load_study


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep will do.

    runs: all runs of the study, with their costs and estimated times.
    records: of finished runs, by id.
    restored: ids of those whose records are given, and will be written to the directory.
    num_given, num_belonging: how many records are given, and how many are of runs of the study.
    steps_done: of interrupted runs that resume from a checkpoint, by id.
    placing, slots: where runs are trained, and how many at once; None if only a cluster knows.
    """

    study: Study
    out: Path
    runs: tuple[PlannedRun, ...]
    records: Mapping[str, RunRecord]
    placing: Placing
    slots: int | None
    steps_done: Mapping[str, int] = field(default_factory=dict)
    restored: frozenset[str] = frozenset()
    num_given: int = 0
    num_belonging: int = 0

    @property
    def finished(self) -> frozenset[str]:
        """Ids of runs that have a record."""
        return frozenset(self.records)

    @property
    def repeats(self) -> int:
        """How many combinations of the study repeat another run, as btt and monarch do."""
        return len(self.study.cells) - len(self.runs)

    @property
    def seconds_left(self) -> float:
        """Estimated time of all runs without a record; one after the other if slots are None."""
        new = (run for run in self.runs if run.id not in self.records)
        left = [run.seconds_from(self.steps_done.get(run.id, 0)) for run in new]
        return makespan(left, self.slots or 1)

    @property
    def flops(self) -> int:
        """FLOPs of all runs, forward and backward."""
        return sum(run.flops for run in self.runs)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep: records in the order of the plan, and runs that failed."""

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
    devices: int | None = None,
    records: str | Path | Iterable[str | Path] = (),
    on_plan: Callable[[SweepPlan], None] | None = None,
    on_progress: OnSweepProgress | None = None,
) -> SweepResult:
    """Train all runs of a study that have no record yet.

    Interrupt it at any time and make the same call again to resume; finished runs are not
    repeated. Several calls on one directory, even from different machines, share the runs. A run
    that fails is retried once, then reported. A run that diverges counts as a result.

    Args:
        study: a Study, its settings by name, or a TOML file.
        out: directory of the sweep; run ID goes to out/runs/ID.
        executor: local processes, inline (this process), ray, or slurm.
        processes: how many runs at once; by default chosen for the machine, or all room on Ray.
        threads: of each run; by default chosen by the size of a step and the machine.
        address: of a Ray cluster; by default one is started on this machine.
        slurm: settings of Slurm jobs by name, for example {"partition": "cpu", "time": "120"}.
        devices: of each run, all on one machine: as many processes, each with a GPU of its own if
            there are any; by default one.
        records: files of packed records, or other sweeps; their runs that belong to the study are
            not trained again, and their records are written to `out`. Records of other data are
            refused.
        on_plan: called before the first run.
        on_progress: called twice a second.
    """
    study = as_study(study)
    given = Placing(executor, processes, threads, address, dict(slurm or {}), devices)
    placing = place(study, given)
    out = sweep_directory(out)
    given_records = collect_records(records)
    with opened(placing, out) as where:
        plan = plan_sweep(study, out, placing, where, given=given_records)
        prepare_directory(study, out)
        for name in plan.restored:
            restore(out / RUNS / name, plan.records[name])
        if on_plan is not None:
            on_plan(plan)
        return run_sweep(plan, where, on_progress or (lambda _: None))


def prepare_directory(study: Study, out: str | Path) -> Path:
    """Create the directory of a sweep, with the study in it."""
    out = sweep_directory(out)
    for old in (out / STUDIES).glob("*.toml"):  # earlier versions named the same study otherwise
        with suppress(EinlinearError):
            if load_study(old).id == study.id:
                return out
    path = out / STUDIES / f"{study.id}.toml"
    try:
        write_whole(path, study.to_toml().encode())
    except EinlinearError:
        if not path.exists():  # else another sweep has just written it
            raise
    return out


def sweep_directory(out: str | Path) -> Path:
    """Return the absolute path of a directory after checking that a sweep can use it."""
    out = Path(out).absolute()
    if out.exists() and not out.is_dir():
        raise EinlinearError(
            what=f"{out} is a file",
            rule="a sweep needs its own directory, with a folder for every run",
            fix="choose another path",
        )
    if (out / "record.json").exists() or (out / "metrics.jsonl").exists():
        raise EinlinearError(
            what=f"{out} is the directory of a single run",
            rule="a sweep needs its own directory, with a folder for every run",
            fix="choose another directory",
        )
    return out


def plan_sweep(
    study: Study,
    out: Path,
    placing: Placing,
    executor: Executor | None = None,
    *,
    is_timed: bool = True,
    given: Iterable[RunRecord] = (),
) -> SweepPlan:
    """Plan a sweep; runs are timed for a few seconds, and nothing is written.

    Runs whose records are given have finished, unless something else is in their directories. If
    others remain, records of other data than the study has here are refused.

    Without timing, models are only counted, even those that need more memory than there is here.

    A local worker makes the plan, if there is one; otherwise a process is started for it. Torch
    takes seconds to load, and a timed run may use all memory.
    """
    is_here = is_timed and placing.executor in ("local", "inline")
    given = tuple(given)
    known = {r.id: r for r in given if can_restore(out / RUNS / r.id, r)}
    times = {name: step_seconds(record) for name, record in known.items()}
    data = {r.id: str(r.environment["data"]) for r in known.values() if "data" in r.environment}
    request = PlanRequest(
        study.as_dict(), str(out), placing.threads, is_timed, is_here, times, data
    )
    if isinstance(executor, LocalExecutor):
        runs = executor.plan(request)
    elif placing.executor == "inline":
        from einlinear.sweeps.planner import plan_study  # loads torch

        runs = plan_study(request)
    else:
        with closing(LocalExecutor(1, request.threads or placing.most_threads or 1)) as planner:
            runs = planner.plan(request)
    held = all_finished(out, (run.id for run in runs))
    restored = {run.id: known[run.id] for run in runs if run.id in known and run.id not in held}
    records = held | restored
    slots = placing.processes if executor is None else executor.slots
    steps = {run.id: last_step(out / RUNS / run.id) for run in runs if run.id not in records}
    steps_done = {name: step for name, step in steps.items() if step}
    ids = {run.id for run in runs}
    return SweepPlan(
        study,
        out,
        runs,
        records,
        placing,
        slots,
        steps_done,
        restored=frozenset(restored),
        num_given=len(given),
        num_belonging=sum(record.id in ids for record in given),
    )


def run_sweep(plan: SweepPlan, executor: Executor, on_progress: OnSweepProgress) -> SweepResult:
    """Train the runs of a plan that have no record."""
    folder, threads = os.getcwd(), plan.placing.threads
    devices = plan.placing.num_devices
    jobs = [
        (run, Job(run.id, str(plan.out), run.config.as_dict(), threads, folder, devices=devices))
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
    """Remove what is left if a process was killed right after it had written its record."""
    directory = RunDirectory(path)
    if directory.checkpoints.exists() and not is_locked(path):
        directory.remove_checkpoints()
    remove_dead_claims(path)
