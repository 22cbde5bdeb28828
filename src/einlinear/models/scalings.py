"""Which scaling the parameters of a module have: torch's own layers, and those that users add."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar, overload

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import (
    Scaling,
    embedding_scaling,
    matrix_scaling,
    vector_scaling,
)
from einlinear.models.free import free_scaling

Rule = Callable[[Any], dict[str, Scaling]]
RuleType = TypeVar("RuleType", bound=Rule)

_RULES: dict[type[nn.Module], Rule] = {}
_RULES_BY_NAME: dict[str, Rule] = {}  # of libraries that are not imported for this


@overload
def register_scaling(
    module_type: type[nn.Module], function: None = None
) -> Callable[[RuleType], RuleType]: ...


@overload
def register_scaling(module_type: type[nn.Module], function: RuleType) -> RuleType: ...


def register_scaling(module_type: type[nn.Module], function: Rule | None = None) -> Any:
    """Say what scaling the parameters of a type of layers have; also works as a decorator.

        @el.register_scaling(MyLayer)
        def my_scaling(layer):
            return {"weight": el.matrix_scaling(layer.d_in, layer.d_out)}

    The function takes a layer and returns the Scaling of each parameter that the layer owns itself,
    by name. It holds for subclasses too; of several the most specific class counts, and on the same
    class it goes before a method `param_scaling`. Registering a type again replaces its rule.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise EinlinearError(
            what=f"a scaling is registered for {quote(module_type)}",
            rule="a rule belongs to a class of modules",
            fix="give the class itself, such as el.register_scaling(MyLayer, function)",
        )

    def register(rule: RuleType) -> RuleType:
        _RULES[module_type] = rule
        return rule

    return register if function is None else register(function)


def module_scaling(module: nn.Module) -> dict[str, Scaling] | None:
    """The scaling of the parameters that a module owns itself; None if nothing is known.

    Without a rule for the module it is what names and shapes tell, which may be some parameters
    only; see `free_scaling`.
    """
    rule = _rule(module)
    return dict(rule(module)) if rule is not None else free_scaling(module) or None


def has_rule(module: nn.Module) -> bool:
    """Whether the module declares its scaling, or a rule is registered for its type."""
    return _rule(module) is not None


def _rule(module: nn.Module) -> Rule | None:
    for cls in type(module).__mro__:
        rule = _RULES.get(cls) or _RULES_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule is None and "param_scaling" in vars(cls):
            rule = cls.param_scaling  # type: ignore[attr-defined]
        if rule is not None:
            return rule
    return None


def _with_bias(
    module: nn.Module, scaling: dict[str, Scaling], width: int, name: str = "bias"
) -> dict[str, Scaling]:
    has_bias = getattr(module, name, None) is not None
    return scaling | ({name: vector_scaling(width)} if has_bias else {})


@register_scaling(nn.Linear)
def _linear(layer: nn.Linear) -> dict[str, Scaling]:
    weight = matrix_scaling(layer.in_features, layer.out_features)
    return _with_bias(layer, {"weight": weight}, layer.out_features)


@register_scaling(nn.Bilinear)
def _bilinear(layer: nn.Bilinear) -> dict[str, Scaling]:
    weight = matrix_scaling(layer.in1_features * layer.in2_features, layer.out_features)
    return _with_bias(layer, {"weight": weight}, layer.out_features)


def _convolution(layer: Any) -> dict[str, Scaling]:
    """Every output sums the kernel's window over the inputs of its group."""
    fan_in = layer.in_channels // layer.groups * prod(layer.kernel_size)
    weight = matrix_scaling(fan_in, layer.out_channels // layer.groups)
    return _with_bias(layer, {"weight": weight}, layer.out_channels)


@register_scaling(nn.MultiheadAttention)
def _attention(layer: nn.MultiheadAttention) -> dict[str, Scaling]:
    width = layer.embed_dim
    inputs = {
        "in_proj_weight": width,
        "q_proj_weight": width,
        "k_proj_weight": layer.kdim,
        "v_proj_weight": layer.vdim,
    }
    scaling = {
        name: matrix_scaling(fan_in, width)
        for name, fan_in in inputs.items()
        if getattr(layer, name) is not None
    }
    for name in ("in_proj_bias", "bias_k", "bias_v"):
        scaling = _with_bias(layer, scaling, width, name)
    return scaling


def _recurrent(layer: Any) -> dict[str, Scaling]:
    """RNN, LSTM, GRU and their cells: gates are stacked along the first axis of a weight."""
    return {
        name: matrix_scaling(parameter.shape[1], layer.hidden_size)
        if parameter.dim() == 2
        else vector_scaling(layer.hidden_size)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def _embedding(layer: Any) -> dict[str, Scaling]:
    return {"weight": embedding_scaling(layer.embedding_dim)}


def _norm(layer: nn.Module) -> dict[str, Scaling]:
    """Gains start at 1, biases at 0."""
    return {
        name: vector_scaling(parameter.numel(), init_mean=float(name == "weight"))
        for name, parameter in layer.named_parameters(recurse=False)
    }


@register_scaling(nn.PReLU)
def _prelu(layer: nn.PReLU) -> dict[str, Scaling]:
    return {"weight": vector_scaling(layer.num_parameters, init_mean=0.25)}


_RULES |= dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution)
_RULES |= dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution)
_RULES |= dict.fromkeys((nn.RNNBase, nn.RNNCellBase), _recurrent)
_RULES |= dict.fromkeys((nn.Embedding, nn.EmbeddingBag), _embedding)
_RULES |= dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm), _norm)
_RULES |= dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _norm)
_RULES |= dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _norm)


def _transposed_linear(layer: Any) -> dict[str, Scaling]:
    """The linear layer of GPT-2 in Hugging Face's library, whose weight is (in, out)."""
    fan_in, fan_out = layer.weight.shape
    return _with_bias(layer, {"weight": matrix_scaling(fan_in, fan_out)}, fan_out)


def _norm_around_zero(layer: nn.Module) -> dict[str, Scaling]:
    """Norms that multiply by 1 + weight, so that it starts at 0."""
    return {name: vector_scaling(p.numel()) for name, p in layer.named_parameters(recurse=False)}


_HUGGING_FACE = "transformers.models"
_RULES_BY_NAME["transformers.pytorch_utils.Conv1D"] = _transposed_linear
_RULES_BY_NAME |= {
    f"{_HUGGING_FACE}.{family}.modeling_{family}.{name}": _norm
    for family, name in (
        ("llama", "LlamaRMSNorm"),
        ("mistral", "MistralRMSNorm"),
        ("qwen2", "Qwen2RMSNorm"),
        ("qwen3", "Qwen3RMSNorm"),
        ("t5", "T5LayerNorm"),
    )
}
_RULES_BY_NAME |= {
    f"{_HUGGING_FACE}.{family}.modeling_{family}.{name}": _norm_around_zero
    for family, name in (
        ("gemma", "GemmaRMSNorm"),
        ("gemma2", "Gemma2RMSNorm"),
        ("gemma3", "Gemma3RMSNorm"),
    )
}
