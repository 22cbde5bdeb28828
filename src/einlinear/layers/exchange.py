"""Rows sent to the ranks that hold their experts, and the results sent back.

A rank holds a run of a layer's experts, and tokens stay where they are. A row is sent once to every
rank that holds one or more of its experts (a visit), with the weights of those experts. The rank
adds up what its experts make of the row, and sends one row back. What travels, and nothing else:
the number of visits, then their experts, weights and rows.

Legend: t tokens of this rank, k the active experts of each; v visits that leave this rank, r rows
that arrive at it; d inputs, e outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from einlinear.layers.experts import Pairs, sort_pairs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Mix = Callable[[Tensor, Tensor, Tensor, Pairs], Tensor]
"""Rows, the experts of each, their weights, and the pairs of them -> rows of output."""


def _uncompiled_mix() -> Callable[..., Tensor]:
    """`mix_over_ranks`, run as it is by compiled models.

    Made for a shard, not for the module: it loads torch's compiler, which takes as long as torch.
    """
    made: Callable[..., Tensor] = torch.compiler.disable(mix_over_ranks)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """Which experts of a layer this rank holds.

    mesh: the ranks that share the experts, along one axis.
    num_experts: of all ranks together.
    mix: `mix_over_ranks`; a compiled model breaks its graph there.
    """

    mesh: DeviceMesh
    num_experts: int
    mix: Callable[..., Tensor] = field(
        default_factory=_uncompiled_mix, init=False, repr=False, compare=False
    )

    @property
    def num_ranks(self) -> int:
        """How many ranks share the experts."""
        return int(self.mesh.size())

    @property
    def count(self) -> int:
        """How many experts every rank holds."""
        return self.num_experts // self.num_ranks

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return int(self.mesh.get_local_rank()) * self.count

    def own(self, every: Tensor) -> Tensor:
        """The part of this rank, of a tensor with all experts along its first axis."""
        return every.narrow(0, self.first, self.count)

    def distributed(self, part: Tensor) -> Tensor:
        """The part of this rank as a tensor that knows all experts: a DTensor, in the same memory.

        In a state dict it tells torch.distributed.checkpoint what the whole is.
        """
        from torch.distributed.tensor import DTensor, Shard

        made: Tensor = DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False)
        return made

    def part_of(self, tensor: Tensor) -> Tensor:
        """What this rank keeps of a tensor from a state dict: of a whole one, or of a DTensor."""
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
        """The way of the results, and of gradients."""
        return Way(self.group, self.arrives, self.sends)

    def carry(self, rows: Tensor) -> Tensor:
        """The rows that arrive, by the rank they come from; not differentiable."""
        arrived = rows.new_empty(sum(self.arrives), *rows.shape[1:])
        dist.all_to_all_single(
            arrived, rows.contiguous(), list(self.arrives), list(self.sends), group=self.group
        )
        return arrived


class _Exchange(torch.autograd.Function):
    """Several tensors carried in one step, so that gradients go back in the same order everywhere.

    Which gradients are wanted is a matter of the model, not of the tokens: all ranks agree on it.
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


class _Average(torch.autograd.Function):
    """The tensor itself; its gradient is divided by a number."""

    @staticmethod
    def forward(tensor: Tensor, number: int) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.number = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad / ctx.number, None


def averaged(parameter: Tensor, shard: ExpertShard) -> Tensor:
    """An expert's parameter, whose gradient is the mean over ranks, as that of all others is.

    The tokens of all ranks reach the expert, so that its gradient is already the sum over ranks of
    the gradients of their losses. DDP and FSDP2 divide all others by the number of ranks.
    """
    made: Tensor = _Average.apply(parameter, shard.num_ranks)  # type: ignore[no-untyped-call]
    return made


def visits(experts_tk: Tensor, num_ranks: int, count: int) -> tuple[Tensor, Tensor]:
    """The tokens that visit each rank, rank after rank, and how many there are for each."""
    hits_tn = torch.zeros(
        experts_tk.shape[0], num_ranks, dtype=torch.bool, device=experts_tk.device
    )
    hits_tn.scatter_(1, torch.div(experts_tk, count, rounding_mode="floor"), True)
    return hits_tn.t().nonzero()[:, 1], hits_tn.sum(0)


def local_experts(
    experts_tk: Tensor, tokens_v: Tensor, sends_n: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The experts of each visit as the rank that is visited numbers them, and which it holds."""
    ranks = torch.arange(sends_n.shape[0], device=sends_n.device)
    firsts_v = torch.repeat_interleave(ranks * count, sends_n, output_size=tokens_v.shape[0])
    experts_vk = experts_tk.index_select(0, tokens_v) - firsts_v.unsqueeze(-1)
    is_held_vk = (experts_vk >= 0) & (experts_vk < count)
    return experts_vk.masked_fill(~is_held_vk, count), is_held_vk


def held_pairs(experts_rk: Tensor, count: int) -> Pairs:
    """The pairs of the rows that arrived; experts that other ranks hold are numbered `count`."""
    pairs = sort_pairs(experts_rk, count)
    held = int(pairs.ends[-1])
    return Pairs(pairs.order[:held], pairs.tokens[:held], pairs.ends)


def mix_over_ranks(
    shard: ExpertShard, x_td: Tensor, experts_tk: Tensor, weights_tk: Tensor, mix: Mix
) -> Tensor:
    """What `mix` makes of the tokens of this rank where all experts are; differentiable.

    Every rank of the mesh must call it, and go backward through it, as often as the others; the
    number of tokens may differ, and be 0.
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
    pairs = held_pairs(experts_rk, count)
    y_re = mix(x_rd, experts_rk.clamp(max=count - 1), weights_rk, pairs)
    (y_ve,) = _exchange(way.back(), y_re)
    return y_ve.new_zeros(x_td.shape[0], y_ve.shape[-1]).index_add(0, tokens_v, y_ve)
