"""How long runs take, before they run: a few steps of some of them, timed, and the rest between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.distributed import joined
from einlinear.studies.loop import Run
from einlinear.studies.plan_run import plan_run
from einlinear.studies.sweeps.plan import PlannedRun

SECONDS = 3.0
"""For all timing together, unless the first measurement alone takes longer."""

_STEPS = 2
_FORWARD = 1 / 3  # of a step: what an evaluation costs per row
_GUESS = 1e-10  # seconds per multiply-add where nothing could be timed


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a step of some runs: those that were timed, or have been run before."""

    kind: tuple[object, ...]
    macs: int
    seconds: float


def estimate(runs: Sequence[PlannedRun], timings: Sequence[Timing]) -> list[float]:
    """About how many seconds each run takes: steps, and evaluations."""
    return [_step_seconds(run, timings) * _steps(run.config) for run in runs]


def time_steps(
    runs: Iterable[PlannedRun],
    known: Sequence[Timing] = (),
    seconds: float = SECONDS,
    *,
    on_model: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Timings of a few runs, besides those known; of every kind the smallest and the largest."""
    timings = list(known)
    held = {(timing.kind, timing.macs) for timing in timings}
    begin = perf_counter()
    for run in _order(runs):
        expected = _step_seconds(run, timings) * (_STEPS + 3) if timings else 0.0
        is_late = bool(held) and perf_counter() - begin + expected > seconds
        if (kind_of(run.config), run.macs) in held or is_late:
            continue
        held.add((kind_of(run.config), run.macs))
        on_model()
        try:
            timings.append(Timing(kind_of(run.config), run.macs, _timed(run.config)))
        except EinlinearError:
            raise
        except Exception:
            continue  # as too little memory: the run will fail, too, and be reported with its log
    return timings


def kind_of(config: RunConfig) -> tuple[object, ...]:
    """Runs of one kind have the same speed, but for their size."""
    experts = (config.experts, config.num_experts, config.num_active) if config.num_experts else ()
    how = (config.device, config.precision, config.compile)
    return (config.task, config.structure, *how, *experts)


def _order(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Runs of different shape: the smallest of every kind, the largest, then all others."""
    shapes = {(kind_of(run.config), run.macs): run for run in runs}
    kinds: dict[tuple[object, ...], list[PlannedRun]] = {}
    for run in sorted(shapes.values(), key=lambda run: run.macs):
        kinds.setdefault(kind_of(run.config), []).append(run)
    ends = [*(found[0] for found in kinds.values()), *(found[-1] for found in kinds.values())]
    return [*ends, *shapes.values()]


def _timed(config: RunConfig) -> float:
    """Seconds of a step, in the mean of a few after the first."""
    with joined(config) as place, torch.random.fork_rng([]):
        run = Run(config, place, plan_run(config, is_checked=False), None, ())
        run.state.step(0)
        run.watch.go()
        for step in range(_STEPS):
            run.state.step(step)
        run.watch.stop()
        return run.watch.seconds / _STEPS


def _step_seconds(run: PlannedRun, timings: Sequence[Timing]) -> float:
    """Between the timings of its kind, in proportion beyond; by the rate of all if it has none."""
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


def _steps(config: RunConfig) -> float:
    """Steps, and evaluations in the time of steps."""
    evaluations = (config.eval_points + 1) * config.eval_size / config.batch_size
    return config.steps + _FORWARD * evaluations
