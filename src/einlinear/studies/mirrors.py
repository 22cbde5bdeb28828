"""Mirrors of the metrics: TensorBoard, or Weights & Biases without a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.loop import Mirror

MirrorName = Literal["tensorboard", "wandb"]


@contextmanager
def open_mirror(name: MirrorName, config: RunConfig, out: Path) -> Iterator[Mirror]:
    """A function to give to `train`, which shows metrics elsewhere, too.

    Args:
        name: "tensorboard" writes event files to out/tensorboard; "wandb" writes to out/wandb,
            offline unless WANDB_MODE says otherwise.
        config: of the run.
        out: directory of the run.
    """
    if name == "tensorboard":
        writer = _module("torch.utils.tensorboard", name).SummaryWriter(str(out / name))

        def show(step: int, numbers: dict[str, float]) -> None:
            for key, number in numbers.items():
                writer.add_scalar(key, number, step)

        try:
            yield show
        finally:
            writer.close()
    else:
        run = _module(name, name).init(
            project="einlinear",
            id=config.id,
            config=config.as_dict(),
            dir=str(out),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
        )
        try:
            yield lambda step, numbers: run.log(numbers, step=step)
        finally:
            run.finish()


def _module(path: str, package: str) -> Any:
    try:
        return import_module(path)
    except ImportError as error:
        raise EinlinearError(
            what=f"metrics cannot be mirrored: {package} is not installed",
            rule=f"the mirror {package!r} needs the package of that name",
            fix=f"pip install {package}, or leave the mirror out",
        ) from error
