"""search: from a task and a budget to a ranked choice of structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.runs.config import RunConfig
from einlinear.runs.config_file import load_config
from einlinear.runs.directory import CONFIG
from einlinear.searches.answer import Answer, LeaderboardRow, write_answer
from einlinear.searches.ladder import (
    Ladder,
    Rungs,
    check_affordable,
    check_rungs,
    choose_rungs,
    run_config,
)
from einlinear.searches.next_run import NextRun
from einlinear.searches.ranking import make_answer
from einlinear.searches.space import SPEC, Candidate, SearchSpace
from einlinear.searches.spec import (
    Objective,
    SearchSpec,
    check_settings,
    check_target,
    has_runs,
    keep_spec,
    read_spec,
)
from einlinear.searches.state import SearchState
from einlinear.searches.supply import RunFolder, Supplier
from einlinear.show.numbers import FLOPS_PER_MAC
from einlinear.sweeps.driver import Driver, Failure, OnSweepProgress
from einlinear.sweeps.executors.executor import Executor
from einlinear.sweeps.job import STUDIES
from einlinear.sweeps.placing import ExecutorName, Placing, opened, place
from einlinear.sweeps.study import Study
from einlinear.sweeps.sweep import plan_sweep, sweep_directory

_MOST_RUNS = 10_000
_USED = 0.85  # of the time is spent in steps, the rest in starting runs and deciding
_BATCHES = (1, 2, 4, 8, 16)  # parts of the usual batch, from which the largest that fits is taken
_TIMED = {"steps": 50}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found: its leaderboard, the best first, the answer, and its directory."""

    leaderboard: tuple[LeaderboardRow, ...]
    answer: Answer
    path: Path


def search(
    task: str | None = None,
    *,
    out: str | Path,
    minutes: float | None = None,
    flops: float | None = None,
    target_flops: float | None = None,
    space: SearchSpace | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    widths: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    objective: Objective = "flops",
    seeds: int = 3,
    seed: int = 0,
    executor: ExecutorName = "local",
    processes: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    slurm: Mapping[str, str] | None = None,
    on_start: Callable[[SearchSpec], None] | None = None,
    on_choice: Callable[[NextRun, SearchState], None] | None = None,
    on_progress: OnSweepProgress | None = None,
) -> SearchResult:
    """Find the structure with the lowest loss at a target compute, within a budget.

    Dense layers are always compared. Interrupt it at any time and make the same call again to go
    on; several calls on one directory, even from different machines, share one search.

    Args:
        task: text, pixels, regression or cifar.
        out: directory of the search; run ID goes to out/runs/ID.
        minutes: how long the search may take.
        flops: or how many FLOPs its runs may have in all; decisions then do not depend on time.
        target_flops: the compute at which losses are compared; by default ten times the largest
            run.
        space: which structures to try, as a SearchSpace or its settings by name.
        settings: of all runs, as fields of RunConfig.
        widths: of dense models, one for every size to train; by default chosen by the budget.
        steps: numbers of steps to train for; by default chosen by the budget.
        objective: compare losses at equal FLOPs, or at equal seconds on this machine.
        seeds: how many runs may differ only in their seed.
        seed: of the decisions of the search.
        executor: local processes, inline (this process), ray, or slurm.
        processes: how many runs at once.
        threads: of each run; 1 by default.
        address: of a Ray cluster.
        slurm: settings of Slurm jobs by name.
        on_start: called with the spec before the first run.
        on_choice: called with every run that is chosen.
        on_progress: called twice a second.
    """
    given = check_settings({**(settings or {}), **({} if task is None else {"task": task})})
    _check_budget(minutes, flops)
    chosen = space if isinstance(space, SearchSpace) else SearchSpace.from_dict(space or {})
    out = sweep_directory(out)
    given_placing = Placing(executor, processes, threads or 1, address, dict(slurm or {}))
    placing = place(Study("search", given), given_placing, _MOST_RUNS)
    with opened(placing, out) as where:
        spec = _make_spec(
            given,
            chosen,
            minutes,
            flops,
            target_flops,
            (widths, steps),
            objective,
            seeds,
            seed,
            out,
            placing,
            where,
        )
        spec = keep_spec(spec, out)
        (out / STUDIES).mkdir(parents=True, exist_ok=True)  # workers look for it
        if on_start is not None:
            on_start(spec)
        ladder = Ladder(spec.settings, spec.rungs)
        seconds = None if minutes is None else 60.0 * minutes
        supplier = Supplier(
            spec, ladder, out, placing.threads, seconds, lambda: where.slots, on_choice
        )
        driver = Driver((), where, on_progress or (lambda _: None), supply=supplier)
        _, failures = driver.to_the_end()
    return _result(out, failures)


def search_result(out: str | Path) -> SearchResult:
    """The result of the runs that a search has finished so far; writes answer.json."""
    return _result(Path(out).absolute(), {})


