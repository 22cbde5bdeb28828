"""convert_: structured layers in the place of a model's dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.moe import MoELinear
from einlinear.layers.routing import Routed
from einlinear.models.attention import ProjectedAttention
from einlinear.models.conversion import Conversion, Left, Lost, Swap, Unseen, grouped
from einlinear.models.experts import Experts
from einlinear.models.heads import Heads
from einlinear.models.obstacles import ADAPTER
from einlinear.models.rules import Choice, Rules, choose, listed, read_rules
from einlinear.models.sites import Site, find_sites, output_heads, structured_names
from einlinear.models.trained import checkpoints, unmarked_source, why_trained
from einlinear.structures.plan import make_plan
from einlinear.structures.structure import Structure

_BEFORE_ADAPTERS = (
    "convert the model before you add adapters: what they learned, merged or not, is lost with "
    "the weights"
)

Where = Callable[[nn.Module, str], bool]


def convert_(
    model: nn.Module,
    rules: Rules,
    *,
    where: Where | None = None,
    init: str | None = None,
    weight_norm: bool = True,
) -> Conversion:
    """Replace linear layers of a model by structured ones, in place; says what was done.

    The new layers start with random weights: what the old ones had learned is lost. So a layer
    whose weights look trained is refused unless init="fresh" is given. Device, dtype, training
    flag, requires_grad and whether there is a bias are kept. If anything speaks against a
    replacement, nothing is changed. Make the optimizer afterwards: parameters are new.

    Args:
        model: any module that holds linear layers: nn.Linear, the Conv1D of Hugging Face,
            nn.MultiheadAttention (its projections are named q_proj, k_proj, v_proj, out_proj).
        rules: a structure for all layers but the output head; or {pattern: structure}, the first
            match deciding. A pattern is a glob on the layer's name ("*.mlp.*"), or a compiled
            regular expression for all of it; a structure is a Structure, its text, el.heads(...),
            el.moe(...), or None to leave the layer alone. Only a pattern for it alone replaces an
            output head.
        where: a further condition on the layer (or the attention that holds it) and its name.
        init: where the new weights come from. "fresh" draws them at random, biases 0, whatever the
            old ones were. None, the default, does the same but raises an error if a layer would be
            replaced whose weights Hugging Face loaded from a checkpoint, which is frozen, or which
            is part of a PEFT adapter.
        weight_norm: whether the new layers normalise their factors.
    """
    _check_init(init)
    conversion = plan_conversion(model, rules, where=where)
    if conversion.lost and init is None:
        _refuse_to_lose(conversion.lost)
    apply_swaps_(model, conversion.swaps, weight_norm=weight_norm)
    return conversion


def plan_conversion(model: nn.Module, rules: Rules, *, where: Where | None = None) -> Conversion:
    """What convert_ would do to the model, which stays as it is.

    Trained weights that would be lost are named in the table; convert_ asks before it does that.
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
    chosen = choose(
        read_rules(rules),
        tuple(site.names for site in sites),
        output_heads(model, sites),
        others=structured,
    )
    loaded = checkpoints(model)
    swaps: list[Swap] = []
    left: list[Left] = []
    lost: list[Lost] = []
    blocked: list[Site] = []
    for site in sites:
        choice = chosen[site.name]
        if where is not None and choice.rule is not None and not where(site.module, site.name):
            choice = Choice(None, reason="where says no")
        if choice.rule is None:
            left.append(Left(site.names, choice.reason))
        elif site.obstacle:
            blocked.append(site)
        else:
            swaps.append(replace(_swap(model, site, choice.rule), typed=choice.typed))
            if reason := site.adapter or why_trained(site.weight, loaded):
                lost.append(Lost(site.names, reason))
    _check_blocked(blocked, [name for swap in swaps for name in swap.names])
    left += [Left(names, "structured already") for names in structured]
    if not swaps:
        _refuse_nothing_to_do(left)
    params = sum(0 if is_lazy(p) else p.numel() for p in model.parameters())
    unseen, source = _unseen(model, sites), unmarked_source(model, loaded)
    return Conversion(tuple(swaps), tuple(left), params, unseen, tuple(lost), source)


def plan_swaps(model: nn.Module, rules: Rules, where: Where | None = None) -> tuple[Swap, ...]:
    """The layers that convert_ would replace, in the order of registration."""
    return plan_conversion(model, rules, where=where).swaps


def apply_swaps_(model: nn.Module, swaps: Iterable[Swap], *, weight_norm: bool = True) -> None:
    """Put the new layers in their places; all are made before the first is put in."""
    sites = {site.names: site for site in find_sites(model)}
    changes: list[tuple[tuple[str, ...], nn.Module]] = []
    projections: dict[int, dict[str, nn.Module]] = {}
    attentions: dict[int, Site] = {}
    for swap in swaps:
        site = sites.get(swap.names)
        if site is None or (site.d_in, site.d_out) != (swap.d_in, swap.d_out) or site.obstacle:
            raise EinlinearError(
                what=f"there is no linear layer {swap.name!r}, {swap.d_in} -> {swap.d_out}, to "
                f"replace in {type(model).__name__}",
                rule="swaps are applied to a model as it was when they were planned",
                fix="plan them for this model",
            )
        layer = _new_layer(site, swap, weight_norm)
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
        for name in names:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).register_module(last, new)
    _leave_fast_path_(model)


