"""The operators of this package, registered with torch when torch first looks for one of them.

A program that torch.export saved names the operators einlinear::multiply and so on. They are
registered by modules that load torch and take some 70 ms, so `import einlinear` does not import
these. It puts a namespace `torch.ops.einlinear` in place, which does so on demand; if torch is not
loaded yet, as soon as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
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
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _AfterTorch())
    else:
        _install(torch)


class _AfterTorch:
    """A finder that finds nothing itself; it waits for torch to be imported, and goes away."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How to import torch, with the namespace put in place at the end; None for all else."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is None or isinstance(loader, type):  # a class would be changed for all modules
            return spec
        execute = loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            del loader.exec_module
            try:
                execute(module)
            except BaseException:
                sys.meta_path.insert(0, self)
                raise
            _install(module)

        with suppress(AttributeError):  # a loader that cannot be changed is left alone
            loader.exec_module = execute_and_install
        return spec


def _install(torch: ModuleType) -> None:
    """Put the namespace in place, unless the operators are there already."""
    with suppress(Exception):  # whatever torch becomes, importing it must not fail here
        if set(HOMES.values()) & sys.modules.keys():
            return
        base: type[ModuleType] = torch._ops._OpNamespace

        class Namespace(base):  # type: ignore[valid-type, misc]
            """torch.ops.einlinear, which registers operators when they are looked up."""

            __module__ = base.__module__  # torch takes the names of operators from it

            def __getattr__(self, name: str) -> Any:
                if name in HOMES:
                    import_module(HOMES[name])
                return super().__getattr__(name)

        torch.ops.einlinear = Namespace("einlinear")
