"""Routing: which experts a token goes to, with which weights, and how balanced the gates are.

Legend: as in `assignment`.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from einlinear.errors import EinlinearError
from einlinear.layers.computed import without_placeholder
from einlinear.layers.engine import compiled
from einlinear.layers.export.plain import is_exporting
from einlinear.layers.moe.assignment import assign
from einlinear.layers.moe.exchange import ExpertShard, Mix, averaged
from einlinear.layers.scaling import Scaling
from einlinear.layers.variants import autocast_operand, is_autocast
from einlinear.structures.values import whole_number

# Multipliers of a 64-bit hash: odd, with irregular bits.
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687
_LOW_BITS = 16

_TIES = (
    "where logits of a gate are equal, the exported program may choose other experts than the model"
    ": its hash of the token, which decides there, cannot be exported. Export a trained gate; a "
    "fresh one is zero, so all of its logits are equal"
)

# torch.export forbids writing to a module. Torch 2.6 cannot tell export from compile.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def _is_within_backward() -> bool:
    """Whether this thread is running a backward pass; False if torch cannot tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


class Gate(nn.Linear):
    """The linear layer of a router: no bias, initialised to zero, computed in float32 or better."""

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_experts, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the weight to zero, so that no expert is preferred."""
        nn.init.zeros_(self.weight)

    def param_scaling(self) -> dict[str, Scaling]:
        """The scaling of a matrix that starts at zero."""
        return {"weight": Scaling(self.in_features, self.out_features, init_std=0.0)}

    def forward(self, x: Tensor) -> Tensor:
        """The logits; in float32 also under autocast and for half precision."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with _without_autocast(x):
            return linear(x.to(dtype), self.weight.to(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the tokens of one forward pass went.

    logits: one per token and expert.
    experts: the active experts of each token.
    """

    logits: Tensor
    experts: Tensor

    @property
    def load(self) -> tuple[float, ...]:
        """Each expert's share of all (token, expert) pairs."""
        return tuple(self.shares().tolist())

    @property
    def probability(self) -> tuple[float, ...]:
        """The mean probability of each expert, by a softmax over all experts."""
        return tuple(self.mean_probability().tolist())

    @property
    def entropy(self) -> float:
        """How even the load is: 1 if all experts have the same load, 0 if one has it all."""
        shares = [share for share in self.load if share > 0]
        num_experts = self.logits.shape[-1]
        return -sum(share * log(share) for share in shares) / log(max(2, num_experts))

    def changed_since(self, other: Routing) -> float:
        """The share of tokens with other experts than in another pass over the same tokens."""
        if self.experts.shape != other.experts.shape:
            raise EinlinearError(
                what=f"routings of shapes {tuple(self.experts.shape)} and "
                f"{tuple(other.experts.shape)} are compared",
                rule="both passes must have the same tokens and number of active experts",
                fix="run both passes on the same batch",
            )
        before, after = (r.experts.sort(-1).values for r in (other, self))
        changed = (before != after).any(-1)
        return float(changed.float().mean()) if len(changed) else 0.0

    def shares(self) -> Tensor:
        """The load as a tensor."""
        flat = self.experts.flatten()
        counts = self.logits.new_zeros(self.logits.shape[-1])
        counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=counts.dtype))
        return counts / max(1, flat.shape[0])

    def mean_probability(self) -> Tensor:
        """The mean probability of each expert as a tensor, differentiable."""
        return self.logits.softmax(-1).sum(0) / max(1, self.logits.shape[0])

    def mean_square(self) -> Tensor:
        """The mean square of log sum exp of the logits (z-loss), differentiable."""
        return self.logits.logsumexp(-1).square().sum() / max(1, self.logits.shape[0])


def expert_counts(num_experts: object, num_active: object) -> tuple[int, int]:
    """The number of experts and how many of them each token uses, checked."""
    total = whole_number(num_experts, "num_experts", 1, fix="give at least one expert")
    fix = f"give an int from 1 to num_experts, which is {total}"
    return total, whole_number(num_active, "num_active", 1, total, fix=fix)


