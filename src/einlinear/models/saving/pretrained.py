"""Models of Hugging Face: what their config says of our layers, so that others refuse to guess.

Without our quantizer, transformers would build plain layers, find no weights for them and draw
random ones, with no more than a report. Two things prevent that, whatever its version:

- the config asks for a fusion that does not exist, whose name is the line to add;
- every structured layer is saved with a weight of one number, whose shape no plain layer has.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.computed import PLACEHOLDER_SHAPE
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.saving.saved_layer import (
    SavedLayer,
    StructuredLayer,
    describe_layers,
    read_layers,
)
from einlinear.show.numbers import listed
from einlinear.version import __version__

METHOD = "einlinear"
"""The name of our quantizer."""
PRETRAINED_SCHEMA = 1
LINE_TO_ADD = "none. This model has layers of einlinear: add the line `import einlinear` to load it"
"""The name of a fusion that does not exist. The error is "Unknown fusion type: none. This ..."."""
ADAPTED = (
    "none. This model was saved with adapters of einlinear, which cannot be loaded: merge them "
    "first, el.merge_(model), or save them alone, el.save_adapters(model, path)"
)
_BOTH = "none. This model has layers of einlinear and is quantized: it cannot be loaded again"


def mark_pretrained_(model: nn.Module) -> None:
    """Let save_pretrained save the structured layers of every Hugging Face model in a model."""
    base = _pretrained_base()
    if base is None:
        return
    try:
        ours = import_module("einlinear.models.saving.quantizer").EinlinearQuantizer
    except ImportError:  # of this version of transformers, which the hook has warned about
        return
    inside: set[int] = set()
    foreign: set[int] = set()  # inside models of another quantizer
    for module in model.modules():
        if not isinstance(module, base):
            continue
        own = {id(inner) for inner in module.modules()}
        is_outermost = id(module) not in inside
        if is_outermost and not any(isinstance(m, StructuredLayer) for m in module.modules()):
            continue
        others: Any = getattr(module, "hf_quantizer", None)
        is_part = module is model and _may_be_a_part(module)
        if is_outermost and not is_part and not isinstance(others, ours):
            _own_config_(module)
        is_foreign = others is not None and not isinstance(others, ours)
        if is_foreign:
            _ask_for_(module.config, _BOTH)
            foreign |= own
        elif id(module) not in foreign:
            layers = describe_layers(module, only_known=True)  # saving refuses the others
            if is_outermost:
                describe_in_config_(module, layers)
            module.hf_quantizer = ours.of(describe_pretrained(layers))
        inside |= own


def mark_adapted_(model: nn.Module) -> None:
    """Let from_pretrained refuse what save_pretrained writes of models while they have adapters.

    It would leave the adapters out. Saving works, for checkpoints that are loaded into the model.
    """
    base = _pretrained_base()
    if base is None:
        return
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, base):
            continue
        is_outermost = id(module) not in inside
        inside |= {id(inner) for inner in module.modules()}
        has_adapters = any(isinstance(inner, AdaptedLinear) for inner in module.modules())
        if not has_adapters:
            forget_line_(module.config, ADAPTED)
            continue
        if is_outermost and not (module is model and _may_be_a_part(module)):
            _own_config_(module)
        _ask_for_(module.config, ADAPTED)


def _pretrained_base() -> Any:
    """The class of models of Hugging Face; None if transformers is not in use."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


def _may_be_a_part(model: Any) -> bool:
    """Whether a model may be the body of another, which is then saved with the same config."""
    return model.base_model is model and model.get_output_embeddings() is None