def _result(out: Path, failures: Mapping[str, Failure]) -> SearchResult:
    spec = read_spec(out)
    state = SearchState(spec, Ladder(spec.settings, spec.rungs), RunFolder(out).read().records)
    state.exclude(load_config(failure.directory / CONFIG) for failure in failures.values())
    if 0 not in state.trained:
        reasons = [failure.reason for failure in failures.values()]
        why = "a run of dense layers diverged" if 0 in state.diverged else ""
        raise EinlinearError(
            what=f"no run of dense layers counts in {out}"
            + "".join(f"; {reason}" for reason in [why, *reasons[:1]] if reason),
            rule="a search compares candidates with dense layers",
            fix="give the command of the search again; with a lower lr if runs diverge",
        )
    answer = make_answer(state)
    write_answer(answer, out)
    return SearchResult(answer.rows, answer, out)


def _check_budget(minutes: float | None, flops: float | None) -> None:
    if (minutes is None) == (flops is None):
        given = minutes is not None
        both = "both minutes and flops are given" if given else "there is no budget"
        raise EinlinearError(
            what=both,
            rule="a search has one budget, in minutes or in FLOPs",
            fix="give minutes=10, or flops=1e14",
        )
    value = flops if minutes is None else minutes
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e40:
        raise EinlinearError(
            what=f"the budget is {value!r}",
            rule="a budget is a number above 0",
            fix="give minutes=10, or flops=1e14",
        )


def _make_spec(
    settings: dict[str, Any],
    space: SearchSpace,
    minutes: float | None,
    flops: float | None,
    target: float | None,
    given: tuple[Sequence[int] | None, Sequence[int] | None],
    objective: Objective,
    seeds: int,
    seed: int,
    out: Path,
    placing: Placing,
    where: Executor,
) -> SearchSpec:
    """The spec of a search: its budget in FLOPs, its ladder, its target.

    A search that has runs keeps its ladder and its target.
    """
    old = read_spec(out) if (out / SPEC).exists() and has_runs(out) else None
    speed = 1e10 if old is None else old.speed
    if old is None and minutes is not None:
        speed = _measured_speed(settings, out, placing, where)
    per_minute = None
    if flops is None:
        assert minutes is not None, "one of the two is given"
        per_minute = _USED * speed * 60.0 * max(1, where.slots)
        flops = per_minute * minutes
    settings = _with_batch(settings, flops, old)
    widths, steps = given
    if old is not None:
        rungs = check_rungs(widths or old.rungs.widths, steps or old.rungs.steps)
    elif widths and steps:
        rungs = check_rungs(widths, steps)
    else:
        chosen = choose_rungs(settings, flops, per_minute)
        rungs = check_rungs(widths or chosen.widths, steps or chosen.steps)
    ladder = Ladder(settings, rungs)
    if old is None:
        check_affordable(ladder, flops)
        _check_candidates(settings, space, rungs)
    largest = ladder.step_flops(Candidate(), len(rungs.widths) - 1) * rungs.steps[-1]
    if target is None and old is not None:
        target = old.target
    return SearchSpec(
        settings,
        space,
        rungs,
        float(flops),
        check_target(target, largest),
        speed,
        objective,
        seeds,
        seed,
    )


def _check_candidates(settings: Mapping[str, Any], space: SearchSpace, rungs: Rungs) -> None:
    """Refuse candidates that the task cannot train, before anything is written."""
    listed = space.candidates[: space.num_listed]
    for candidate in (*listed, space.candidates[-1]):
        own = {**settings, **candidate.settings}
        run_config(own, rungs, width=rungs.widths[-1], steps=rungs.steps[0], seed=0)


def _with_batch(settings: dict[str, Any], flops: float, old: SearchSpec | None) -> dict[str, Any]:
    """The settings with a batch that suits the budget, unless they have one.

    Small budgets pay for too few steps of large batches.
    """
    if "batch_size" in settings:
        return settings
    if old is not None:
        return settings | {"batch_size": old.settings["batch_size"]}
    usual = RunConfig.from_dict(settings, "a search").batch_size
    for share in _BATCHES:
        smaller = settings | {"batch_size": max(1, usual // share)}
        with suppress(EinlinearError):
            choose_rungs(smaller, flops)
            return smaller
    return settings | {"batch_size": max(1, usual // _BATCHES[-1])}


def _measured_speed(
    settings: dict[str, Any], out: Path, placing: Placing, where: Executor
) -> float:
    """FLOPs per second of a small dense model and of btt, on the mean."""
    study = Study("speed", {**settings, **_TIMED}, ({"structure": ["dense", "btt"]},))
    runs = plan_sweep(study, out, placing, where).runs
    times = [(FLOPS_PER_MAC * run.macs * run.config.steps, run.seconds) for run in runs]
    return sum(f for f, _ in times) / max(1e-6, sum(s for _, s in times))
