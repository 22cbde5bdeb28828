"""Tell the transformers library of our layers once it is loaded, without loading it.

`from_pretrained` finds the layers of a saved model through a registered quantizer. The module that
registers it loads torch and transformers, so `import einlinear` only asks to be told when
transformers loads its own quantizers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from einlinear.errors import reason

_THEIRS = "transformers.quantizers.auto"
_OURS = "einlinear.models.saving.quantizer"


def register_with_transformers() -> None:
    """Register our quantizer, now or once transformers has loaded its own."""
    if _THEIRS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WhenTransformersLoads())


class _WhenTransformersLoads:
    """A finder that finds one module, with the other finders, and adds a step to its loading."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module of the quantizers of transformers, and nothing else."""
        if name != _THEIRS:
            return None
        # Not in place: an import that is iterating over the list would skip a finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _register_after_loading_(spec.loader)
                return spec
        return None


def _register_after_loading_(loader: Any) -> None:
    load = loader.exec_module

    def load_and_register(module: ModuleType) -> None:
        load(module)
        _register()

    loader.exec_module = load_and_register


def _register() -> None:
    try:
        import_module(_OURS)
    except Exception as error:  # importing any version of transformers must not fail here
        warnings.warn(
            "from_pretrained cannot load models with layers of einlinear in this version of "
            f"transformers: {reason(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
