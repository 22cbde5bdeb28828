"""merge_ and remove_adapters_: plain layers again, with what the adapters learned or without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.attention import PROJECTIONS, ProjectedAttention, packed_attention
from einlinear.models.convert.names import LayerNames
from einlinear.models.saving.placing import put_module_
from einlinear.models.saving.pretrained import mark_adapted_
from einlinear.models.survey.inferred import own_parameters
from einlinear.models.survey.obstacles import memory
from einlinear.models.survey.sites import module_paths


def merge_(model: nn.Module) -> tuple[str, ...]:
    """Add every adapter to the weight of its layer, in place; return the names of these layers.

    The layers are plain again, of the class that they had, and compute the same up to rounding.
    The sum is computed in float32 or better. An nn.MultiheadAttention is one again, too. Which
    parameters are frozen stays as it is: call model.requires_grad_(True) to train them all.
    """
    found = adapted_layers(model, "merge")
    _check_own(model, found)
    return _put_plain_(model, found, AdaptedLinear.merged)


def remove_adapters_(model: nn.Module) -> tuple[str, ...]:
    """Remove every adapter, in place; return the names of these layers.

    The model is as it was before adapt_, bit for bit, apart from parameters that were trained
    besides the adapters, from running statistics of norms, and from what is frozen.
    """
    return _put_plain_(model, adapted_layers(model, "remove"), AdaptedLinear.without_update)


def adapted_layers(model: nn.Module, verb: str) -> dict[LayerNames, AdaptedLinear]:
    """Return the layers of a model that have adapters, by all their names; there must be some."""
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module",
            fix="give the model that has adapters",
        )
    found = {
        names: module for module, names in module_paths(model) if isinstance(module, AdaptedLinear)
    }
    if not found:
        raise EinlinearError(
            what=f"{type(model).__name__} has no adapter",
            rule=f"there must be an adapter to {verb}",
            fix="add some first: el.adapt_(model, el.btt())",
        )
    if ("",) in found:
        raise EinlinearError(
            what="the model itself is an AdaptedLinear",
            rule="layers are replaced inside a model; the model itself stays the same object",
            fix="use layer.merged() or layer.without_update(), which return the plain layer",
        )
    return found


def _check_own(model: nn.Module, found: dict[LayerNames, AdaptedLinear]) -> None:
    """Refuse to untie a weight that another layer uses, too."""
    uses = Counter(memory(p) for m in model.modules() for p in own_parameters(m).values())
    for names, layer in found.items():
        if uses[memory(layer.weight)] > 1:
            raise EinlinearError(
                what=f"the weight of layer {names[0]!r} is tied to another",
                rule="the sum of a weight and its adapter belongs to one layer",
                fix="give the layer a weight of its own before you merge",
            )


def _put_plain_(
    model: nn.Module,
    found: dict[LayerNames, AdaptedLinear],
    plain: Callable[[AdaptedLinear], nn.Module],
) -> tuple[str, ...]:
    new = {names: plain(layer) for names, layer in found.items()}
    for names, layer in new.items():
        put_module_(model, names, layer)
    for module, names in module_paths(model):
        if isinstance(module, ProjectedAttention) and names != ("",):
            parts = [f"{names[0]}.{part}" for part in PROJECTIONS]
            has_changed = any(part in every for every in new for part in parts)
            if has_changed and (packed := packed_attention(module)) is not None:
                put_module_(model, names, packed)
    mark_adapted_(model)
    return tuple(names[0] for names in found)
