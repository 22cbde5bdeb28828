"""convert_: replace the linear layers of a model by structured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NoReturn, get_args

from torch import nn
from torch.nn.parameter import is_lazy

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.moe.layers import MoELinear
from einlinear.layers.moe.routing import Routed
from einlinear.layers.scaling import FactorInit
from einlinear.models.convert.conversion import Conversion, LayerNote, Swap, Unseen
from einlinear.models.convert.experts import Experts
from einlinear.models.convert.heads import Heads
from einlinear.models.convert.names import LayerNames, grouped, layer_list, patterns_for
from einlinear.models.convert.rules import RuleChoice, Rules, choose_rules, read_rules
from einlinear.models.saving.placing import keep_flags_, put_layers_
from einlinear.models.saving.pretrained import mark_pretrained_
from einlinear.models.survey.obstacles import ADAPTER
from einlinear.models.survey.sites import Site, find_sites, output_heads, structured_names
from einlinear.models.survey.trained import checkpoints, unmarked_source, why_trained
from einlinear.structures.plan import make_plan
from einlinear.structures.structure import Structure
from einlinear.structures.values import one_of

_BEFORE_ADAPTERS = (
    "convert the model before you add adapters: what they have learned, merged or not, is lost "
    "with the weights"
)

LayerFilter = Callable[[nn.Module, str], bool]


def convert_(
    model: nn.Module,
    rules: Rules,
    *,
    where: LayerFilter | None = None,
    init: str | None = None,
    weight_norm: bool = True,
    factor_init: FactorInit = "spectral",
) -> Conversion:
    """Replace linear layers of a model by structured ones, in place; return what was done.

    The new layers are randomly initialised: what the old ones had learned is lost. A layer whose
    weights look trained therefore raises an error unless init="fresh". The new layers keep device,
    dtype, training flag, requires_grad, and whether there is a bias. If any layer cannot be
    replaced, nothing is changed. Create the optimizer afterwards, because the parameters are new.

    Args:
        model: any module that contains linear layers: nn.Linear, the Conv1D of Hugging Face,
            nn.MultiheadAttention (its projections are named q_proj, k_proj, v_proj, out_proj).
        rules: a structure for all layers except the output head; or {pattern: structure}, where the
            first match decides. A pattern is a glob ("*.mlp.*") or a compiled regular expression
            that matches the full name of a layer. A structure is a Structure, its text,
            el.heads(...), el.moe(...), or None to leave the layer alone. An output head is only
            replaced by a pattern that matches nothing else.
        where: a further condition on the layer (or the attention that contains it) and its name.
        init: where the new weights come from. "fresh" initialises them randomly, with biases 0,
            whatever the old ones were. None, the default, does the same, but raises an error if a
            layer to replace was loaded from a checkpoint by Hugging Face, is frozen, or is part of
            a PEFT adapter.
        weight_norm: whether the new layers normalise their factors.
        factor_init: the standard deviation of their fresh factors, as in EinsumLinear.
    """
    _check_init(init)
    one_of(factor_init, "factor_init", get_args(FactorInit))
    conversion = plan_conversion(model, rules, where=where)
    if conversion.lost and init is None:
        _refuse_to_lose(conversion.lost_by_reason)
    apply_swaps_(model, conversion.swaps, weight_norm=weight_norm, factor_init=factor_init)
    mark_pretrained_(model)
    return conversion


def plan_conversion(
    model: nn.Module, rules: Rules, *, where: LayerFilter | None = None
) -> Conversion:
    """Return what convert_ would do, without changing the model.

    The table names trained weights that would be lost; convert_ asks before it replaces those.
    """
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module",
            fix="give the model first, then the rules: el.convert_(model, el.btt())",
        )
    sites = find_sites(model)
    _check_sites(model, sites)
    structured = structured_names(model)
    chosen = choose_rules(
        read_rules(rules),
        tuple(site.names for site in sites),
        output_heads(model, sites),
        others=structured,
    )
    loaded = checkpoints(model)
    swaps: list[Swap] = []
    left: list[LayerNote] = []
    lost: list[LayerNote] = []
    blocked: list[Site] = []
    for site in sites:
        choice = chosen[site.name]
        if where is not None and choice.rule is not None and not where(site.module, site.name):
            choice = RuleChoice(None, reason="excluded by `where`")
        if choice.rule is None:
            left.append(LayerNote(site.names, choice.reason))
        elif site.obstacle:
            blocked.append(site)
        else:
            swaps.append(replace(_swap(model, site, choice.rule), typed=choice.typed))
            if reason := site.adapter or why_trained(site.weight, loaded):
                lost.append(LayerNote(site.names, reason))
    _check_blocked(blocked, [name for swap in swaps for name in swap.names])
    left += [LayerNote(names, "structured already") for names in structured]
    if not swaps:
        _refuse_nothing_to_do(left)
    params = sum(0 if is_lazy(p) else p.numel() for p in model.parameters())
    unseen, source = _unseen(model, sites), unmarked_source(model, loaded)
    return Conversion(tuple(swaps), tuple(left), params, unseen, tuple(lost), source)


def apply_swaps_(
    model: nn.Module,
    swaps: Iterable[Swap],
    *,
    weight_norm: bool = True,
    factor_init: FactorInit = "spectral",
) -> None:
    """Replace the layers; all new layers are created before the first is put in place."""
    sites = {site.names: site for site in find_sites(model)}
    layers: list[tuple[Site, nn.Module]] = []
    for swap in swaps:
        site = sites.get(swap.names)
        if site is None or (site.d_in, site.d_out) != (swap.d_in, swap.d_out) or site.obstacle:
            raise EinlinearError(
                what=f"there is no linear layer {swap.name!r}, {swap.d_in} -> {swap.d_out}, to "
                f"replace in {type(model).__name__}",
                rule="swaps can only be applied to the model they were planned for",
                fix="plan them again for this model",
            )
        layers.append((site, _new_layer(site, swap, weight_norm, factor_init)))
    put_layers_(model, layers)


def _check_init(init: str | None) -> None:
    if init in (None, "fresh"):
        return
    is_planned = init == "project"
    raise EinlinearError(
        what=f"init is {quote(init)}" + ", which is not available in this version yet" * is_planned,
        rule='new layers are randomly initialised: init="fresh"',
        fix='give init="fresh" if the old weights may be lost, or leave init out'
        + '; init="project", which starts from the old weights, comes in a later release'
        * is_planned,
    )


def _refuse_to_lose(lost: dict[str, list[LayerNames]]) -> NoReturn:
    named = "; ".join(f"{layer_list(layers, 5)} ({reason})" for reason, layers in lost.items())
    is_adapted = any(reason.startswith(ADAPTER) for reason in lost)
    raise EinlinearError(
        what=f"trained weights would be lost: {named}",
        rule="new layers are randomly initialised, so the model forgets what these have learned",
        fix=f"{_BEFORE_ADAPTERS}; or "
        * is_adapted
        + 'give init="fresh" to replace them anyway, or the rule None for layers to keep; '
        'init="project", which starts from the old weights, comes in a later release',
    )


def _unseen(model: nn.Module, sites: tuple[Site, ...]) -> tuple[Unseen, ...]:
    """Return every module that owns parameters which belong to no linear layer."""
    known = EinsumLinear | Routed
    layers = [site.module for site in sites]
    layers += [module for module in model.modules() if isinstance(module, known)]
    seen = {id(parameter) for layer in layers for parameter in layer.parameters()}
    found = []
    for name, module in model.named_modules():
        own = {id(p): p for p in module.parameters(recurse=False) if id(p) not in seen}
        seen |= own.keys()
        params = sum(0 if is_lazy(p) else p.numel() for p in own.values())
        if params:
            found.append(Unseen(name or "the model itself", type(module).__name__, params))
    return tuple(found)


def _swap(model: nn.Module, site: Site, rule: Structure | Heads | Experts) -> Swap:
    """Return the swap that a rule asks for; errors name the layer."""
    try:
        structure = rule.structure if isinstance(rule, Experts) else rule
        if isinstance(structure, Heads):
            structure = structure.structure_for(model, site.name, site.d_in, site.d_out)
        make_plan(structure, site.d_in, site.d_out)
    except EinlinearError as error:
        raise EinlinearError(
            what=f"layer {site.name!r}, {site.d_in} -> {site.d_out}: {error.what}",
            rule=error.rule,
            fix=error.fix,
        ) from error
    swap = Swap(site.names, site.d_in, site.d_out, site.bias is not None, structure)
    if not isinstance(rule, Experts):
        return swap
    return replace(
        swap,
        num_experts=rule.num_experts,
        num_active=rule.num_active,
        expert_norm=rule.expert_norm,
        expert_gain=rule.expert_gain,
    )


def _check_sites(model: nn.Module, sites: tuple[Site, ...]) -> None:
    if any(name in ("", site.part) for site in sites for name in site.names):
        raise EinlinearError(
            what=f"the model itself is a {type(model).__name__}",
            rule="convert_ replaces layers inside a model; the model itself stays the same object",
            fix="put it into a container, nn.Sequential(layer), or create an el.EinsumLinear",
        )
    if not sites:
        raise EinlinearError(
            what=f"{type(model).__name__} has no linear layer to replace",
            rule="convert_ replaces nn.Linear, nn.MultiheadAttention and the Conv1D of Hugging "
            "Face",
            fix="give a model that contains such layers; convert each model only once",
        )


def _check_blocked(blocked: list[Site], replaced: list[str]) -> None:
    """Refuse to skip a layer that a rule asks for."""
    if blocked:
        first, *more = blocked
        others = f"; neither can {layer_list([site.names for site in more], 5)}" if more else ""
        patterns = patterns_for([site.name for site in blocked], replaced)
        rules = ", ".join(f"{pattern!r}: None" for pattern in patterns)
        is_adapted = first.obstacle.startswith(ADAPTER)
        raise EinlinearError(
            what=f"layer {first.name!r} cannot be replaced: {first.obstacle}{others}",
            rule="only plain linear layers that own their weights can be replaced",
            fix=f"{_BEFORE_ADAPTERS if is_adapted else 'remove the obstacle'}; or leave "
            f"{'them' if more else 'the layer'} alone by putting this first in the rules: {rules}",
        )


def _refuse_nothing_to_do(left: list[LayerNote]) -> NoReturn:
    lines = grouped((layer.names, (layer.reason,)) for layer in left)
    some = ", ".join(f"{name} ({reason})" for name, (reason,) in lines[:8])
    raise EinlinearError(
        what=f"no layer would be replaced: {some}{', ...' * (len(lines) > 8)}",
        rule="rules must replace at least one layer; a pattern replaces an output head only if it "
        "matches nothing else",
        fix="give a pattern for the layers to replace; for a head, its name: {'lm_head': ...}",
    )


def _new_layer(
    site: Site, swap: Swap, weight_norm: bool, factor_init: FactorInit
) -> EinsumLinear | MoELinear:
    """Create the structured layer with the device, dtype and flags of the dense one."""
    make: Callable[..., EinsumLinear | MoELinear] = EinsumLinear
    if swap.num_experts:
        make = partial(
            MoELinear,
            num_experts=swap.num_experts,
            num_active=swap.num_active,
            expert_norm=swap.expert_norm,
            expert_gain=swap.expert_gain,
        )
    new = make(
        swap.d_in,
        swap.d_out,
        bias=swap.has_bias,
        structure=swap.structure,
        weight_norm=weight_norm,
        factor_init=factor_init,
        device=site.weight.device,
        dtype=site.weight.dtype,
    )
    keep_flags_(new, site)
    return new
