"""LoRA of the peft library on structured layers."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.moe import MoELinear

_STARTS = (True, False, "gaussian")  # all others of peft read or change the weight of the layer
_VARIANTS = tuple(
    "use_dora use_qalora use_bdlora mica arrow_config velora_config monteclora_config kasa_config "
    "alora_invocation_tokens corda_config".split()
)


def lora(config: Any) -> Any:
    """A copy of peft's LoraConfig that can also target EinsumLinear and MoELinear.

        model = peft.get_peft_model(model, el.lora(LoraConfig(target_modules=["up", "down"])))

    The output of an adapted layer is that of the structured layer plus the adapter's, as usual.
    Merging is refused, because the sum has no such structure. peft does not save which layers are
    supported, so give the config again to load: PeftModel.from_pretrained(model, path,
    config=el.lora(LoraConfig.from_pretrained(path))).
    """
    is_known = hasattr(type(config), "_register_custom_module")
    if not is_known or config.peft_type != "LORA":  # other methods inherit from LoraConfig
        raise EinlinearError(
            what=f"a config for LoRA is given as {quote(config)}",
            rule="el.lora takes a LoraConfig of peft, new enough; of its methods LoRA alone works "
            "on structured layers",
            fix="write el.lora(peft.LoraConfig(target_modules=[...]))",
        )
    _check(config)
    own = copy(config)
    own._custom_modules = dict(config._custom_modules or {})
    own._register_custom_module(dict.fromkeys((EinsumLinear, MoELinear), _adapter_class()))
    return own


def _check(config: Any) -> None:
    """Refuse what needs the weight of the layer as one matrix, or passes structured layers by."""
    if config.target_modules == "all-linear":
        raise EinlinearError(
            what='target_modules is "all-linear"',
            rule="peft then looks for nn.Linear only, and passes structured layers by",
            fix='name the layers, by the end of their names: target_modules=["up", "down"]',
        )
    asked = [name for name in _VARIANTS if getattr(config, name, None)]
    if config.init_lora_weights not in _STARTS:
        asked.append(f"init_lora_weights={quote(config.init_lora_weights)}")
    if asked:
        raise EinlinearError(
            what=f"the LoraConfig asks for {', '.join(asked)}",
            rule="a structured layer has no weight matrix that this variant of LoRA could read or "
            "change",
            fix="leave it out: plain LoRA works on structured layers",
        )


@lru_cache(maxsize=1)
def _adapter_class() -> type[nn.Module]:
    """The LoRA layer of peft for linear layers, for one whose weight is computed."""
    plain: Any = import_module("peft.tuners.lora.layer").Linear

    class StructuredLora(plain):  # type: ignore[misc]
        """LoRA around a structured layer."""

        __qualname__ = "StructuredLora"  # where pickle looks for it: see __getattr__ below

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

        def merge(self, *arguments: Any, **options: Any) -> NoReturn:
            """Refuse: the sum of a structured and a low-rank matrix has no such structure."""
            raise EinlinearError(
                what=f"an adapter would be merged into {type(self.get_base_layer()).__name__}",
                rule="the sum of a structured matrix and an adapter has no such structure",
                fix="use the model with its adapters, or drop them with model.unload()",
            )

    return StructuredLora


def __getattr__(name: str) -> type[nn.Module]:
    """The adapter under the name that pickles give it; peft is loaded only then."""
    if name == "StructuredLora":
        return _adapter_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
