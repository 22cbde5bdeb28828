"""Checkpoints: tensors and plain values of a run, written whole, checked when they are read.

A checkpoint is two files, step-N.safetensors and step-N.json. The second is written last and holds
the checksum of the first and of itself, so what is cut off, mixed up or damaged is noticed.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from einlinear.errors import EinlinearError, cannot_write
from einlinear.files import sync_folder, write_whole

KEPT = 2
"""How many checkpoints are kept: the last, and one to fall back to."""

_CHUNK = 1 << 20
_DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a run needs to go on: after how many steps, its tensors, its plain values."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and remove all but the last few."""
    path = _path(folder, checkpoint.step)
    write_tensors(path, checkpoint.tensors)
    held = {"step": checkpoint.step, "sha256": _file_hash(path), "values": checkpoint.values}
    text = json.dumps(held, sort_keys=True)
    sealed = {"content": text, "sha256": sha256(text.encode()).hexdigest()}
    write_whole(path.with_suffix(".json"), json.dumps(sealed).encode())
    for old in _found(folder)[:-KEPT]:
        _remove(old)


def load_checkpoint(folder: Path, most_metrics: int) -> Checkpoint | None:
    """The last checkpoint that is whole; None if there is none. Says which ones are damaged.

    Args:
        folder: where they are.
        most_metrics: length of the metrics; a checkpoint that counts on more cannot be used.
    """
    for path in reversed(_found(folder)):
        try:
            checkpoint = _read(path)
            if checkpoint.values["metrics_position"] > most_metrics:
                raise ValueError("the metrics before it are missing")
            return checkpoint
        except _DAMAGE as error:
            warnings.warn(
                f"the checkpoint {path} is damaged ({error}); going on from the one before",
                stacklevel=2,
            )
    return None


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """The checkpoint after so many steps, which another process has found whole."""
    try:
        return _read(_path(folder, step).with_suffix(".json"))
    except _DAMAGE as error:
        raise EinlinearError(
            what=f"cannot read the checkpoint of step {step} in {folder}: {error}",
            rule="all processes of a run see the same directory",
            fix="choose a directory on a file system that all machines share",
        ) from error


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run that has ended."""
    for path in _found(folder):
        _remove(path)
    for path in folder.glob("step-*"):  # what a run that was killed left half written
        path.unlink(missing_ok=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as a safetensors file, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise cannot_write(path, cause) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {error}",
            rule="weights are a safetensors file that a run has written",
            fix="name the directory of a run that has finished, or train it again",
        ) from error


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def _found(folder: Path) -> list[Path]:
    """The JSON files of all checkpoints, oldest first."""
    return sorted(folder.glob("step-*.json"))


def _read(path: Path) -> Checkpoint:
    sealed = json.loads(path.read_text(encoding="utf-8"))
    text = sealed["content"]
    if sha256(str(text).encode()).hexdigest() != sealed["sha256"]:
        raise ValueError(f"the checksum of {path.name} is wrong")
    held = json.loads(text)
    tensors = path.with_suffix(".safetensors")
    if _file_hash(tensors) != held["sha256"]:
        raise ValueError(f"the checksum of {tensors.name} is wrong")
    return Checkpoint(held["step"], load_file(tensors), held["values"])


def _file_hash(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    """Remove a checkpoint: first what makes it one."""
    path.unlink(missing_ok=True)
    path.with_suffix(".safetensors").unlink(missing_ok=True)
