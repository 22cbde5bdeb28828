"""plan_study: the runs of a study, each once, with the steps that budgets buy and their times.

A few steps of some runs are timed; the times of all others are interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter

import torch

from einlinear.errors import EinlinearError, quote
from einlinear.runs.config import RunConfig
from einlinear.runs.schedule import eval_steps
from einlinear.runs.shape import step_settings
from einlinear.show.numbers import FLOPS_PER_MAC, counted
from einlinear.sweeps.job import all_finished, step_seconds
from einlinear.sweeps.plan import PlannedRun, PlanRequest
from einlinear.sweeps.study import BUDGET, Study, StudyCell
from einlinear.training.devices.distributed import joined
from einlinear.training.loop import RunLoop
from einlinear.training.needs import check_needs, fits, using_threads
from einlinear.training.pace import take_steps
from einlinear.training.plan import cost_run, plan_run, task_of

TIMING_SECONDS = 6.0
"""For all timing together, unless the first measurement alone takes longer."""

# What else decides the memory of a run, and the rows of its validation set.
_BESIDE_STEPS = ("eval_points", "eval_size", "validation", "rule", "ema")

# What decides the data of a run, except for that of regression.
_OF_DATA = ("task", "data", "validation", "vocabulary", "rule", "pool")

# Sizes of a step: within a kind of runs, time is interpolated by its multiply-adds.
_SIZES = {"width", "depth", "head_size", "context", "batch_size", "accumulation"}
_SIZES |= {"teacher_width", "teacher_depth", "pool"}

# Settings in the order in which a label has them; all others follow.
_FIRST = ("task", "structure", "experts", "num_experts", "num_active", "width", "depth")
_BARE = ("task", "structure")  # clear without their names
_NOT_SHOWN = ("preset", "warmup", "checkpoint_every")  # they follow from others, or change nothing

# Of a timed run: warm-up steps, then timed steps; fewer of either if they are slow.
_COLD, _STEPS = 3, 9
_COLD_SECONDS, _STEP_SECONDS = 0.2, 0.3
_FORWARD = 1 / 3  # cost of evaluating a row, relative to training on it
_GUESS = 1e-10  # seconds per multiply-add if nothing could be timed

Kind = tuple[object, ...]
"""What runs of the same speed have in common, apart from their size."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per step of the runs of one kind and size, and seconds before the first step."""

    kind: Kind
    macs: int
    seconds: float
    start: float | None = None


def plan_study(
    request: PlanRequest, on_model: Callable[[], None] = lambda: None
) -> tuple[PlannedRun, ...]:
    """Return all runs of a study with their times, after timing some for a few seconds in all.

    `on_model` is called for each model that is counted or timed.
    """
    runs = expand_study(Study.from_dict(request.study), on_model)
    records = all_finished(Path(request.out), (run.id for run in runs))
    steps = dict(request.finished) | {
        name: step_seconds(record) for name, record in records.items()
    }
    timings = _timings(runs, steps)
    new = [run for run in runs if run.id not in steps]
    if new:
        given = {name: found for name, found in request.data.items() if name not in records}
        _check_data([run.config for run in runs], given)
    if request.is_here:
        _check_needs(new)
        untimed = new
    else:  # other machines may have GPUs and more memory
        untimed = [run for run in new if _can_be_timed(run.config)]
    if untimed and request.is_timed:
        timings = time_steps(untimed, timings, threads=request.threads, on_model=on_model)
    return tuple(
        replace(run, seconds=seconds, is_guessed=not timings)
        for run, seconds in zip(runs, estimate(runs, timings), strict=True)
    )


