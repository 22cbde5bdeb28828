"""The plan of a run, before its first step: its task, its model, their cost."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn

from einlinear.data.tasks.catalogue import open_task
from einlinear.data.tasks.cifar import CifarTask
from einlinear.data.tasks.pixels import PixelTask
from einlinear.data.tasks.task import Batch, Task
from einlinear.data.tasks.text import TextTask
from einlinear.runs.config import RunConfig
from einlinear.runs.record import Counts
from einlinear.training.counting import count_model, counted_macs
from einlinear.training.model import make_model, sizes_of
from einlinear.training.needs import count_shape

_SETTINGS = {
    "text": ("context", "vocabulary", "rule", "validation"),
    "regression": ("teacher_width", "teacher_depth"),
    "cifar": ("pool",),
}


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    """Task and model of a run, counts per unit, units per step, and the name of a unit."""

    task: Task
    model: nn.Module
    counts: Counts
    units_per_step: int
    unit: str


@dataclass(frozen=True, slots=True)
class RunCost:
    """Counts per unit, units per step, the name of a unit, and rows of the validation set."""

    counts: Counts
    units_per_step: int
    unit: str
    eval_rows: int


def plan_run(config: RunConfig, *, is_checked: bool = True) -> RunPlan:
    """Plan a run without training or writing anything; finds all errors in data and settings.

    Args:
        config: of the run.
        is_checked: whether to compare the counts with those of torch.
    """
    task = task_of(config)
    model = make_model(config, sizes_of(task))
    row = _row(config, task)
    counts = count_model(model, row.units)
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
    """The cost of a run from shapes alone, without making weights or a teacher."""
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
    """Rows of the validation set: as many as requested, if the data has them."""
    available = config.eval_size
    if isinstance(task, TextTask):
        available = (len(task.tokens.validation) - 1) // task.context
    elif isinstance(task, PixelTask):
        available = len(task.test)
    elif isinstance(task, CifarTask):
        available = len(task.images.test_y)
    return min(available, config.eval_size)


def _with_small_teacher(config: RunConfig) -> RunConfig:
    """The config with a tiny teacher, if it has one: costs do not depend on it."""
    if config.teacher_depth is None:
        return config
    return replace(config, teacher_width=1, teacher_depth=min(2, config.teacher_depth))


def task_of(config: RunConfig) -> Task:
    """Open the task of a config, with its data."""
    settings = {name: getattr(config, name) for name in _SETTINGS.get(config.task, ())}
    return open_task(config.task, config.data, **settings)
