"""The parameters of a model, each once, with the scaling that its modules declare."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol, get_args, runtime_checkable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import SumLinear
from einlinear.layers.scaling import Scaling
from einlinear.models.survey.inferred import own_parameters, rule_code, rule_entries
from einlinear.models.survey.scalings import has_rule, module_scaling
from einlinear.show.numbers import listed
from einlinear.structures.values import one_of

LayerRole = Literal["head", "zero"]

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # in names, of torch.compile and others


@runtime_checkable
class _NamesRoles(Protocol):
    def layer_roles(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """A parameter of a model, its scaling, and the names of the modules that use it.

    keys: the name of the parameter in each of these modules.
    """

    name: str
    parameter: nn.Parameter
    scaling: Scaling
    owners: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A module that owns parameters directly, with their scaling.

    A SumLinear owns the parameters of its terms, under names such as "terms.0.A".
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    scaling: dict[str, Scaling]

    @property
    def matrices(self) -> list[str]:
        """The names of its matrices, in the order in which they multiply the input."""
        return [name for name in self.scaling if self.scaling[name].kind == "matrix"]

    @property
    def last_matrices(self) -> list[str]:
        """The names of the matrices that make its output: one, or one for each term of a sum."""
        last: dict[str, str] = {}
        for name in self.matrices:
            last[name.rpartition(".")[0]] = name
        return list(last.values())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def find_layers(model: nn.Module, *, frozen: bool = False) -> list[Layer]:
    """Return every module that owns trainable parameters directly, or with `frozen` any."""
    _check_model(model)
    owners = []
    terms: set[int] = set()
    for name, module in unwrapped(model).named_modules():
        if id(module) in terms:
            continue
        every = own_parameters(module)
        if isinstance(module, SumLinear):
            terms |= {id(inner) for inner in module.modules()}
            every = dict(module.named_parameters())
        own = {k: p for k, p in every.items() if frozen or p.requires_grad}
        if own:
            owners.append((plain_name(name), module, own, module_scaling(module)))
    known = {
        id(p) for *_, own, declared in owners for key, p in own.items() if key in (declared or {})
    }
    # A module needs no rule if another layer declares all its parameters, such as a head's bias.
    return [
        _layer(name, module, own, declared)
        for name, module, own, declared in owners
        if declared is not None or not known.issuperset(map(id, own.values()))
    ]


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module: its layers tell how their parameters scale",
            fix="give the model itself, not its parameters",
        )
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise EinlinearError(
            what=f"the width of {plain_name(lazy[0])} is not known yet: its layer is lazy",
            rule="learning rates and initial weights follow from the widths",
            fix="run the model once on an input, then call this again",
        )


def plain_name(name: str) -> str:
    """Return a qualified name without the marks of torch.compile and activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _layer(
    name: str,
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    declared: dict[str, Scaling] | None,
) -> Layer:
    missing = [key for key in parameters if key not in (declared or {})]
    if declared is None or missing:
        given = ", ".join(f"{key} {tuple(parameters[key].shape)}" for key in missing)
        fix = paste_rule(name, module)
        if has_rule(module):
            entries = "\n".join(rule_entries(module, missing))
            fix = f"add this to what its rule returns; `module` is the layer:\n\n{entries}\n"
        raise EinlinearError(
            what=f"no learning rate is known for {given} of {name or 'the model itself'}, "
            f"a {type(module).__module__}.{type(module).__qualname__}",
            rule="a module that owns parameters declares how they scale with the width",
            fix=fix,
        )
    scaling = {key: scaling for key, scaling in declared.items() if key in parameters}
    return Layer(name, module, parameters, scaling)


def paste_rule(name: str, module: nn.Module) -> str:
    """Return the fix that offers code of a rule for the class of a module."""
    return f"paste this once, before the call, and check it:\n\n{rule_code(name, module)}\n"


