"""save and load: a converted model as a folder of two files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.files.fields import typed
from einlinear.files.whole import as_path
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.saving.pretrained import mark_pretrained_
from einlinear.models.saving.restore import restore_layers_
from einlinear.models.saving.saved_layer import SavedLayer, describe_layers, read_layers
from einlinear.models.saving.sealed_folder import FolderFormat
from einlinear.models.saving.weights import distinct_tensors, set_tensors_

MODEL_FORMAT = FolderFormat(
    "einlinear model",
    1,
    "model.safetensors",
    "einlinear.json",
    noun="saved model",
    content="model",
    saved_by="el.save",
    loaded_by="el.load",
)

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _Header:
    """The fields of the description."""

    layers: tuple[Any, ...]
    tied: dict[str, str]


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
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    _check_adapters(model)
    layers = describe_layers(model)
    if not layers:
        raise EinlinearError(
            what=f"{type(model).__name__} has no structured layer",
            rule="el.save is for models with EinsumLinear, SumLinear, MoELinear or MoEFeedForward",
            fix="convert the model first, el.convert_(model, ...); save others with torch",
        )
    tensors, tied = distinct_tensors(model)
    header = _Header(tuple(layer.as_json() for layer in layers), tied)
    MODEL_FORMAT.write(folder, asdict(header), tensors)
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
    (layers, tied), tensors = MODEL_FORMAT.read(folder, _parsed)
    model = _made(make_model)
    restore_layers_(model, layers)
    set_tensors_(model, tensors, tied, device=device, dtype=dtype)
    mark_pretrained_(model)
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


def _check_adapters(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            raise EinlinearError(
                what=f"layer {name!r} has an adapter",
                rule="el.save writes models without adapters, which are saved on their own",
                fix="merge them first, el.merge_(model), or save them alone: "
                "el.save_adapters(model, path)",
            )


def _parsed(values: dict[str, Any]) -> tuple[tuple[SavedLayer, ...], dict[str, str]]:
    header: _Header = typed(_Header, values, "it")
    return read_layers(list(header.layers)), header.tied
