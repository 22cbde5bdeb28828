"""A whole model initialised under muP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from einlinear.errors import EinlinearError
from einlinear.layers.exchange import ExpertShard
from einlinear.layers.expert_parallel import expert_shards
from einlinear.models.facts import (
    PASTE,
    Fact,
    Layer,
    find_facts,
    find_layers,
    match_names,
    named_roles,
)
from einlinear.models.free import constant, rule_code, unsure_gains
from einlinear.models.obstacles import adapters
from einlinear.models.scalings import has_rule
from einlinear.models.trained import checkpoints, loaded_from


@dataclass(frozen=True, slots=True)
class Start:
    """How one parameter starts: normal numbers of this mean and deviation."""

    name: str
    mean: float
    std: float


def init_(
    model: nn.Module,
    *,
    zero: str | Iterable[str] = (),
    embedding_std: float | None = None,
    generator: torch.Generator | None = None,
    overwrite: bool = False,
) -> None:
    """Initialise every parameter of a model under muP, in place; `plan_init` says how.

    Matrices: normal, of deviation sqrt(min(fan_in, fan_out)) / fan_in, each factor of a structured
    layer by its own; biases 0; norms 1 and 0; embeddings normal, of a deviation that is the same at
    every width. What starts at zero: the head, and the last layer of residual branches, so that a
    model begins as the identity and with equal logits. A model names them itself by a method
    `layer_roles() -> {pattern: "head" or "zero"}`; of a Hugging Face model the head is known. In a
    structured layer only the last factor becomes zero, so that all learn. A head that is tied to
    an embedding, or to another layer, is not set to zero, and neither is one that nobody names.
    The gain of a hand-written norm keeps the constant that it has. A frozen parameter of a module
    without a rule, such as a table of fixed positions, stays as it is; other frozen ones are drawn.
    Weights that Hugging Face loaded, or that are part of a PEFT adapter, are refused unless
    overwrite=True is given.

    Args:
        model: any module on a real device, before FSDP2 shards it. If its experts are sharded, all
            are drawn on every rank and each keeps its own: with equal seeds as on one rank.
        zero: patterns of the names of further layers whose output starts at zero.
        embedding_std: the deviation of all embeddings; unless given, what each declares, which is
            0.02 for nn.Embedding, as in the paper's GPT.
        generator: of the random numbers, for the same weights each time; torch's own unless given.
        overwrite: whether weights may be lost that were loaded from a checkpoint, or are part of a
            PEFT adapter.
    """
    plan = plan_init(model, zero=zero, embedding_std=embedding_std)
    if not overwrite:
        _check_trained(model, plan)
    apply_init_(model, plan, generator)


def apply_init_(
    model: nn.Module, plan: tuple[Start, ...], generator: torch.Generator | None = None
) -> None:
    """Draw the parameters as planned; the row of an embedding for padding becomes zero."""
    parameters = {fact.name: fact.parameter for fact in find_facts(model, frozen=True)}
    if on_meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise EinlinearError(
            what=f"{on_meta[0]} and {len(on_meta) - 1} more parameters are on the meta device",
            rule="only parameters that have memory can be initialised",
            fix='call model.to_empty(device="cpu") first',
        )
    shards = expert_shards(model)
    with torch.no_grad():
        for start in plan:
            parameter = parameters[start.name]
            _draw_(parameter, start, generator, shards.get(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                if module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0


def plan_init(
    model: nn.Module, *, zero: str | Iterable[str] = (), embedding_std: float | None = None
) -> tuple[Start, ...]:
    """How every parameter would start; changes nothing."""
    every = find_layers(model, frozen=True)
    free = [layer for layer in every if not has_rule(layer.module)]
    _check_gains(free)
    fixed = {id(p) for layer in free for p in layer.parameters.values() if not p.requires_grad}
    facts = [fact for fact in find_facts(model, frozen=True) if id(fact.parameter) not in fixed]
    layers = [layer for layer in every if layer.matrices]
    asked = match_names(zero, [layer.name for layer in layers], "zero")
    roles = named_roles(model)
    zeros = _last_matrices(layers, asked)
    for fact in facts:
        if fact.scaling.kind == "embedding" and id(fact.parameter) in zeros:
            raise EinlinearError(
                what=f"zero names {', '.join(asked)}, whose weight is tied to {fact.name}",
                rule="an embedding does not start at zero",
                fix="leave the tied layer out of zero, or untie it",
            )
    zeros |= _last_matrices(layers, roles["zero"])
    # A head that shares its matrix with an inner layer, both zero, would never get a gradient.
    heads = _last_matrices(layers, roles["head"])
    zeros |= heads - {id(f.parameter) for f in facts if not set(f.owners) <= roles["head"]}
    drawn = [f for f in facts if f.scaling.init_mean is not None or id(f.parameter) in zeros]
    return tuple(_start(fact, zeros, embedding_std) for fact in drawn)


def _check_trained(model: nn.Module, plan: tuple[Start, ...]) -> None:
    """Refuse to draw weights anew that were loaded or belong to an adapter."""
    adapted = adapters(model)
    reasons = {
        id(parameter): adapted[id(module)]
        for module in model.modules()
        if id(module) in adapted
        for parameter in module.parameters(recurse=False)
    }
    for key, source in checkpoints(model).items():
        reasons.setdefault(key, loaded_from(source))
    if not reasons:
        return
    parameters = {fact.name: fact.parameter for fact in find_facts(model, frozen=True)}
    lost: dict[str, list[str]] = {}
    for start in plan:
        if reason := reasons.get(id(parameters[start.name])):
            lost.setdefault(reason, []).append(start.name)
    if lost:
        named = "; ".join(
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)} ({reason})"
            for reason, names in list(lost.items())[:3]
        )
        raise EinlinearError(
            what=f"trained weights would be lost: {named}{'; ...' * (len(lost) > 3)}",
            rule="init_ draws every parameter anew, so the model forgets what it had learned",
            fix="leave init_ out to train on from these weights; give overwrite=True to draw them "
            "all the same",
        )


def _check_gains(layers: list[Layer]) -> None:
    """Refuse to guess where the gains of hand-written norms start."""
    for layer in layers:
        if gains := unsure_gains(layer.module):
            value = "0" if constant(layer.parameters[gains[0]]) == 0 else "not one number"
            raise EinlinearError(
                what=f"it is not known where {gains[0]} of {layer.name or 'the model itself'} "
                f"starts: {type(layer.module).__name__} has no rule, and now it is {value}",
                rule="the gain of a norm without a rule keeps the constant that it has: 1 in most "
                "norms, 0 in those that multiply by 1 + gain",
                fix=f"{PASTE}{rule_code(layer.name, layer.module)}\n",
            )


def _last_matrices(layers: list[Layer], names: set[str]) -> set[int]:
    """The ids of the matrices that make the output of the named layers zero."""
    return {id(layer.parameters[layer.matrices[-1]]) for layer in layers if layer.name in names}


def _start(fact: Fact, zeros: set[int], embedding_std: float | None) -> Start:
    scaling = fact.scaling
    mean = scaling.init_mean or 0.0
    if scaling.kind == "embedding" and embedding_std is not None:
        return Start(fact.name, mean, embedding_std)
    is_zero = id(fact.parameter) in zeros
    return Start(fact.name, mean, 0.0 if is_zero else scaling.init_std)


def _draw_(
    parameter: nn.Parameter,
    start: Start,
    generator: torch.Generator | None,
    shard: ExpertShard | None,
) -> None:
    """Normal numbers in float32 at least, so that half precision rounds them once."""
    if start.std == 0:
        parameter.fill_(start.mean)
        return
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    device = parameter.device if generator is None else generator.device
    first = parameter.shape[:1] if shard is None else (shard.num_experts,)
    numbers = torch.empty((*first, *parameter.shape[1:]), dtype=dtype, device=device)
    numbers.normal_(start.mean, start.std, generator=generator)
    parameter.copy_(numbers if shard is None else shard.own(numbers))
