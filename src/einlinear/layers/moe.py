"""Mixtures of experts: MoELinear for any linear layer, MoEFeedForward for a whole feed-forward net.

Only the active experts of a token are computed; no token is dropped, however many go to one expert.

Legend: x_td rows of input, y_te rows of output, experts_tk and weights_tk of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from einlinear.errors import EinlinearError, quote
from einlinear.layers.execute import dense_weight
from einlinear.layers.expert_operators import multiply_experts
from einlinear.layers.experts import Pairs, normalised_experts, sort_pairs
from einlinear.layers.mixture import is_mixable, mix
from einlinear.layers.room import room_for
from einlinear.layers.routing import Gate, Routed
from einlinear.layers.scaling import Scaling, factor_scaling, matrix_scaling, vector_scaling
from einlinear.structures.named import dense
from einlinear.structures.plan import make_plan
from einlinear.structures.structure import Structure
from einlinear.structures.text import parse

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu": relu, "silu": silu}


class MoELinear(Routed):
    """A linear layer whose matrix is a mixture of experts, chosen for each token by a gate.

        y = sum over the active experts e of p_e W_e x, + bias        p: softmax of their logits

    Every W_e has the same structure. The factors are parameters named A, B, C, ... with the axis of
    experts in front; `gate` is a linear layer without bias that starts at zero. `last_routing` says
    where the tokens of the last forward pass went. Ref: [P24 §5].

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether a bias is added, one for all experts.
        structure: of each expert: a Structure, or its text such as "btt(rank=2)".
        num_experts: how many experts there are.
        num_active: how many each token uses.
        weight_norm: whether factors are normalised, each expert's by itself.
        device: where the parameters are.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        structure: Structure | str,
        num_experts: int,
        num_active: int = 2,
        weight_norm: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, num_active)
        structure = parse(structure) if isinstance(structure, str) else structure
        self.plan = make_plan(structure, in_features, out_features)
        self.in_features = self.plan.d_in
        self.out_features = self.plan.d_out
        self.weight_norm = weight_norm
        scaling = factor_scaling(self.plan)
        self._names = [step.factor for step in self.plan.steps]
        self._stds = [scaling[name].init_std for name in self._names]
        self.expert_names = tuple(self.plan.factor_shapes)
        weights = self.num_experts * (self.plan.params + self.in_features)
        with _room(self.num_experts, self.in_features, self.out_features, weights):
            for name, shape in self.plan.factor_shapes.items():
                empty = torch.empty((self.num_experts, *shape), device=device, dtype=dtype)
                self.register_parameter(name, nn.Parameter(empty))
            empty = torch.empty(self.out_features, device=device, dtype=dtype)
            self.gate = Gate(self.in_features, self.num_experts, device=device, dtype=dtype)
        self.bias = nn.Parameter(empty) if bias else None
        self.reset_parameters()

    @property
    def structure(self) -> Structure:
        """The structure of each expert."""
        return self.plan.structure

    @property
    def macs(self) -> int:
        """Multiply-adds per token: of the active experts and of the gate; no bias."""
        return self.num_active * self.plan.macs + self.in_features * self.num_experts

    def param_scaling(self) -> dict[str, Scaling]:
        """What initialisation and learning rates need to know: that of one expert."""
        scaling = factor_scaling(self.plan)
        if self.bias is not None:
            scaling["bias"] = vector_scaling(self.out_features)
        return scaling

    def reset_parameters(self) -> None:
        """Draw the factors of all experts anew; bias and gate 0."""
        self.draw_(self.param_scaling())

    def to_dense(self) -> Tensor:
        """The effective weights, (num_experts, out_features, in_features); of the experts here."""
        factors = [getattr(self, name) for name in self._names]
        if self.weight_norm:
            factors = normalised_experts(factors, self._stds)
        own = zip(*(factor.unbind() for factor in factors), strict=True)
        return torch.stack([dense_weight(self.plan, list(expert)) for expert in own])

    def forward(self, x: Tensor) -> Tensor:
        """The layer applied to the last axis of x."""
        _check(x, getattr(self, self._names[0]), self.in_features)
        x_td = x.reshape(-1, self.in_features)
        own = [getattr(self, name) for name in self._names]
        known = own if self.bias is None else [*own, self.bias]
        is_own = self.shard is None and not self.has_other_route
        if is_own and is_mixable(self.gate, x_td, known):
            stds = self._stds if self.weight_norm else ()
            y_te, logits_te, experts_tk = mix(
                self.plan, x_td, self.gate.weight, self.bias, own,
                num_active=self.num_active, stds=stds,
            )  # fmt: skip
            self.remember(logits_te, experts_tk)
            return y_te.reshape(*x.shape[:-1], self.out_features)
        experts_tk, weights_tk = self.route(x_td)
        bias = None if self.bias is None else _cast(self.bias)
        if self.shard is None:
            pairs = sort_pairs(experts_tk, self.num_experts)
            y_te = self._mix(_cast(x_td), experts_tk, weights_tk, pairs, bias)
        else:
            y_te = self.shard.mix(self.shard, _cast(x_td), experts_tk, weights_tk, self._mix)
            y_te = y_te if bias is None else y_te + bias
        return y_te.reshape(*x.shape[:-1], self.out_features)

    def _mix(
        self,
        x_td: Tensor,
        experts_tk: Tensor,
        weights_tk: Tensor,
        pairs: Pairs,
        bias: Tensor | None = None,
    ) -> Tensor:
        """What the experts here make of rows, weighted and added up."""
        return multiply_experts(
            self.plan,
            x_td,
            weights_tk.flatten().index_select(0, pairs.order),
            pairs,
            [_cast(self.own_experts(name)) for name in self._names],
            bias=bias,
            stds=self._stds if self.weight_norm else (),
            adds=x_td.shape[0],
        )

    def extra_repr(self) -> str:
        """What print(layer) shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, structure={str(self.structure)!r}, "
            f"num_experts={self.num_experts}{self._shard_repr()}, num_active={self.num_active}"
            + ("" if self.weight_norm else ", weight_norm=False")
        )


class MoEFeedForward(Routed):
    """A feed-forward net of two dense layers, of which there are many: the standard MoE.

        y = sum over the active experts e of p_e (D_e f(U_e x + up_bias_e) + down_bias_e)

    U and D are the parameters `up` (experts x d_model x d_hidden) and `down` (experts x d_hidden x
    d_model). Gate, routing and balance are those of MoELinear, with which it is to be compared.

    Args:
        d_model: width of input and output.
        d_hidden: width of each expert's hidden layer.
        num_experts: how many experts there are.
        num_active: how many each token uses.
        activation: "gelu", "relu" or "silu".
        bias: whether every expert adds biases.
        device: where the parameters are.
        dtype: of the parameters.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        num_experts: int,
        num_active: int = 2,
        activation: str = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, num_active)
        if activation not in ACTIVATIONS:
            raise EinlinearError(
                what=f"the activation is {quote(activation)}",
                rule=f"an activation is one of {', '.join(ACTIVATIONS)}",
                fix='give activation="gelu"',
            )
        self.activation = activation
        self._up_plan = make_plan(dense(), d_model, d_hidden)
        self._down_plan = make_plan(dense(), d_hidden, d_model)
        self.d_model, self.d_hidden = self._up_plan.d_in, self._up_plan.d_out

        def stacked(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        with _room(num_experts, d_model, d_hidden, num_experts * d_model * (2 * d_hidden + 1)):
            self.up, self.down = stacked(d_model, d_hidden), stacked(d_hidden, d_model)
            self.up_bias = stacked(d_hidden) if bias else None
            self.down_bias = stacked(d_model) if bias else None
            self.gate = Gate(d_model, self.num_experts, device=device, dtype=dtype)
        self.expert_names = ("up", "down", "up_bias", "down_bias") if bias else ("up", "down")
        self.reset_parameters()

    @property
    def macs(self) -> int:
        """Multiply-adds per token: of the active experts and of the gate; no biases."""
        return self.num_active * 2 * self.d_model * self.d_hidden + self.d_model * self.num_experts

    def param_scaling(self) -> dict[str, Scaling]:
        """What initialisation and learning rates need to know: that of one expert."""
        scaling = {
            "up": matrix_scaling(self.d_model, self.d_hidden),
            "down": matrix_scaling(self.d_hidden, self.d_model),
        }
        if self.up_bias is not None:
            scaling["up_bias"] = vector_scaling(self.d_hidden)
            scaling["down_bias"] = vector_scaling(self.d_model)
        return scaling

    def reset_parameters(self) -> None:
        """Draw all experts anew; biases and gate 0."""
        self.draw_(self.param_scaling())

    def forward(self, x: Tensor) -> Tensor:
        """The net applied to the last axis of x."""
        _check(x, self.up, self.d_model)
        x_td = x.reshape(-1, self.d_model)
        experts_tk, weights_tk = self.route(x_td)
        if self.shard is None:
            pairs = sort_pairs(experts_tk, self.num_experts)
            y_te = self._mix(_cast(x_td), experts_tk, weights_tk, pairs)
        else:
            y_te = self.shard.mix(self.shard, _cast(x_td), experts_tk, weights_tk, self._mix)
        return y_te.reshape(x.shape)

    def _mix(self, x_td: Tensor, experts_tk: Tensor, weights_tk: Tensor, pairs: Pairs) -> Tensor:
        """What the experts here make of rows, weighted and added up."""
        up, down = _cast(self.own_experts("up")), _cast(self.own_experts("down"))
        hidden_ph = multiply_experts(self._up_plan, x_td, None, pairs, [up])
        if self.up_bias is not None:
            expert_p = experts_tk.flatten().index_select(0, pairs.order)
            up_bias = self.own_experts("up_bias").to(hidden_ph.dtype)
            hidden_ph = hidden_ph + up_bias.index_select(0, expert_p)
        y_te = multiply_experts(
            self._down_plan,
            ACTIVATIONS[self.activation](hidden_ph),
            weights_tk.flatten().index_select(0, pairs.order),
            pairs,
            [down],
            takes=False,
            adds=x_td.shape[0],
        )
        if self.down_bias is not None:
            biases_tke = self.own_experts("down_bias").to(y_te.dtype)[experts_tk]
            y_te = y_te + (weights_tk.unsqueeze(-1).to(y_te.dtype) * biases_tke).sum(-2)
        return y_te

    def extra_repr(self) -> str:
        """What print(layer) shows."""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, "
            f"num_experts={self.num_experts}{self._shard_repr()}, num_active={self.num_active}, "
            f"activation={self.activation!r}, bias={self.up_bias is not None}"
        )


def _room(num_experts: int, d_in: int, d_out: int, weights: int) -> AbstractContextManager[None]:
    name = f"a mixture of {num_experts} experts from {d_in} to {d_out}"
    return room_for(name, weights, "give fewer experts, or a smaller rank or width")


def _check(x: Tensor, weight: Tensor, width: int) -> None:
    is_cast = torch.amp.is_autocast_available(x.device.type)
    is_cast = is_cast and torch.is_autocast_enabled(x.device.type)
    is_cast = is_cast and _is_castable(x) and _is_castable(weight)
    fits = (x.dtype == weight.dtype or is_cast) and x.device == weight.device
    if not fits or x.shape[-1:] != (width,):
        raise EinlinearError(
            what=f"the input has shape {tuple(x.shape)} and dtype {x.dtype}, on {x.device}",
            rule=f"the layer takes {weight.dtype}, with a last axis of {width}, on {weight.device}",
            fix=f"reshape or project the input to (..., {width}); convert it with "
            f".to({weight.device.type!r}, {weight.dtype}), or the layer with layer.to(...)",
        )


def _cast(tensor: Tensor) -> Tensor:
    """What autocast does to an operand of a linear layer: nothing to float64."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device)) if _is_castable(tensor) else tensor


def _is_castable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
