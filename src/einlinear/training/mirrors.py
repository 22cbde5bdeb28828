"""Mirrors of the metrics: TensorBoard, or Weights & Biases offline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from einlinear.errors import EinlinearError
from einlinear.runs.config import RunConfig
from einlinear.training.loop import Mirror

MirrorName = Literal["tensorboard", "wandb"]


@contextmanager
def open_mirror(name: MirrorName, config: RunConfig, out: Path) -> Iterator[Mirror]:
    """A function for `train(mirrors=...)` that also shows the metrics elsewhere.

    Writes nothing before the first line of metrics. If a run resumes, steps that it repeats replace
    those shown before.

    Args:
        name: "tensorboard" writes event files to out/tensorboard; "wandb" writes to out/wandb,
            offline unless you set WANDB_MODE.
        config: of the run.
        out: directory of the run.
    """
    module = _module("torch.utils.tensorboard" if name == "tensorboard" else name, name)
    opened: list[Any] = []

    def show_board(step: int, numbers: dict[str, float]) -> None:
        if not opened:
            opened.append(module.SummaryWriter(str(out / name), purge_step=step))
        for key, number in numbers.items():
            opened[0].add_scalar(key, number, step)

    def show_account(step: int, numbers: dict[str, float]) -> None:
        if not opened:
            opened.append(_account(module, config, out))
        opened[0].log(numbers, step=step)

    try:
        yield show_board if name == "tensorboard" else show_account
    finally:
        for target in opened:
            (target.close if name == "tensorboard" else target.finish)()


def _account(wandb: Any, config: RunConfig, out: Path) -> Any:
    return wandb.init(
        project="einlinear",
        id=config.id,
        config=config.as_dict(),
        dir=str(out),
        mode=os.environ.get("WANDB_MODE", "offline"),
        resume="allow",
    )


def _module(path: str, package: str) -> Any:
    try:
        return import_module(path)
    except ImportError as error:
        raise EinlinearError(
            what=f"metrics cannot be mirrored: {package} is not installed",
            rule=f"the mirror {package!r} needs the package of that name",
            fix=f"pip install {package}, or leave out the mirror",
        ) from error
