"""The command sweep."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import tyro

from einlinear.cli.sweep_display import sweep_display
from einlinear.cli.terminal import columns, console
from einlinear.errors import EinlinearError
from einlinear.errors import quote as quoted
from einlinear.runs.sources import collect_records
from einlinear.show.numbers import counted, duration
from einlinear.show.tables import text_table
from einlinear.sweeps.placing import ExecutorName, Placing, place
from einlinear.sweeps.study import Study, load_study
from einlinear.sweeps.sweep import SweepPlan, SweepResult, plan_sweep, sweep_directory
from einlinear.sweeps.sweep import sweep as train_all

if TYPE_CHECKING:
    from einlinear.sweeps.driver import OnSweepProgress, SweepProgress
    from einlinear.sweeps.plan import PlannedRun

_MOST_LINES = 12  # of a failure


def sweep(
    study: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY.toml")],
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    executor: ExecutorName = "local",
    processes: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    slurm: tuple[str, ...] = (),
    devices: int | None = None,
    records: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")] = (),
    dry_run: bool = False,
) -> None:
    """Train all runs of a study: prints the plan, then the progress of each run.

    A study is a TOML file. [base] holds settings of einlinear train; [grid] holds lists of them, of
    which every combination is trained; a key such as "width, steps" holds settings that vary
    together. Give flops instead of steps to set a budget for each run. Interrupt it at any time and
    rerun it to resume. Several sweeps on one directory share the runs.

    Args:
        study: File of the study.
        out: Directory of the sweep; each run gets its own in DIR/runs.
        executor: Train in local processes, in this process (inline), on a Ray cluster, or on Slurm.
        processes: Number of runs at once; by default, as many as there are cores, or room on Ray.
        threads: Threads of each run; by default, as many as its steps can use and cores allow.
        address: Address of a Ray cluster; by default, one is started on this machine.
        slurm: Settings of Slurm jobs, such as partition=cpu time=120 mem=8G.
        devices: GPUs of each run, all on one machine; without GPUs, its processes; by default, 1.
        records: Files of einlinear pack, or other sweeps: runs with a record there are not trained.
        dry_run: Print the plan and stop; nothing is written.
    """
    placing = Placing(executor, processes, threads, address, slurm_settings(slurm), devices)
    result = run_study(load_study(study), out, placing, dry_run=dry_run, records=records)
    if result is None:
        return
    print(f"next: einlinear report {quote(str(result.plan.out))}")
    if result.failures:
        raise SystemExit(1)


def run_study(
    study: Study,
    out: Path,
    placing: Placing,
    *,
    dry_run: bool,
    is_timed: bool = True,
    records: tuple[Path, ...] = (),
) -> SweepResult | None:
    """Train the runs of a study, with its plan and its progress on the screen.

    Runs whose records are in these files are not trained.

    Returns None after a dry run, which prints the plan only: without times if `is_timed` is False.
    """
    out = sweep_directory(out)
    print(f"study: {study.name}")
    times = ", times a few steps" if is_timed or not dry_run else ""
    print(f"planning {counted(len(study.cells), 'combination')}: counts FLOPs{times}", flush=True)
    if dry_run:
        with console().status("planning"):
            given = collect_records(records)
            plan = plan_sweep(study, out, place(study, placing), is_timed=is_timed, given=given)
        _print_plan(plan)
        return None
    try:
        with ExitStack() as stack:
            screen = _Screen(stack)
            result = train_all(
                study,
                out,
                executor=placing.executor,
                processes=placing.processes,
                threads=placing.threads,
                address=placing.address,
                slurm=placing.slurm,
                devices=placing.devices,
                records=records,
                on_plan=screen.start,
                on_progress=screen.show,
            )
    except KeyboardInterrupt:
        print("note: finished work is kept; run the same command again to resume", file=sys.stderr)
        raise
    _print_result(result)
    return result


class _Screen:
    """A spinner while the sweep is planned, then the plan, then the progress of its runs."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._status = stack.enter_context(console().status("planning"))
        self._display: OnSweepProgress | None = None

    def start(self, plan: SweepPlan) -> None:
        self._status.stop()
        _print_plan(plan)
        labels = {run.id: run.label for run in plan.runs}
        self._display = self._stack.enter_context(sweep_display(console(), labels))

    def show(self, at: SweepProgress) -> None:
        assert self._display is not None, "a sweep is planned before it makes progress"
        self._display(at)


