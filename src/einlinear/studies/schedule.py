"""When a run does what: the learning rate at each step, and the steps at which it is evaluated."""

from __future__ import annotations

from math import cos, pi

from einlinear.studies.config import RunConfig


def rate_multiplier(config: RunConfig, step: int) -> float:
    """What the rate of a step is multiplied by; the first step is 0.

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
        begin = config.steps - round(config.decay_share * config.steps)
        return warm * (1 - (1 - final) * _share(step, begin, config.steps))
    return warm


def _share(step: int, begin: int, end: int) -> float:
    """How far a step is between two others, from 0 to 1."""
    return min(1.0, max(0.0, (step - begin) / max(1, end - begin)))


def eval_steps(steps: int, num_points: int) -> tuple[int, ...]:
    """The numbers of finished steps after which a run is evaluated: 0, and then geometrically."""
    ratios = (i / max(1, num_points - 1) for i in range(num_points))
    spaced = {round(steps**ratio) for ratio in ratios} if num_points > 1 else set()
    return tuple(sorted({0, steps} | spaced))


def log_interval(steps: int) -> int:
    """The number of steps whose mean loss is one line of the log: a hundredth, at most 100."""
    return max(1, min(100, steps // 100))


def average_weight(ema: float, step: int) -> float:
    """How much of the weights after a step goes into their average.

        1 / (ema * step), up to 1

    So the average is over about the last share `ema` of the steps so far, at every step.
    """
    return min(1.0, 1.0 / (ema * step))
