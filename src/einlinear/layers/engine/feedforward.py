"""Feed-forward nets on the engine: tensors in, tensors out. feedforward.c says what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from einlinear.layers.engine import binding
from einlinear.layers.engine.abi import Activation, CallArguments
from einlinear.layers.engine.compiled import DTYPES, address_of, factor_addresses
from einlinear.layers.strided import contiguous, rows
from einlinear.structures.plan import Plan


class NetLayer(NamedTuple):
    """One layer of a net; with stds, its factors are normalised."""

    plan: Plan
    factors: Sequence[Tensor]
    bias: Tensor | None
    stds: Sequence[float] | None


Scales = tuple[float, ...] | None


def net_forward(
    layers: Sequence[NetLayer], activation: Activation, x_td: Tensor
) -> tuple[Tensor, list[Scales]]:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)); the scales of each layer.

    Layers are in the order of these formulas from the inside: up or gate and up, then down.
    """
    x_td, layers = rows(x_td), [_contiguous(layer) for layer in layers]
    y_te = x_td.new_empty(x_td.shape[0], layers[-1].plan.d_out)
    calls = [_arguments(layer, x_td) for layer in layers]
    used = []
    for layer, call in zip(layers, calls, strict=True):
        if layer.bias is not None:
            call.bias = address_of(layer.bias, (layer.plan.d_out,), x_td.dtype)
        count, stds = len(layer.factors), layer.stds
        # The engine writes the scales.
        used.append(binding.set_array(call, "scales", stds, count) if stds else None)
    calls[-1].y, calls[-1].y_row = y_te.data_ptr(), y_te.stride(0)
    binding.run_net("feedforward_forward", calls, activation)
    return y_te, [None if scales is None else tuple(scales) for scales in used]


def net_backward(
    layers: Sequence[NetLayer],
    activation: Activation,
    x_td: Tensor,
    grad_te: Tensor,
    wanted: Sequence[bool],
    scales: Sequence[Scales],
) -> list[Tensor | None]:
    """The gradients of the input, then of each layer's bias and factors; None if not wanted."""
    x_td, grad_te = rows(x_td), rows(grad_te)
    layers = [_contiguous(layer) for layer in layers]
    calls = [_arguments(layer, x_td) for layer in layers]
    inputs = [x_td, *net_tensors(layers)]
    grads = [
        None if tensor is None or not flag else tensor.new_empty(tensor.shape)
        for tensor, flag in zip(inputs, wanted, strict=True)
    ]
    places = iter([0 if grad is None else grad.data_ptr() for grad in grads])
    calls[0].grad_x, calls[0].grad_x_row = next(places), x_td.shape[1]
    for layer, call, known in zip(layers, calls, scales, strict=True):
        count = len(layer.factors)
        if layer.bias is not None:
            call.bias = address_of(layer.bias, (layer.plan.d_out,), x_td.dtype)
        call.grad_bias = next(places)
        binding.set_array(call, "grad_factors", [next(places) for _ in layer.factors], count)
        if known is not None:
            binding.set_array(call, "scales", known, count)
            call.scales_known = True
    shape = (x_td.shape[0], layers[-1].plan.d_out)
    calls[-1].grad_y = address_of(grad_te, shape, x_td.dtype)
    calls[-1].grad_y_row = grad_te.stride(0)
    binding.run_net("feedforward_backward", calls, activation)
    return grads


def net_tensors(layers: Sequence[NetLayer]) -> list[Tensor | None]:
    """The bias and the factors of each layer."""
    return [tensor for layer in layers for tensor in (layer.bias, *layer.factors)]


def _contiguous(layer: NetLayer) -> NetLayer:
    bias = layer.bias if layer.bias is None else layer.bias.contiguous()
    return layer._replace(factors=contiguous(layer.factors), bias=bias)


def _arguments(layer: NetLayer, x_td: Tensor) -> CallArguments:
    """The fields of a call that both passes share; x is used of the first layer."""
    dtype, tokens = x_td.dtype, x_td.shape[0]
    addresses = factor_addresses(layer.plan, layer.factors, dtype)
    call = binding.make_arguments(layer.plan, DTYPES[dtype], addresses)
    call.tokens, call.threads = tokens, torch.get_num_threads()
    call.x, call.x_row = x_td.data_ptr(), x_td.stride(0)
    if layer.stds:
        binding.set_array(call, "stds", layer.stds, len(addresses))
    return call