class Routed(nn.Module):
    """A layer with a gate and experts. Its forward pass writes only `last_routing`.

    expert_names: the parameters with a first axis of experts.
    shard: the experts this rank holds; None if it holds all.
    """

    num_experts: int
    num_active: int
    gate: Gate
    expert_names: tuple[str, ...]

    def __init__(self, num_experts: int, num_active: int) -> None:
        super().__init__()
        self.num_experts, self.num_active = expert_counts(num_experts, num_active)
        self._routed: tuple[Tensor, Tensor] | None = None
        self.shard: ExpertShard | None = None

    @property
    def last_routing(self) -> Routing | None:
        """Where the tokens of the last forward pass went; None before the first."""
        return None if self._routed is None else Routing(*self._routed)

    @property
    def has_other_route(self) -> bool:
        """Whether a subclass or a caller has replaced `route`."""
        return getattr(self.route, "__func__", None) is not Routed.route

    def route(self, x_td: Tensor) -> tuple[Tensor, Tensor]:
        """The active experts of each token, and their weights, which add up to 1."""
        logits_te = self.gate(x_td)
        experts_tk = choose_experts(logits_te, x_td, self.num_active)
        self.remember(logits_te, experts_tk)
        with _without_autocast(x_td):
            return experts_tk, logits_te.gather(-1, experts_tk).softmax(-1)

    def mixed(self, x_td: Tensor, mix: Mix, scale: Tensor | None = None) -> Tensor:
        """The result of `mix` for the active experts of each token, on whichever rank they are.

        The scale multiplies what all experts give.
        """
        if self.shard is not None and is_exporting():
            raise EinlinearError(
                what=f"this rank holds only {self.shard.count} of {self.num_experts} experts",
                rule="an exported program runs in one process, so it must hold all experts",
                fix="load el.full_state_dict(model) into a model that is not sharded, export that",
            )
        experts_tk, weights_tk = self.route(x_td)
        if scale is not None:
            weights_tk = weights_tk * scale.to(weights_tk.dtype)
        x_td = autocast_operand(x_td)
        if self.shard is not None:
            return self.shard.mix(self.shard, x_td, experts_tk, weights_tk, mix)
        assignment, _ = assign(experts_tk, weights_tk, self.num_experts)
        return mix(x_td, experts_tk, weights_tk, assignment)

    def remember(self, logits_te: Tensor, experts_tk: Tensor) -> None:
        """Keep the routing for `last_routing`.

        A pass that checkpointing recomputes during backward is not kept: all layers would hold
        their whole graphs until the next pass.
        """
        is_compiling = torch.compiler.is_compiling()
        if not (_is_exporting() if is_compiling else _is_within_backward()):
            self._routed = (logits_te, experts_tk)

    def draw_(self, scalings: dict[str, Scaling]) -> None:
        """Initialise parameters randomly, the same on one rank or many, and the gate to 0."""
        for name, scaling in scalings.items():
            parameter = getattr(self, name)
            if self.shard is None or name not in self.expert_names:
                nn.init.normal_(parameter, scaling.init_mean or 0.0, scaling.init_std)
                continue
            every = parameter.new_empty(self.num_experts, *parameter.shape[1:])
            with torch.no_grad():
                parameter.copy_(self.shard.own(every.normal_(std=scaling.init_std)))
        self.gate.reset_parameters()

    def own_experts(self, name: str) -> Tensor:
        """A parameter of the local experts, for use in a forward pass."""
        parameter: Tensor = getattr(self, name)
        return parameter if self.shard is None else averaged(parameter, self.shard)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the experts of a sharded layer as DTensors."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.shard is not None:
            for name in self.expert_names:
                destination[prefix + name] = self.shard.distributed(destination[prefix + name])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load a state; a sharded layer also takes that of an unsharded one."""
        state_dict = without_placeholder(state_dict, prefix)
        if self.shard is not None:
            keys = [prefix + name for name in self.expert_names if prefix + name in state_dict]
            parts = {key: self.shard.part_of(state_dict[key]) for key in keys}
            state_dict = {**state_dict, **parts}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _shard_repr(self) -> str:
        shard = self.shard
        return f", here {shard.first} to {shard.first + shard.count - 1}" if shard else ""

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, without the last routing, which holds a graph."""
        return {**self.__dict__, "_routed": None}


