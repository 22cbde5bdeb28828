"""open_task: the task with a given name, checked and ready for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from einlinear.data.tasks.cifar import open_cifar_task
from einlinear.data.tasks.pixels import open_pixel_task
from einlinear.data.tasks.regression import open_regression_task
from einlinear.data.tasks.task import Task
from einlinear.data.tasks.text import open_text_task
from einlinear.errors import EinlinearError, did_you_mean, quote

OPENERS: dict[str, Callable[..., Task]] = {
    "text": open_text_task,
    "pixels": open_pixel_task,
    "regression": open_regression_task,
    "cifar": open_cifar_task,
}


def open_task(
    name: str, data: str | Path | Sequence[str | Path] | None = None, **settings: Any
) -> Task:
    """Open a task on your data, or on the small set in the package.

    All errors in the data are found here, before any training.

    Args:
        name: "text", "pixels", "regression" or "cifar".
        data: files or a folder, see docs/data.md; by default the data in the package.
        settings: of the task, for example context=128.
    """
    if not isinstance(name, str) or name not in OPENERS:
        raise EinlinearError(
            what=f"the task is {quote(name)}",
            rule=f"a task is one of {', '.join(OPENERS)}",
            fix=did_you_mean(name, OPENERS, f"use {next(iter(OPENERS))!r}", 0.0),
        )
    known = list(signature(OPENERS[name]).parameters)[1:]
    for setting in settings:
        if setting not in known:
            raise EinlinearError(
                what=f"the task {name} is given the setting {quote(setting)}",
                rule=f"the settings of {name} are {', '.join(known) or 'none'}",
                fix=did_you_mean(setting, known, "leave it out", 0.0),
            )
    return OPENERS[name](data, **settings)
