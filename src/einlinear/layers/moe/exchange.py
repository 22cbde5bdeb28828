"""Send rows to the ranks that hold their experts, and the results back.

Each rank holds consecutive experts of a layer and its own tokens. A row is sent once to every rank
that holds one or more of its experts (a visit), with the weights of those experts. That rank sums
the results of its experts and sends one row back. Only this is sent: the number of visits, then
their experts, weights and rows.

Legend: as in `assignment`, with t tokens of this rank, v visits that leave it, r rows that arrive,
n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from einlinear.layers.moe.assignment import Assignment, assign

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Mix = Callable[[Tensor, Tensor, Tensor, Assignment], Tensor]
"""Input rows, the experts of each, their weights, and the pairs of both -> output rows."""


def _uncompiled_mix() -> Callable[..., Tensor]:
    """`mix_over_ranks`, which torch.compile leaves uncompiled.

    Created for each shard, not at import: it loads torch's compiler, which takes as long as torch.
    """
    made: Callable[..., Tensor] = torch.compiler.disable(mix_over_ranks)  # type: ignore[no-untyped-call]
    return made


def _uncompiled_sum() -> Callable[..., Tensor]:
    """`summed_over_ranks`, created in the same way."""
    made: Callable[..., Tensor] = torch.compiler.disable(summed_over_ranks)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Which experts of a layer this rank holds.

    mesh: the ranks that share the experts, along one axis.
    num_experts: the total over all ranks.
    mix: `mix_over_ranks`; a compiled model breaks its graph there.
    sum: `summed_over_ranks`; here too.
    """

    mesh: DeviceMesh
    num_experts: int
    mix: Callable[..., Tensor] = field(
        default_factory=_uncompiled_mix, init=False, repr=False, compare=False
    )
    sum: Callable[..., Tensor] = field(
        default_factory=_uncompiled_sum, init=False, repr=False, compare=False
    )

    @property
    def num_ranks(self) -> int:
        """How many ranks share the experts."""
        return int(self.mesh.size())

    @property
    def count(self) -> int:
        """How many experts each rank holds."""
        return self.num_experts // self.num_ranks

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return int(self.mesh.get_local_rank()) * self.count

    def own(self, every: Tensor) -> Tensor:
        """This rank's part of a tensor with all experts along its first axis."""
        return every.narrow(0, self.first, self.count)

    def distributed(self, part: Tensor) -> Tensor:
        """This rank's part as a DTensor of all experts, sharing its memory.

        In a state dict it tells torch.distributed.checkpoint about the whole tensor.
        """
        from torch.distributed.tensor import DTensor, Shard

        made: Tensor = DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False)
        return made

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor from a state dict, which may be whole or a DTensor."""
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            if tensor.device_mesh == self.mesh and tensor.placements[0].is_shard(0):
                return tensor.to_local()
            tensor = tensor.full_tensor()
        is_whole = tensor.dim() > 0 and tensor.shape[0] == self.num_experts
        return self.own(tensor).clone() if is_whole else tensor


@dataclass(frozen=True, slots=True)
class Way:
    """How many rows go to each rank of a group, and how many come from each."""

    group: dist.ProcessGroup
    sends: tuple[int, ...]
    arrives: tuple[int, ...]

    def back(self) -> Way:
        """The way back, for results and gradients."""
        return Way(self.group, self.arrives, self.sends)

    def carry(self, rows: Tensor) -> Tensor:
        """Send rows; returns those that arrive, in the order of ranks. Not differentiable."""
        arrived = rows.new_empty(sum(self.arrives), *rows.shape[1:])
        dist.all_to_all_single(
            arrived, rows.contiguous(), list(self.arrives), list(self.sends), group=self.group
        )
        return arrived


class _Exchange(torch.autograd.Function):
    """Several tensors sent in one step, so that gradients return in the same order on all ranks.

    Which gradients are needed depends on the model, not on the tokens, so all ranks agree on it.
    """

    @staticmethod
    def forward(way: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(way.carry(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.way = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[1:]
        kept = [grad for grad, flag in zip(grads, wanted, strict=True) if flag]
        made = iter(_exchange(ctx.way.back(), *kept))
        return None, *(next(made) if flag else None for flag in wanted)


def _exchange(way: Way, *tensors: Tensor) -> tuple[Tensor, ...]:
    arrived: tuple[Tensor, ...] = _Exchange.apply(way, *tensors)  # type: ignore[no-untyped-call]
    return arrived


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks of a tensor; its gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _SumOverRanks.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def summed_over_ranks(shard: ExpertShard, tensor: Tensor) -> Tensor:
    """The sum of a tensor over the ranks that share the experts; differentiable."""
    made: Tensor = _SumOverRanks.apply(tensor, shard.mesh.get_group())  # type: ignore[no-untyped-call]
    return made


def averaged(parameter: Tensor, shard: ExpertShard) -> Tensor:
    """An expert's parameter, whose gradient is the mean over ranks like all others.

    The tokens of all ranks reach the expert, so its gradient is already the sum over the losses of
    all ranks. DDP and FSDP2 divide other gradients by the number of ranks.
    """
    used = parameter.view_as(parameter)
    if used.requires_grad:
        used.register_hook(lambda grad: grad / shard.num_ranks)  # type: ignore[no-untyped-call]
    return used


def visits(experts_tk: Tensor, num_ranks: int, count: int) -> tuple[Tensor, Tensor]:
    """The tokens that visit each rank, in the order of ranks, and how many visit each."""
    hits_tn = torch.zeros(
        experts_tk.shape[0], num_ranks, dtype=torch.bool, device=experts_tk.device
    )
    hits_tn.scatter_(1, torch.div(experts_tk, count, rounding_mode="floor"), True)
    return hits_tn.t().nonzero()[:, 1], hits_tn.sum(0)


def local_experts(
    experts_tk: Tensor, tokens_v: Tensor, sends_n: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The experts of each visit as the visited rank numbers them, and which of them it holds."""
    ranks = torch.arange(sends_n.shape[0], device=sends_n.device)
    firsts_v = torch.repeat_interleave(ranks * count, sends_n, output_size=tokens_v.shape[0])
    experts_vk = experts_tk.index_select(0, tokens_v) - firsts_v.unsqueeze(-1)
    is_held_vk = (experts_vk >= 0) & (experts_vk < count)
    return experts_vk.masked_fill(~is_held_vk, count), is_held_vk


