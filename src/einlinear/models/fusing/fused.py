"""Modules that follow a recipe: the class of a fused module, and the way back.

A fused module gets a subclass of its class, as torch's FSDP and parametrizations do it. Its
attributes, parameters and their names stay the same. The subclass overrides one method, which does
what the old one does wherever the recipe may not be followed.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from einlinear.models.fusing.recipe import Recipe

_RECIPE = "_einlinear_recipe"
_ORIGINAL = "_einlinear_original"


def put_recipe_(module: nn.Module, method: str, recipe: Recipe) -> None:
    """Let a module follow a recipe when a method is called."""
    vars(module)[_RECIPE] = recipe
    original: Any = type(module)
    module.__class__ = fused_class(original, method)


def remove_recipe_(module: nn.Module) -> bool:
    """Give a module its own class again; returns whether it was fused."""
    original = getattr(type(module), _ORIGINAL, None)
    if original is None:
        return False
    module.__class__ = original
    vars(module).pop(_RECIPE, None)
    return True


@cache
def fused_class(original: Any, method: str) -> Any:
    """A subclass whose method follows the recipe of the module, if it still holds."""
    plain = getattr(original, method)

    @wraps(plain)
    def follow(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return plain(self, *args, **kwargs)
        recipe: Recipe | None = vars(self).get(_RECIPE)
        if recipe is None or not recipe.holds(self):
            return plain(self, *args)
        return recipe.follow(self, args[0])

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        """Copy and pickle by the original class, which can be imported."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else dict(vars(self))
        return _remake, (original, method), state

    names = {
        method: follow,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        _ORIGINAL: original,
    }
    return type(original)(original.__name__, (original,), names)


def _remake(original: Any, method: str) -> Any:
    kind = fused_class(original, method)
    return kind.__new__(kind)
