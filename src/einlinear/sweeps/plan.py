"""The plan of a sweep as plain data: its runs, what each costs, and how long all of them take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heapify, heapreplace
from typing import Any

from einlinear.runs.config import RunConfig
from einlinear.show.numbers import FLOPS_PER_MAC


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of a plan: plain data, so that any process can make the plan.

    study: as Study.as_dict returns it.
    out: the directory of the sweep, absolute.
    threads: of torch; None lets each run use as many as its steps can use.
    is_timed: whether runs may be timed if no similar run has finished.
    is_here: whether the runs are trained on this machine; others may have GPUs.
    finished: seconds per step of runs whose records are not in the directory yet, by id.
    data: fingerprints of the data that these runs were trained on, by id.
    """

    study: Mapping[str, Any]
    out: str
    threads: int | None
    is_timed: bool = True
    is_here: bool = True
    finished: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep.

    macs: multiply-adds of a forward step.
    eval_rows: rows of the validation set that each evaluation uses.
    label: the settings in which it differs from the other runs.
    seconds: estimated duration; 0 before anything was timed.
    is_guessed: nothing could be timed, so `seconds` only gives an order.
    """

    config: RunConfig
    macs: int
    eval_rows: int
    label: str
    seconds: float = 0.0
    is_guessed: bool = False

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.config.id

    @property
    def flops(self) -> int:
        """FLOPs of all steps, forward and backward."""
        return FLOPS_PER_MAC * self.macs * self.config.steps

    def seconds_from(self, step: int) -> float:
        """Estimated time of the steps after this one."""
        return self.seconds * (1 - min(step, self.config.steps) / self.config.steps)

    def as_dict(self) -> dict[str, Any]:
        """The run as a JSON object."""
        return asdict(self) | {"config": self.config.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlannedRun:
        """Read a run from what `as_dict` returns."""
        return cls(**{**values, "config": RunConfig.from_dict(values["config"])})


def makespan(seconds: Sequence[float], slots: int) -> float:
    """How long jobs take on this many slots if the longest start first."""
    ends = [0.0] * max(1, slots)
    heapify(ends)
    for length in sorted(seconds, reverse=True):
        heapreplace(ends, ends[0] + length)
    return max(ends)
