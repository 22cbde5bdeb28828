"""Mixtures of experts: MoELinear for a linear layer, MoEFeedForward for a feed-forward network.

Only the active experts of a token are computed. No token is ever dropped.

Legend: as in `assignment`; h hidden features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from einlinear.errors import EinlinearError, quote
from einlinear.layers.machine import room_for
from einlinear.layers.moe.assignment import Assignment
from einlinear.layers.moe.fused import can_fuse, gate_and_experts
from einlinear.layers.moe.operators import multiply_experts
from einlinear.layers.moe.routing import Gate, Routed
from einlinear.layers.norm import common_scales, normalised_experts
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.project import project, trainable_factors
from einlinear.layers.reference import dense_weight
from einlinear.layers.scaling import (
    ExpertNorm,
    FactorInit,
    Scaling,
    factor_scaling,
    matrix_scaling,
    scalar_scaling,
    vector_scaling,
)
from einlinear.layers.variants import autocast_operand, check_input, is_autocast, is_castable
from einlinear.structures.named import dense
from einlinear.structures.plan import make_plan
from einlinear.structures.structure import Structure
from einlinear.structures.text import parse_structure
from einlinear.structures.values import one_of, true_or_false

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu": relu, "silu": silu}


class MoELinear(Routed):
    """A linear layer whose matrix is a mixture of experts, chosen for each token by a gate.

        y = sum over the active experts e of p_e W_e x, + bias        p: softmax of their logits

    Every W_e has the same structure. The factors are parameters named A, B, C, ... with a first
    axis of experts; `gate` is a linear layer without bias, initialised to zero. `last_routing`
    tells where the tokens of the last forward pass went. Ref: [P24 §5].

    Departure: by default each expert is normalised by itself, and factors have no gains.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether to add a learnable bias, shared by all experts.
        structure: of each expert: a Structure, or text like "btt(rank=2)".
        num_experts: how many experts there are.
        num_active: how many experts each token uses.
        weight_norm: whether to normalise the factors.
        factor_init: the standard deviation of fresh factors, as in EinsumLinear.
        expert_norm: "each" normalises the factors of every expert by themselves, "together" all
            experts of a factor by one scale, as the paper's code does.
        expert_gain: whether every factor has a learnable gain that starts at 1, shared by all
            experts, as in the paper's code. The parameter `gain` holds those of all factors.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
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
        factor_init: FactorInit = "spectral",
        expert_norm: ExpertNorm = "each",
        expert_gain: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, num_active)
        structure = parse_structure(structure) if isinstance(structure, str) else structure
        self.plan = make_plan(structure, in_features, out_features)
        self.in_features = self.plan.d_in
        self.out_features = self.plan.d_out
        self.weight_norm = weight_norm
        self.expert_norm = one_of(expert_norm, "expert_norm", get_args(ExpertNorm))
        self.factor_init = one_of(factor_init, "factor_init", get_args(FactorInit))
        scaling = factor_scaling(self.plan, self.factor_init)
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
        self.gain: nn.Parameter | None = None
        if true_or_false(expert_gain, "expert_gain"):
            self.gain = nn.Parameter(torch.empty(len(self._names), device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def structure(self) -> Structure:
        """The structure of each expert."""
        return self.plan.structure

    @property
    def macs(self) -> int:
        """Multiply-adds per token of the active experts and the gate, without bias."""
        return self.num_active * self.plan.macs + self.in_features * self.num_experts

    def param_scaling(self) -> dict[str, Scaling]:
        """The scaling of each parameter of one expert, for initialisation and learning rates."""
        scaling = factor_scaling(self.plan, self.factor_init)
        if self.bias is not None:
            scaling["bias"] = vector_scaling(self.out_features)
        if self.gain is not None:
            scaling["gain"] = scalar_scaling(len(self._names))
        return scaling

    def reset_parameters(self) -> None:
        """Initialise the factors of all experts randomly, bias and gate to 0, gains to 1."""
        self.draw_(self.param_scaling())

    @torch.no_grad()
    def project_(self, weight: Tensor, metric: Metric | None = None) -> float:
        """Set all experts to the factors whose matrix is closest to a dense weight; gains to 1.

        The weights of the active experts add up to 1, so the layer computes what one such matrix
        does, wherever the gate sends a token.

        Args:
            weight: the dense weight, laid out like nn.Linear.weight.
            metric: what errors count; the Frobenius norm if left out.

        Returns:
            The share of the squared norm of the weight that is lost, in this metric.
        """
        if self.weight_norm or self.shard is not None:
            problem = "has weight normalisation" if self.weight_norm else "is sharded"
            raise EinlinearError(
                what=f"the layer {problem}",
                rule="a projected weight needs all experts, with factors of any size",
                fix="create the layer with weight_norm=False, project it, then shard it",
            )
        found = project(self.plan, weight, metric)
        for name, factor in trainable_factors(found.factors, self._names[-1]).items():
            getattr(self, name).data.copy_(factor)  # to every expert
        if self.gain is not None:
            self.gain.data.fill_(1.0)
        return found.error

    def to_dense(self) -> Tensor:
        """The effective weights of local experts, (num_experts, out_features, in_features)."""
        factors = [getattr(self, name) for name in self._names]
        if stds := self._own_stds():
            factors = normalised_experts(factors, stds)
        own = zip(*(factor.unbind() for factor in factors), strict=True)
        dense_eoi = torch.stack([dense_weight(self.plan, list(expert)) for expert in own])
        scale = self._common_scale()
        return dense_eoi if scale is None else dense_eoi * scale.to(dense_eoi.dtype)

    def _own_stds(self) -> list[float]:
        """The standard deviations of the factors, if each expert is normalised by itself."""
        return self._stds if self.weight_norm and self.expert_norm == "each" else []

    def _common_scale(self) -> Tensor | None:
        """What multiplies the matrices of all experts, since they are linear in each factor.

        prod over the factors of gain * min(1, std / rms over all experts)
        """
        scale: Tensor | None = None
        if self.weight_norm and self.expert_norm == "together":
            factors = [self.own_experts(name) for name in self._names]
            dtype = torch.promote_types(factors[0].dtype, torch.float32)
            squares_f = torch.stack([factor.to(dtype).square().sum() for factor in factors])
            if self.shard is not None:
                squares_f = self.shard.sum(self.shard, squares_f)
            numbers = [self.num_experts * factor[0].numel() for factor in factors]
            scale = common_scales(squares_f, numbers, self._stds).prod()
        if self.gain is not None:
            gain = self.gain.to(torch.promote_types(self.gain.dtype, torch.float32)).prod()
            scale = gain if scale is None else scale * gain
        return scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last axis of x."""
        _check(x, getattr(self, self._names[0]), self.in_features)
        x_td = x.reshape(-1, self.in_features)
        own = [getattr(self, name) for name in self._names]
        known = own if self.bias is None else [*own, self.bias]
        scale = self._common_scale()
        is_own = self.shard is None and not self.has_other_route and scale is None
        if is_own and can_fuse(self.gate, x_td, known):
            y_to, logits_te, experts_tk = gate_and_experts(
                self.plan, x_td, self.gate.weight, self.bias, own,
                num_active=self.num_active, stds=self._own_stds(),
            )  # fmt: skip
            self.remember(logits_te, experts_tk)
            return y_to.reshape(*x.shape[:-1], self.out_features)
        y_to = self.mixed(x_td, self._mix, scale)
        if self.bias is not None and self.shard is not None:
            y_to = y_to + autocast_operand(self.bias)
        return y_to.reshape(*x.shape[:-1], self.out_features)

    def _mix(
        self, x_td: Tensor, experts_tk: Tensor, weights_tk: Tensor, assignment: Assignment
    ) -> Tensor:
        """The weighted sum over the local experts of each row, with the bias if they are all."""
        factors = [autocast_operand(self.own_experts(name)) for name in self._names]
        stds = self._own_stds()
        bias: Tensor | None = self.bias if self.shard is None else None
        bias = None if bias is None else autocast_operand(bias)
        return multiply_experts(self.plan, x_td, factors, assignment, bias=bias, stds=stds)

    def extra_repr(self) -> str:
        """The arguments that print(layer) shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, structure={str(self.structure)!r}, "
            f"num_experts={self.num_experts}{self._shard_repr()}, num_active={self.num_active}"
            + ("" if self.weight_norm else ", weight_norm=False")
            + ("" if self.factor_init == "spectral" else f", factor_init={self.factor_init!r}")
            + ("" if self.expert_norm == "each" else f", expert_norm={self.expert_norm!r}")
            + ("" if self.gain is None else ", expert_gain=True")
        )


class MoEFeedForward(Routed):
    """A mixture of feed-forward networks of two dense layers: the standard MoE.

        y = sum over the active experts e of p_e (D_e f(U_e x + up_bias_e) + down_bias_e)

    U and D are the parameters `up` (experts x d_model x d_hidden) and `down` (experts x d_hidden x
    d_model). Gate, routing and balance are those of MoELinear, so you can compare the two.

    Args:
        d_model: width of input and output.
        d_hidden: width of each expert's hidden layer.
        num_experts: how many experts there are.
        num_active: how many experts each token uses.
        activation: "gelu", "relu" or "silu".
        bias: whether every expert has learnable biases.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
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
        """Multiply-adds per token of the active experts and the gate, without biases."""
        return self.num_active * 2 * self.d_model * self.d_hidden + self.d_model * self.num_experts

    def param_scaling(self) -> dict[str, Scaling]:
        """The scaling of each parameter of one expert, for initialisation and learning rates."""
        scaling = {
            "up": matrix_scaling(self.d_model, self.d_hidden),
            "down": matrix_scaling(self.d_hidden, self.d_model),
        }
        if self.up_bias is not None:
            scaling["up_bias"] = vector_scaling(self.d_hidden)
            scaling["down_bias"] = vector_scaling(self.d_model)
        return scaling

    def reset_parameters(self) -> None:
        """Initialise all experts randomly, biases and gate to 0."""
        self.draw_(self.param_scaling())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last axis of x."""
        _check(x, self.up, self.d_model)
        x_td = x.reshape(-1, self.d_model)
        return self.mixed(x_td, self._mix).reshape(x.shape)

    def _mix(
        self, x_td: Tensor, experts_tk: Tensor, weights_tk: Tensor, assignment: Assignment
    ) -> Tensor:
        """The weighted sum over the local experts of each row."""
        up, down = (autocast_operand(self.own_experts(name)) for name in ("up", "down"))
        hidden_ph = multiply_experts(self._up_plan, x_td, [up], assignment.to_pairs())
        if self.up_bias is not None:
            up_bias = self.own_experts("up_bias").to(hidden_ph.dtype)
            hidden_ph = hidden_ph + assignment.spread(up_bias)
        hidden_ph = ACTIVATIONS[self.activation](hidden_ph)
        y_to = multiply_experts(self._down_plan, hidden_ph, [down], assignment.from_pairs())
        if self.down_bias is not None:
            biases_tko = self.own_experts("down_bias").to(y_to.dtype)[experts_tk]
            y_to = y_to + (weights_tk.unsqueeze(-1).to(y_to.dtype) * biases_tko).sum(-2)
        return y_to

    def extra_repr(self) -> str:
        """The arguments that print(layer) shows."""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, "
            f"num_experts={self.num_experts}{self._shard_repr()}, num_active={self.num_active}, "
            f"activation={self.activation!r}, bias={self.up_bias is not None}"
        )


def _room(num_experts: int, d_in: int, d_out: int, weights: int) -> AbstractContextManager[None]:
    name = f"a mixture of {num_experts} experts from {d_in} to {d_out}"
    return room_for(name, weights, "give fewer experts, or a smaller rank or width")


def _check(x: Tensor, weight: Tensor, width: int) -> None:
    is_cast = is_autocast(x) and is_castable(x) and is_castable(weight)
    check_input(x, weight, width, is_cast=is_cast)
