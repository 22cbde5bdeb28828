"""The operators of this package, registered with torch when torch first looks for one of them.

A program that torch.export saved names the operators einlinear::multiply and so on. They are
registered by modules that load torch and take some 70 ms, so `import einlinear` does not import
these. It puts a namespace `torch.ops.einlinear` in place, which does so on demand; if torch is not
loaded yet, as soon as it is.
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
    "experts": "einlinear.layers.expert_operators",
    "experts_gradients": "einlinear.layers.expert_operators",
}
"""The module that registers each operator."""


def register_on_demand() -> None:
    """Have the operators registered when torch looks for them, now or once torch is loaded."""
    if not _has_operators():
        sys.meta_path.insert(0, _WhenTorchLoads())
        return
    with suppress(Exception):  # whatever torch becomes, importing it must not fail here
        _install(sys.modules["torch._ops"])


class _WhenTorchLoads:
    """A finder that finds nothing; it is asked at each import, and goes once torch is there.

    torch imports modules until long after its operators are there, so it need not be changed.
    """

    def find_spec(self, *_: object) -> None:
        """Nothing, for any module."""
        if _has_operators():
            # Not removed in place: an import that goes through the list would miss a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            register_on_demand()


def _has_operators() -> bool:
    return hasattr(sys.modules.get("torch._ops"), "ops")


def _install(home: Any) -> None:
    """Put the namespace in place, unless the operators are there already."""
    if set(HOMES.values()) & sys.modules.keys():
        return
    base: type[ModuleType] = home._OpNamespace

    class Namespace(base):  # type: ignore[valid-type, misc]
        """torch.ops.einlinear, which registers operators when they are looked up."""

        __module__ = base.__module__  # torch takes the names of operators from it

        def __getattr__(self, name: str) -> Any:
            if name in HOMES:
                import_module(HOMES[name])
            return super().__getattr__(name)

    home.ops.einlinear = Namespace("einlinear")