def _check_init(init: str | None) -> None:
    if init in (None, "fresh"):
        return
    is_planned = init == "project"
    raise EinlinearError(
        what=f"init is {quote(init)}" + ", which is not available in this version yet" * is_planned,
        rule='new layers start with random weights: init="fresh"',
        fix='give init="fresh" if the old weights may be lost, or leave init out'
        + '; a later release builds init="project", which starts from the old weights' * is_planned,
    )


def _refuse_to_lose(lost: tuple[Lost, ...]) -> NoReturn:
    """No trained weights are replaced by random ones unless that is asked for."""
    by_reason: dict[str, list[tuple[str, ...]]] = {}
    for layer in lost:
        by_reason.setdefault(layer.reason, []).append(layer.names)
    named = "; ".join(f"{listed(names, 5)} ({reason})" for reason, names in by_reason.items())
    is_adapted = any(reason.startswith(ADAPTER) for reason in by_reason)
    raise EinlinearError(
        what=f"trained weights would be lost: {named}",
        rule="new layers start with random weights, so the model forgets what these had learned",
        fix=f"{_BEFORE_ADAPTERS}; or "
        * is_adapted
        + 'give init="fresh" to replace them all the same, or a rule of None for layers to keep; '
        'init="project", to start from the old weights, comes in a later release',
    )


def _unseen(model: nn.Module, sites: tuple[Site, ...]) -> tuple[Unseen, ...]:
    """Every module with parameters of its own that are not those of a linear layer."""
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
    """The swap that a rule asks for; an error says of which layer it is."""
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
    return replace(swap, num_experts=rule.num_experts, num_active=rule.num_active)


def _check_sites(model: nn.Module, sites: tuple[Site, ...]) -> None:
    if any(name in ("", site.part) for site in sites for name in site.names):
        raise EinlinearError(
            what=f"the model itself is a {type(model).__name__}",
            rule="layers are replaced inside a model; the model itself stays the same object",
            fix="put it into a container: nn.Sequential(layer); or make an el.EinsumLinear",
        )
    if not sites:
        raise EinlinearError(
            what=f"{type(model).__name__} has no linear layer to replace",
            rule="nn.Linear, nn.MultiheadAttention and the Conv1D of Hugging Face are replaced",
            fix="give a model that holds such layers, and convert each model once",
        )


def _check_blocked(blocked: list[Site], replaced: list[str]) -> None:
    """No layer that a rule asks for may be skipped in silence."""
    if blocked:
        first, *more = blocked
        others = f"; so cannot {listed([site.names for site in more], 5)}" if more else ""
        patterns = _patterns_for([site.name for site in blocked], replaced)
        rules = ", ".join(f"{pattern!r}: None" for pattern in patterns)
        fix = (
            _BEFORE_ADAPTERS if first.obstacle.startswith(ADAPTER) else "remove what is in the way"
        )
        raise EinlinearError(
            what=f"layer {first.name!r} cannot be replaced: {first.obstacle}{others}",
            rule="a layer is replaced if it is a plain linear layer that owns its weights",
            fix=f"{fix}; or leave {'them' if more else 'the layer'} alone, by the first "
            f"rule{'s' * (len(patterns) > 1)}: {{{rules}, ...}}",
        )


def _patterns_for(names: list[str], others: list[str]) -> list[str]:
    """Globs that match all of the names and none of the others: as few as are easily found."""
    patterns: list[str] = []
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        parts = name.split(".")
        every_block = ".".join("*" if part.isdecimal() else part for part in parts)
        wide = [f"*.{parts[-1]}", every_block] if len(names) > 1 and len(parts) > 1 else []
        fits = [glob for glob in wide if not any(fnmatchcase(other, glob) for other in others)]
        patterns += [*fits, name][:1]
    return patterns


def _refuse_nothing_to_do(left: list[Left]) -> NoReturn:
    lines = grouped((layer.names, (layer.reason,)) for layer in left)
    some = ", ".join(f"{name} ({reason})" for name, (reason,) in lines[:8])
    raise EinlinearError(
        what=f"no layer would be replaced: {some}{', ...' * (len(lines) > 8)}",
        rule="rules replace at least one layer, and an output head only if a pattern is for it "
        "alone",
        fix="give a pattern for the layers to replace, a head by its name: {'lm_head': ...}",
    )


def _new_layer(site: Site, swap: Swap, weight_norm: bool) -> EinsumLinear | MoELinear:
    """The structured layer, with device, dtype and flags of the dense one."""
    make: Callable[..., EinsumLinear | MoELinear] = EinsumLinear
    if swap.num_experts:
        make = partial(MoELinear, num_experts=swap.num_experts, num_active=swap.num_active)
    new = make(
        swap.d_in,
        swap.d_out,
        bias=swap.has_bias,
        structure=swap.structure,
        weight_norm=weight_norm,
        device=site.weight.device,
        dtype=site.weight.dtype,
    )
    new.requires_grad_(site.weight.requires_grad)
    if new.bias is not None and site.bias is not None:
        new.bias.requires_grad_(site.bias.requires_grad)
    return new.train(site.module.training)


def _leave_fast_path_(model: nn.Module) -> None:
    """Let torch's encoder call its layers: its fused inference reads their weights instead."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            continue
        if any(isinstance(inner, EinsumLinear | MoELinear) for inner in module.modules()):
            if isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False
            else:
                module.activation_relu_or_gelu = 0
