"""MLP and ResidualMLP: perceptrons of plain linear layers.

The inner layers of both, as of GPT, are those that the pattern "blocks.*" fits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from einlinear.errors import EinlinearError, quote
from einlinear.models.init import init_
from einlinear.structures.values import whole_number

Activation = Literal["relu", "gelu"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "gelu": gelu}


class MLP(nn.Module):
    """A plain perceptron: an input layer, depth - 1 square layers, a head that starts at zero.

    Each layer but the head is followed by the activation. `convert_(model, {"blocks.*": ...})`
    replaces the square layers; call `init_` after it.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        width: of the hidden layers.
        depth: how many hidden layers there are, the input layer among them.
        activation: "relu" or "gelu".
        device: where the parameters are.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int,
        depth: int = 3,
        activation: Activation = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width, depth = whole_number(width, "width", 1), whole_number(depth, "depth", 1)
        if activation not in get_args(Activation):
            raise EinlinearError(
                what=f"the activation is {quote(activation)}",
                rule=f"an activation is one of {', '.join(map(repr, get_args(Activation)))}",
                fix='give activation="relu"',
            )
        to: Any = {"device": device, "dtype": dtype}
        self.activation = activation
        self.input = nn.Linear(whole_number(in_features, "in_features", 1), width, **to)
        self.blocks = nn.ModuleList(nn.Linear(width, width, **to) for _ in range(depth - 1))
        self.head = nn.Linear(width, whole_number(out_features, "out_features", 1), **to)
        _init_unless_meta_(self)

    def layer_roles(self) -> dict[str, str]:
        """The head, which starts at zero."""
        return {"head": "head"}

    def forward(self, x: Tensor) -> Tensor:
        """The net applied to the last axis of x."""
        activation = _ACTIVATIONS[self.activation]
        x = activation(self.input(x))
        for layer in self.blocks:
            x = activation(layer(x))
        y: Tensor = self.head(x)
        return y

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"activation={self.activation!r}"


class ResidualMLP(nn.Module):
    """The paper's net for regression: residual blocks between an input layer and a head.

        x = input(x)
        x = x + s down(gelu(up(norm(x))))        in each block, s = sqrt(3 / depth)
        y = head(x)

    up makes 4 x the width. The head and every `down` start at zero. `convert_(model, {"blocks.*":
    ...})` replaces the inner layers, as in the paper; call `init_` after it. Ref: [P24].

    Args:
        in_features: width of the input.
        out_features: width of the output.
        width: of the stream that blocks add to.
        depth: how many blocks there are.
        device: where the parameters are.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int,
        depth: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width, depth = whole_number(width, "width", 1), whole_number(depth, "depth", 1)
        to: Any = {"device": device, "dtype": dtype}
        self.input = nn.Linear(whole_number(in_features, "in_features", 1), width, **to)
        self.blocks = nn.ModuleList(
            ResidualBlock(width, sqrt(3 / depth), **to) for _ in range(depth)
        )
        self.head = nn.Linear(width, whole_number(out_features, "out_features", 1), **to)
        _init_unless_meta_(self)

    def layer_roles(self) -> dict[str, str]:
        """The head, which starts at zero."""
        return {"head": "head"}

    def forward(self, x: Tensor) -> Tensor:
        """The net applied to the last axis of x."""
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class ResidualBlock(nn.Module):
    """A feed-forward net of 4 x the width on a normed input, added to it."""

    def __init__(self, width: int, scale: float, **to: Any) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(width, **to)
        self.up = nn.Linear(width, 4 * width, **to)
        self.down = nn.Linear(4 * width, width, **to)

    def layer_roles(self) -> dict[str, str]:
        """The end of the branch, which starts at zero."""
        return {"down": "zero"}

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to the last axis of x."""
        return torch.add(x, self.down(gelu(self.up(self.norm(x)))), alpha=self.scale)


def _init_unless_meta_(model: MLP | ResidualMLP) -> None:
    if not model.head.weight.is_meta:
        init_(model)
