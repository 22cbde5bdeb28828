"""init_: initialise all parameters of a model under µP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import get_args

import torch
from torch import nn

from einlinear.errors import EinlinearError
from einlinear.layers.moe.exchange import ExpertShard
from einlinear.layers.moe.routing import Gate
from einlinear.layers.moe.sharding import expert_shards
from einlinear.layers.scaling import HeadInit, Parametrization, Scaling
from einlinear.models.survey.facts import (
    Fact,
    Layer,
    find_facts,
    find_layers,
    match_names,
    named_roles,
    paste_rule,
)
from einlinear.models.survey.inferred import constant, unsure_gains
from einlinear.models.survey.obstacles import adapters
from einlinear.models.survey.scalings import has_rule
from einlinear.models.survey.trained import checkpoints, loaded_from
from einlinear.show.numbers import listed
from einlinear.structures.values import one_of, whole_number


@dataclass(frozen=True, slots=True)
class Start:
    """How one parameter starts: normally distributed with this mean and standard deviation."""

    name: str
    mean: float
    std: float


def init_(
    model: nn.Module,
    *,
    zero: str | Iterable[str] = (),
    head_init: HeadInit | None = None,
    base_width: int | None = None,
    embedding_std: float | None = None,
    generator: torch.Generator | None = None,
    overwrite: bool = False,
) -> None:
    """Initialise every parameter of a model under µP, in place.

    Matrices, and each factor of a structured layer, are normal with standard deviation
    sqrt(min(fan_in, fan_out)) / fan_in. Embeddings are normal with the same standard deviation at
    every width. Biases start at 0, norms at 1 and 0. The gain of a hand-written norm keeps its
    constant.

    The last layer of each residual branch starts at zero, so that every block begins as the
    identity, and the head at zero or small. The model names these layers in a method `layer_roles()
    -> {pattern: "head" or "zero"}`; the head of a Hugging Face model is known without it. In a
    structured layer only the last factor is zero or small, so that all factors learn. A head starts
    as any other layer if it shares its weight with an embedding or another layer, or if nothing
    names it.

    Frozen parameters of modules without a rule, such as fixed positions, keep their values; other
    frozen parameters are initialised too. Weights that Hugging Face loaded or that are part of a
    PEFT adapter raise an error unless overwrite=True. `plan_init` returns what would be done.

    Args:
        model: any module on a real device, before FSDP2 shards it. If its experts are sharded,
            every rank samples all experts and keeps its own, so equal seeds give the same weights
            as on one rank.
        zero: patterns for the names of further layers whose output starts at zero.
        head_init: how the head starts: "zero"; "small", with standard deviation
            sqrt(base_width) / fan_in; or "usual", with 1 / sqrt(fan_in). By default small, which
            learns faster, if you give the base_width, otherwise zero.
        base_width: the width at which you tuned the learning rate; only "small" needs it.
        embedding_std: standard deviation of all embeddings; by default what each one declares,
            which is 0.02 for nn.Embedding, as in the paper's GPT.
        generator: random generator, for reproducible weights; torch's default if None.
        overwrite: whether to overwrite weights that were loaded from a checkpoint or are part of a
            PEFT adapter.
    """
    head_init = head_init or ("zero" if base_width is None else "small")
    plan = plan_init(
        model, zero=zero, head_init=head_init, base_width=base_width, embedding_std=embedding_std
    )
    if not overwrite:
        _check_trained(model, plan)
    apply_init_(model, plan, generator)


def apply_init_(
    model: nn.Module, plan: tuple[Start, ...], generator: torch.Generator | None = None
) -> None:
    """Initialise the parameters as planned; padding rows of embeddings become zero."""
    parameters = {fact.name: fact.parameter for fact in find_facts(model, frozen=True)}
    if on_meta := [name for name, parameter in parameters.items() if parameter.is_meta]:
        raise EinlinearError(
            what=f"parameters are on the meta device: {listed(on_meta, 3)}",
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
    model: nn.Module,
    *,
    zero: str | Iterable[str] = (),
    head_init: HeadInit | None = None,
    base_width: int | None = None,
    embedding_std: float | None = None,
    parametrization: Parametrization = "mup",
    unit: str | Iterable[str] = "*",
    use_roles: bool = True,
) -> tuple[Start, ...]:
    """Return how every parameter would start, without changing the model.

    See `Parametrization` for what "mup", "naive" and "unit" mean; `unit` are patterns for the names
    of the layers that "unit" draws from N(0, 1), without heads and gates.

    With use_roles=False, only the layers that you name in `zero` start at zero, whatever the
    model's `layer_roles` say; the head follows head_init if you give it. Without head_init, a head
    with a role starts at zero.
    """
    one_of(parametrization, "parametrization", get_args(Parametrization))
    if head_init is not None:
        one_of(head_init, "head_init", get_args(HeadInit))
    if head_init == "small":
        fix = "give the width at which you tuned the learning rate, such as base_width=64"
        base_width = whole_number(base_width, "base_width", 1, fix=fix)
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
                what=f"zero matches {', '.join(asked)}, whose weight is tied to {fact.name}",
                rule="an embedding cannot start at zero",
                fix="leave the tied layer out of zero, or untie it",
            )
    if use_roles:
        zeros |= _last_matrices(layers, roles["zero"])
        head_init = head_init or "zero"
    heads = [layer for layer in layers if layer.name in roles["head"]]
    stds = _head_stds(heads, head_init, base_width)
    # A head that shares its matrix with an inner layer, both zero, would never get a gradient.
    for fact in facts:
        if not set(fact.owners) <= roles["head"]:
            stds.pop(id(fact.parameter), None)
    if parametrization == "unit":
        stds = dict.fromkeys(_unit_matrices(layers, unit, roles["head"]), 1.0) | stds
    stds |= dict.fromkeys(zeros, 0.0)
    drawn = [f for f in facts if f.scaling.init_mean is not None or stds.get(id(f.parameter)) == 0]
    return tuple(_start(fact, stds, embedding_std, parametrization) for fact in drawn)


def _head_stds(
    heads: list[Layer], head_init: HeadInit | None, base_width: int | None
) -> dict[int, float]:
    """Return the standard deviations of the matrices of the heads that head_init decides, by id."""
    stds = {}
    for layer in heads:
        names = layer.matrices if head_init == "usual" else layer.last_matrices
        for name in names if head_init else ():
            scaling = layer.scaling[name]
            std = 0.0 if head_init == "zero" else _unit_std(scaling)
            if head_init == "small":
                assert base_width is not None, "it is checked"
                std *= sqrt(base_width / (scaling.d_in or scaling.fan_in))
            stds[id(layer.parameters[name])] = std
    return stds


def _check_trained(model: nn.Module, plan: tuple[Start, ...]) -> None:
    """Refuse to overwrite weights that were loaded or belong to an adapter."""
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
        named = [f"{listed(names, 3)} ({reason})" for reason, names in lost.items()]
        named[3:] = ["..."] * (len(named) > 3)
        raise EinlinearError(
            what=f"trained weights would be lost: {'; '.join(named)}",
            rule="init_ overwrites every parameter, so the model forgets what it has learned",
            fix="do not call init_ if you want to keep these weights; give overwrite=True to "
            "overwrite them",
        )


def _check_gains(layers: list[Layer]) -> None:
    """Refuse to guess the initial gains of hand-written norms."""
    for layer in layers:
        if gains := unsure_gains(layer.module):
            value = "0" if constant(layer.parameters[gains[0]]) == 0 else "not one number"
            raise EinlinearError(
                what=f"the initial value of {gains[0]} of {layer.name or 'the model itself'} is "
                f"unknown: {type(layer.module).__name__} has no rule, and now it is {value}",
                rule="the gain of a norm without a rule keeps its constant: 1 in most norms, 0 in "
                "those that multiply by 1 + gain",
                fix=paste_rule(layer.name, layer.module),
            )


def _unit_matrices(layers: list[Layer], patterns: str | Iterable[str], heads: set[str]) -> set[int]:
    """Return the ids of the matrices that "unit" draws from N(0, 1)."""
    named = match_names(patterns, [layer.name for layer in layers], "unit")
    drawn = [
        layer
        for layer in layers
        if layer.name in named - heads and not isinstance(layer.module, Gate)
    ]
    return {id(layer.parameters[name]) for layer in drawn for name in layer.matrices}


def _last_matrices(layers: list[Layer], names: set[str]) -> set[int]:
    """Return the ids of the matrices that make the output of the named layers zero."""
    return {
        id(layer.parameters[last])
        for layer in layers
        if layer.name in names
        for last in layer.last_matrices
    }


def _unit_std(scaling: Scaling) -> float:
    """The standard deviation that keeps the variance of the input, for a sum of its terms too."""
    return 1 / sqrt(scaling.fan_in * scaling.num_terms)


def _start(
    fact: Fact,
    stds: dict[int, float],
    embedding_std: float | None,
    parametrization: Parametrization,
) -> Start:
    scaling, std = fact.scaling, fact.scaling.init_std
    if scaling.kind == "embedding" and embedding_std is not None:
        std = embedding_std
    elif id(fact.parameter) in stds:
        std = stds[id(fact.parameter)]
    elif scaling.kind == "matrix" and parametrization != "mup":
        std = _unit_std(scaling)
    return Start(fact.name, scaling.init_mean or 0.0, std)


def _draw_(
    parameter: nn.Parameter,
    start: Start,
    generator: torch.Generator | None,
    shard: ExpertShard | None,
) -> None:
    """Fill a parameter; sample in float32 or wider, so that half precision rounds only once."""
    if start.std == 0:
        parameter.fill_(start.mean)
        return
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    device = parameter.device if generator is None else generator.device
    first = parameter.shape[:1] if shard is None else (shard.num_experts,)
    numbers = torch.empty((*first, *parameter.shape[1:]), dtype=dtype, device=device)
    numbers.normal_(start.mean, start.std, generator=generator)
    parameter.copy_(numbers if shard is None else shard.own(numbers))
