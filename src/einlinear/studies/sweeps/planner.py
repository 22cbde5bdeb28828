"""make_plan: the runs of a study, each once, with the steps that budgets buy and their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean

import torch

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.needs import check_needs, fits
from einlinear.studies.numbers import FLOPS_PER_MAC
from einlinear.studies.plan_run import cost_run
from einlinear.studies.record import RunRecord
from einlinear.studies.sweeps.estimate import Timing, estimate, kind_of, time_steps
from einlinear.studies.sweeps.job import all_finished
from einlinear.studies.sweeps.plan import PlannedRun, PlanRequest
from einlinear.studies.sweeps.study import BUDGET, Cell, Study

# Runs that differ only in these have the same model, batches and data, and so the same counts.
_NO_COST = ("seed", "steps", "lr", "warmup", "checkpoint_every", "preset")
_SHAPE = tuple(field.name for field in fields(RunConfig) if field.name not in _NO_COST)

# Settings in the order in which a label has them; all others follow.
_FIRST = ("task", "structure", "experts", "num_experts", "num_active", "width", "depth")
_BARE = ("task", "structure")  # clear without their names


def make_plan(
    request: PlanRequest, on_model: Callable[[], None] = lambda: None
) -> tuple[PlannedRun, ...]:
    """All runs of a study, with their times; some are timed, for a few seconds in all.

    `on_model` is called after each model that was counted or timed.
    """
    runs = plan_runs(Study.from_dict(request.study), on_model)
    records = all_finished(Path(request.out), (run.id for run in runs))
    timings = _timings(runs, records)
    new = [run for run in runs if run.id not in records]
    if request.is_here:
        _check_needs(new)
        untimed = new
    else:  # other machines may have GPUs, and more memory
        untimed = [run for run in new if _can_be_timed(run.config)]
    if untimed and request.is_timed:
        timings = time_steps(untimed, timings, threads=request.threads, on_model=on_model)
    return tuple(
        replace(run, seconds=seconds, is_guessed=not timings)
        for run, seconds in zip(runs, estimate(runs, timings), strict=True)
    )


def _check_needs(runs: Sequence[PlannedRun]) -> None:
    """Refuse runs for which this machine has too little memory, before any is trained."""
    for config in {_shape(run.config): run.config for run in runs}.values():
        # Where runs may go to a GPU, its memory is not known here.
        if config.device == "cpu" or not torch.cuda.is_available():
            check_needs(config)


def _can_be_timed(config: RunConfig) -> bool:
    return (torch.cuda.is_available() or config.device != "cuda") and fits(config)


def _shape(config: RunConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in _SHAPE)


def plan_runs(study: Study, on_model: Callable[[], None] = lambda: None) -> tuple[PlannedRun, ...]:
    """All runs of a study, each once, with the steps that budgets buy; none is timed."""
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


def _with_steps(cell: Cell, macs: int) -> RunConfig:
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
    """The settings in which runs differ."""
    rows = [config.as_dict() for config in configs]
    names = [*_FIRST, *(name for name in rows[0] if name not in _FIRST)]
    skipped = ("preset", "warmup", "checkpoint_every")  # they follow others, or change nothing
    vary = [n for n in names if n not in skipped and any(row[n] != rows[0][n] for row in rows)]
    shown = vary or ["structure", "width"]
    return [", ".join(f"{n} {row[n]}".removeprefix(_prefix(n)) for n in shown) for row in rows]


def _prefix(name: str) -> str:
    return f"{name} " if name in _BARE else ""


def _timings(runs: Sequence[PlannedRun], records: Mapping[str, RunRecord]) -> list[Timing]:
    """How long a step took in runs that have finished, in the mean of those that cost the same."""
    found: dict[tuple[tuple[object, ...], int], list[float]] = {}
    for run in runs:
        record = records.get(run.id)
        if record is not None and record.steps_done and record.seconds > 0:
            of_its_cost = found.setdefault((kind_of(run.config), run.macs), [])
            of_its_cost.append(record.seconds / record.steps_done)
    return [Timing(kind, macs, fmean(seconds)) for (kind, macs), seconds in found.items()]
