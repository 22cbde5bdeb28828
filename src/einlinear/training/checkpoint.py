"""Checkpoints: tensors and plain values of a run, written atomically and checked when read.

A checkpoint is two files, step-N.safetensors and step-N.json. The second is written last and holds
checksums of the first and of itself, which reveal truncated, mixed-up or damaged files.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from einlinear.errors import EinlinearError, reason
from einlinear.files.seals import sealed, unsealed
from einlinear.files.tensors import load_tensors, write_tensors
from einlinear.files.whole import parse_object, write_whole
from einlinear.runs.config import RunConfig

KEPT = 2
"""Number of checkpoints to keep: the last, and one to fall back to."""

_SCHEMA = 2
_OLD = {"content", "sha256"}  # the fields of the first schema
_DAMAGE = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a run needs to resume: its step, tensors and plain values."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with the prefix, without it."""
        held = self.tensors.items()
        return {k.removeprefix(prefix): v for k, v in held if k.startswith(prefix)}


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and remove all others except the last few before it.

    Checkpoints of later steps are stale: the run went back to an earlier step.
    """
    path = _path(folder, checkpoint.step)
    seal = write_tensors(path.with_suffix(".safetensors"), checkpoint.tensors)
    held = {"schema": _SCHEMA, "step": checkpoint.step, "tensors": seal}
    write_whole(path, sealed({**held, "values": checkpoint.values}))
    found = _found(folder)
    place = found.index(path)
    for other in (*found[: max(0, place - KEPT + 1)], *found[place + 1 :]):
        _remove(other)


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint, damaged or not."""
    return bool(_found(folder))


def load_checkpoint(
    folder: Path, otherwise: str = "starting again from step 0"
) -> Checkpoint | None:
    """The last undamaged checkpoint, or None; warns about damaged ones.

    `otherwise` says what happens if all are damaged.
    """
    paths = _found(folder)
    while paths:
        path = paths.pop()
        try:
            return _read(path)
        except EinlinearError:
            raise
        except _DAMAGE as error:
            _check_reachable(path, error)
            then = "resuming from the one before" if paths else otherwise
            warnings.warn(
                f"the checkpoint {path} is damaged ({reason(error)}); {then}", stacklevel=2
            )
    return None


def check_owner(checkpoint: Checkpoint, config: RunConfig, directory: Path) -> None:
    """Refuse a checkpoint of a run with other settings.

    Checkpoints of earlier versions have earlier ids; `check_shapes` finds those with other sizes.
    """
    if checkpoint.values["config"] not in (config.id, config.earlier_id):
        raise EinlinearError(
            what=f"the checkpoint of step {checkpoint.step} in {directory} is of a run with other "
            "settings: config.json has changed since",
            rule="the settings of a run do not change",
            fix="restore config.json, or delete it and give the command of the run again; "
            "new settings go into another directory",
        )


def check_shapes(
    held: Mapping[str, Tensor], parameters: Mapping[str, Tensor], directory: Path
) -> None:
    """Refuse stored weights whose shapes are not those of the model's parameters."""
    for name, parameter in parameters.items():
        if name in held and held[name].shape != parameter.shape:
            raise EinlinearError(
                what=f"in {directory}, {name} has the shape {tuple(held[name].shape)}; in the "
                f"model it has the shape {tuple(parameter.shape)}",
                rule="an older version of einlinear chose other sizes for the structure of this "
                "run; weights fit only the sizes with which they were trained",
                fix="use the version that started the run, or train it again in another directory",
            )


def remove_later(folder: Path, step: int) -> None:
    """Remove the checkpoints after the step from which a run resumes: all are damaged."""
    for path in _found(folder):
        if path.stem > _path(folder, step).stem:
            _remove(path)


def _check_reachable(path: Path, error: Exception) -> None:
    """Raise if a file is only unreadable at the moment: it may be undamaged."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | IsADirectoryError):
        raise EinlinearError(
            what=f"cannot read the checkpoint {path}: {reason(error)}",
            rule="a run resumes from its last undamaged checkpoint",
            fix="make the file readable, and give the same command again",
        ) from error


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, which another process has found undamaged."""
    try:
        return _read(_path(folder, step))
    except EinlinearError:
        raise
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
    text = path.read_text(encoding="utf-8")
    if parse_object(text).keys() == _OLD:
        raise EinlinearError(
            what=f"the checkpoint {path} was written by an earlier version of einlinear",
            rule="a run resumes with the version that started it",
            fix=f"finish the run with that version; or remove {path.parent} to start again",
        )
    held = unsealed(text)
    if held["schema"] != _SCHEMA:
        raise ValueError(f"its schema is {held['schema']}, not {_SCHEMA}")
    tensors = load_tensors(path.with_suffix(".safetensors"), held["tensors"])
    return Checkpoint(held["step"], tensors, held["values"])


def _remove(path: Path) -> None:
    """Remove a checkpoint as far as possible; first the file that makes it valid."""
    for part in (path, path.with_suffix(".safetensors")):
        with suppress(OSError):
            part.unlink(missing_ok=True)