def _check_data(configs: Sequence[RunConfig], given: Mapping[str, str]) -> None:
    """Refuse given records of other data than the study has here: ids hold only its path.

    given: the fingerprints of the data of runs, by id.
    """
    sets: dict[tuple[object, ...], list[RunConfig]] = {}
    for config in configs:
        if config.id in given and config.task != "regression":  # its settings are all of its data
            key = tuple(getattr(config, name) for name in _OF_DATA)
            sets.setdefault(key, []).append(config)
    for found in sets.values():
        try:
            here = task_of(found[0]).fingerprint
        except EinlinearError:  # the data is not on this machine
            continue
        others = [given[config.id] for config in found if given[config.id] != here]
        if others:
            data = found[0].data or f"the {found[0].task} data of the package"
            raise EinlinearError(
                what=f"given records of {counted(len(others), 'run')} are of other data: "
                f"{quote(data)} has the fingerprint {quote(here)} here, and {quote(others[0])} "
                "in the records",
                rule="all runs of a sweep are trained on the same data; the id of a run holds only "
                "its path",
                fix="put the data of the records there, or leave these records out of --records",
            )


def _check_needs(runs: Sequence[PlannedRun]) -> None:
    """Refuse runs that need more memory than this machine has, before any is trained."""
    for config in {_shape(run.config): run.config for run in runs}.values():
        # The memory of a GPU is not known here.
        if config.device == "cpu" or not torch.cuda.is_available():
            check_needs(config)


def _can_be_timed(config: RunConfig) -> bool:
    return (torch.cuda.is_available() or config.device != "cuda") and fits(config)


def _shape(config: RunConfig) -> tuple[object, ...]:
    """The same for runs with the same model, batches and data, and so the same cost."""
    beside = (getattr(config, name) for name in _BESIDE_STEPS)
    return (*step_settings(config).values(), *beside)


def expand_study(
    study: Study, on_model: Callable[[], None] = lambda: None
) -> tuple[PlannedRun, ...]:
    """Return all runs of a study, each once, with the steps that budgets buy, without timing."""
    costs: dict[tuple[object, ...], tuple[int, int]] = {}
    found: dict[str, tuple[RunConfig, int, int]] = {}
    for cell in study.cells:
        shape = _shape(cell.config)
        if shape not in costs:
            cost = cost_run(cell.config)
            costs[shape] = cost.counts.macs * cost.units_per_step, cost.eval_rows
            on_model()
        macs, eval_rows = costs[shape]
        config = _with_steps(cell, macs)
        found.setdefault(config.id, (config, macs, eval_rows))
    labels = _labels([config for config, _, _ in found.values()])
    return tuple(
        PlannedRun(*values, label) for values, label in zip(found.values(), labels, strict=True)
    )


def _with_steps(cell: StudyCell, macs: int) -> RunConfig:
    if cell.flops is None:
        return cell.config
    step = FLOPS_PER_MAC * macs
    if cell.flops < step:
        raise EinlinearError(
            what=f"{BUDGET} are {cell.flops:.3g}, a step of {dict(cell.settings)} takes {step:.3g}",
            rule="a budget is enough for one step",
            fix=f"give {BUDGET} of {step:.3g} or more, or leave that model out",
        )
    return cell.with_steps(round(cell.flops / step))


def _labels(configs: Sequence[RunConfig]) -> list[str]:
    """The settings in which the runs differ, for each run."""
    every = [field.name for field in fields(RunConfig)]
    names = [*_FIRST, *(name for name in every if name not in _FIRST)]
    rows = [{name: getattr(config, name) for name in names} for config in configs]
    vary = [n for n in names if n not in _NOT_SHOWN and any(r[n] != rows[0][n] for r in rows)]
    shown = vary or ["structure", "width"]
    return [
        ", ".join(str(row[n]) if n in _BARE else f"{n} {row[n]}" for n in shown) for row in rows
    ]


