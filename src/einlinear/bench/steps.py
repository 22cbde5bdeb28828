"""measure_steps: the time of a training step of each model of some runs, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from math import comb
from random import Random
from statistics import median

import torch

from einlinear.errors import EinlinearError
from einlinear.laws.observations import structure_label
from einlinear.layers.machine import machine_facts, memory_bytes, processor_model
from einlinear.runs.config import RunConfig
from einlinear.runs.record import RunRecord
from einlinear.runs.shape import step_key, step_settings
from einlinear.runs.step_times import ModelTime, StepTimes, trained_threads
from einlinear.show.numbers import amount, counted
from einlinear.show.progress import Progress
from einlinear.structures.values import whole_number
from einlinear.training.devices.distributed import joined
from einlinear.training.loop import RunLoop
from einlinear.training.needs import MOST_THREADS, needs, using_threads
from einlinear.training.pace import take_steps
from einlinear.training.plan import plan_run

_LEVEL = 0.9  # of the intervals: five rounds reach it; with fewer, an interval is the whole range
_MOST_REPEATS = 10_000
_WARM, _WARM_SECONDS = 3, 0.02  # untimed steps of a turn; fewer if they are slow
_LEAST, _SECONDS = 2, 0.04  # timed steps of a turn: as many as begin within this time
_MOST = 1000
# Steps are the first of a long warm-up: weights hardly change, and no run diverges.
_STEPS, _WARMUP = 1_000_000, 100_000


def measure_steps(
    runs: Iterable[RunRecord | RunConfig],
    *,
    repeats: int = 9,
    threads: int | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> StepTimes:
    """Measure the time of a training step of each distinct model of some runs.

    In each round all models have a turn, in random order: a few untimed steps, then about 40
    milliseconds of timed ones, at least two. The time of a model is the median over rounds, so that
    other work on the machine affects all models alike, or none. All models are kept in memory.

    Args:
        runs: records or configs; runs whose steps take the same time are measured once.
        repeats: number of rounds; with five or more, times have intervals at the level of 90 %.
        threads: threads of torch; by default as many as the records were trained with, or one if
            they differ or configs are given.
        seed: random seed of the order.
        on_progress: called with the number of turns so far, and of all.
    """
    whole_number(repeats, "repeats", 1, _MOST_REPEATS)
    runs = tuple(runs)
    if threads is None:
        found = trained_threads(run for run in runs if isinstance(run, RunRecord))
        threads = found[0] if len(found) == 1 else 1
    whole_number(threads, "threads", 1, MOST_THREADS)
    models = distinct_models(runs)
    _check_memory(list(models.values()))
    loops: list[RunLoop] = []
    random, show = Random(seed), on_progress or (lambda at: None)
    total = (repeats + 1) * len(models)  # a turn to build it
    first = next(iter(models.values()))
    with using_threads(first, threads), torch.random.fork_rng([]):
        for config in models.values():
            loops.append(_open(config))
            show(Progress(len(loops), total, len(loops) / total))
        times: list[list[float]] = [[] for _ in loops]
        order = list(range(len(loops)))
        for number in range(1, repeats + 1):
            random.shuffle(order)
            for place, k in enumerate(order, 1):
                times[k].append(_turn(loops[k]))
                done = number * len(loops) + place
                show(Progress(done, total, done / total))
        machine = machine_facts() | {"processor_model": processor_model()}
    for loop in loops:
        loop.state.close()
    rows = [
        _row(key, label, loop, found)
        for key, label, loop, found in zip(
            models, _labels(list(models.values())), loops, times, strict=True
        )
    ]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return StepTimes(tuple(rows), now, repeats, machine)


def distinct_models(runs: Iterable[RunRecord | RunConfig]) -> dict[str, RunConfig]:
    """One config for each distinct model, batch and optimizer, by its key; dense ones first."""
    configs = [run.config if isinstance(run, RunRecord) else run for run in runs]
    models: dict[str, RunConfig] = {}
    for config in sorted(configs, key=lambda config: (config.structure != "dense", config.width)):
        models.setdefault(step_key(config), config)
    if not models:
        raise EinlinearError(
            what="there are no runs whose models can be measured",
            rule="times are measured for the models of one run or more",
            fix="give records or configs, or the directory of a sweep that has some",
        )
    return models


def median_interval(values: Sequence[float], level: float = _LEVEL) -> tuple[float, float]:
    """An interval of the median: two order statistics, or the range if there are few values.

    Of n values, the k-th smallest and the k-th largest have the median of the distribution between
    them with probability 1 - 2 P(Binomial(n, 1/2) < k). Uses the largest k with at least `level`.
    Checked by: test_steps.py::test_intervals_of_medians_cover.
    """
    ordered, count = sorted(values), len(values)
    k, outside = 1, 2 * 0.5**count
    while k < count // 2 and outside + 2 * comb(count, k) * 0.5**count <= 1 - level:
        outside += 2 * comb(count, k) * 0.5**count
        k += 1
    return ordered[k - 1], ordered[-k]


def _open(config: RunConfig) -> RunLoop:
    """A run before its first step, after what happens only once, such as compilation."""
    config = replace(config, steps=_STEPS, warmup=_WARMUP, keep_state=False)
    config = replace(config, eval_points=1, eval_size=1, eval_spacing="geometric")
    with joined(config) as place:
        loop = RunLoop(config, place, plan_run(config, is_checked=False), None, ())
    loop.done += len(take_steps(loop, most=1, seconds=0.0))
    return loop


def _turn(loop: RunLoop) -> float:
    """Seconds of a step, in one round."""
    loop.done += len(take_steps(loop, most=_WARM, seconds=_WARM_SECONDS, begin=loop.done))
    times = take_steps(loop, most=_MOST, seconds=_SECONDS, least=_LEAST, begin=loop.done)
    loop.done += len(times)
    return median(times)


def _row(key: str, label: str, loop: RunLoop, times: Sequence[float]) -> ModelTime:
    low, high = median_interval(times)
    return ModelTime(
        key=key,
        label=label,
        width=loop.config.width,
        seconds=median(times),
        low=low,
        high=high,
        units=loop.plan.units_per_step,
        unit=loop.plan.unit,
    )


def _labels(configs: Sequence[RunConfig]) -> list[str]:
    """The layers of each model, and what sets it apart from others of these layers and width."""
    spelling: dict[str, str] = {}
    plain = [(str(structure_label(config, spelling)), config.width) for config in configs]
    settings = [step_settings(config) for config in configs]
    labels = []
    for (label, width), own in zip(plain, settings, strict=True):
        alike = [s for p, s in zip(plain, settings, strict=True) if p == (label, width)]
        vary = [name for name in own if any(s.get(name) != own[name] for s in alike)]
        labels.append(", ".join([label, *(f"{name} {own[name]}" for name in vary)]))
    return labels


def _check_memory(configs: Sequence[RunConfig]) -> None:
    """Refuse models that do not fit into memory together.

    Measured in several groups, they would differ by the speed of the machine at the time of each.
    """
    have = memory_bytes()
    parts = [needs(config) for config in configs]
    held = sum(part.bytes for found in parts for part in found if part.name == "the weights")
    most = max(sum(part.bytes for part in found) for found in parts)
    if have is not None and held + most > have:
        raise EinlinearError(
            what=f"{counted(len(configs), 'model')} would need {amount(held + most)}B together; "
            f"this machine has {amount(have)}B",
            rule="models are measured in turns, so all of them are in memory at once",
            fix="give the runs of fewer or smaller models, or use a larger machine",
        )
