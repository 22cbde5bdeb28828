"""Parameters and multiply-adds of a model, from shapes and plans, and as torch counts them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from einlinear.layers.linear import EinsumLinear, SumLinear, SumTerm
from einlinear.layers.moe.layers import MoEFeedForward, MoELinear
from einlinear.layers.moe.routing import Gate
from einlinear.layers.variants import situation
from einlinear.models.gpt import GPT
from einlinear.models.survey.facts import named_roles
from einlinear.runs.record import Counts


def count_model(model: nn.Module, length: int) -> Counts:
    """Count a model, per token of sequences of that length, or per row for an MLP.

    Linear layers are nn.Linear, EinsumLinear and mixtures of experts, each used once; norms count
    as in the paper, see `GPT.norm_macs`.
    """
    heads = named_roles(model)["head"]
    macs = linear_macs(model)
    head = sum(number for name, number in macs.items() if name in heads)
    linear = sum(macs.values()) - head
    attention = model.attention_macs(length) if isinstance(model, GPT) else 0
    norms = model.norm_macs() if isinstance(model, GPT) else 0
    return Counts(
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=linear + head + attention + norms,
        linear_macs=linear,
        head_macs=head,
        attention_macs=attention,
        norm_macs=norms,
    )


def linear_macs(model: nn.Module) -> dict[str, int]:
    """Multiply-adds per token of every linear layer, by name."""
    macs = {}
    for name, module in model.named_modules():
        if isinstance(module, SumTerm):
            continue
        if isinstance(module, EinsumLinear | SumLinear):
            macs[name] = module.plan.macs
        elif isinstance(module, MoELinear | MoEFeedForward):
            macs[name] = module.macs
        elif isinstance(module, nn.Linear) and not isinstance(module, Gate):
            macs[name] = module.in_features * module.out_features
    return macs


@torch.no_grad()
def counted_macs(model: nn.Module, inputs: Tensor) -> int:
    """The multiply-adds of a forward pass by torch's counter, which ignores norms.

    Layers multiply by their factors, also where building the dense matrix would be faster.
    """
    layers = [module for module in model.modules() if isinstance(module, EinsumLinear)]
    tuned = [layer.choices for layer in layers]
    num_tokens = len(inputs) if inputs.is_floating_point() else inputs.numel()
    for layer in layers:
        layer.choices = {situation(torch.empty(0), num_tokens, has_backward=False): "strided"}
    # The counter knows only the plain implementation of attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs)
    for layer, choices in zip(layers, tuned, strict=True):
        layer.choices = choices
    return int(counter.get_total_flops()) // 2
