"""lora: LoRA adapters of the peft library on structured layers."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear, SumLinear
from einlinear.layers.moe.layers import MoELinear

_STARTS = (True, False, "gaussian")  # all other values read or change the layer's weight
_VARIANTS = tuple(
    "use_dora use_qalora use_bdlora mica arrow_config velora_config monteclora_config kasa_config "
    "alora_invocation_tokens corda_config".split()
)


def lora(config: Any) -> Any:
    """Return a copy of peft's LoraConfig that can also target structured layers.

        model = peft.get_peft_model(model, el.lora(LoraConfig(target_modules=["up", "down"])))

    As usual, an adapted layer outputs the sum of the structured layer and the adapter. Adapters
    cannot be merged, because the sum does not have the structure. peft does not save which layers
    are supported, so give the config again when you load: PeftModel.from_pretrained(model, path,
    config=el.lora(LoraConfig.from_pretrained(path))).
    """
    is_known = hasattr(type(config), "_register_custom_module")
    if not is_known or config.peft_type != "LORA":  # other methods inherit from LoraConfig
        raise EinlinearError(
            what=f"a config for LoRA is given as {quote(config)}",
            rule="el.lora takes the LoraConfig of a recent peft; no other method of peft works on "
            "structured layers",
            fix="write el.lora(peft.LoraConfig(target_modules=[...]))",
        )
    _check(config)
    own = copy(config)
    own._custom_modules = dict(config._custom_modules or {})
    kinds = EinsumLinear, SumLinear, MoELinear
    own._register_custom_module(dict.fromkeys(kinds, _adapter_class()))
    return own


def _check(config: Any) -> None:
    """Refuse settings that need the weight as one matrix, or that skip structured layers."""
    if config.target_modules == "all-linear":
        raise EinlinearError(
            what='target_modules is "all-linear"',
            rule="peft then looks only for nn.Linear and skips structured layers",
            fix='name the layers by the ends of their names: target_modules=["up", "down"]',
        )
    asked = [name for name in _VARIANTS if getattr(config, name, None)]
    if config.init_lora_weights not in _STARTS:
        asked.append(f"init_lora_weights={quote(config.init_lora_weights)}")
    if asked:
        raise EinlinearError(
            what=f"the LoraConfig asks for {', '.join(asked)}",
            rule="this variant of LoRA needs a weight matrix, which a structured layer does not "
            "have",
            fix="leave it out: plain LoRA works on structured layers",
        )


@lru_cache(maxsize=1)
def _adapter_class() -> type[nn.Module]:
    """Return peft's LoRA layer, adapted to layers whose weight is computed."""
    plain: Any = import_module("peft.tuners.lora.layer").Linear

    class StructuredLora(plain):  # type: ignore[misc]
        """LoRA around a structured layer."""

        __qualname__ = "StructuredLora"  # pickle finds it through __getattr__ below

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

        def merge(self, *arguments: Any, **options: Any) -> NoReturn:
            """Refuse to merge: the sum of a structured and a low-rank matrix has no structure."""
            raise EinlinearError(
                what=f"an adapter would be merged into {type(self.get_base_layer()).__name__}",
                rule="the sum of a structured matrix and an adapter does not have the structure",
                fix="use the model with its adapters, or remove them with model.unload()",
            )

    return StructuredLora


def __getattr__(name: str) -> type[nn.Module]:
    """Return the adapter class, which pickle looks up here; import peft only then."""
    if name == "StructuredLora":
        return _adapter_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
