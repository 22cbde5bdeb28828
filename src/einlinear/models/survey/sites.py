"""The linear layers of a model: where they are, and which is the output head."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor, nn

from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.layers import MoELinear
from einlinear.layers.moe.routing import Gate, Routed
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.attention import (
    PROJECTIONS,
    projection_of,
    projection_params,
    projection_widths,
)
from einlinear.models.survey.facts import named_roles, plain_name
from einlinear.models.survey.obstacles import Surroundings, linear_class, memory

HEAD_NAMES = frozenset(
    "lm_head head classifier output_layer output_projection score cls embed_out qa_outputs "
    "classification_head mlm_head".split()
)
"""The last part of the name of an output head."""

_ADAPTED = "it has an adapter; merge it with el.merge_(model), or drop it: el.remove_adapters_"
_HEAD_NAMES_WHEN_ALONE = frozenset({"fc_out"})  # in some models every block has one


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """One linear layer of a model, or one projection of an nn.MultiheadAttention.

    module: the layer, or the attention.
    part: the name of the projection; "" for a layer.
    obstacle: why the layer cannot be replaced; "" if it can.
    adapter: the PEFT adapter that the layer is part of; "" if there is none.
    """

    names: tuple[str, ...]
    module: nn.Module
    part: str
    d_in: int
    d_out: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    obstacle: str
    adapter: str = ""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """Return every linear layer of the model once, with all its names, in registration order.

    Linear layers are nn.Linear and its subclasses, the Conv1D of Hugging Face, the four projections
    of nn.MultiheadAttention, and adapted layers, which cannot be replaced. Layers that are
    structured already are left out.
    """
    paths = module_paths(model)
    around = Surroundings.of(model)
    inside = {
        id(module.out_proj) for module, _ in paths if isinstance(module, nn.MultiheadAttention)
    }
    sites: list[Site] = []
    for module, names in paths:
        if isinstance(module, nn.MultiheadAttention):
            sites += _attention_sites(module, names, paths, around)
        elif isinstance(module, AdaptedLinear):
            shape = module.in_features, module.out_features
            sites.append(Site(names, module, "", *shape, module.weight, module.bias, _ADAPTED))
        elif (
            id(module) not in inside
            and not isinstance(module, Gate)
            and (widths := _widths(module))
        ):
            sites.append(_linear_site(module, names, widths, around))
    return tuple(sites)


def dense_parameters(site: Site) -> tuple[Tensor, Tensor | None]:
    """Return the weight of a layer, outputs x inputs, and its bias."""
    if site.part:
        assert isinstance(site.module, nn.MultiheadAttention), "a part belongs to an attention"
        layer = projection_of(site.module, site.part)
        return layer.get_parameter("weight"), getattr(layer, "bias", None)
    is_transposed = linear_class(site.module) is not nn.Linear  # the Conv1D of Hugging Face
    return site.weight.T if is_transposed else site.weight, site.bias


def structured_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of every layer that is structured already; adapters and terms are none."""
    known = EinsumLinear | SumLinear | Routed
    inside = {
        id(inner)
        for module in model.modules()
        if isinstance(module, AdaptedLinear | SumLinear)
        for inner in module.modules()
        if inner is not module
    }
    return tuple(
        names
        for module, names in module_paths(model)
        if isinstance(module, known) and id(module) not in inside
    )


