"""Ladder: the sizes and lengths at which a search trains candidates, and what each run costs.

A level is a number of multiply-adds per unit of data: that of a dense model of some width. Every
candidate has the width at which it costs most nearly the same. A rung is a number of steps, about
twice that of the rung below. So all candidates are compared at nearly the same points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log, log10
from typing import Any

from einlinear.errors import EinlinearError, quote
from einlinear.runs.config import RunConfig
from einlinear.runs.record import Counts
from einlinear.searches.space import Candidate
from einlinear.show.numbers import FLOPS_PER_MAC, short
from einlinear.structures.values import whole_number
from einlinear.training.model import sizes_of
from einlinear.training.needs import count_shape
from einlinear.training.plan import task_of

LEVELS, RUNGS = 3, 6
_MIDDLE_LEVEL, _MIDDLE_RUNG = 1, 2
_USUAL_STEPS = 400  # of a run in the middle; at larger budgets models grow faster than steps
_OPENING = 0.25  # of the budget, at most, for the first runs of dense layers
_LEAST_STEPS = 50  # of the lowest rung
_SHARE = 1 / 12  # of the budget for the longest run of the largest model
_WIDTHS = tuple(base << k for k in range(12) for base in (2, 3))  # in units, growing by 4/3 or 3/2
_LEAST_SAVED = 100  # steps between checkpoints
_FREE_UNIT = 16  # widths of MLPs are multiples of this
_PER_DECADE, _PER_RUNG = 10, 3  # evaluations: 10**(3/10) is almost 2


@dataclass(frozen=True, slots=True)
class Rungs:
    """What fixes a ladder: widths of dense models, and steps."""

    widths: tuple[int, ...]
    steps: tuple[int, ...]


class Ladder:
    """Runs of candidates by level, rung and seed."""

    def __init__(self, settings: Mapping[str, Any], rungs: Rungs) -> None:
        self.settings, self.rungs = dict(settings), rungs
        self.counter = Counter(settings)
        self._widths: dict[tuple[str, int], int] = {}
        self.places: dict[str, tuple[int, int, int, int, float] | None] = {}  # of runs by id
        self.macs = [self.counter.macs(Candidate(), width) for width in rungs.widths]

    def width(self, candidate: Candidate, level: int) -> int:
        """The width at which a candidate costs most nearly what the level says."""
        if candidate == Candidate():
            return self.rungs.widths[level]
        key = candidate.key, level
        if key not in self._widths:
            width = self.counter.width(candidate, self.macs[level])
            if level:  # no two levels have the same width
                width = max(width, self.width(candidate, level - 1) + self.counter.unit)
            self._widths[key] = width
        return self._widths[key]

    def config(
        self, candidate: Candidate, level: int, rung: int, seed: int, rate: float = 1.0
    ) -> RunConfig:
        """The run of a candidate; `rate` multiplies its learning rate."""
        config = run_config(
            self.settings | candidate.settings,
            self.rungs,
            width=self.width(candidate, level),
            steps=self.rungs.steps[rung],
            seed=seed,
        )
        return config if rate == 1.0 else replace(config, lr=config.lr * rate)

    def step_flops(self, candidate: Candidate, level: int) -> float:
        """FLOPs of a step, forward and backward."""
        macs = self.counter.macs(candidate, self.width(candidate, level))
        return float(FLOPS_PER_MAC * macs * self.counter.units_per_step)

    def level_of(self, candidate: Candidate, width: int) -> int | None:
        """The level of a run, None if it has another width."""
        for level in range(len(self.macs)):
            if self.width(candidate, level) == width:
                return level
        return None


class Counter:
    """Counts models of a task from shapes alone."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        config = RunConfig.from_dict(self.settings, "a search")
        task = task_of(config)
        row = task.batch(0, 1, seed=0)
        self._sizes, self._units = sizes_of(task), row.units
        self.units_per_step = row.units * config.batch_size
        self.unit = config.head_size or config.num_heads or _FREE_UNIT
        self._counts: dict[tuple[str, int], Counts] = {}

    def counts(self, candidate: Candidate, width: int) -> Counts:
        """Parameters and multiply-adds of a candidate at a width."""
        key = candidate.key, width
        if key not in self._counts:
            values = self.settings | candidate.settings | {"width": width}
            config = RunConfig.from_dict(values, "a search")
            self._counts[key] = count_shape(config, self._sizes, self._units)
        return self._counts[key]

    def macs(self, candidate: Candidate, width: int) -> int:
        """Multiply-adds per unit of data."""
        return self.counts(candidate, width).macs

    def width(self, candidate: Candidate, macs: int) -> int:
        """The width at which a candidate has most nearly this many multiply-adds."""
        low, high = 1, 2
        while self.macs(candidate, high * self.unit) < macs and high < 1 << 16:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.macs(candidate, middle * self.unit) < macs:
                low = middle
            else:
                high = middle
        ends = [count * self.unit for count in (low, high)]
        return min(ends, key=lambda width: abs(log(self.macs(candidate, width) / macs)))


