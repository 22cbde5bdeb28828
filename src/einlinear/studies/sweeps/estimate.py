"""How long runs take, before they run: a few steps of some of them, timed, and the rest between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.distributed import joined
from einlinear.studies.loop import Run
from einlinear.studies.plan_run import plan_run
from einlinear.studies.sweeps.plan import PlannedRun
from einlinear.studies.threads import using_threads

SECONDS = 6.0
"""For all timing together, unless the first measurement alone takes longer."""

# Of a run: steps that are not timed, as they load and choose what later ones find, and steps that
# are; fewer of either where they take long.
_COLD, _STEPS = 3, 9
_COLD_SECONDS, _STEP_SECONDS = 0.2, 0.3
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
    return [_step_seconds(run, timings) * _steps(run) for run in runs]


def time_steps(
    runs: Iterable[PlannedRun],
    known: Sequence[Timing] = (),
    seconds: float = SECONDS,
    *,
    threads: int | None = None,
    on_model: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Timings of some runs, besides those known: of every kind the smallest, the largest, the rest.

    Args:
        runs: those to time, as far as there is time.
        known: timings that need not be made.
        seconds: for all together.
        threads: of torch; by the size of a run if None.
        on_model: called before each timing.
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
            timings.append(Timing(kind_of(run.config), run.macs, _timed(run.config, threads)))
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


def _timed(config: RunConfig, threads: int | None) -> float:
    """Seconds of a warm step: the median of some, so that one that was disturbed does not count."""
    with joined(config) as place, using_threads(config, threads), torch.random.fork_rng([]):
        run = Run(config, place, plan_run(config, is_checked=False), None, ())
        _take_steps(run, _COLD, _COLD_SECONDS)
        return median(_take_steps(run, _STEPS, _STEP_SECONDS))


def _take_steps(run: Run, most: int, seconds: float) -> list[float]:
    """The time of each of some steps, as many as fit into so many seconds; one at least."""
    times: list[float] = []
    while len(times) < most and sum(times) < seconds:
        before = run.watch.seconds
        run.watch.go()
        run.state.step(len(times))
        run.watch.stop()
        times.append(run.watch.seconds - before)
    return times


def _timing_seconds(step: float) -> float:
    """About how long it takes to time a run, by the time of its step."""
    timed = max(step, min(_COLD * step, _COLD_SECONDS)) + max(
        step, min(_STEPS * step, _STEP_SECONDS)
    )
    return timed + 2 * step  # to make its model and data


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


def _steps(run: PlannedRun) -> float:
    """Steps, and evaluations in the time of steps: over the rows that the data has."""
    config = run.config
    points = 1 + min(config.eval_points, config.steps)
    return config.steps + _FORWARD * points * run.eval_rows / config.batch_size
