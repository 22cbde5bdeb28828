"""model_card: a README for a converted model, with its structures and the line that loads it."""

from __future__ import annotations

import sys

from torch import nn

from einlinear.errors import EinlinearError
from einlinear.models.saving.saved_layer import SavedLayer, describe_layers
from einlinear.show.numbers import amount, listed
from einlinear.structures.named import named_call
from einlinear.structures.text import parse
from einlinear.version import __version__

_HUGGING_FACE = """\
import einlinear  # the line to add: without it, from_pretrained raises an error
from transformers import {kind}

model = {kind}.from_pretrained("this folder")
"""
_FOLDER = """\
import einlinear as el

model = el.load("this folder", lambda: {kind}(...))
"""


def model_card(model: nn.Module) -> str:
    """Return a README for a converted model: its structures, their sizes, and how to load it.

    It is Markdown with the header of the Hugging Face Hub, to be written to README.md in the folder
    of the model.
    """
    layers = describe_layers(model)
    if not layers:
        raise EinlinearError(
            what=f"{type(model).__name__} has no structured layer",
            rule="the card tells which layers of a model are structured",
            fix="convert the model first: el.convert_(model, ...)",
        )
    kind = type(model).__name__
    library = sys.modules.get("transformers.modeling_utils")
    is_pretrained = library is not None and isinstance(model, library.PreTrainedModel)
    structured = _params(model, layers)
    dense = sum(_dense_params(layer) for layer in layers)
    total = sum(parameter.numel() for parameter in model.parameters())
    head = ["---", "library_name: transformers", "tags:", "- einlinear", "---", ""]
    return "\n".join(
        [
            *head * is_pretrained,
            f"# {kind} with structured linear layers",
            "",
            f"Layers of this model are structured layers of einlinear {__version__}. They have "
            f"{amount(structured)} parameters; dense layers in their places would have "
            f"{amount(dense)}. The whole model has {amount(total)}.",
            "",
            *_table(model, layers),
            "",
            "To load it:",
            "",
            "```python",
            (_HUGGING_FACE if is_pretrained else _FOLDER).format(kind=kind) + "```",
            "",
        ]
    )


def _table(model: nn.Module, layers: tuple[SavedLayer, ...]) -> list[str]:
    """Return the rows of a table; layers of one structure and shape share a row."""
    groups: dict[tuple[str, str], list[SavedLayer]] = {}
    for layer in layers:
        widths = f"{layer.in_features} → {layer.out_features}"
        groups.setdefault((_structure(layer), widths), []).append(layer)
    rows = ["| structure | in → out | layers | parameters | dense |", "|---|---|---|---|---|"]
    for (structure, widths), group in groups.items():
        names = listed([f"`{layer.names[0]}`" for layer in group], 2)
        before = sum(_dense_params(layer) for layer in group)
        after = _params(model, tuple(group))
        rows.append(f"| {structure} | {widths} | {names} | {amount(after)} | {amount(before)} |")
    return rows


def _structure(layer: SavedLayer) -> str:
    name = f"`{named_call(parse(layer.structure))}`" if layer.structure else layer.kind
    experts = f"{layer.num_experts} experts, {layer.num_active} active"
    return f"{name}, {experts}" if layer.num_experts else name


def _params(model: nn.Module, layers: tuple[SavedLayer, ...]) -> int:
    modules = [model.get_submodule(layer.names[0]) for layer in layers]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _dense_params(layer: SavedLayer) -> int:
    """Return the parameters of what the layer stands for: a dense layer, or two of them."""
    one = layer.in_features * layer.out_features
    if layer.kind == "MoEFeedForward":
        return 2 * one + (layer.in_features + layer.out_features) * layer.bias
    return one + layer.out_features * layer.bias