def run_config(
    settings: Mapping[str, Any], rungs: Rungs, *, width: int, steps: int, seed: int
) -> RunConfig:
    """A run of a search: one that a longer run can go on from."""
    fixed = {
        "schedule": settings.get("schedule", "constant"),
        "warmup": settings.get("warmup", max(1, rungs.steps[0] // 4)),
        "eval_spacing": "fixed",
        "eval_points": settings.get("eval_points", _PER_DECADE),
        "keep_state": True,
        "save_model": False,
        "checkpoint_every": max(_LEAST_SAVED, steps // 4),
    }
    own = {"width": width, "steps": steps, "seed": seed}
    return RunConfig.from_dict({**settings, **fixed, **own}, "a search")


def choose_rungs(
    settings: Mapping[str, Any], flops: float, flops_per_minute: float | None = None
) -> Rungs:
    """Sizes and steps that suit a budget; raises if it cannot pay for the smallest.

    flops_per_minute: of the search, if its budget was given in minutes.
    """
    counter = Counter(settings)
    top = 2.0 ** (LEVELS - 1 + RUNGS - 1 - _MIDDLE_LEVEL - _MIDDLE_RUNG)
    middle = _SHARE * flops / top

    def steps_of(width: int) -> float:
        step = FLOPS_PER_MAC * counter.macs(Candidate(), width) * counter.units_per_step
        return middle / step

    widths = [count * counter.unit for count in _WIDTHS]
    best = min(
        range(_MIDDLE_LEVEL, len(widths) - LEVELS),
        key=lambda k: abs(log(steps_of(widths[k]) / _USUAL_STEPS)),
    )
    lowest = steps_of(widths[best]) / 2**_MIDDLE_RUNG
    if lowest < _LEAST_STEPS:
        needed = flops * _LEAST_STEPS / lowest
        given, least = f"{short(flops)} FLOPs", f"{short(ceil(needed))} FLOPs"
        if flops_per_minute is not None:
            given = f"{short(flops / flops_per_minute)} minutes, or {given} on this machine,"
            least = f"{ceil(needed / flops_per_minute)} minutes"
        raise EinlinearError(
            what=f"a budget of {given}",
            rule=f"a search trains {LEVELS} sizes for {_LEAST_STEPS} steps and more",
            fix=f"give {least} or more",
        )
    chosen = widths[best - _MIDDLE_LEVEL : best - _MIDDLE_LEVEL + LEVELS]
    first = round(_PER_DECADE * log10(lowest))
    steps = (round(10 ** ((first + _PER_RUNG * k) / _PER_DECADE)) for k in range(RUNGS))
    return Rungs(tuple(chosen), tuple(steps))


def check_rungs(widths: Sequence[int], steps: Sequence[int]) -> Rungs:
    """Sizes and steps that a user gives."""
    for name, values in (("widths", widths), ("steps", steps)):
        for value in values:
            whole_number(value, f"each of {name}", 1)
        if len(values) < 2 or list(values) != sorted(set(values)) or values[0] < 1:
            raise EinlinearError(
                what=f"{name} are {quote(list(values))}",
                rule="a search trains two sizes or more for two numbers of steps or more",
                fix=f"give {name} as growing whole numbers",
            )
    return Rungs(tuple(widths), tuple(steps))


def check_affordable(ladder: Ladder, flops: float) -> None:
    """Refuse a budget that cannot pay for the shortest runs of dense layers."""
    levels = range(len(ladder.rungs.widths))
    steps = ladder.rungs.steps[0]
    least = sum(ladder.step_flops(Candidate(), level) * steps for level in levels) / _OPENING
    if flops < least:
        raise EinlinearError(
            what=f"a budget of {short(flops)} FLOPs",
            rule=f"the shortest runs of dense layers, of {steps} steps at "
            f"{len(levels)} sizes, are a quarter of it at most",
            fix=f"give {short(ceil(least))} FLOPs or more, or smaller widths and fewer steps",
        )
