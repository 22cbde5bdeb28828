"""Experts on many devices: each rank of a process group keeps some experts of each layer.

Tokens stay on their rank, and gates and all other parameters are on every rank; `exchange` sends
rows to experts. Parameters stay plain tensors, of this rank's experts, so optimizers see nothing
new; in a state dict they are DTensors of all experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from einlinear.errors import EinlinearError, quote
from einlinear.layers.moe.exchange import ExpertShard
from einlinear.layers.moe.routing import Routed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer: how many, how many per rank, and their parameters."""

    name: str
    num_experts: int
    per_rank: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertSharding:
    """Which experts each rank of the group that shares them holds; print it for a summary."""

    rank: int
    num_ranks: int
    layers: tuple[LayerExperts, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that differ from rank to rank."""
        return tuple(name for layer in self.layers for name in layer.parameters)

    def experts(self, layer: str, rank: int | None = None) -> range:
        """The experts of a layer that a rank holds; by default this rank."""
        per_rank = {known.name: known.per_rank for known in self.layers}.get(layer, 0)
        if not per_rank:
            raise EinlinearError(
                what=f"the experts of layer {quote(layer)} are asked for",
                rule="only layers with experts are sharded",
                fix=f"name one of {', '.join(repr(known.name) for known in self.layers)}",
            )
        first = (self.rank if rank is None else rank) * per_rank
        return range(first, first + per_rank)

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.num_ranks}"]
        for layer in self.layers:
            own = self.experts(layer.name)
            name = layer.name or "the model itself"
            lines.append(f"{name}: experts {own[0]} to {own[-1]} of {layer.num_experts}")
        return "\n".join(lines)


def shard_experts_(
    model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None
) -> ExpertSharding:
    """Keep only this rank's experts in every MoELinear and MoEFeedForward, in place.

    Experts are split into n equal runs, and rank r keeps the r-th. From then on, forward and
    backward passes send rows between ranks, so all ranks must make the same passes, each on its own
    tokens (or none). Gradients of experts are means over ranks, like those of all other parameters
    under DDP and FSDP2; without either, call `average_gradients_`. Call this before DDP, which then
    ignores the experts, before FSDP2 (pass the experts as ignored_params), and before the first
    optimizer step. The ranks are those of a group, or of a mesh with one axis; by default all. The
    model must have the same layers on every rank. See docs/moe.md.
    """
    mesh = _mesh(model, group)
    plan = plan_sharding(model, int(mesh.get_local_rank()), int(mesh.size()))
    layers = dict(model.named_modules())
    done: set[int] = set()
    for planned in plan.layers:
        layer = layers[planned.name]
        assert isinstance(layer, Routed), "only layers with experts are planned"
        layer.shard = ExpertShard(mesh, layer.num_experts)
        for name in layer.expert_names:
            parameter = getattr(layer, name)
            if id(parameter) not in done:  # layers may share one
                done.add(id(parameter))
                parameter.data = layer.shard.own(parameter.data).clone()
                parameter.grad = None
    _hide_from_ddp_(model, plan)
    return plan


def plan_sharding(model: nn.Module, rank: int, num_ranks: int) -> ExpertSharding:
    """Which experts each rank would hold; changes nothing."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, Routed)}
    if not found:
        raise EinlinearError(
            what=f"{type(model).__name__} has no layer with experts",
            rule="only experts of MoELinear and MoEFeedForward layers can be sharded",
            fix='convert it first: el.convert_(model, el.moe("btt", num_experts=8))',
        )
    _check_wrappers(model)
    for name, layer in found.items():
        _check_layer(name or "itself", layer, num_ranks)
    layers = tuple(
        LayerExperts(
            name,
            layer.num_experts,
            layer.num_experts // num_ranks,
            tuple(f"{name}.{own}" if name else own for own in layer.expert_names),
        )
        for name, layer in found.items()
    )
    return ExpertSharding(rank, num_ranks, layers)


def _check_layer(name: str, layer: Routed, num_ranks: int) -> None:
    if layer.shard is not None:
        raise EinlinearError(
            what=f"layer {name!r} is sharded already, over {layer.shard.num_ranks} ranks",
            rule="experts can be sharded only once",
            fix="call shard_experts_ once, on the whole model",
        )
    if layer.num_experts % num_ranks:
        less = layer.num_experts - layer.num_experts % num_ranks
        take = f"{less} or {less + num_ranks}" if less else str(num_ranks)
        raise EinlinearError(
            what=f"layer {name!r} has {layer.num_experts} experts, for {num_ranks} ranks",
            rule="every rank holds the same number of experts",
            fix=f"take {take} experts, or a group of ranks whose size divides {layer.num_experts}",
        )


def _check_wrappers(model: nn.Module) -> None:
    is_wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if is_wrapped or any(_is_distributed(parameter) for parameter in model.parameters()):
        raise EinlinearError(
            what=f"{type(model).__name__} is in DDP or has DTensors as parameters already",
            rule="DDP and FSDP2 must know which parameters are experts when they wrap the model",
            fix="call shard_experts_(model) first, then DDP(model), or fully_shard with the "
            "experts as ignored_params",
        )


def _mesh(model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None) -> DeviceMesh:
    """The ranks as a mesh with one axis."""
    if not (dist.is_available() and dist.is_initialized()):
        raise EinlinearError(
            what="experts cannot be sharded: there is no process group",
            rule="the processes that share the experts form a process group",
            fix="start them with torchrun and call torch.distributed.init_process_group() first",
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise EinlinearError(
                what=f"the mesh has {group.ndim} axes",
                rule="experts are sharded along one axis",
                fix='name it: shard_experts_(model, mesh["experts"])',
            )
        return group
    process_group = dist.group.WORLD if group is None else group
    if not isinstance(process_group, dist.ProcessGroup):
        raise EinlinearError(
            what=f"the group is given as {quote(group)}, of which this rank is not part",
            rule="a group is a ProcessGroup or a DeviceMesh that holds this rank",
            fix="leave it out for all ranks, or give what torch.distributed.new_group returns",
        )
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return DeviceMesh.from_group(process_group, devices.pop() if devices else "cpu")


def _hide_from_ddp_(model: nn.Module, plan: ExpertSharding) -> None:
    """Tell DDP not to synchronise experts, whichever part of the model it wraps."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        names = [name.removeprefix(start) for name in plan.parameters if name.startswith(start)]
        if names:
            known = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
            hide_: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            hide_(module, [*known, *names])


def expert_shards(model: nn.Module) -> dict[nn.Parameter, ExpertShard]:
    """The parameters of which this rank holds a part, each with its shard."""
    return {
        getattr(layer, name): layer.shard
        for layer in model.modules()
        if isinstance(layer, Routed) and layer.shard is not None
        for name in layer.expert_names
    }


def _sharded(model: nn.Module) -> tuple[dict[nn.Parameter, ExpertShard], dist.ProcessGroup]:
    shards = expert_shards(model)
    meshes = list({id(shard.mesh): shard.mesh for shard in shards.values()}.values())
    if not meshes or any(mesh != meshes[0] for mesh in meshes):
        raise EinlinearError(
            what=f"the experts of {type(model).__name__} are sharded in {len(meshes)} groups",
            rule="gradients are averaged and measured over one group",
            fix="call shard_experts_(model) once, on the whole model",
        )
    return shards, meshes[0].get_group()


def average_gradients_(model: nn.Module) -> None:
    """Average the gradients of a sharded model over all ranks.

    Call it after `loss.backward()` if you do not use DDP. Gradients of experts are means already;
    all others are averaged. A gradient that only some ranks have counts as 0 on the others; one
    that no rank has stays None. Every rank must call it.
    """
    shards, group = _sharded(model)
    others = [p for p in model.parameters() if p.requires_grad and p not in shards]
    if any(_is_distributed(parameter) for parameter in others):
        raise EinlinearError(
            what=f"{type(model).__name__} has DTensors as parameters",
            rule="FSDP2 averages their gradients itself",
            fix="do not call average_gradients_",
        )
    if not others:
        return
    has = torch.tensor([p.grad is not None for p in others], device=others[0].device).int()
    dist.all_reduce(has, group=group)
    used = [p for p, count in zip(others, has.tolist(), strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for grads in _by_type(parameter.grad for parameter in used if parameter.grad is not None):
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        means = torch.split(flat, [grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))


def _by_type(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors grouped by dtype and device, in the same order on all ranks."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    yield from found.values()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradient norm over all ranks to max_norm; returns the norm before clipping.

    torch.nn.utils.clip_grad_norm_ would see only the experts of this rank and scale gradients
    differently on each rank. Call this on every rank after gradients are averaged.
    """
    shards, group = _sharded(model)
    graded = [parameter for parameter in model.parameters() if parameter.grad is not None]
    own = [parameter for parameter in graded if parameter in shards]
    others = [parameter for parameter in graded if parameter not in shards]
    device = next(iter(shards)).device
    squares = [_norm(part).square().to(device, torch.float64) for part in (own, others)]
    dist.all_reduce(squares[0], group=group)
    norm = (squares[0] + squares[1]).sqrt()
    for part in (own, others):
        clip_grads_with_norm_(part, max_norm, norm)
    return norm


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return _whole(norm)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of a sharded model with all experts, for an unsharded model.

    Copies on the CPU, the same on every rank; every rank must call it. A sharded model can load it
    with `load_state_dict`, too.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return {
        name: _whole(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }


def _is_distributed(tensor: Tensor) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if _is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return whole
