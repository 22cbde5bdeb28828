"""save and load: a converted model as a folder of two files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, cannot_write, quote
from einlinear.files.fields import typed
from einlinear.files.seals import sealed, unseal_
from einlinear.files.tensors import load_tensors, write_tensors
from einlinear.files.whole import as_path, checked_reading, parse_object, write_whole
from einlinear.models.saving.restore import restore_layers_
from einlinear.models.saving.saved_layer import SavedLayer, describe_layers, read_layers
from einlinear.models.saving.weights import distinct_tensors, set_tensors_
from einlinear.version import __version__

FORMAT = "einlinear model"
MODEL_SCHEMA = 1
"""The version of the format. A change that older versions cannot read needs a new number."""
WEIGHTS = "model.safetensors"
DESCRIPTION = "einlinear.json"

_NEXT = f"{WEIGHTS}.next"  # the new weights, until the new description is in place
_AGAIN = "save the model again, or restore the folder from a copy"

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _Header:
    """The fields of the description, besides format and schema."""

    einlinear: str
    layers: tuple[Any, ...]
    tied: dict[str, str]
    weights_seal: str


def save(model: nn.Module, path: str | Path) -> Path:
    """Save a model with structured layers to a folder; return the folder. el.load reads it.

    The folder holds model.safetensors, the weights and buffers, and einlinear.json, what decides
    every structured layer. A model that was saved there before is replaced; if writing fails or is
    interrupted, it stays as it was. The model is not changed.
    """
    folder = as_path(path, "the path of the model")
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module",
            fix="give the model first, then the folder: el.save(model, path)",
        )
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    layers = describe_layers(model)
    if not layers:
        raise EinlinearError(
            what=f"{type(model).__name__} has no structured layer",
            rule="el.save is for models with EinsumLinear, MoELinear or MoEFeedForward layers",
            fix="convert the model first, el.convert_(model, ...); save others with torch",
        )
    tensors, tied = distinct_tensors(model)
    _check_folder(folder)
    seal = write_tensors(folder / _NEXT, {name: t.cpu() for name, t in tensors.items()})
    header = _Header(__version__, tuple(layer.as_json() for layer in layers), tied, seal)
    # Until the next line is done, the folder holds the earlier model; after it, the new one.
    values = {"format": FORMAT, "schema": MODEL_SCHEMA, **asdict(header)}
    write_whole(folder / DESCRIPTION, sealed(values))
    try:
        (folder / _NEXT).replace(folder / WEIGHTS)
    except OSError as error:
        raise cannot_write(folder / WEIGHTS, error) from error
    return folder


def load(
    path: str | Path,
    make_model: Callable[[], _Model],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> _Model:
    """Load a model that el.save wrote: the same layers and weights, bit for bit.

    Args:
        path: the folder.
        make_model: a function without arguments that returns the model as it was before it was
            converted, such as the class itself. Its weights are not used, so it may create them on
            the meta device.
        device: where to put the model; by default, where make_model put it, or on the CPU if that
            is the meta device.
        dtype: the dtype of all weights and buffers of floating-point numbers; by default, those
            that were saved.
    """
    folder = as_path(path, "the path of the model")
    _check_dtype(dtype)
    header, layers = _read_description(folder)
    tensors = _read_weights(folder, header.weights_seal)
    model = _made(make_model)
    restore_layers_(model, layers)
    set_tensors_(model, tensors, header.tied, device=device, dtype=dtype)
    return model


def _made(make_model: Callable[[], _Model]) -> _Model:
    if not callable(make_model) or isinstance(make_model, nn.Module):
        raise EinlinearError(
            what=f"make_model is given as {quote(make_model)}",
            rule="make_model is a function without arguments that returns a new model",
            fix="write el.load(path, lambda: MyModel(...))",
        )
    model = make_model()
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"make_model returned {quote(model)}",
            rule="make_model returns the model as it was before it was converted, an nn.Module",
            fix="write el.load(path, lambda: MyModel(...))",
        )
    return model


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise EinlinearError(
        what=f"dtype is given as {quote(dtype)}",
        rule="weights are floating-point numbers",
        fix="give dtype=torch.float32 or torch.bfloat16, or leave it out",
    )


def _check_folder(folder: Path) -> None:
    """Refuse to write among files that are not those of a saved model."""
    try:
        found = sorted(item.name for item in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise cannot_write(folder, error) from error
    own = {WEIGHTS, DESCRIPTION, _NEXT, f"{_NEXT}.part", f"{DESCRIPTION}.part"}
    is_ours = DESCRIPTION in found and _is_ours(folder / DESCRIPTION)
    strange = [name for name in found if name not in own or name == WEIGHTS or name == DESCRIPTION]
    if strange and not is_ours:
        raise EinlinearError(
            what=f"{folder} holds other files: {', '.join(strange[:5])}",
            rule="a model is saved to a new or empty folder, or over a model that el.save wrote",
            fix="give the path of a new folder",
        )


def _is_ours(path: Path) -> bool:
    try:
        return parse_object(path.read_bytes()).get("format") == FORMAT
    except (OSError, ValueError):
        return False


def _read_description(folder: Path) -> tuple[_Header, tuple[SavedLayer, ...]]:
    path = folder / DESCRIPTION
    if not path.is_file():
        is_hugging_face = (folder / "config.json").is_file()
        raise EinlinearError(
            what=f"{folder} is not a saved model: it has no {DESCRIPTION}",
            rule="el.load reads a folder that el.save wrote",
            fix="this folder is for Hugging Face: AutoModel.from_pretrained(path)"
            if is_hugging_face
            else "give the folder that you gave to el.save",
        )
    with checked_reading(path, rule="a saved model is read as it was written", fix=_AGAIN):
        values = parse_object(path.read_bytes())
        _check_format(path, values)
        unseal_(values)
        fields = {name: values[name] for name in values if name not in ("format", "schema")}
        header: _Header = typed(_Header, fields, "it")
        return header, read_layers(list(header.layers))


def _check_format(path: Path, values: dict[str, Any]) -> None:
    found, schema = values.get("format"), values.get("schema")
    if found != FORMAT:
        raise EinlinearError(
            what=f"{path} has the format {quote(found)}",
            rule=f'the description of a saved model has the format "{FORMAT}"',
            fix="give the folder that you gave to el.save",
        )
    if schema != MODEL_SCHEMA:
        raise EinlinearError(
            what=f"{path} has the schema {quote(schema)}, written by einlinear "
            f"{quote(values.get('einlinear'))}",
            rule=f"einlinear {__version__} reads schema {MODEL_SCHEMA}",
            fix="install the version of einlinear that wrote it, or a later one",
        )


def _read_weights(folder: Path, seal: str) -> dict[str, Tensor]:
    """Read the weights; those of a save that was interrupted just before its end, too."""
    path = folder / WEIGHTS
    with checked_reading(path, rule="a saved model is read as it was written", fix=_AGAIN):
        try:
            return load_tensors(path, seal)
        except (OSError, ValueError):
            if not (folder / _NEXT).is_file():
                raise
            return load_tensors(folder / _NEXT, seal)
