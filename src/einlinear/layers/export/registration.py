"""Register our operators with torch when torch first looks for one of them.

An exported program names operators like einlinear::multiply. The modules that register them load
torch and take about 70 ms, so `import einlinear` does not import them. Instead it installs a
namespace `torch.ops.einlinear` that imports them on demand; if torch is not loaded yet, as soon as
it is.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

HOMES = {
    "multiply": "einlinear.layers.operators",
    "gradients": "einlinear.layers.operators",
    "experts": "einlinear.layers.moe.operators",
    "experts_gradients": "einlinear.layers.moe.operators",
}
"""The module that registers each operator."""


def register_on_demand() -> None:
    """Arrange for operators to be registered on first use, now or once torch is loaded."""
    if not _has_operators():
        sys.meta_path.insert(0, _WhenTorchLoads())
        return
    with suppress(Exception):  # importing any version of torch must not fail here
        _install(sys.modules["torch._ops"])


class _WhenTorchLoads:
    """A finder that finds nothing, but sees every import; it removes itself once torch is loaded.

    torch goes on importing modules long after its operators exist, so there is no need to patch it.
    """

    def find_spec(self, *_: object) -> None:
        """Find nothing, whatever the module."""
        if _has_operators():
            # Not in place: an import that is iterating over the list would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            register_on_demand()


def _has_operators() -> bool:
    return hasattr(sys.modules.get("torch._ops"), "ops")


def _install(home: Any) -> None:
    """Install the namespace, unless the operators are registered already."""
    if set(HOMES.values()) & sys.modules.keys():
        return
    base: type[ModuleType] = home._OpNamespace

    class Namespace(base):  # type: ignore[valid-type, misc]
        """torch.ops.einlinear, which registers operators when they are looked up."""

        __module__ = base.__module__  # torch derives the names of operators from it

        def __getattr__(self, name: str) -> Any:
            if name in HOMES:
                import_module(HOMES[name])
            return super().__getattr__(name)

    home.ops.einlinear = Namespace("einlinear")
