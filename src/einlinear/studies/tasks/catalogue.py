"""open_task: the task of a name, ready for training, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, quote
from einlinear.studies.tasks.cifar import open_cifar_task
from einlinear.studies.tasks.pixels import open_pixel_task
from einlinear.studies.tasks.regression import open_regression_task
from einlinear.studies.tasks.task import Task
from einlinear.studies.tasks.text import open_text_task

OPENERS: dict[str, Callable[..., Task]] = {
    "text": open_text_task,
    "pixels": open_pixel_task,
    "regression": open_regression_task,
    "cifar": open_cifar_task,
}


def open_task(
    name: str, data: str | Path | Sequence[str | Path] | None = None, **settings: Any
) -> Task:
    """The task of this name on some data, or on the small set in the package.

    Everything that can be wrong with the data is found here, before any training.

    Args:
        name: "text", "pixels", "regression" or "cifar".
        data: files or a folder, see docs/data.md; what is in the package unless given.
        settings: of the task, such as context=128.
    """
    if not isinstance(name, str) or name not in OPENERS:
        raise EinlinearError(
            what=f"the task is {quote(name)}",
            rule=f"a task is one of {', '.join(OPENERS)}",
            fix=f"try {_nearest(quote(name), list(OPENERS))!r}",
        )
    known = list(signature(OPENERS[name]).parameters)[1:]
    for setting in settings:
        if setting not in known:
            raise EinlinearError(
                what=f"the task {name} is given the setting {quote(setting)}",
                rule=f"the settings of {name} are {', '.join(known) or 'none'}",
                fix=f"did you mean {_nearest(setting, known)!r}?" if known else "leave it out",
            )
    return OPENERS[name](data, **settings)


def _nearest(word: str, known: Sequence[str]) -> str:
    return (get_close_matches(word[:40], known, 1, 0.0) or known)[0]
