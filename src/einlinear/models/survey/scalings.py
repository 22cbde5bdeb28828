"""Rules that say how the parameters of a type of module scale: built in, or added by users."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeVar, overload

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import (
    MatrixAxes,
    Scaling,
    embedding_scaling,
    matrix_scaling,
    vector_scaling,
)
from einlinear.models.survey.inferred import inferred_scaling

ScalingRule = Callable[[Any], dict[str, Scaling]]
_Rule = TypeVar("_Rule", bound=ScalingRule)


@overload
def register_scaling(
    module_type: type[nn.Module], function: None = None
) -> Callable[[_Rule], _Rule]: ...


@overload
def register_scaling(module_type: type[nn.Module], function: _Rule) -> _Rule: ...


def register_scaling(module_type: type[nn.Module], function: ScalingRule | None = None) -> Any:
    """Register how the parameters of a type of module scale; also works as a decorator.

        @el.register_scaling(MyLayer)
        def my_scaling(layer):
            return {"weight": el.matrix_scaling(layer.d_in, layer.d_out)}

    The function takes a layer and returns the Scaling of each parameter that the layer owns
    directly, by name. The rule also applies to subclasses; the most specific class wins. A
    registered rule takes precedence over a method `param_scaling` of the same class. Registering a
    type again replaces its rule.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise EinlinearError(
            what=f"a scaling is registered for {quote(module_type)}",
            rule="a rule belongs to a class of modules",
            fix="give the class: el.register_scaling(MyLayer, function)",
        )

    def register(rule: _Rule) -> _Rule:
        _RULES[module_type] = rule
        return rule

    return register if function is None else register(function)


def module_scaling(module: nn.Module) -> dict[str, Scaling] | None:
    """Return the scaling of the parameters that a module owns directly; None if it is unknown.

    If the module has no rule, names and shapes may still tell the scaling of some parameters; see
    `inferred_scaling`.
    """
    rule = _rule(module)
    return dict(rule(module)) if rule is not None else inferred_scaling(module) or None


def has_rule(module: nn.Module) -> bool:
    """Return whether the module declares its scaling, or a rule is registered for its type."""
    return _rule(module) is not None


def _rule(module: nn.Module) -> ScalingRule | None:
    for cls in type(module).__mro__:
        rule = _RULES.get(cls) or _RULES_BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if rule := rule or vars(cls).get("param_scaling"):
            return rule
    return None


_OUT_IN, _IN_OUT = MatrixAxes((-1,), (-2,)), MatrixAxes((-2,), (-1,))


def _with_bias(layer: nn.Module, weight: Scaling, width: int) -> dict[str, Scaling]:
    bias = {} if getattr(layer, "bias", None) is None else {"bias": vector_scaling(width)}
    return {"weight": weight} | bias


def _linear(layer: nn.Linear) -> dict[str, Scaling]:
    weight = matrix_scaling(layer.in_features, layer.out_features, _OUT_IN)
    return _with_bias(layer, weight, layer.out_features)


def _transposed_linear(layer: Any) -> dict[str, Scaling]:
    """The Conv1D of Hugging Face is a linear layer whose weight is (in, out)."""
    d_in, d_out = layer.weight.shape
    return _with_bias(layer, matrix_scaling(d_in, d_out, _IN_OUT), d_out)


def _bilinear(layer: nn.Bilinear) -> dict[str, Scaling]:
    axes = MatrixAxes((-2, -1), (-3,))
    weight = matrix_scaling(layer.in1_features * layer.in2_features, layer.out_features, axes)
    return _with_bias(layer, weight, layer.out_features)


def _convolution(layer: Any) -> dict[str, Scaling]:
    """Each output sums over the kernel's window and the input channels of its group."""
    fan_in = layer.in_channels // layer.groups * prod(layer.kernel_size)
    window = tuple(range(-len(layer.kernel_size), 0))
    second = window[0] - 1
    first = second - 1
    inputs, outputs = (first, second) if layer.transposed else (second, first)
    axes = MatrixAxes((inputs, *window), (outputs,), (first, layer.groups))
    weight = matrix_scaling(fan_in, layer.out_channels // layer.groups, axes)
    return _with_bias(layer, weight, layer.out_channels)


def _attention(layer: nn.MultiheadAttention) -> dict[str, Scaling]:
    width = layer.embed_dim
    stacked = MatrixAxes((-1,), (-2,), (-2, 3))
    packed = {"in_proj_weight": matrix_scaling(width, width, stacked)}
    separate = {
        f"{name}_proj_weight": matrix_scaling(fan_in, width, _OUT_IN)
        for name, fan_in in (("q", width), ("k", layer.kdim), ("v", layer.vdim))
    }
    vectors = dict.fromkeys(("in_proj_bias", "bias_k", "bias_v"), vector_scaling(width))
    every = packed | separate | vectors
    return {name: scaling for name, scaling in every.items() if getattr(layer, name) is not None}


def _recurrent(layer: Any) -> dict[str, Scaling]:
    """RNN, LSTM, GRU and their cells stack the gates along the first axis of a weight."""

    def weight(parameter: nn.Parameter) -> Scaling:
        gates, rest = divmod(parameter.shape[0], layer.hidden_size)
        axes = MatrixAxes((-1,), (-2,), (-2, 1 if rest else gates))  # a projection has no gates
        return matrix_scaling(parameter.shape[1], layer.hidden_size, axes)

    return {
        name: weight(parameter) if parameter.dim() == 2 else vector_scaling(layer.hidden_size)
        for name, parameter in layer.named_parameters(recurse=False)
    }


def _embedding(layer: Any) -> dict[str, Scaling]:
    return {"weight": embedding_scaling(layer.embedding_dim)}


def _gains(layer: nn.Module, *, start: float) -> dict[str, Scaling]:
    """The weight is a gain with this initial value; biases start at 0."""
    return {
        name: vector_scaling(parameter.numel(), init_mean=start if name == "weight" else 0.0)
        for name, parameter in layer.named_parameters(recurse=False)
    }


_norm = partial(_gains, start=1.0)
_norm_around_zero = partial(_gains, start=0.0)  # multiplies by 1 + weight

_RULES: dict[type[nn.Module], ScalingRule] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    nn.MultiheadAttention: _attention,
    nn.PReLU: partial(_gains, start=0.25),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    **dict.fromkeys((nn.RNNBase, nn.RNNCellBase), _recurrent),
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), _embedding),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.SyncBatchNorm), _norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _norm),
}
_HUGGING_FACE: dict[str, ScalingRule] = {
    "models.gemma.modeling_gemma.GemmaRMSNorm": _norm_around_zero,
    "models.gemma2.modeling_gemma2.Gemma2RMSNorm": _norm_around_zero,
    "models.gemma3.modeling_gemma3.Gemma3RMSNorm": _norm_around_zero,
    "models.llama.modeling_llama.LlamaRMSNorm": _norm,
    "models.mistral.modeling_mistral.MistralRMSNorm": _norm,
    "models.qwen2.modeling_qwen2.Qwen2RMSNorm": _norm,
    "models.qwen3.modeling_qwen3.Qwen3RMSNorm": _norm,
    "models.t5.modeling_t5.T5LayerNorm": _norm,
    "pytorch_utils.Conv1D": _transposed_linear,
}
# By name, so that the library need not be imported.
_RULES_BY_NAME = {f"transformers.{name}": rule for name, rule in _HUGGING_FACE.items()}