def choose_experts(logits_te: Tensor, x_td: Tensor, num_active: int) -> Tensor:
    """The experts with the largest logits, for every token.

    Departure: the paper's gate starts at zero and then sends all tokens to the same experts. Here a
    hash of the token's numbers gives it an order of experts, which decides among equal logits. So
    a fresh layer is balanced, and where a token goes depends only on the token.
    Ref: [P24 §5].  Checked by: test_routing.py::test_a_fresh_gate_is_balanced.
    """
    logits_te = logits_te.detach()
    num_experts = logits_te.shape[-1]
    if is_exporting():  # ONNX cannot read the bits of a number, and AOTInductor reads them wrongly
        if num_active < num_experts:
            warnings.warn(_TIES, stacklevel=2)
        return logits_te.topk(num_active, -1).indices
    if 0 < num_active < num_experts and compiled.is_direct(x_td, ()):
        # Ties are rare, and looking for them costs less than breaking them.
        top = logits_te.topk(num_active + 1, -1)
        last = top.values[:, num_active - 1 :]
        if last.dtype == torch.float64:  # a tie must not depend on other tokens
            last = _coarse_bits(last).view(torch.float64)
        if bool((last[:, 0] > last[:, 1]).all()):
            return top.indices[:, :num_active].contiguous()
    keys_te = _coarse_bits(logits_te) | _preferences(x_td.detach(), num_experts)
    return keys_te.view(torch.float64).topk(num_active, -1).indices


def _coarse_bits(logits: Tensor) -> Tensor:
    """The bits of the logits in float64; the lowest, which float32 does not use, are 0.

    Infinities become the largest finite numbers: with other low bits they would be NaN.
    """
    most = torch.finfo(torch.float64).max
    bits = (logits.double() + 0.0).clamp(-most, most).view(torch.int64)
    return bits >> _LOW_BITS << _LOW_BITS


def _preferences(x_td: Tensor, num_experts: int) -> Tensor:
    """A small number for every token and expert, hashed from all bits of the token."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x_td.element_size()]
    bits_td = x_td.contiguous().view(whole).long()
    places = torch.arange(1, x_td.shape[-1] + 1, device=x_td.device)
    experts = torch.arange(1, num_experts + 1, device=x_td.device)
    hash_t = _mixed((bits_td * (_mixed(places * _FIRST) | 1)).sum(-1))
    mixed_te = _mixed(hash_t.unsqueeze(-1) + experts * _FIRST)
    return (mixed_te >> 32) & ((1 << _LOW_BITS) - 1)


def _mixed(numbers: Tensor) -> Tensor:
    """Hash whole numbers: every bit depends on all bits of the input."""
    numbers = (numbers ^ (numbers >> 31)) * _SECOND
    numbers = (numbers ^ (numbers >> 29)) * _FIRST
    return numbers ^ (numbers >> 32)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def balance_loss(model: nn.Module, *, z_loss: float = 0.1) -> Tensor:
    """How unevenly the last forward pass used the experts, summed over all gates of a model.

        E * sum over experts of (mean probability * load)  +  z_loss * mean of (log sum exp)²

    where log sum exp is over the logits of the gate. The first part is 1 for a balanced gate. Add a
    small multiple to the loss; the paper uses 0.01 times the mean over the gates, so divide by
    their number. Works with non-reentrant gradient checkpointing, in compiled models, and in DDP,
    where every process balances its own tokens. If a layer ran several times, its last pass counts.
    Departure: the z-loss uses log sum exp.
    Ref: [P24 §5].  Checked by: test_routing.py::test_balance_loss_by_hand.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Routed)}
    if not layers:
        raise EinlinearError(
            what=f"{type(model).__name__} has no layer with a gate",
            rule="the balance loss is that of MoELinear and MoEFeedForward layers",
            fix='convert it first: el.convert_(model, el.moe("btt", num_experts=8))',
        )
    losses = [_balance(name, layer, z_loss) for name, layer in layers.items()]
    return torch.stack(losses).sum()


def _balance(name: str, layer: Routed, z_loss: float) -> Tensor:
    routing = layer.last_routing
    if routing is None:
        raise EinlinearError(
            what=f"layer {name or 'itself'!r} has not run yet",
            rule="the balance loss is that of the last forward pass",
            fix="call the model first",
        )
    is_trained = layer.gate.weight.requires_grad and torch.is_grad_enabled()
    if is_trained and not routing.logits.requires_grad:
        raise EinlinearError(
            what=f"the last forward pass of layer {name or 'itself'!r} kept no gradients",
            rule="to train the balance, the forward pass must record gradients",
            fix="use checkpoint(..., use_reentrant=False); for the value alone, call balance_loss "
            "under torch.no_grad()",
        )
    balance = (routing.mean_probability() * routing.shares()).sum() * layer.num_experts
    return balance + z_loss * routing.mean_square()
