"""MLP and ResidualMLP: perceptrons built from plain linear layers.

As in GPT, the pattern "blocks.*" matches the inner layers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from einlinear.models.choices import ActivationName
from einlinear.models.mup.init import init_
from einlinear.structures.values import one_of, whole_number

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "gelu": gelu}


class MLP(nn.Module):
    """A plain perceptron: an input layer, depth - 1 square layers, and a head that starts at zero.

    Every layer except the head is followed by the activation. To replace the square layers, call
    `convert_(model, {"blocks.*": ...})`, then `init_`.

    Args:
        in_features: number of input features.
        out_features: number of output features.
        width: width of the hidden layers.
        depth: number of hidden layers, including the input layer.
        activation: "relu" or "gelu".
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int,
        depth: int = 3,
        activation: ActivationName = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width, depth = whole_number(width, "width", 1), whole_number(depth, "depth", 1)
        to: Any = {"device": device, "dtype": dtype}
        self.activation = one_of(activation, "activation", tuple(_ACTIVATIONS))
        self.input = nn.Linear(whole_number(in_features, "in_features", 1), width, **to)
        self.blocks = nn.ModuleList(nn.Linear(width, width, **to) for _ in range(depth - 1))
        self.head = nn.Linear(width, whole_number(out_features, "out_features", 1), **to)
        if not self.head.weight.is_meta:
            init_(self)

    def layer_roles(self) -> dict[str, str]:
        """Name the head, which starts at zero."""
        return {"head": "head"}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last axis of x."""
        activation = _ACTIVATIONS[self.activation]
        x = activation(self.input(x))
        for layer in self.blocks:
            x = activation(layer(x))
        y: Tensor = self.head(x)
        return y

    def extra_repr(self) -> str:
        """Return the settings that print(model) shows."""
        return f"activation={self.activation!r}"


class ResidualMLP(nn.Module):
    """The paper's regression network: residual blocks between an input layer and a head.

        x = input(x)                             with input_norm: norm(gelu(input(x)))
        x = x + s down(gelu(up(norm(x))))        in each block, s = branch_scale
        y = head(x)

    `up` has 4 width outputs. The head and every `down` start at zero. To replace the inner layers,
    as the paper does, call `convert_(model, {"blocks.*": ...})`, then `init_`. The paper's network
    has input_norm=True and branch_scale=1. Ref: [P24].

    Args:
        in_features: number of input features.
        out_features: number of output features.
        width: width of the residual stream.
        depth: number of blocks.
        input_norm: whether GELU and a norm follow the input layer.
        branch_scale: factor of the residual branches; sqrt(3 / depth) by default.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int,
        depth: int = 3,
        input_norm: bool = False,
        branch_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width, depth = whole_number(width, "width", 1), whole_number(depth, "depth", 1)
        to: Any = {"device": device, "dtype": dtype}
        self.input = nn.Linear(whole_number(in_features, "in_features", 1), width, **to)
        self.input_norm = nn.LayerNorm(width, **to) if input_norm else None
        self.branch_scale = sqrt(3 / depth) if branch_scale is None else float(branch_scale)
        self.blocks = nn.ModuleList(
            ResidualBlock(width, self.branch_scale, **to) for _ in range(depth)
        )
        self.head = nn.Linear(width, whole_number(out_features, "out_features", 1), **to)
        if not self.head.weight.is_meta:
            init_(self)

    def layer_roles(self) -> dict[str, str]:
        """Name the head, which starts at zero."""
        return {"head": "head"}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last axis of x."""
        x = self.input(x)
        if self.input_norm is not None:
            x = self.input_norm(gelu(x))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class ResidualBlock(nn.Module):
    """A residual block: norm, 4 x as many features, GELU, and back."""

    def __init__(self, width: int, scale: float, **to: Any) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(width, **to)
        self.up = nn.Linear(width, 4 * width, **to)
        self.down = nn.Linear(4 * width, width, **to)

    def layer_roles(self) -> dict[str, str]:
        """Name the last layer of the branch, which starts at zero."""
        return {"down": "zero"}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the last axis of x."""
        return torch.add(x, self.down(gelu(self.up(self.norm(x)))), alpha=self.scale)