def slurm_settings(pairs: tuple[str, ...]) -> dict[str, str]:
    """Settings by name out of name=value."""
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name or not value:
            raise EinlinearError(
                what=f"--slurm has {quoted(pair)}",
                rule="settings of Slurm are given as name=value",
                fix="try --slurm partition=cpu time=120",
            )
        found[name] = value
    return found


def _print_plan(plan: SweepPlan) -> None:
    from einlinear.laws.observations import structure_label  # numpy takes a while to load

    spelling: dict[str, str] = {}
    groups: dict[tuple[str, int, int], list[PlannedRun]] = {}
    for run in plan.runs:
        config = run.config
        key = (str(structure_label(config, spelling)), config.width, config.depth)
        groups.setdefault(key, []).append(run)
    rows = []
    for (structure, width, depth), runs in groups.items():
        times = [run.seconds for run in runs]
        row = (
            structure,
            str(width),
            str(depth),
            str(len(runs)),
            str(sum(run.id in plan.finished for run in runs)),
            f"{sum(run.flops for run in runs):.3g}",
            "unknown" if runs[0].is_guessed else _from_to(min(times), max(times)),
        )
        rows.append(row)
    head = ("structure", "width", "depth", "runs", "done", "FLOPs", "time of one")
    print(text_table(head, rows, width=columns()) + "\n")
    if plan.num_given:
        verb = "belongs" if plan.num_belonging == 1 else "belong"
        records = counted(plan.num_given, "given record")
        print(f"{plan.num_belonging} of {records} {verb} to this study")
    print(_plan_line(plan))
    print(f"writes to {plan.out}")


def _from_to(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys(map(duration, (low, high))))


def _plan_line(plan: SweepPlan) -> str:
    left = len(plan.runs) - len(plan.finished)
    line = f"{counted(len(plan.runs), 'run')}, {plan.flops:.3g} training FLOPs in all"
    if plan.repeats:
        line += f"; combinations that repeat another: {plan.repeats}"
    if plan.finished:
        line += f"; {len(plan.finished)} are done, {left} to go"
    if plan.restored:
        line += f"; {len(plan.restored)} from --records"
    if plan.steps_done:
        line += f"; {counted(len(plan.steps_done), 'run')} will resume from a checkpoint"
    if not left:
        return line
    is_guessed = any(run.is_guessed for run in plan.runs)
    time = "no run could be timed" if is_guessed else f"about {duration(plan.seconds_left)}"
    return f"{line}\n{_where(plan)}; {time}"


def _where(plan: SweepPlan) -> str:
    if plan.placing.executor == "inline":
        return "one after the other in this process"
    nouns = {"local": "processes", "ray": "tasks of Ray", "slurm": "jobs of Slurm"}
    threads, most = plan.placing.threads, plan.placing.most_threads
    each = "1 thread" if (threads or most) == 1 else f"{threads or f'up to {most}'} threads"
    by = f"by {nouns[plan.placing.executor]} of {each} each"
    if plan.placing.num_devices > 1:
        by = f"on {plan.placing.num_devices} devices each, {by.removesuffix('each')}per device"
    if plan.slots is None:
        return f"as many at once as there is room for, {by}; one after the other"
    return f"{plan.slots} at once {by}"


def _print_result(result: SweepResult) -> None:
    diverged = [record for record in result.records if record.status == "diverged"]
    for failure in result.failures:
        lines = failure.text.strip().splitlines()
        print(f"\nfailed: {failure.id} {failure.label}")
        print("\n".join(f"  {line}" for line in lines[-_MOST_LINES:]))
        print(f"  log: {failure.directory / 'log.txt'}")
    print(
        f"{counted(len(result.records), 'run')} finished, {len(diverged)} of them diverged; "
        f"{len(result.failures)} failed"
    )
    if result.failures:
        print("run the same command again to retry the failed runs")
    print(f"wrote {result.plan.out}")