def output_heads(model: nn.Module, sites: tuple[Site, ...]) -> frozenset[str]:
    """Return the first names of the linear layers that compute the model's output.

    A layer is a head if the model declares it (`layer_roles`, or Hugging Face's
    get_output_embeddings), if it shares its weight with an nn.Embedding, or if its name ends in one
    of HEAD_NAMES, or in fc_out if there is only one of those. If there is no such layer, the head
    is the last of several layers, provided that no layer has an input of its output width. A layer
    that every block has is not a head, whatever its name: see `_has_sibling`. Structured layers
    take part in this search but are never heads unless the model declares them, so converting a
    model does not change its heads.
    """
    declared = named_roles(model)["head"]
    embedded = {memory(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = _layers(model, sites)
    count = Counter(layer.last_parts[0] for layer in layers)
    found = set()
    for site in sites:
        layer = _Layer(site.names, site.d_in, site.d_out)
        last = set(layer.last_parts)
        is_named = last & HEAD_NAMES or any(count[n] == 1 for n in last & _HEAD_NAMES_WHEN_ALONE)
        is_declared = any(plain_name(name) in declared for name in site.names)
        is_tied = memory(site.weight) in embedded
        if is_declared or is_tied or (is_named and not _has_sibling(layer, layers)):
            found.add(site.name)
    return frozenset(found if found or declared else _last_head(sites, layers))


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer, dense or structured, as the search for the head sees it."""

    names: tuple[str, ...]
    d_in: int
    d_out: int

    @property
    def last_parts(self) -> tuple[str, ...]:
        """The last part of each of its names."""
        return tuple(plain_name(name).rpartition(".")[2] for name in self.names)

    @property
    def places(self) -> set[str]:
        """Its names with # in place of block numbers; a number at the end stays."""
        parts = [plain_name(name).split(".") for name in self.names]
        return {".".join(["#" if p.isdigit() else p for p in ps[:-1]] + ps[-1:]) for ps in parts}


def _layers(model: nn.Module, sites: tuple[Site, ...]) -> list[_Layer]:
    """Return all linear layers, dense and structured, in registration order."""
    order = {id(module): i for i, module in enumerate(model.modules())}
    structured = structured_names(model)
    found = [(order[id(s.module)], _Layer(s.names, s.d_in, s.d_out)) for s in sites]
    found += [
        (order[id(module)], _Layer(names, module.in_features, module.out_features))
        for module, names in module_paths(model)
        if isinstance(module, EinsumLinear | SumLinear | MoELinear) and names in structured
    ]
    return [layer for _, layer in sorted(found, key=lambda item: item[0])]


def _last_head(sites: tuple[Site, ...], layers: list[_Layer]) -> set[str]:
    """Return the last of several layers, if it is dense and no layer reads its width."""
    if len(layers) < 2:
        return set()
    last = layers[-1]
    is_dense = any(site.names == last.names for site in sites)
    is_read = any(layer.d_in == last.d_out for layer in layers)
    return {last.names[0]} if is_dense and not is_read and not _has_sibling(last, layers) else set()


def _has_sibling(layer: _Layer, layers: list[_Layer]) -> bool:
    """Return whether another block has the same layer: the same name and output width."""
    return any(
        other.names != layer.names and other.d_out == layer.d_out and other.places & layer.places
        for other in layers
    )


def module_paths(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Return every module once, with all its qualified names."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    return [(module, tuple(names[key])) for key, module in modules.items()]


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the input and output width of a linear layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if linear_class(module) is None:
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.shape[0], weight.shape[1]  # Conv1D keeps its weight transposed


def _linear_site(
    module: nn.Module, names: tuple[str, ...], widths: tuple[int, int], around: Surroundings
) -> Site:
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    bias: nn.Parameter | None = getattr(module, "bias", None)
    obstacle, adapter = around.linear_obstacle(module), around.adapter(module)
    return Site(names, module, "", *widths, weight, bias, obstacle, adapter)


def _attention_sites(
    module: nn.MultiheadAttention,
    names: tuple[str, ...],
    paths: list[tuple[nn.Module, tuple[str, ...]]],
    around: Surroundings,
) -> list[Site]:
    out_names = next(names for other, names in paths if other is module.out_proj)
    several = f"its out_proj is used in several places: {', '.join(out_names)}"
    several = several if len(out_names) > len(names) else ""
    sites = []
    for part in PROJECTIONS:
        weight, *rest = [*projection_params(module, part).values()] or [next(module.parameters())]
        bias = rest[0] if rest else None
        widths = projection_widths(module, part)
        obstacle = several or around.projection_obstacle(module, part)
        qualified = tuple(f"{name}.{part}".lstrip(".") for name in names)
        sites.append(Site(qualified, module, part, *widths, weight, bias, obstacle))
    return sites
