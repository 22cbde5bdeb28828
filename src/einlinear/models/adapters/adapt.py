"""adapt_: freeze a model and put structured updates beside its linear layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear, SumLinear, terms_of
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.adapters.adaptation import Adaptation
from einlinear.models.adapters.freezing import freeze_, trainable_names, trained_besides
from einlinear.models.attention import projection_of
from einlinear.models.convert.conversion import Swap
from einlinear.models.convert.convert import LayerFilter, plan_conversion
from einlinear.models.convert.names import layer_list
from einlinear.models.convert.rules import LayerRule, Rules
from einlinear.models.saving.placing import put_layers_
from einlinear.models.saving.pretrained import mark_adapted_
from einlinear.models.survey.obstacles import ADAPTER, linear_class
from einlinear.models.survey.sites import Site, find_sites
from einlinear.structures.structure import StructureSum

LayerPattern = str | re.Pattern[str]


def adapt_(
    model: nn.Module,
    rules: Rules,
    *,
    where: LayerPattern | Iterable[LayerPattern] | LayerFilter | None = None,
    trainable: str | Iterable[str] = (),
    dtype: torch.dtype | None = None,
) -> Adaptation:
    """Freeze a model and add a trained structured update to its linear layers; return a report.

        y = W x + bias  becomes  y = W x + U x + bias        U: any structure, zero at the start

    With low_rank(rank=r), this is LoRA. The last factor of every update, in a sum of every term, is
    zero and the others are fresh, so the output is unchanged and gradients flow. There is no scale:
    its effect is that of the learning rate. Updates have no weight normalisation, which
    would limit how far they can move a layer. If any layer cannot be adapted, nothing is changed.
    Create the optimizer afterwards. A second call adapts further layers; what the first one trains
    is still trained.

    Args:
        model: any module that contains linear layers, as for convert_.
        rules: the structure of the updates of all layers except the output head; or
            {pattern: structure}, as for convert_, with None to leave layers alone.
        where: the layers to adapt: a pattern or several, as in rules; or a further condition on
            the layer and its name.
        trainable: globs on the names of parameters, or of modules with all their parameters, that
            are trained too: "head", "*.norm*". They are saved with the adapters.
        dtype: the dtype of the updates; by default that of each layer. Give torch.float32 to train
            updates of a model in bfloat16.
    """
    condition = where if callable(where) else None
    rules = _rules_where(rules, where) if condition is None else rules
    plan = plan_conversion(model, rules, where=condition)
    _check_rules([swap for swap in plan.swaps if swap.num_experts])
    _check_dtype(dtype)
    if within := [layer.names for layer in plan.lost if layer.reason.startswith(ADAPTER)]:
        raise EinlinearError(
            what=f"adapters inside adapters of PEFT: {layer_list(within, 5)}",
            rule="adapt_ adds updates to plain linear layers",
            fix="merge the others first, or adapt the model before them",
        )
    others = trainable_names(model, trainable) | trained_besides(model)
    sites = {site.names: site for site in find_sites(model)}
    layers = [(sites[swap.names], _adapted(sites[swap.names], swap, dtype)) for swap in plan.swaps]
    put_layers_(model, layers)
    freeze_(model, except_for=others)
    mark_adapted_(model)
    return _report(model, plan.swaps, plan.left)


def adapted_layer(site: Site, update: EinsumLinear | SumLinear) -> AdaptedLinear:
    """Return the layer at a site with an update beside it."""
    if not site.part:
        is_transposed = linear_class(site.module) is not nn.Linear  # the Conv1D of Hugging Face
        return AdaptedLinear(site.module, update, is_transposed=is_transposed)
    assert isinstance(site.module, nn.MultiheadAttention), "a part belongs to an attention"
    plain = projection_of(site.module, site.part)
    return AdaptedLinear(plain.train(site.module.training), update)


def _adapted(site: Site, swap: Swap, dtype: torch.dtype | None) -> AdaptedLinear:
    is_sum = isinstance(swap.structure, StructureSum)
    make: Callable[..., EinsumLinear | SumLinear] = SumLinear if is_sum else EinsumLinear
    update = make(
        swap.d_in,
        swap.d_out,
        bias=False,
        structure=swap.structure,
        weight_norm=False,
        device=site.weight.device,
        dtype=site.weight.dtype if dtype is None else dtype,
    )
    for term in terms_of(update):
        nn.init.zeros_(term.get_parameter(term.plan.steps[-1].factor))
    return adapted_layer(site, update.train(site.module.training))


def _report(model: nn.Module, swaps: tuple[Swap, ...], left: Any) -> Adaptation:
    updates = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, AdaptedLinear)
        for parameter in module.update.parameters()
    }
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Adaptation(
        swaps,
        left,
        tuple(name for name, p in named.items() if id(p) not in updates),
        sum(p.numel() for p in named.values()),
        sum(p.numel() for p in model.parameters()),
    )


def _rules_where(rules: Rules, where: object) -> Rules:
    """The rules for the layers that patterns name."""
    if where is None:
        return rules
    patterns = [where] if isinstance(where, str | re.Pattern) else where
    if isinstance(rules, Mapping):
        raise EinlinearError(
            what=f"where is {quote(where)}, and the rules are a mapping",
            rule="patterns stand in one place: in a mapping of rules, or in where",
            fix="write the patterns into the rules, or give one structure",
        )
    patterns = list(patterns) if isinstance(patterns, Iterable) else [None]
    if not all(isinstance(pattern, str | re.Pattern) for pattern in patterns):
        raise EinlinearError(
            what=f"where is given as {quote(where)}",
            rule="where is a pattern on layer names, several, or a function of layer and name",
            fix='write where="*.mlp.*" or where=["*.q_proj", "*.v_proj"]',
        )
    chosen: dict[object, LayerRule] = dict.fromkeys(patterns, rules)
    return chosen


def _check_rules(mixed: list[Swap]) -> None:
    if mixed:
        raise EinlinearError(
            what=f"experts as adapters: {layer_list([swap.names for swap in mixed], 5)}",
            rule="an adapter is one structured matrix, so that it can be merged",
            fix="give a structure, such as el.btt(rank=2)",
        )


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EinlinearError(
            what=f"the dtype of adapters is given as {quote(dtype)}",
            rule="weights are floating-point numbers",
            fix="give dtype=torch.float32, or leave it out",
        )
