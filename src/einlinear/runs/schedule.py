"""The schedule of a run: the learning rate at each step, and the steps to evaluate at."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import cos, pi

from einlinear.runs.config import RunConfig
from einlinear.runs.settings import Spacing


def rate_multiplier(config: RunConfig, step: int) -> float:
    """The factor of the learning rate at a step; the first step is 0.

        warm-up: (step + 1) / warmup, up to 1, times

        constant: 1
        cosine:   final + (1 - final) (1 + cos(pi t)) / 2       t from 0 to 1 after the warm-up
        wsd:      1, then linear from 1 to final in the last decay_share of all steps

    Checked by: test_schedule.py::test_rates_by_hand.
    """
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    final = config.final_rate
    if config.schedule == "cosine":
        progress = _share(step, min(config.warmup, config.steps), config.steps)
        return warm * (final + (1 - final) * (1 + cos(pi * progress)) / 2)
    if config.schedule == "wsd":
        begin = _decay_begin(config)
        return warm * (1 - (1 - final) * _share(step, begin, config.steps))
    return warm


def freeze_step(config: RunConfig) -> int | None:
    """The number of steps after which a longer run with the same settings would still be the same.

    All steps of a constant schedule, those before the decay of wsd. None if the run differs from a
    longer one from the start: by a cosine schedule, or because it is not evaluated at fixed steps.
    """
    if config.schedule == "cosine" or config.eval_spacing != "fixed":
        return None
    return _decay_begin(config) if config.schedule == "wsd" else config.steps


def _decay_begin(config: RunConfig) -> int:
    return config.steps - round(config.decay_share * config.steps)


def _share(step: int, begin: int, end: int) -> float:
    """The position of a step between two others, from 0 to 1."""
    return min(1.0, max(0.0, (step - begin) / max(1, end - begin)))


def eval_steps(steps: int, num_points: int, spacing: Spacing = "geometric") -> tuple[int, ...]:
    """The steps after which a run is evaluated: 0, then growing geometrically or evenly.

    Fixed spacing has `num_points` steps in each factor of ten: 10**(k / num_points), rounded, for
    k = 0, 1, ...; only the last step of a run can be another one.
    """
    if spacing == "fixed":
        return tuple(sorted({0, steps} | set(_powers(num_points, steps))))
    if spacing == "even":
        return tuple(sorted({i * steps // num_points for i in range(num_points + 1)}))
    ratios = (i / max(1, num_points - 1) for i in range(num_points))
    spaced = {round(steps**ratio) for ratio in ratios} if num_points > 1 else set()
    return tuple(sorted({0, steps} | spaced))


def _powers(num_points: int, most: int) -> Iterator[int]:
    """The powers of ten with exponents k / num_points, rounded, up to a number."""
    for k in count():
        power = round(10 ** (k / num_points))
        if power > most:
            return
        yield power


def log_interval(steps: int) -> int:
    """The number of steps in one line of metrics: a hundredth of all, at most 100."""
    return max(1, min(100, steps // 100))


def fixed_interval(step: int) -> int:
    """The same with fixed spacing, by the steps so far: 1, from 128 steps on 2, from 256 on 4, ...

    From 64 to 128 lines in each doubling of the steps, until a line has 64 steps.
    """
    return 1 << min(6, max(0, step.bit_length() - 7))


def average_weight(ema: float, step: int) -> float:
    """The weight of the latest step in the average of the weights.

        1 / (ema * step), up to 1

    So the average always covers about the last share `ema` of the steps so far.
    """
    return min(1.0, 1.0 / (ema * step))
