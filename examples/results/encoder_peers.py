"""Other projects that replace trained linear layers: what is installed of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

_BLOCKS = 16  # of inputs and of outputs, near the square root of a width of 384

_COMPARED = ("torch", "transformers", "torchao", "torch-structured", "lazylinop")


def peers() -> dict[str, Callable[[nn.Module, int], float]]:
    """Those installed: each replaces the linear layers of a model, and returns its FLOPs share."""
    found = {}
    if find_spec("torch_structured") and find_spec("einops"):
        found["torch-structured, Monarch"] = _replacing(_torch_structured)
    if find_spec("lazylinop"):
        found["lazylinop, ksd"] = _replacing(_lazylinop)
    return found


def versions() -> dict[str, str]:
    """The versions of what is installed of all that is compared."""
    return {d.name: d.version for d in distributions() if d.name in _COMPARED}


def _replacing(fit: Callable[[nn.Linear, int], Any]) -> Callable[[nn.Module, int], float]:
    """A function that gives every linear layer the weight that a peer can represent."""

    def replace(model: nn.Module, share: int) -> float:
        used = dense = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for layer in [each for each in model.modules() if isinstance(each, nn.Linear)]:
                weight, count = fit(layer, share)
                layer.weight.data.copy_(weight)
                used, dense = used + count, dense + layer.weight.numel()
        return used / dense

    return replace


def _torch_structured(layer: nn.Linear, share: int) -> tuple[Tensor, int]:
    from torch_structured.monarch import blockdiag_butterfly_einsum as monarch

    d_out, d_in = layer.weight.shape
    rank = _rank_of_blocks(d_in, d_out, share)
    args = layer.weight.detach(), _BLOCKS, _BLOCKS, rank
    factors = monarch.blockdiag_butterfly_project_einsum_rank(*args)
    unit = layer.weight.new_ones(d_in).diag()
    weight = monarch.blockdiag_butterfly_multiply_einsum_rank(unit, *factors).mT
    return weight, sum(factor.numel() for factor in factors)


def _lazylinop(layer: nn.Linear, share: int) -> tuple[Tensor, int]:
    from lazylinop.butterfly import Chain, ksd

    d_out, d_in = layer.weight.shape
    rank = _rank_of_blocks(d_in, d_out, share)
    outer = (1, d_out // _BLOCKS, _BLOCKS * rank, _BLOCKS)
    inner = (_BLOCKS, _BLOCKS * rank, d_in // _BLOCKS, 1)
    made = ksd(layer.weight.detach().numpy(), Chain([outer, inner]))
    weight = layer.weight.new_tensor(made.toarray())
    return weight, sum(values.size for values in made.ks_values)


def in_8_bits(model: nn.Module) -> dict[str, nn.Module]:
    """Copies of a model with 8-bit weights and dynamic 8-bit inputs of linear layers."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its own for torchao
        dynamic = torch.ao.quantization.quantize_dynamic
        found["8-bit, torch"] = dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
        if find_spec("torchao"):
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

            found["8-bit, torchao"] = copy.deepcopy(model)
            quantize_(found["8-bit, torchao"], Int8DynamicActivationInt8WeightConfig())
    return found


def _rank_of_blocks(d_in: int, d_out: int, share: int) -> int:
    return max(1, share * d_in * d_out // (100 * _BLOCKS * (d_in + d_out)))
