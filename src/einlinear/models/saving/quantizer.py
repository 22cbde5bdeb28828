"""EinlinearQuantizer: how from_pretrained puts structured layers in place.

transformers calls whatever changes layers before weights are loaded a quantizer. Ours quantizes
nothing: models can be trained, cast and compiled as usual. This module imports transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from einlinear.errors import EinlinearError, quote, reason
from einlinear.layers.linear import SumLinear
from einlinear.models.saving.pretrained import (
    METHOD,
    PRETRAINED_SCHEMA,
    check_loaded,
    describe_in_config_,
    forget_line_,
    placed_in,
    placeholder_patterns,
    placeholders,
    unpack_layers,
)
from einlinear.models.saving.restore import restore_layers_
from einlinear.models.saving.saved_layer import SavedLayer, describe_layers
from einlinear.models.saving.weights import check_whole
from einlinear.version import __version__


@register_quantization_config(METHOD)
class EinlinearConfig(QuantizationConfigMixin):
    """The structured layers of a model, as its config.json has them."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        schema: int = PRETRAINED_SCHEMA,
        einlinear: str = __version__,
        **others: Any,
    ) -> None:
        if schema != PRETRAINED_SCHEMA:
            raise EinlinearError(
                what=f"the model has the schema {quote(schema)}, written by einlinear "
                f"{quote(einlinear)}",
                rule=f"einlinear {__version__} reads schema {PRETRAINED_SCHEMA}",
                fix="install the version of einlinear that wrote it, or a later one",
            )
        self.quant_method: Any = METHOD
        self.schema = schema
        self.einlinear = einlinear
        self.groups = groups

    def layers(self) -> tuple[SavedLayer, ...]:
        """The layers, checked."""
        try:
            return unpack_layers(self.groups)
        except EinlinearError:
            raise
        except ValueError as error:
            raise EinlinearError(
                what=f"cannot read the quantization_config of the model: {reason(error)}",
                rule="a saved model is read as it was written",
                fix="save the model again, or restore its config.json from a copy",
            ) from error


@register_quantizer(METHOD)
class EinlinearQuantizer(HfQuantizer):
    """Puts the structured layers of a saved model in place, and saves them."""

    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: EinlinearConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if not self.pre_quantized:
            raise EinlinearError(
                what="from_pretrained is given an EinlinearConfig for a plain model",
                rule="layers are converted after a model is loaded",
                fix="load the model without quantization_config=, then call el.convert_",
            )
        self._layers = quantization_config.layers
        self._shapes: dict[str, torch.Size] = {}

    @classmethod
    def of(cls, values: dict[str, Any]) -> EinlinearQuantizer:
        """Create the quantizer of a converted model from the description of its layers."""
        return cls(EinlinearConfig(**values), pre_quantized=True)

    def is_serializable(self) -> bool:
        """Whether models can be saved: yes."""
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        """Remove from the config what makes transformers refuse the model without einlinear."""
        config = copy.deepcopy(config)
        forget_line_(config)
        return config

    def preprocess_model(self, model: Any, dtype: torch.dtype | None = None, **_: Any) -> None:
        """Put the layers into a model that has no weights yet."""
        saved = self._layers()
        layers = placed_in(model, saved)
        if isinstance(dtype, torch.dtype):
            layers = tuple(replace(layer, dtype=str(dtype).split(".")[1]) for layer in layers)
        restore_layers_(model, layers)
        _keep_from_initialising_(model, layers)
        known = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = known | placeholder_patterns(saved)
        self._shapes = {name: tensor.shape for name, tensor in model.named_parameters()}

    def postprocess_model(self, model: Any, **_: Any) -> None:
        """Check what was loaded; transformers compares no shapes when there is a quantizer."""
        for name, tensor in model.named_parameters():
            if name in self._shapes and tensor.shape != self._shapes[name]:
                raise EinlinearError(
                    what=f"{name!r} has the shape {tuple(self._shapes[name])} in the new model, "
                    f"and was saved with {tuple(tensor.shape)}",
                    rule="the new model has the shapes of the one that was saved",
                    fix="load it with the config that it was saved with",
                )
        self._shapes = {}
        check_loaded(model)
        describe_in_config_(model, describe_layers(model))

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, Any]:
        """Return the tensors to save; describe the layers that the model has now in its config."""
        if getattr(model, "_hf_peft_config_loaded", False):  # only adapters are saved
            return None, {}
        own: nn.Module = model
        if getattr(model.config, "distributed_config", None) is None:
            check_whole(own)  # transformers takes no gathered weights from a quantizer's caller
        layers = describe_layers(own)
        describe_in_config_(model, layers)
        return {**own.state_dict(), **placeholders(layers)}, {}


def _keep_from_initialising_(model: nn.Module, layers: Iterable[SavedLayer]) -> None:
    """Mark structured layers, and modules that hold nothing else, as initialised.

    Before it loads weights, transformers initialises all modules; some initialise the weights of
    layers inside them, which mixtures of experts do not have.
    """
    for layer in layers:
        for name in layer.names:
            own = model.get_submodule(name)
            for module in own.modules() if isinstance(own, SumLinear) else (own,):
                module._is_hf_initialized = True  # type: ignore[assignment]
            parent = model.get_submodule(name.rpartition(".")[0])
            if not [*parent.parameters(recurse=False), *parent.buffers(recurse=False)]:
                parent._is_hf_initialized = True  # type: ignore[assignment]