def _timings(runs: Sequence[PlannedRun], steps: Mapping[str, float]) -> list[Timing]:
    """Mean seconds per step of the finished runs of each kind and size; 0 means unknown."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for run in runs:
        if steps.get(run.id):
            found.setdefault((kind_of(run.config), run.macs), []).append(steps[run.id])
    return [Timing(kind, macs, fmean(seconds)) for (kind, macs), seconds in found.items()]


def estimate(runs: Sequence[PlannedRun], timings: Sequence[Timing]) -> list[float]:
    """Estimate the seconds of each run, evaluations and the time to start included."""
    return [
        _start_seconds(run, timings) + _step_seconds(run, timings) * _steps(run) for run in runs
    ]


def time_steps(
    runs: Iterable[PlannedRun],
    known: Sequence[Timing] = (),
    seconds: float = TIMING_SECONDS,
    *,
    threads: int | None = None,
    on_model: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Time runs until the seconds are used up; return the known timings and the new ones.

    Times the smallest run of every kind first, then the largest, then all others; `on_model` is
    called before each. If threads are None, they are chosen by the size of a run.
    """
    timings = list(known)
    held = {(timing.kind, timing.macs) for timing in timings}
    begin = perf_counter()
    for run in _order(runs):
        expected = _timing_seconds(_step_seconds(run, timings)) if timings else 0.0
        is_late = bool(held) and perf_counter() - begin + expected > seconds
        if (kind_of(run.config), run.macs) in held or is_late:
            continue
        held.add((kind_of(run.config), run.macs))
        on_model()
        try:
            timings.append(Timing(kind_of(run.config), run.macs, *_timed(run.config, threads)))
        except EinlinearError:
            raise
        except Exception:
            continue  # out of memory, say: the run will fail too, and be reported with its log
    return timings


def kind_of(config: RunConfig) -> Kind:
    """The kind of a run: runs of one kind differ in speed only by their size."""
    settings = step_settings(config)
    others = (value for name, value in settings.items() if name not in _SIZES)
    return (config.task, settings["structure"], *others)


def _order(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """One run of each kind and size: the smallest of every kind, the largest, then all others."""
    shapes = {(kind_of(run.config), run.macs): run for run in runs}
    kinds: dict[Kind, list[PlannedRun]] = {}
    for run in sorted(shapes.values(), key=lambda run: run.macs):
        kinds.setdefault(kind_of(run.config), []).append(run)
    ends = [*(found[0] for found in kinds.values()), *(found[-1] for found in kinds.values())]
    return [*ends, *shapes.values()]


def _timed(config: RunConfig, threads: int | None) -> tuple[float, float]:
    """Seconds of a step, and seconds before the first one.

    The median over warm steps, so that a disturbed step does not count.
    """
    begin = perf_counter()
    with joined(config) as place, using_threads(config, threads), torch.random.fork_rng([]):
        run = RunLoop(config, place, plan_run(config, is_checked=False), None, ())
        start = perf_counter() - begin
        take_steps(run, most=_COLD, seconds=_COLD_SECONDS)
        return median(take_steps(run, most=_STEPS, seconds=_STEP_SECONDS)), start


def _timing_seconds(step: float) -> float:
    """Estimate how long it takes to time a run, from the time of its step."""
    cold = max(step, min(_COLD * step, _COLD_SECONDS))
    warm = max(step, min(_STEPS * step, _STEP_SECONDS))
    return cold + warm + 2 * step  # two to build its model and data


def _step_seconds(run: PlannedRun, timings: Sequence[Timing]) -> float:
    """Seconds per step: interpolated within its kind, else by the mean rate of all kinds."""
    if not timings:
        return _GUESS * run.macs
    own = sorted((t.macs, t.seconds) for t in timings if t.kind == kind_of(run.config))
    if not own:
        rate = sum(t.seconds for t in timings) / sum(t.macs for t in timings)
        return rate * run.macs
    if run.macs >= own[-1][0]:
        return own[-1][1] * run.macs / own[-1][0]
    for (low, low_seconds), (high, high_seconds) in pairwise(own):
        if low <= run.macs < high:
            share = (run.macs - low) / (high - low)
            return low_seconds + share * (high_seconds - low_seconds)
    return own[0][1]


def _start_seconds(run: PlannedRun, timings: Sequence[Timing]) -> float:
    """Seconds before the first step: the median of its task, which decides the data to load."""
    starts = [t.start for t in timings if t.start is not None and t.kind[0] == run.config.task]
    return median(starts) if starts else 0.0


def _steps(run: PlannedRun) -> float:
    """Steps of a run plus its evaluations, counted in steps."""
    config = run.config
    points = 1 + min(config.eval_points, config.steps)
    if config.eval_spacing == "fixed":
        points = len(eval_steps(config.steps, config.eval_points, "fixed"))
    return config.steps + _FORWARD * points * run.eval_rows / config.batch_size