def held_pairs(experts_rk: Tensor, weights_rk: Tensor, count: int) -> Assignment:
    """The assignment of the rows that arrived; experts of other ranks are numbered `count`."""
    every, _ = assign(experts_rk, weights_rk, count)
    held = int(every.ends_e[-1])
    w_p = None if every.w_p is None else every.w_p[:held]
    return Assignment(every.tokens_p[:held], every.ends_e, w_p, every.num_tokens)


def mix_over_ranks(
    shard: ExpertShard, x_td: Tensor, experts_tk: Tensor, weights_tk: Tensor, mix: Mix
) -> Tensor:
    """The result of `mix` for this rank's tokens with the experts of all ranks; differentiable.

    Every rank of the mesh must make the same number of forward and backward calls; the number of
    tokens may differ, or be 0.
    """
    group, count = shard.mesh.get_group(), shard.count
    tokens_v, sends_n = visits(experts_tk, shard.num_ranks, count)
    arrives_n = torch.empty_like(sends_n)
    dist.all_to_all_single(arrives_n, sends_n, group=group)
    way = Way(group, tuple(sends_n.tolist()), tuple(arrives_n.tolist()))
    experts_vk, is_held_vk = local_experts(experts_tk, tokens_v, sends_n, count)
    weights_vk = weights_tk.index_select(0, tokens_v).masked_fill(~is_held_vk, 0)
    experts_rk = way.carry(experts_vk)
    x_rd, weights_rk = _exchange(way, x_td.index_select(0, tokens_v), weights_vk)
    assignment = held_pairs(experts_rk, weights_rk, count)
    y_ro = mix(x_rd, experts_rk.clamp(max=count - 1), weights_rk, assignment)
    (y_vo,) = _exchange(way.back(), y_ro)
    return y_vo.new_zeros(x_td.shape[0], y_vo.shape[-1]).index_add(0, tokens_v, y_vo)
