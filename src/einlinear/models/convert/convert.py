"""convert_: replace the linear layers of a model by structured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, get_args

from torch import nn
from torch.nn.parameter import is_lazy

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.routing import Routed
from einlinear.layers.scaling import FactorInit
from einlinear.models.convert.apply import (
    apply_swaps_,
    check_projectable,
    check_without_experts,
    project_swaps_,
)
from einlinear.models.convert.batches import iterated
from einlinear.models.convert.budget import BudgetUnit, Costs, check_budget, within_budget
from einlinear.models.convert.calibration import (
    LossOf,
    Weighting,
    measure_moments,
)
from einlinear.models.convert.conversion import Conversion, LayerNote, Swap, Unseen
from einlinear.models.convert.experts import Experts
from einlinear.models.convert.heads import Heads
from einlinear.models.convert.names import LayerNames, grouped, layer_list, patterns_for
from einlinear.models.convert.rules import OUTPUT_HEAD, RuleChoice, Rules, choose_rules, read_rules
from einlinear.models.saving.pretrained import mark_pretrained_
from einlinear.models.survey.obstacles import ADAPTER
from einlinear.models.survey.sites import (
    Site,
    find_sites,
    output_heads,
    structured_names,
)
from einlinear.models.survey.trained import checkpoints, unmarked_source, why_trained
from einlinear.show.progress import show_nothing
from einlinear.structures.named import low_rank
from einlinear.structures.plan import make_plan
from einlinear.structures.structure import Structure, StructureSum
from einlinear.structures.values import one_of

_BEFORE_ADAPTERS = (
    'convert the model before you add adapters, or merge them and give init="project": what they '
    "have learned is lost with the weights"
)
_STRUCTURED = "structured already"

LayerFilter = Callable[[nn.Module, str], bool]


def convert_(
    model: nn.Module,
    rules: Rules | None = None,
    *,
    where: LayerFilter | None = None,
    init: str | None = None,
    budget: float | None = None,
    unit: BudgetUnit = "flops",
    tokens: int = 2048,
    calibration: Iterable[Any] | None = None,
    weighting: Weighting = "both",
    loss: LossOf | None = None,
    anchored: bool = False,
    weight_norm: bool | None = None,
    factor_init: FactorInit = "spectral",
    on_progress: Callable[[str], None] = show_nothing,
) -> Conversion:
    """Replace linear layers of a model by structured ones, in place; return what was done.

    By default the new layers are randomly initialised: what the old ones had learned is lost. A
    layer whose weights look trained therefore raises an error unless you choose: init="project"
    starts from the old weights, init="fresh" gives them up. The new layers keep device, dtype,
    training flag, requires_grad, and whether there is a bias. If any layer cannot be replaced,
    nothing is changed. Create the optimizer afterwards, because the parameters are new.

    Args:
        model: any module that contains linear layers: nn.Linear, the Conv1D of Hugging Face,
            nn.MultiheadAttention (its projections are named q_proj, k_proj, v_proj, out_proj).
        rules: a structure for all layers except the output head; or {pattern: structure}, where the
            first match decides. A pattern is a glob ("*.mlp.*") or a compiled regular expression
            that matches the full name of a layer. A structure is a Structure, a sum of them, its
            text, el.heads(...), el.moe(...), or None to leave the layer alone. An output head is
            only replaced by a pattern that matches nothing else.
        where: a further condition on the layer (or the attention that contains it) and its name.
        init: where the new weights come from. "project" takes the factors whose matrix is closest
            to the old weight, and the old biases. "fresh" initialises them randomly, with biases 0,
            whatever the old ones were. None, the default, does the same, but raises an error if a
            layer to replace was loaded from a checkpoint by Hugging Face, is frozen, or is part of
            a PEFT adapter.
        budget: instead of rules, the share of the cost of dense layers that the new ones may have.
            Each layer gets the rank with which all of them together lose least, or stays dense.
            Implies init="project". Rules may name layers to leave alone: {pattern: None}.
        unit: what the budget counts: "flops", "parameters", or "seconds" of inference, measured on
            this machine.
        tokens: for "seconds", how many tokens a call has.
        calibration: for init="project", batches of typical inputs: tensors, tuples of arguments or
            mappings of keyword arguments of the model. Weights are then closest in what matters
            for such inputs. Give at least as many tokens as the widest layer has inputs.
        weighting: what calibration looks at: "inputs" of each layer, or "both" its inputs and how
            much the output of the model depends on its outputs, which needs a backward pass.
        loss: for "both", the loss that matters, from the output of the model and the batch; by
            default, any change of the output does.
        anchored: whether to fit the layers once more after projection, one after the other, to the
            outputs of the original layers, on the inputs that they get in the converted model. Each
            makes up for errors before it. Takes up to as many passes over the calibration as there
            are layers.
        weight_norm: whether the new layers normalise their factors; by default, unless they are
            projected, whose factors it would shrink.
        factor_init: the standard deviation of their fresh factors, as in EinsumLinear.
        on_progress: for init="project", called with a short text for each batch and each layer,
            such as "projecting: layer 3 of 12, blocks.0.up". To see them, give print.
    """
    init = "project" if budget is not None and init is None else init
    _check_init(init, weight_norm, calibration)
    check_progress(on_progress)
    check_loss(loss, weighting, calibration)
    _check_anchored(anchored, calibration)
    one_of(factor_init, "factor_init", get_args(FactorInit))
    one_of(weighting, "weighting", get_args(Weighting))
    one_of(unit, "unit", get_args(BudgetUnit))
    if budget is not None:
        check_budget(budget, tokens)
    conversion = plan_conversion(model, _rules_within(model, rules, budget, init), where=where)
    if init == "project":
        check_projectable(model, conversion)
        check_without_experts(conversion)
        moments = None
        anchors: Sequence[Any] = ()
        if calibration is not None:
            if anchored:  # they are needed again and again
                calibration = anchors = list(iterated(calibration))
            widths = {swap.names: (swap.d_in, swap.d_out) for swap in conversion.swaps}
            moments = measure_moments(
                model, widths, calibration, weighting=weighting, loss=loss, on_progress=on_progress
            )
        if budget is not None:
            costs = Costs(unit, tokens)
            conversion = within_budget(
                model, conversion, moments or {}, budget, costs, on_progress=on_progress
            )
        conversion = project_swaps_(model, conversion, moments, anchors, on_progress=on_progress)
        mark_pretrained_(model)
        return conversion
    if conversion.lost and init is None:
        _refuse_to_lose(conversion.lost_by_reason)
    has_norm = weight_norm is None or weight_norm
    apply_swaps_(model, conversion.swaps, weight_norm=has_norm, factor_init=factor_init)
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
    left += [LayerNote(names, _STRUCTURED) for names in structured]
    if not swaps:
        _refuse_nothing_to_do(left)
    params = sum(0 if is_lazy(p) else p.numel() for p in model.parameters())
    unseen, source = _unseen(model, sites), unmarked_source(model, loaded)
    return Conversion(tuple(swaps), tuple(left), params, unseen, tuple(lost), source)


def _rules_within(
    model: nn.Module, rules: Rules | None, budget: float | None, init: str | None
) -> Rules:
    """The rules; with a budget, all layers that the rules do not leave alone, at any structure."""
    if budget is None:
        if rules is None:
            raise EinlinearError(
                what="there are neither rules nor a budget",
                rule="rules say which structure each layer gets; a budget lets convert_ choose",
                fix='give el.convert_(model, "btt"), or budget=0.5 for half of the FLOPs',
            )
        return rules
    kept: Rules = {} if rules is None else rules
    if init != "project" or not isinstance(kept, Mapping) or any(kept.values()):
        raise EinlinearError(
            what=f"a budget with {f'init={quote(init)}' if init != 'project' else quote(rules)}",
            rule="with a budget, convert_ chooses structures and projects the old weights",
            fix="leave out init and structures; rules may name layers to keep: {pattern: None}",
        )
    if "*" in kept:
        raise EinlinearError(
            what=f"a budget with {quote(rules)}",
            rule="with a budget, rules name the layers to leave alone; these are all",
            fix="leave out the pattern '*'",
        )
    within: dict[Any, Any] = {**kept, "*": low_rank(rank=1)}
    patterns = read_rules(kept) if kept else ()
    names = [site.names for site in find_sites(model)] if isinstance(model, nn.Module) else []
    if names and all(any(p.matches(each) for p in patterns) for each in names):
        raise EinlinearError(
            what=f"a budget with {quote(rules)}, which leave all linear layers alone",
            rule="a budget is shared out among the layers that no rule names",
            fix="leave out some of the rules",
        )
    return within


def _check_init(
    init: str | None, weight_norm: bool | None, calibration: Iterable[Any] | None
) -> None:
    if init not in (None, "fresh", "project"):
        raise EinlinearError(
            what=f"init is {quote(init)}",
            rule='new layers start from the old weights, init="project", or randomly, init="fresh"',
            fix="give one of the two, or leave init out",
        )
    if init != "project" and calibration is not None:
        raise EinlinearError(
            what=f"there are calibration batches, and init is {quote(init)}",
            rule="calibration says which errors of projected weights matter",
            fix='give init="project", or leave out calibration',
        )
    if init == "project" and weight_norm:
        raise EinlinearError(
            what='weight_norm=True with init="project"',
            rule="normalisation would shrink projected factors, and so change the weights",
            fix="leave out weight_norm",
        )


def check_progress(on_progress: object) -> None:
    """Raise an error unless progress can be reported to it."""
    if not callable(on_progress):
        raise EinlinearError(
            what=f"on_progress is {quote(on_progress)}",
            rule="it is a function of a text",
            fix="give on_progress=print to see each batch and each layer",
        )


def check_loss(
    loss: LossOf | None, weighting: Weighting, calibration: Iterable[Any] | None
) -> None:
    """Refuse a loss that would not be used."""
    if loss is not None and (calibration is None or weighting != "both"):
        missing = "no calibration" if calibration is None else f"weighting={quote(weighting)}"
        raise EinlinearError(
            what=f"loss is given with {missing}",
            rule="the loss is differentiated on calibration batches, for weighting='both'",
            fix="give calibration=batches and leave out weighting, or leave out loss",
        )


def _check_anchored(anchored: bool, calibration: Iterable[Any] | None) -> None:
    if anchored and calibration is None:
        raise EinlinearError(
            what="anchored=True without calibration",
            rule="layers are fitted to what the original model does on calibration batches",
            fix='give calibration=batches and init="project" or budget=...',
        )


def _refuse_to_lose(lost: dict[str, list[LayerNames]]) -> NoReturn:
    named = "; ".join(f"{layer_list(layers, 5)} ({reason})" for reason, layers in lost.items())
    is_adapted = any(reason.startswith(ADAPTER) for reason in lost)
    raise EinlinearError(
        what=f"trained weights would be lost: {named}",
        rule="without init, new layers start at random, and what these have learned is lost",
        fix=f"{_BEFORE_ADAPTERS}; or give " * is_adapted
        + 'give init="project" to start from them, ' * (not is_adapted)
        + 'init="fresh" to replace them anyway, or the rule None for layers to keep',
    )


def _unseen(model: nn.Module, sites: tuple[Site, ...]) -> tuple[Unseen, ...]:
    """Return every module that owns parameters which belong to no linear layer."""
    known = EinsumLinear | SumLinear | Routed
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


def _swap(model: nn.Module, site: Site, rule: Structure | StructureSum | Heads | Experts) -> Swap:
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
            rule="layers are replaced inside a model; the model itself stays the same object",
            fix="put it into a container, nn.Sequential(layer), or create an el.EinsumLinear",
        )
    if not sites:
        raise EinlinearError(
            what=f"{type(model).__name__} has no linear layer to replace",
            rule="linear layers: nn.Linear, nn.MultiheadAttention and the Conv1D of Hugging Face",
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
    if left and all(layer.reason in (_STRUCTURED, OUTPUT_HEAD) for layer in left):
        raise EinlinearError(
            what="no layer would be replaced: all but output heads are structured already",
            rule="only dense layers are replaced or adapted, each of them once",
            fix="start from the dense model; el.adapt_ comes before el.convert_, and peft adds "
            "LoRA to structured layers: el.lora(LoraConfig(...))",
        )
    lines = grouped((layer.names, (layer.reason,)) for layer in left)
    some = ", ".join(f"{name} ({reason})" for name, (reason,) in lines[:8])
    raise EinlinearError(
        what=f"no layer would be replaced: {some}{', ...' * (len(lines) > 8)}",
        rule="rules must replace at least one layer; a pattern replaces an output head only if it "
        "matches nothing else",
        fix="give a pattern for the layers to replace; for a head, its name: {'lm_head': ...}",
    )
