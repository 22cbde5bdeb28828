"""put_layers_: put new layers where a model has linear layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.layers import MoELinear
from einlinear.models.attention import ProjectedAttention
from einlinear.models.survey.sites import Site


def put_layers_(model: nn.Module, layers: Iterable[tuple[Site, nn.Module]]) -> None:
    """Put layers in the places of a model's linear layers, under all names of each.

    An nn.MultiheadAttention is replaced as a whole, since it cannot hold layers.
    """
    changes: list[tuple[tuple[str, ...], nn.Module]] = []
    projections: dict[int, dict[str, nn.Module]] = {}
    attentions: dict[int, Site] = {}
    for site, layer in layers:
        if site.part:
            attentions[id(site.module)] = site
            projections.setdefault(id(site.module), {})[site.part] = layer
        else:
            changes.append((site.names, layer))
    for key, site in attentions.items():
        assert isinstance(site.module, nn.MultiheadAttention), "a part belongs to an attention"
        names = tuple(name.removesuffix(f".{site.part}") for name in site.names)
        changes.append((names, ProjectedAttention(site.module, projections[key])))
    for names, new in changes:
        put_module_(model, names, new)
    _leave_fast_path_(model)


def keep_flags_(new: EinsumLinear | SumLinear | MoELinear, site: Site) -> None:
    """Give a layer the flags of the one that it replaces: requires_grad and training."""
    new.requires_grad_(site.weight.requires_grad)
    if new.bias is not None and site.bias is not None:
        new.bias.requires_grad_(site.bias.requires_grad)
    new.train(site.module.training)


def put_module_(model: nn.Module, names: Iterable[str], new: nn.Module) -> None:
    """Put a module in place under all these names."""
    for name in names:
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent).register_module(last, new)


def _leave_fast_path_(model: nn.Module) -> None:
    """Disable the fused inference of torch's encoder, which reads weights and skips layers."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            continue
        if any(isinstance(inner, EinsumLinear | MoELinear) for inner in module.modules()):
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
            else:
                module.activation_relu_or_gelu = 0
