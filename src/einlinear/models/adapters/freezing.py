"""freeze_: which parameters of an adapted model are trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.models.adapted import AdaptedLinear
from einlinear.models.survey.facts import match_names


def trainable_names(model: nn.Module, patterns: str | Iterable[str]) -> set[str]:
    """Return the names of modules and parameters that match a pattern; each must match some."""
    given = [patterns] if isinstance(patterns, str) else patterns
    every = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(pattern, str) for pattern in every):
        raise EinlinearError(
            what=f"trainable is given as {quote(patterns)}",
            rule="trainable is a glob on the names of parameters or modules, or several",
            fix='write trainable="head" or trainable=["head", "*.norm*"]',
        )
    names: dict[str, None] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        names |= dict.fromkeys(_with_parents(name))
    return match_names([p for p in every if p is not None], names, "trainable")


def trained_besides(model: nn.Module) -> set[str]:
    """Return the names of parameters of an adapted model that are trained besides its adapters."""
    updates = _updates(model)
    if not updates:
        return set()
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, p in every if p.requires_grad and id(p) not in updates}


def freeze_(model: nn.Module, *, except_for: Collection[str]) -> None:
    """Train the adapters of a model, and parameters and modules of these names; freeze the rest."""
    updates = _updates(model)
    chosen = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(part in except_for for part in _with_parents(name))
    }
    for parameter in model.parameters():
        is_trained = id(parameter) in updates | chosen and parameter.is_floating_point()
        parameter.requires_grad_(is_trained)


def _updates(model: nn.Module) -> set[int]:
    layers = (module for module in model.modules() if isinstance(module, AdaptedLinear))
    return {id(parameter) for layer in layers for parameter in layer.update.parameters()}


def _with_parents(name: str) -> list[str]:
    """Return the names of the modules around a parameter, and its own."""
    return list(accumulate(name.split("."), lambda start, part: f"{start}.{part}"))
