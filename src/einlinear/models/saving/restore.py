"""restore_layers_: put the layers that were saved into a plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from torch import nn

from einlinear.errors import EinlinearError
from einlinear.layers.moe.layers import MoEFeedForward
from einlinear.models.saving.placing import keep_flags_, put_layers_, put_module_
from einlinear.models.saving.saved_layer import (
    SavedLayer,
    StructuredLayer,
    describe_layer,
    make_layer,
)
from einlinear.models.survey.sites import Site, find_sites, structured_names


def restore_layers_(model: nn.Module, layers: Sequence[SavedLayer]) -> None:
    """Replace the linear layers of a plain model by those that were saved; weights are empty.

    A layer that the model has already, because its own code creates it, stays. All new layers are
    created before the first is put in place.
    """
    sites = {site.names: site for site in find_sites(model)}
    linear: list[tuple[Site, nn.Module]] = []
    others: list[tuple[SavedLayer, nn.Module]] = []
    for saved in layers:
        if _is_there(model, saved):
            continue
        if saved.kind == "MoEFeedForward":
            others.append((saved, _instead_of(model, saved)))
            continue
        site = sites.get(saved.names)
        if site is None:
            _refuse_place(model, saved)
        _check_site(site, saved)
        layer = make_layer(saved, site.weight.device)
        assert not isinstance(layer, MoEFeedForward), "a feed-forward network has no site"
        keep_flags_(layer, site)
        linear.append((site, layer))
    put_layers_(model, linear)
    for saved, module in others:
        put_module_(model, saved.names, module)
    _check_rest(model, layers)


def _is_there(model: nn.Module, saved: SavedLayer) -> bool:
    """Whether the model has the layer already, in every place and with every setting."""
    found = [_module_at(model, name) for name in saved.names]
    first = found[0]
    if not isinstance(first, StructuredLayer) or any(other is not first for other in found):
        return False
    own = replace(describe_layer(first, saved.names), dtype=saved.dtype)
    if own != saved:
        raise EinlinearError(
            what=f"layer {saved.names[0]!r} of the new model is {first}, and another was saved",
            rule="a layer that make_model creates has the settings of the one that was saved",
            fix="make the model as it was before it was saved, or with plain linear layers",
        )
    return True


def _instead_of(model: nn.Module, saved: SavedLayer) -> nn.Module:
    """Return the feed-forward network for a place that holds some module."""
    found = [_module_at(model, name) for name in saved.names]
    if found[0] is None or any(other is not found[0] for other in found):
        _refuse_place(model, saved)
    weight = next(found[0].parameters(), None)
    layer = make_layer(saved, "cpu" if weight is None else weight.device)
    return layer.train(found[0].training)


def _module_at(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name) if name else model
    except AttributeError:
        return None


def _check_site(site: Site, saved: SavedLayer) -> None:
    given = site.d_in, site.d_out, site.bias is not None
    if site.obstacle:
        raise EinlinearError(
            what=f"layer {site.name!r} cannot be replaced: {site.obstacle}",
            rule="only plain linear layers that own their weights can be replaced",
            fix="make the model as it was before it was converted",
        )
    if given != (saved.in_features, saved.out_features, saved.bias):
        raise EinlinearError(
            what=f"layer {site.name!r} is {_shape(*given)} in the new model, and was saved as "
            f"{_shape(saved.in_features, saved.out_features, saved.bias)}",
            rule="the new model has the shapes of the one that was saved",
            fix="make the model with the same widths, and biases in the same places",
        )


def _shape(d_in: int, d_out: int, has_bias: bool) -> str:
    return f"{d_in} -> {d_out} {'with' if has_bias else 'without'} bias"


def _check_rest(model: nn.Module, layers: Sequence[SavedLayer]) -> None:
    """Refuse structured layers that were not saved."""
    saved = {name for layer in layers for name in layer.names}
    extra = [name for names in structured_names(model) for name in names if name not in saved]
    if extra:
        raise EinlinearError(
            what=f"layer {extra[0]!r} of the new model is structured, and was not saved",
            rule="the new model is plain, or has the structured layers of the one that was saved",
            fix="make the model as it was before it was converted",
        )


def _refuse_place(model: nn.Module, saved: SavedLayer) -> NoReturn:
    shared = f", shared by {' and '.join(saved.names)}" if len(saved.names) > 1 else ""
    raise EinlinearError(
        what=f"{type(model).__name__} has no layer {saved.names[0]!r}{shared}, which was saved as "
        f"{saved.kind}",
        rule="the new model has the same layers as the model that was saved, under the same names",
        fix="make the model as it was before it was converted",
    )
