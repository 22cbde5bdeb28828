"""What a model's modules declare of their parameters, gathered: each parameter once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol, get_args, runtime_checkable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import Scaling
from einlinear.models.free import rule_code, rule_entries
from einlinear.models.scalings import has_rule, module_scaling

PASTE = "paste this once, before the call, and check it:\n\n"
"""What stands before the code of a rule."""

Role = Literal["head", "zero"]

# Modules that wrap another one, as they appear in the names of parameters.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


@runtime_checkable
class _NamesRoles(Protocol):
    def layer_roles(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """One parameter of a model, with its scaling; `owners` are the modules that use it."""

    name: str
    parameter: nn.Parameter
    scaling: Scaling
    owners: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A module that owns parameters itself, with their scaling."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    scaling: dict[str, Scaling]

    @property
    def matrices(self) -> list[str]:
        """The names of its matrices, in the order in which they meet the input."""
        return [name for name in self.scaling if self.scaling[name].kind == "matrix"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def find_layers(model: nn.Module, *, frozen: bool = False) -> list[Layer]:
    """Every module that owns parameters itself; those that only own frozen ones if asked for."""
    _check_model(model)
    owners = []
    for name, module in unwrapped(model).named_modules():
        parameters = {
            key: parameter
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if frozen or parameter.requires_grad
        }
        if parameters:
            owners.append((plain_name(name), module, parameters))
    # A module that only shares what a layer with a rule owns, such as a head's bias, needs none.
    declared = {id(module): module_scaling(module) for _, module, _ in owners}
    known = {
        id(p)
        for _, module, own in owners
        for key, p in own.items()
        if key in (declared[id(module)] or {})
    }
    return [
        _layer(name, module, own, declared[id(module)])
        for name, module, own in owners
        if declared[id(module)] is not None or not all(id(p) in known for p in own.values())
    ]


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise EinlinearError(
            what=f"the model is given as {quote(model)}",
            rule="a model is an nn.Module: its layers say how their parameters scale",
            fix="give the model itself, not its parameters",
        )
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise EinlinearError(
            what=f"the width of {plain_name(lazy[0])} is not known yet: its layer is lazy",
            rule="rates and deviations follow from widths",
            fix="run the model once on an input, then call this again",
        )


def plain_name(name: str) -> str:
    """A qualified name without the marks of torch.compile and of checkpointing."""
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
        fix = f"{PASTE}{rule_code(name, module)}\n"
        if has_rule(module):
            entries = "\n".join(rule_entries(module, missing))
            fix = f"add to what its rule returns, module being the layer:\n\n{entries}\n"
        raise EinlinearError(
            what=f"no learning rate is known for {given} of {name or 'the model itself'}, "
            f"a {type(module).__module__}.{type(module).__qualname__}",
            rule="a module that owns parameters says how they scale with the width",
            fix=fix,
        )
    scaling = {key: scaling for key, scaling in declared.items() if key in parameters}
    return Layer(name, module, parameters, scaling)


def named_roles(model: nn.Module) -> dict[str, set[str]]:
    """The names of the layers that the model itself calls its head, or to be zero at the start.

    A module may have a method `layer_roles() -> {pattern: "head" or "zero"}`, with patterns on
    names inside of it. Of a Hugging Face model `get_output_embeddings()` is the head.
    """
    model = unwrapped(model)
    roles: dict[str, set[str]] = {role: set() for role in get_args(Role)}
    modules = [(plain_name(name), module) for name, module in model.named_modules()]
    for prefix, module in modules:
        if isinstance(module, _NamesRoles):
            declared = module.layer_roles()
            names = [name for name, other in modules if other._parameters]
            for pattern, role in declared.items():
                if role not in roles:
                    raise EinlinearError(
                        what=f"layer_roles of {type(module).__name__} gives {quote(pattern)} the "
                        f"role {quote(role)}",
                        rule=f"a role is one of {', '.join(map(repr, roles))}",
                        fix='use "head" for the output layer, "zero" for the end of a branch',
                    )
                full = f"{prefix}.{pattern}" if prefix else pattern
                roles[role] |= match_names([full], names, "layer_roles")
        head = _declared_head(module)
        if head is not None:
            roles["head"] |= {name for name, other in modules if other is head}
    return roles


def _declared_head(module: nn.Module) -> object:
    """What a model of Hugging Face declares as its head; None for all other modules."""
    declare = getattr(module, "get_output_embeddings", None)
    try:
        return declare() if callable(declare) else None
    except AttributeError:  # many ask a part of theirs, which may have no such method, or be None
        return None


def match_names(patterns: Iterable[str], names: Iterable[str], argument: str) -> set[str]:
    """The names that fit one of the patterns (globs; * also spans dots); each must fit some."""
    names = list(names)
    matched = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise EinlinearError(
                what=f"{argument}: the pattern {quote(pattern)} fits no layer",
                rule="a pattern is compared with the full names of layers; * stands for any text",
                fix=f"the layers are {', '.join(names[:20]) or 'none'}"
                + (", ..." if len(names) > 20 else ""),
            )
        matched |= found
    return matched


def find_facts(
    model: nn.Module, *, heads: Collection[str] = (), frozen: bool = False
) -> tuple[Fact, ...]:
    """Every parameter once, in the model's order.

    Args:
        model: any module; its layers must have rules.
        heads: the names of the output layers, whose scaling has a head_width then.
        frozen: whether parameters that are not trained are wanted too.
    """
    layers = find_layers(model, frozen=frozen)
    facts: dict[int, Fact] = {}
    for layer in layers:
        scaling = _as_head(layer) if layer.name in heads else layer.scaling
        for key, parameter in layer.parameters.items():
            name = f"{layer.name}.{key}" if layer.name else key
            fact = Fact(name, parameter, scaling[key], (layer.name,))
            known = facts.get(id(parameter))
            facts[id(parameter)] = fact if known is None else _merged(known, fact)
    return tuple(facts.values())


def _as_head(layer: Layer) -> dict[str, Scaling]:
    """The scaling of a layer whose output does not grow with the model."""
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
    """One parameter that two modules use: as an embedding if it is one, else they must agree.

    A matrix that is both embedding and head acts on the input as a table of vectors, whose entries
    must move by as much as they are large, at every width: the embedding's rate. What 1 / fan_in
    the head then lacks is a multiplier of the logits and belongs to the model. What the head shares
    with another layer counts as the head's.
    """
    owners = known.owners + fact.owners
    is_vector = known.scaling.kind != "matrix", fact.scaling.kind != "matrix"
    if is_vector[0] != is_vector[1]:
        return replace(known if is_vector[0] else fact, name=known.name, owners=owners)
    width = max(known.scaling.head_width, fact.scaling.head_width)
    scaling, other = (
        replace(f.scaling, head_width=f.scaling.head_width or width) for f in (known, fact)
    )
    if scaling != other:
        raise EinlinearError(
            what=f"{known.name} and {fact.name} are one parameter, with the scalings "
            f"{known.scaling} and {fact.scaling}",
            rule="layers that share a parameter agree on its scaling",
            fix="el.register_scaling a rule for one of the two types that gives what the other has",
        )
    return replace(known, scaling=scaling, owners=owners)
