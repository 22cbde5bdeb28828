"""SavedLayer: what decides a structured layer, as plain values for a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from einlinear.errors import EinlinearError
from einlinear.files.fields import typed
from einlinear.layers.export.kronecker import KroneckerLinear
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.layers import MoEFeedForward, MoELinear
from einlinear.layers.scaling import ExpertNorm, FactorInit
from einlinear.models.adapted import AdaptedLinear
from einlinear.structures.plan import make_plan
from einlinear.structures.text import parse

StructuredLayer: TypeAlias = EinsumLinear | SumLinear | MoELinear | MoEFeedForward
LayerKind = Literal["EinsumLinear", "KroneckerLinear", "SumLinear", "MoELinear", "MoEFeedForward"]

_KINDS: dict[type[nn.Module], LayerKind] = {
    EinsumLinear: "EinsumLinear",
    KroneckerLinear: "KroneckerLinear",
    SumLinear: "SumLinear",
    MoELinear: "MoELinear",
    MoEFeedForward: "MoEFeedForward",
}


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """Everything that decides a structured layer, except its weights.

    in_features, out_features: of an MoEFeedForward, the width of the model and the hidden width.
    sizes, axes: of the plan: the size of every edge, and the edges of every factor in order. They
        follow from the structure, but are stored, so that a later rule cannot change a layer. In a
        sum, edges and factors are named after their terms, "0.XA".
    num_experts: 0 if there are none.
    """

    names: tuple[str, ...]
    kind: LayerKind
    in_features: int
    out_features: int
    bias: bool
    dtype: str
    structure: str = ""
    sizes: dict[str, int] | None = None
    axes: dict[str, tuple[str, ...]] | None = None
    weight_norm: bool = False
    factor_init: FactorInit = "spectral"
    num_experts: int = 0
    num_active: int = 0
    expert_norm: ExpertNorm = "each"
    expert_gain: bool = False
    activation: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)


def describe_layers(model: nn.Module, *, only_known: bool = False) -> tuple[SavedLayer, ...]:
    """Describe every structured layer of a model once, under all its names.

    Layers of other classes, such as subclasses, are refused or, with only_known, left out.
    Adapters are none of the layers.
    """
    names: dict[int, list[str]] = {}
    layers: dict[int, StructuredLayer] = {}
    parts: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AdaptedLinear):  # adapters are saved on their own
            parts |= {id(part) for part in module.update.modules()}
        if isinstance(module, SumLinear):
            parts |= {id(term) for term in module.terms}
        if id(module) in parts:
            continue
        if isinstance(module, StructuredLayer) and not (only_known and _kind(module) is None):
            names.setdefault(id(module), []).append(name)
            layers[id(module)] = module
    return tuple(describe_layer(layer, tuple(names[key])) for key, layer in layers.items())


def describe_layer(layer: StructuredLayer, names: tuple[str, ...]) -> SavedLayer:
    """Describe one structured layer; refuse one whose class a file cannot name."""
    kind = _kind(layer)
    if kind is None:
        raise EinlinearError(
            what=f"layer {names[0]!r} is of the class {type(layer).__name__}, which cannot be "
            "saved with what decides it",
            rule=f"a layer is saved if its class is exactly {', '.join(_KINDS.values())}; others "
            "may compute something else from the same weights",
            fix="save the weights alone, torch.save(model.state_dict(), path), and load them into "
            "a model that your own code creates",
        )
    dtype = str(next(layer.parameters()).dtype).removeprefix("torch.")
    if isinstance(layer, MoEFeedForward):
        return SavedLayer(
            names,
            kind,
            layer.d_model,
            layer.d_hidden,
            layer.up_bias is not None,
            dtype,
            num_experts=layer.num_experts,
            num_active=layer.num_active,
            activation=layer.activation,
        )
    saved = SavedLayer(
        names,
        kind,
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        dtype,
        structure=str(layer.structure),
        sizes=layer.plan.sizes,
        axes=layer.plan.factor_edges,
        weight_norm=bool(layer.weight_norm),
        factor_init=layer.factor_init,
    )
    if isinstance(layer, EinsumLinear | SumLinear):
        return saved
    return replace(
        saved,
        num_experts=layer.num_experts,
        num_active=layer.num_active,
        expert_norm=layer.expert_norm,
        expert_gain=layer.gain is not None,
    )


def _kind(layer: nn.Module) -> LayerKind | None:
    kind, *bases = type(layer).__mro__
    if bases[0].__name__ == "FSDPModule":  # FSDP2 puts a class of its own in front
        kind = bases[1]
    return _KINDS.get(kind)


def read_layers(values: object) -> tuple[SavedLayer, ...]:
    """Read the layers of a file; raise a ValueError that names the field that is wrong."""
    layers: tuple[SavedLayer, ...] = typed(tuple[SavedLayer, ...], values, "layers")
    for layer in layers:
        if not layer.names:
            raise ValueError("layers has a layer without a name")
        if not isinstance(getattr(torch, layer.dtype, None), torch.dtype):
            raise ValueError(f"layers has the dtype {layer.dtype!r}")
    return layers


def make_layer(saved: SavedLayer, device: torch.device | str) -> StructuredLayer:
    """Create the layer that was described, with fresh weights; errors name the layer."""
    dtype: torch.dtype = getattr(torch, saved.dtype)
    with torch.device("meta"):  # draws no random numbers, of which the caller has a use
        layer = _with_error(saved, dtype)
    return layer.to_empty(device=device)


def _with_error(saved: SavedLayer, dtype: torch.dtype) -> StructuredLayer:
    try:
        _check_plan(saved)
        return _make(saved, dtype)
    except EinlinearError as error:
        raise EinlinearError(
            what=f"layer {saved.names[0]!r}: {error.what}", rule=error.rule, fix=error.fix
        ) from error


def _make(saved: SavedLayer, dtype: torch.dtype) -> StructuredLayer:
    if saved.kind == "MoEFeedForward":
        return MoEFeedForward(
            saved.in_features,
            saved.out_features,
            num_experts=saved.num_experts,
            num_active=saved.num_active,
            activation=saved.activation,
            bias=saved.bias,
            dtype=dtype,
        )
    if saved.kind != "MoELinear":
        make: Callable[..., EinsumLinear | SumLinear] = EinsumLinear
        if saved.kind != "EinsumLinear":
            make = SumLinear if saved.kind == "SumLinear" else KroneckerLinear
        return make(
            saved.in_features,
            saved.out_features,
            saved.bias,
            structure=saved.structure,
            weight_norm=saved.weight_norm,
            factor_init=saved.factor_init,
            dtype=dtype,
        )
    return MoELinear(
        saved.in_features,
        saved.out_features,
        saved.bias,
        structure=saved.structure,
        num_experts=saved.num_experts,
        num_active=saved.num_active,
        weight_norm=saved.weight_norm,
        factor_init=saved.factor_init,
        expert_norm=saved.expert_norm,
        expert_gain=saved.expert_gain,
        dtype=dtype,
    )


def _check_plan(saved: SavedLayer) -> None:
    """Refuse a layer that this version would lay out in another way than it was saved."""
    if saved.kind == "MoEFeedForward":
        return
    plan = make_plan(parse(saved.structure), saved.in_features, saved.out_features)
    if plan.sizes != saved.sizes or plan.factor_edges != saved.axes:
        raise EinlinearError(
            what=f"{saved.structure} was saved with {_plan_text(saved.sizes, saved.axes)}, and "
            f"this version of einlinear plans {_plan_text(plan.sizes, plan.factor_edges)}",
            rule="a layer is loaded with the sizes that it was trained with",
            fix="load it with the version of einlinear that saved it, which the file names",
        )


def _plan_text(sizes: Mapping[str, int] | None, axes: Mapping[str, tuple[str, ...]] | None) -> str:
    edges = ", ".join(f"{edge} {size}" for edge, size in (sizes or {}).items())
    factors = "; ".join(f"{name}: {' '.join(own)}" for name, own in (axes or {}).items())
    return f"the sizes {edges} ({factors})"
