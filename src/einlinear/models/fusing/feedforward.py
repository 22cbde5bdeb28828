"""Feed-forward nets in one pass: up, activation and down a few tokens at a time, by the engine.

The hidden activations between the layers never leave the cache. Of all of them, only the input is
saved for the backward pass, which computes them again. Where the engine cannot be used like this,
callers call layer by layer, which gives the same numbers up to rounding.

Legend: t tokens, d inputs, e outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu
from torch.nn.modules import module as torch_module

from einlinear.layers.engine import compiled
from einlinear.layers.engine.abi import Activation
from einlinear.layers.engine.feedforward import (
    NetLayer,
    net_backward,
    net_forward,
    net_tensors,
)
from einlinear.layers.linear import EinsumLinear
from einlinear.layers.norm import normalised
from einlinear.layers.opaque import differentiable_gradients
from einlinear.layers.operators import batched_gradients
from einlinear.layers.reference import multiply_by_einsum

FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: relu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
    Activation.SILU: silu,
}
"""The activations that nets can have, as functions of torch."""

_LEAST_TOKENS = 32  # fewer stay in cache between layers anyway
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called with each call of a module, which a fused net would not call."""
    return any([getattr(module, name) for name in _HOOKS]) or "forward" in vars(module)


def has_global_hooks() -> bool:
    """Whether something is called with each call of every module."""
    return bool(torch_module._has_any_global_hook())  # type: ignore[no-untyped-call]


def feed_forward(layers: Sequence[nn.Module], activation: Activation, x: Tensor) -> Tensor | None:
    """The output of a net in one pass; None if it must be computed layer by layer.

    Args:
        layers: up and down, or gate, up and down.
        activation: what follows up, or gate, whose results are then multiplied by those of up.
        x: the input.
    """
    if not compiled.IS_AVAILABLE or torch.compiler.is_compiling() or x.dim() == 0:
        return None
    if has_global_hooks() or torch.is_autocast_enabled("cpu"):
        return None
    down = layers[-1]
    for layer in layers:
        if type(layer) is not EinsumLinear or has_hooks(layer):
            return None
        if layer.in_features != (x.shape[-1] if layer is not down else layers[0].out_features):
            return None
    x_td = x.reshape(-1, x.shape[-1])
    if x_td.shape[0] < _LEAST_TOKENS:
        return None
    known = [layer for layer in layers if isinstance(layer, EinsumLinear)]
    parts = [_net_layer(layer, x) for layer in known]
    tensors = net_tensors(parts)
    if not compiled.is_direct(x, [tensor for tensor in tensors if tensor is not None]):
        return None
    if any([layer._variant(x_td, x_td.shape[0]) != "engine" for layer in known]):
        return None
    still = [part._replace(factors=(), bias=None) for part in parts]
    y_te: Tensor = _Net.apply(still, activation, x_td, *tensors)  # type: ignore[no-untyped-call]
    return y_te.reshape(*x.shape[:-1], y_te.shape[-1])


def _net_layer(layer: EinsumLinear, x: Tensor) -> NetLayer:
    """A layer for the engine, which normalises factors except in bfloat16."""
    if layer.weight_norm and x.dtype != torch.bfloat16:
        factors = [getattr(layer, name) for name in layer._names]
        return NetLayer(layer.plan, factors, layer.bias, layer._stds)
    return NetLayer(layer.plan, layer.factors(), layer.bias, None)


def _with_tensors(layers: Sequence[NetLayer], tensors: Sequence[Tensor | None]) -> list[NetLayer]:
    """The layers with their biases and factors again, in the order of `net_tensors`."""
    given: Iterator[Any] = iter(tensors)
    return [
        layer._replace(bias=next(given), factors=[next(given) for _ in layer.plan.steps])
        for layer in layers
    ]


class _Net(torch.autograd.Function):
    """Both passes inside the engine; second derivatives by the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        layers: Sequence[NetLayer],
        activation: Activation,
        x_td: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        y_te, ctx.scales = net_forward(_with_tensors(layers, tensors), activation, x_td)
        ctx.save_for_backward(x_td, *tensors)
        ctx.layers, ctx.activation = layers, activation
        return y_te

    @staticmethod
    def backward(ctx: Any, grad_te: Tensor) -> tuple[Any, ...]:
        inputs: tuple[Any, ...] = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        present = [tensor for tensor in inputs if tensor is not None]
        if torch.is_grad_enabled() or not compiled.is_direct(grad_te, present):
            made = iter(
                batched_gradients(
                    lambda grad: _slow_gradients(ctx.layers, ctx.activation, inputs, grad, wanted),
                    grad_te,
                )
            )
            return None, None, *(next(made) if flag else None for flag in wanted)
        layers, scales = _with_tensors(ctx.layers, inputs[1:]), ctx.scales
        return None, None, *net_backward(layers, ctx.activation, inputs[0], grad_te, wanted, scales)


def _slow_gradients(
    layers: Sequence[NetLayer],
    activation: Activation,
    inputs: Sequence[Tensor | None],
    grad_te: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are wanted, by the reference, which can be differentiated once more."""

    def net(x_td: Tensor, *tensors: Tensor | None) -> tuple[Tensor]:
        *ups, down = (partial(_reference, part) for part in _with_tensors(layers, tensors))
        a_th = FUNCTIONS[activation](ups[0](x_td))
        return (down(a_th * ups[1](x_td) if len(ups) > 1 else a_th),)

    grads = differentiable_gradients(net, inputs, [grad_te], wanted)
    return [grad for grad in grads if grad is not None]


def _reference(layer: NetLayer, x_td: Tensor) -> Tensor:
    plan, factors, bias, stds = layer
    if stds is not None:
        factors = [normalised(f, std) for f, std in zip(factors, stds, strict=True)]
    return multiply_by_einsum(plan, x_td, factors, bias)
