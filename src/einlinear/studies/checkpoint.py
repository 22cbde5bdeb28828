"""Checkpoints: tensors and plain values of a run, written whole, checked when they are read.

A checkpoint is two files, step-N.safetensors and step-N.json. The second is written last and holds
the checksum of the first and of itself, so what is cut off, mixed up or damaged is noticed.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from einlinear.errors import EinlinearError
from einlinear.files import write_whole
from einlinear.studies.seals import sealed, unsealed
from einlinear.studies.tensor_files import load_tensors, write_tensors

KEPT = 2
"""How many checkpoints are kept: the last, and one to fall back to."""

_SCHEMA = 2
_DAMAGE = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a run needs to go on: after how many steps, its tensors, its plain values."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and remove all but the last few."""
    path = _path(folder, checkpoint.step)
    seal = write_tensors(path.with_suffix(".safetensors"), checkpoint.tensors)
    held = {"schema": _SCHEMA, "step": checkpoint.step, "tensors": seal}
    write_whole(path, sealed({**held, "values": checkpoint.values}))
    for old in _found(folder)[:-KEPT]:
        _remove(old)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The last checkpoint that is whole; None if there is none. Says which ones are damaged."""
    for path in reversed(_found(folder)):
        try:
            return _read(path)
        except _DAMAGE as error:
            warnings.warn(
                f"the checkpoint {path} is damaged ({error}); going on from the one before",
                stacklevel=2,
            )
    return None


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """The checkpoint after so many steps, which another process has found whole."""
    try:
        return _read(_path(folder, step))
    except _DAMAGE as error:
        raise EinlinearError(
            what=f"cannot read the checkpoint of step {step} in {folder}: {error}",
            rule="all processes of a run see the same directory",
            fix="choose a directory on a file system that all machines share",
        ) from error


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.json"


def _found(folder: Path) -> list[Path]:
    """The JSON files of all checkpoints, oldest first."""
    return sorted(folder.glob("step-*.json"))


def _read(path: Path) -> Checkpoint:
    held = unsealed(path.read_text(encoding="utf-8"))
    if held["schema"] != _SCHEMA:
        raise ValueError(f"its schema is {held['schema']}, not {_SCHEMA}")
    tensors = load_tensors(path.with_suffix(".safetensors"), held["tensors"])
    return Checkpoint(held["step"], tensors, held["values"])


def _remove(path: Path) -> None:
    """Remove a checkpoint: first what makes it one."""
    path.unlink(missing_ok=True)
    path.with_suffix(".safetensors").unlink(missing_ok=True)