def named_roles(model: nn.Module) -> dict[str, set[str]]:
    """Return the names of the layers that the model declares as its head, or to start at zero.

    A module may have a method `layer_roles() -> {pattern: "head" or "zero"}`; patterns match names
    inside that module. In a Hugging Face model `get_output_embeddings()` is the head.
    """
    model = unwrapped(model)
    roles: dict[str, set[str]] = {role: set() for role in get_args(LayerRole)}
    modules = [(plain_name(name), module) for name, module in model.named_modules()]
    for prefix, module in modules:
        if isinstance(module, _NamesRoles):
            names = [name for name, other in modules if other._parameters]
            for pattern, role in module.layer_roles().items():
                place = f"the role of {quote(pattern)} in {type(module).__name__}.layer_roles"
                fix = 'use "head" for the output layer, "zero" for the last layer of a branch'
                one_of(role, place, tuple(roles), fix=fix)
                full = f"{prefix}.{pattern}" if prefix else pattern
                roles[role] |= match_names([full], names, "layer_roles")
        head = _declared_head(module)
        if head is not None:
            roles["head"] |= {name for name, other in modules if other is head}
    return roles


def _declared_head(module: nn.Module) -> object:
    """Return the head that a Hugging Face model declares; None for other modules."""
    declare = getattr(module, "get_output_embeddings", None)
    try:
        return declare() if callable(declare) else None
    except AttributeError:  # many ask a submodule, which may have no such method or be None
        return None


def match_names(patterns: Iterable[str], names: Iterable[str], argument: str) -> set[str]:
    """Return the names that match a pattern (a glob; * also spans dots); each must match some."""
    names = list(names)
    matched = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise EinlinearError(
                what=f"{argument}: the pattern {quote(pattern)} matches no layer",
                rule="a pattern must match the full name of a layer; * stands for any text",
                fix=f"the layers are {listed(names, 20) or 'none'}",
            )
        matched |= found
    return matched


def find_facts(
    model: nn.Module, *, heads: Collection[str] = (), frozen: bool = False
) -> tuple[Fact, ...]:
    """Return every parameter once, in the model's order.

    Args:
        model: any module whose layers have rules.
        heads: the names of the output layers, whose scaling gets a head_width.
        frozen: whether to include parameters that are not trained.
    """
    layers = find_layers(model, frozen=frozen)
    facts: dict[int, Fact] = {}
    for layer in layers:
        scaling = _as_head(layer) if layer.name in heads else layer.scaling
        for key, parameter in layer.parameters.items():
            name = f"{layer.name}.{key}" if layer.name else key
            fact = Fact(name, parameter, scaling[key], (layer.name,), (key,))
            known = facts.get(id(parameter))
            facts[id(parameter)] = fact if known is None else _merged(known, fact)
    return tuple(facts.values())


def _as_head(layer: Layer) -> dict[str, Scaling]:
    """Return the scaling of a layer whose output does not grow with the model."""
    matrices = layer.matrices
    width = getattr(layer.module, "out_features", None)
    if not isinstance(width, int) and len(matrices) == 1:
        width = layer.scaling[matrices[0]].fan_out
    if not isinstance(width, int):
        raise EinlinearError(
            what=f"the head {layer.name} has the parameters {', '.join(layer.scaling)}",
            rule="the width of a head's output is its out_features, or the fan_out of its matrix",
            fix="give the module an attribute out_features, or declare head_width in its Scaling",
        )
    return {name: replace(scaling, head_width=width) for name, scaling in layer.scaling.items()}


def _merged(known: Fact, fact: Fact) -> Fact:
    """Merge the facts of one parameter that two modules share.

    If one of the two is an embedding, its scaling wins: the entries of an embedding move by the
    same amount at every width. A tied head then lacks a factor of 1 / fan_in, which the model
    itself must apply to the logits. Otherwise the two scalings must agree; a parameter that the
    head shares with another layer scales as the head's.
    """
    owners, keys = known.owners + fact.owners, known.keys + fact.keys
    is_vector = known.scaling.kind != "matrix", fact.scaling.kind != "matrix"
    if is_vector[0] != is_vector[1]:
        return replace(known if is_vector[0] else fact, name=known.name, owners=owners, keys=keys)
    width = max(known.scaling.head_width, fact.scaling.head_width)
    scaling, other = (
        replace(f.scaling, head_width=f.scaling.head_width or width) for f in (known, fact)
    )
    if scaling != other:
        raise EinlinearError(
            what=f"{known.name} and {fact.name} are one parameter, with the scalings "
            f"{known.scaling} and {fact.scaling}",
            rule="layers that share a parameter agree on its scaling",
            fix="register a rule for one of the two types that returns the scaling of the other: "
            "el.register_scaling(...)",
        )
    return replace(known, scaling=scaling, owners=owners, keys=keys)
