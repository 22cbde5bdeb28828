"""save_adapters and load_adapters_: the adapters of a model as a small folder of two files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from einlinear.errors import EinlinearError, quote
from einlinear.files.fields import typed
from einlinear.files.whole import as_path
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.adapters.adapt import adapted_layer
from einlinear.models.adapters.freezing import freeze_
from einlinear.models.adapters.merge import adapted_layers
from einlinear.models.convert.names import LayerNames
from einlinear.models.saving.placing import put_layers_
from einlinear.models.saving.pretrained import mark_adapted_
from einlinear.models.saving.saved_layer import (
    SavedLayer,
    describe_layer,
    make_layer,
    read_layers,
)
from einlinear.models.saving.sealed_folder import FolderFormat
from einlinear.models.saving.weights import check_whole
from einlinear.models.survey.sites import Site, find_sites
from einlinear.show.numbers import listed

ADAPTER_FORMAT = FolderFormat(
    "einlinear adapters",
    1,
    "adapters.safetensors",
    "adapters.json",
    noun="folder of adapters",
    content="adapters",
    saved_by="el.save_adapters",
    loaded_by="el.load_adapters_",
)

_SAME = "load them into the model that was adapted, before it has adapters"


@dataclass(frozen=True, slots=True)
class _Header:
    """The fields of the description.

    layers: the updates, under the names of the layers that they adapt.
    trained: the names of parameters that were trained besides them, and of running statistics.
    """

    layers: tuple[Any, ...]
    trained: tuple[str, ...]


def save_adapters(model: nn.Module, path: str | Path) -> Path:
    """Save the adapters of a model to a folder; return the folder. el.load_adapters_ reads it.

    The folder holds adapters.safetensors, the factors of all updates, and adapters.json, what
    decides them. Other parameters that are trained (requires_grad is True) and the running
    statistics of norms are saved with them; what is frozen is not. Adapters that were saved there
    before are replaced; if writing fails or is interrupted, they stay as they were. The model is
    not changed.
    """
    folder = as_path(path, "the path of the adapters")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    found = adapted_layers(model, "save")
    check_whole(model)
    layers = tuple(describe_layer(layer.update, names) for names, layer in found.items())
    tensors = _update_tensors(found)
    updates = set(map(id, tensors.values()))
    trained: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in updates
    }
    trained |= _statistics(model)
    for name, tensor in (tensors | trained).items():
        if tensor.is_meta:
            raise EinlinearError(
                what=f"{name!r} is on the meta device",
                rule="saved adapters have weights; tensors on the meta device have none",
                fix="create the model on the CPU or a GPU, or load its weights first",
            )
    values = {"layers": [layer.as_json() for layer in layers], "trained": list(trained)}
    ADAPTER_FORMAT.write(folder, values, {**tensors, **trained})
    return folder


def load_adapters_(model: nn.Module, path: str | Path) -> tuple[str, ...]:
    """Put adapters that el.save_adapters wrote into a model; return the names of their layers.

    The model is the one that was adapted, with its weights and without adapters. As after adapt_,
    the adapters and what was trained besides them are trainable, and the rest is frozen. All names,
    shapes and checksums are checked before the model is changed. Adapters only fit the weights
    that they were trained with, which the folder does not hold.
    """
    folder = as_path(path, "the path of the adapters")
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module",
            fix="give the model first, then the folder: el.load_adapters_(model, path)",
        )
    model = getattr(model, "_orig_mod", model)
    (layers, trained), tensors = ADAPTER_FORMAT.read(folder, _parsed)
    sites = {site.names: site for site in find_sites(model)}
    adapted = [_restored(model, sites, saved) for saved in layers]
    wanted = _update_tensors({site.names: layer for site, layer in adapted})
    _check_tensors(tensors, {**wanted, **_trained_parameters(model, trained, adapted)})
    put_layers_(model, adapted)
    own = _own_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    freeze_(model, except_for=trained)
    mark_adapted_(model)
    return tuple(saved.names[0] for saved in layers)


def _parsed(values: dict[str, Any]) -> tuple[tuple[SavedLayer, ...], tuple[str, ...]]:
    header: _Header = typed(_Header, values, "it")
    layers = read_layers(list(header.layers))
    for layer in layers:
        if layer.kind not in ("EinsumLinear", "SumLinear") or layer.bias or layer.weight_norm:
            raise ValueError(f"the layer {layer.names[0]!r} is not an update")
    return layers, header.trained


def _update_tensors(found: Mapping[LayerNames, AdaptedLinear]) -> dict[str, Tensor]:
    """The factors of all updates, by their names in the model."""
    return {
        f"{names[0]}.update.{key}": parameter
        for names, layer in found.items()
        for key, parameter in layer.update.named_parameters()
    }


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **_statistics(model)}


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of norms, which change in training although they are no parameters."""
    return {
        f"{name}.{key}": tensor
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for key, tensor in module.named_buffers(recurse=False)
    }


def _restored(
    model: nn.Module, sites: Mapping[LayerNames, Site], saved: SavedLayer
) -> tuple[Site, AdaptedLinear]:
    """The site that an update belongs to, and the layer for it; weights are empty."""
    site = sites.get(saved.names)
    if site is None:
        raise EinlinearError(
            what=f"{type(model).__name__} has no linear layer {' = '.join(saved.names)}",
            rule="a model has the layers that were adapted, under the same names",
            fix=_SAME,
        )
    if site.obstacle:
        raise EinlinearError(
            what=f"layer {site.name!r} cannot be adapted: {site.obstacle}",
            rule="adapters are loaded into plain linear layers",
            fix=_SAME,
        )
    if (site.d_in, site.d_out) != (saved.in_features, saved.out_features):
        raise EinlinearError(
            what=f"layer {site.name!r} is {site.d_in} -> {site.d_out} in the model, and was saved "
            f"as {saved.in_features} -> {saved.out_features}",
            rule="a model has the widths that it had when it was adapted",
            fix=_SAME,
        )
    update = make_layer(saved, site.weight.device)
    assert isinstance(update, EinsumLinear | SumLinear), "the description was checked"
    return site, adapted_layer(site, update.train(site.module.training))


def _trained_parameters(
    model: nn.Module, trained: tuple[str, ...], adapted: list[tuple[Site, AdaptedLinear]]
) -> dict[str, Tensor]:
    """The parameters that were trained besides the updates, as the adapted model will have them."""
    own = _own_tensors(model)
    for site, layer in adapted:  # projections of an attention have no such names before
        for name in site.names:
            own |= {f"{name}.{key}": p for key, p in layer.named_parameters(recurse=False)}
    if missing := [name for name in trained if name not in own]:
        raise EinlinearError(
            what=f"{type(model).__name__} has no parameter {listed(missing, 5)}",
            rule="a model has the parameters that were trained besides the adapters",
            fix=_SAME,
        )
    return {name: own[name] for name in trained}


def _check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    if odd := sorted(name for name, _ in found.items() ^ expected.items()):
        first = odd[0]
        raise EinlinearError(
            what=f"{first!r} has the shape {expected.get(first, 'of nothing')} in the model, and "
            f"was saved with {found.get(first, 'nothing')}",
            rule="a model has the shapes that it had when it was adapted",
            fix=_SAME,
        )
