"""What a sweep will be: its runs with all settings, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.plan_run import RunCost, cost_run
from einlinear.studies.sweeps.study import BUDGET, Cell, Study

FLOPS_PER_MAC = 6
"""A multiply-add is two FLOPs; the backward pass has twice those of the forward pass."""

# A run of other values of these has the same model, batches and data, and so the same counts.
_NO_COST = {"seed": 0, "steps": 1, "lr": 1.0, "warmup": 0, "checkpoint_every": 1, "preset": "cpu"}

# Settings in the order in which a label has them; all others follow.
_FIRST = ("task", "structure", "experts", "num_experts", "num_active", "width", "depth")
_BARE = ("task", "structure")  # clear without their names


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep, what it costs, and what tells it from the others."""

    config: RunConfig
    cost: RunCost
    label: str

    @property
    def id(self) -> str:
        """Of the run."""
        return self.config.id

    @property
    def macs(self) -> int:
        """Multiply-adds of a step, forward."""
        return self.cost.counts.macs * self.cost.units_per_step

    @property
    def flops(self) -> int:
        """Of all steps, forward and backward."""
        return FLOPS_PER_MAC * self.macs * self.config.steps


def plan_runs(study: Study) -> tuple[PlannedRun, ...]:
    """All runs of a study, each once, with the steps that budgets buy."""
    costs: dict[RunConfig, RunCost] = {}
    found: dict[str, tuple[RunConfig, RunCost]] = {}
    for cell in study.cells:
        shape = shape_of(cell.config(None if cell.flops is None else 1))
        if shape not in costs:
            costs[shape] = cost_run(shape)
        config = _with_steps(cell, costs[shape])
        found.setdefault(config.id, (config, costs[shape]))
    labels = _labels([config for config, _ in found.values()])
    return tuple(
        PlannedRun(config, cost, label)
        for (config, cost), label in zip(found.values(), labels, strict=True)
    )


def shape_of(config: RunConfig) -> RunConfig:
    """One config for all runs whose steps cost the same."""
    return replace(config, **_NO_COST)  # type: ignore[arg-type]


def _with_steps(cell: Cell, cost: RunCost) -> RunConfig:
    if cell.flops is None:
        return cell.config()
    step = FLOPS_PER_MAC * cost.counts.macs * cost.units_per_step
    if cell.flops < step:
        raise EinlinearError(
            what=f"{BUDGET} are {cell.flops:.3g}, a step of {dict(cell.settings)} takes {step:.3g}",
            rule="a budget is enough for one step",
            fix=f"give {BUDGET} of {step:.3g} or more, or leave that model out",
        )
    return cell.config(round(cell.flops / step))


def _labels(configs: Sequence[RunConfig]) -> list[str]:
    """The settings in which runs differ."""
    rows = [config.as_dict() for config in configs]
    names = [*_FIRST, *(name for name in rows[0] if name not in _FIRST)]
    skipped = ("preset", "warmup", "checkpoint_every")  # they follow others, or change nothing
    vary = [n for n in names if n not in skipped and any(row[n] != rows[0][n] for row in rows)]
    shown = vary or ["structure", "width"]
    return [", ".join(f"{n} {row[n]}".removeprefix(_prefix(n)) for n in shown) for row in rows]


def _prefix(name: str) -> str:
    return f"{name} " if name in _BARE else ""


def makespan(seconds: Sequence[float], slots: int) -> float:
    """How long jobs take on so many slots, the longest first."""
    ends = [0.0] * max(1, slots)
    heapify(ends)
    for length in sorted(seconds, reverse=True):
        heapreplace(ends, ends[0] + length)
    return max(ends)
