"""What a run will be, before its first step: its task, its model, what they cost."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn

from einlinear.studies.build import make_model, sizes_of
from einlinear.studies.config import RunConfig
from einlinear.studies.counting import count, counted_macs
from einlinear.studies.needs import count_shape
from einlinear.studies.record import Counts
from einlinear.studies.tasks.catalogue import open_task
from einlinear.studies.tasks.cifar import CifarTask
from einlinear.studies.tasks.pixels import PixelTask
from einlinear.studies.tasks.task import Batch, Task
from einlinear.studies.tasks.text import TextTask

_SETTINGS = {
    "text": ("context", "vocabulary", "rule", "validation"),
    "regression": ("teacher_width", "teacher_depth"),
}


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    """Task and model of a run, counts per unit, the units of a step, and what a unit is."""

    task: Task
    model: nn.Module
    counts: Counts
    units_per_step: int
    unit: str


@dataclass(frozen=True, slots=True)
class RunCost:
    """Counts of a run per unit, the units of a step, what a unit is, and rows for validation."""

    counts: Counts
    units_per_step: int
    unit: str
    eval_rows: int


def plan_run(config: RunConfig, *, is_checked: bool = True) -> RunPlan:
    """What a run will be; nothing is trained or written.

    Everything that is wrong with data or settings is found here.

    Args:
        config: of the run.
        is_checked: whether the counts are compared with those of torch, which takes seconds.
    """
    task = task_of(config)
    model = make_model(config, sizes_of(task))
    row = _row(config, task)
    counts = count(model, row.units)
    if is_checked:
        counted = counted_macs(model, row.inputs)
        if counted != counts.product_macs * row.units:
            warnings.warn(
                f"a row has {counts.product_macs * row.units} multiply-adds by the plans of its "
                f"layers, and {counted} by the counter of torch",
                stacklevel=2,
            )
    return RunPlan(task, model, counts, row.units * config.batch_size, task.unit)


def cost_run(config: RunConfig) -> RunCost:
    """What a run costs, from shapes alone: no weights are made, and no teacher either."""
    task = task_of(_with_small_teacher(config))
    row = _row(config, task)
    counts = count_shape(config, sizes_of(task), row.units)
    rows = _eval_rows(config, task)
    return RunCost(counts, row.units * config.batch_size, task.unit, rows)


def _row(config: RunConfig, task: Task) -> Batch:
    """One row of data."""
    row = task.batch(0, 1, seed=config.seed)
    length = row.inputs.shape[1] if row.inputs.dtype == torch.int64 else 1
    assert length == row.units, "a model makes one output for every unit"
    return row


def _eval_rows(config: RunConfig, task: Task) -> int:
    """Rows of the validation set: as many as asked for, if the data has them."""
    available = config.eval_size
    if isinstance(task, TextTask):
        available = (len(task.tokens.validation) - 1) // task.context
    elif isinstance(task, PixelTask):
        available = len(task.test)
    elif isinstance(task, CifarTask):
        available = len(task.images.test_y)
    return min(available, config.eval_size)


def _with_small_teacher(config: RunConfig) -> RunConfig:
    """The same with a teacher that is made at once, if there is one: costs do not depend on it."""
    if config.teacher_depth is None:
        return config
    return replace(config, teacher_width=1, teacher_depth=min(2, config.teacher_depth))


def task_of(config: RunConfig) -> Task:
    """The task of a config, with its data."""
    settings = {name: getattr(config, name) for name in _SETTINGS.get(config.task, ())}
    return open_task(config.task, config.data, **settings)
