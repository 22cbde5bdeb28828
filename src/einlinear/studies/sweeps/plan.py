"""What a sweep will be: its runs with all settings, what each costs, how long all take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

from einlinear.studies.config import RunConfig
from einlinear.studies.numbers import FLOPS_PER_MAC


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made from: plain data, so that any process can make it.

    study: as Study.as_dict gives it.
    out: the directory of the sweep, absolute.
    threads: of torch; None is as many as a step can use, of those that torch has there.
    is_timed: whether runs may be timed, if none like them has finished.
    is_here: whether they run on this machine; others may have GPUs where this one has none.
    """

    study: Mapping[str, Any]
    out: str
    threads: int | None
    is_timed: bool = True
    is_here: bool = True


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep.

    macs: multiply-adds of a step, forward.
    eval_rows: of the validation set, which each evaluation goes through.
    label: what tells it from the others.
    seconds: about how long it takes; 0 before anything was timed.
    is_guessed: whether nothing could be timed, so that `seconds` are fit for the order alone.
    """

    config: RunConfig
    macs: int
    eval_rows: int
    label: str
    seconds: float = 0.0
    is_guessed: bool = False

    @property
    def id(self) -> str:
        """Of the run."""
        return self.config.id

    @property
    def flops(self) -> int:
        """Of all steps, forward and backward."""
        return FLOPS_PER_MAC * self.macs * self.config.steps

    def as_dict(self) -> dict[str, Any]:
        """The run as JSON has it."""
        return {
            "config": self.config.as_dict(),
            "macs": self.macs,
            "eval_rows": self.eval_rows,
            "label": self.label,
            "seconds": self.seconds,
            "is_guessed": self.is_guessed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlannedRun:
        """A run as `as_dict` gives it."""
        return cls(**{**values, "config": RunConfig.from_dict(values["config"])})


def makespan(seconds: Sequence[float], slots: int) -> float:
    """How long jobs take on so many slots, the longest first."""
    ends = [0.0] * max(1, slots)
    heapify(ends)
    for length in sorted(seconds, reverse=True):
        heapreplace(ends, ends[0] + length)
    return max(ends)