def _own_config_(model: nn.Module) -> None:
    """Give a model a copy of its config, which other models may hold too.

    Modules inside share the copy, and its parts, as they shared the original.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        held = vars(module)
        held.update({name: copies[id(v)] for name, v in held.items() if id(v) in copies})


def describe_pretrained(layers: Iterable[SavedLayer]) -> dict[str, Any]:
    """Describe the structured layers of a model for its config."""
    return {
        "quant_method": METHOD,
        "schema": PRETRAINED_SCHEMA,
        "einlinear": __version__,
        "groups": pack_layers(layers),
    }


def describe_in_config_(model: nn.Module, layers: Iterable[SavedLayer]) -> None:
    """Write the structured layers of a Hugging Face model to its config."""
    config: Any = model.config
    config.quantization_config = describe_pretrained(layers)
    _ask_for_(config, LINE_TO_ADD)


def _ask_for_(config: Any, fusion: str) -> None:
    """Make a config ask for a fusion; transformers refuses one that does not exist."""
    config.fusion_config = {**(getattr(config, "fusion_config", None) or {}), fusion: True}


def forget_line_(config: Any, line: str = LINE_TO_ADD) -> None:
    """Remove a fusion that does not exist from a config."""
    asked = getattr(config, "fusion_config", None)
    if isinstance(asked, Mapping) and line in asked:
        config.fusion_config = {name: value for name, value in asked.items() if name != line}
        if not config.fusion_config:
            del config.fusion_config


def pack_layers(layers: Iterable[SavedLayer]) -> list[dict[str, Any]]:
    """Describe layers for a config: layers that differ only in their names share an entry."""
    groups: dict[str, dict[str, Any]] = {}
    for layer in layers:
        values = layer.as_json()
        names = list(values.pop("names"))
        groups.setdefault(repr(values), {**values, "modules": []})["modules"].append(names)
    return list(groups.values())


def unpack_layers(groups: object) -> tuple[SavedLayer, ...]:
    """Read the layers of a config; raise a ValueError if they are not what pack_layers made."""
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) for g in groups):
        raise ValueError(f"groups is {quote(groups)}, not a list of objects")
    layers = []
    for group in groups:
        modules = group.get("modules")
        if not isinstance(modules, Sequence):
            raise ValueError(f"modules is {quote(modules)}, not a list")
        own = {name: value for name, value in group.items() if name != "modules"}
        layers += [{**own, "names": names} for names in modules]
    return read_layers(layers)


def placed_in(model: nn.Module, layers: Sequence[SavedLayer]) -> tuple[SavedLayer, ...]:
    """Return the layers under their names in a model, which may be one with another head.

    As for all weights in from_pretrained, the body of a model can be loaded without its head, and
    the other way round. Layers outside the body that the model does not have are left out.
    """
    body = str(getattr(model, "base_model_prefix", "") or "")
    has_body = bool(body) and hasattr(model, body)
    is_inside = [layer.names[0].startswith(f"{body}.") for layer in layers]
    if has_body and not any(is_inside):
        return tuple(_renamed(layer, "", f"{body}.") for layer in layers)
    if body and not has_body and any(is_inside):
        chosen = [layer for layer, inside in zip(layers, is_inside, strict=True) if inside]
        return tuple(_renamed(layer, f"{body}.", "") for layer in chosen)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known = [layer.names[0].rpartition(".")[0] in modules for layer in layers]
    pairs = zip(layers, is_inside, known, strict=True)
    return tuple(layer for layer, inside, is_known in pairs if inside or is_known or not body)


def _renamed(layer: SavedLayer, old: str, new: str) -> SavedLayer:
    return replace(layer, names=tuple(new + name.removeprefix(old) for name in layer.names))


def placeholders(layers: Iterable[SavedLayer]) -> dict[str, Tensor]:
    """Return the weights of one number, by name. Each has memory of its own."""
    return {
        f"{name}.weight": torch.zeros(PLACEHOLDER_SHAPE, dtype=torch.uint8)
        for layer in layers
        for name in layer.names
        if layer.kind != "MoEFeedForward"
    }


def placeholder_patterns(layers: Iterable[SavedLayer]) -> set[str]:
    """Return patterns of the names of these weights in any file, whatever the body is called."""
    return {rf"(^|\.){re.escape(name)}$" for name in placeholders(layers)}


def check_loaded(model: nn.Module) -> None:
    """Refuse a model that lacks weights of a structured layer: their numbers would be arbitrary.

    transformers marks every parameter that it has loaded.
    """
    missing = [
        f"{layer.names[0]}.{name}"
        for layer in describe_layers(model)
        for name, parameter in model.get_submodule(layer.names[0]).named_parameters()
        if getattr(parameter, "_is_hf_initialized", False) is not True
    ]
    if missing:
        raise EinlinearError(
            what=f"the files of the model lack {listed(missing, 5)}",
            rule="every weight of a structured layer is loaded; none is drawn at random",
            fix="save the converted model again with save_pretrained; if the files are of a plain "
            "model with the config of a converted one, remove quantization_config and "
            "fusion_config from config.json",
        )
