"""A converted model and its dense twin: the same model in plain torch, with to_dense() weights."""

import torch
from torch import nn

from einlinear import EinsumLinear


def structured(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, EinsumLinear)}


def shake_(model, scale=0.1):
    """Move every parameter a little, so that biases and norms are not at 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=scale)


def slots(twin, name):
    """Return where the dense twin keeps the weight and bias: (tensor, rows, is transposed)."""
    parent, _, last = name.rpartition(".")
    owner = twin.get_submodule(parent)
    if isinstance(owner, nn.MultiheadAttention) and last != "out_proj":
        width = owner.embed_dim
        start = ["q_proj", "k_proj", "v_proj"].index(last) * width
        rows = slice(start, start + width)
        packed = owner.in_proj_weight is not None
        weight = owner.in_proj_weight if packed else getattr(owner, f"{last}_weight")
        return (weight, rows if packed else slice(None), False), (owner.in_proj_bias, rows)
    layer = twin.get_submodule(name)
    return (layer.weight, slice(None), not isinstance(layer, nn.Linear)), (layer.bias, slice(None))


def copy_into_(twin, converted):
    """Copy the effective weights of the converted model into the dense twin; leave nothing out."""
    layers = structured(converted)
    own = dict(twin.named_parameters())
    with torch.no_grad():
        for name, layer in layers.items():
            (weight, rows, is_transposed), (bias, bias_rows) = slots(twin, name)
            dense = layer.to_dense()
            weight[rows].copy_(dense.t() if is_transposed else dense)
            assert (bias is None) == (layer.bias is None), name
            if bias is not None:
                bias[bias_rows].copy_(layer.bias)
        for name, parameter in converted.named_parameters():
            if name in own:
                own[name].copy_(parameter)
            elif name.rpartition(".")[0] not in layers:
                # A dense projection of an attention that was converted in part.
                prefix, _, kind = name.rpartition(".")
                (weight, rows, _), (bias, bias_rows) = slots(twin, prefix)
                if kind == "weight":
                    weight[rows].copy_(parameter)
                else:
                    bias[bias_rows].copy_(parameter)


def assert_same_gradients(converted, twin, tolerance):
    """Check every factor: its gradient is that of the dense weight, propagated through to_dense."""
    layers = structured(converted)
    assert layers
    for name, layer in layers.items():
        (weight, rows, is_transposed), (bias, bias_rows) = slots(twin, name)
        wanted = weight.grad[rows].t() if is_transposed else weight.grad[rows]
        factors = [parameter for key, parameter in layer.named_parameters() if key != "bias"]
        expected = torch.autograd.grad(layer.to_dense(), factors, wanted)
        for factor, grad in zip(factors, expected, strict=True):
            assert factor.grad.abs().max() > 0, name
            torch.testing.assert_close(factor.grad, grad, atol=tolerance, rtol=tolerance)
        if layer.bias is not None:
            grad = bias.grad[bias_rows]
            torch.testing.assert_close(layer.bias.grad, grad, atol=tolerance, rtol=tolerance)
