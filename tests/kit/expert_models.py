"""What each of two processes runs for the tests of whole models with sharded experts."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import einlinear as el
from kit.expert_ranks import WIDTH, batch, close, make_layer, own, part


class Block(nn.Module):
    """Some layers with experts, some without, and one that is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(WIDTH, 16)
        self.mix = el.MoELinear(16, 16, structure="btt", num_experts=4)
        self.norm = nn.LayerNorm(16)
        self.net = el.MoEFeedForward(16, 24, num_experts=2, num_active=1)
        self.leave = nn.Linear(16, 5)
        self.unused = nn.Linear(3, 3)
        self.double()
        for gate in (self.mix.gate, self.net.gate):
            nn.init.normal_(gate.weight)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        return self.leave(self.net(self.norm(x + self.mix(x))))


def wrapped(model, kind):
    """The model to call, sharded."""
    sharding = el.shard_experts_(model)
    if kind == "alone":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    experts = {p for name, p in model.named_parameters() if name in sharding.parameters}
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=experts)


def steps(model, x, classes, clip, *, averages=False):
    """Three steps with parameter groups, the balance of what all ranks agree on, and clipping."""
    groups = el.param_groups(model, 0.02, base_width=16)
    optimizer = torch.optim.AdamW(groups, eps=1e-3, weight_decay=0.1, foreach=True)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), classes)
        inner = getattr(model, "module", model)
        loss = loss + 0.1 * inner.mix.last_routing.mean_square()
        assert el.balance_loss(model).isfinite()
        loss.backward()
        if averages:
            el.average_gradients_(model)
        norms.append(float(clip(model)))
        optimizer.step()
    return norms


def training(rank, kind):
    """Three steps end where one process with all tokens does."""
    twin, model = Block(), Block()
    x, classes = batch(), torch.arange(40) % 5
    wanted = steps(
        twin, x, classes, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    )
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    model = wrapped(model, kind)
    got = steps(
        model,
        part(x, rank),
        part(classes, rank),
        lambda model: el.clip_grad_norm_(model, 0.05),
        averages=kind == "alone",
    )
    assert min(wanted) > 0.05  # it was clipped
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)
    state = el.full_state_dict(model)
    assert sorted(state) == sorted(before)
    for name, tensor in before.items():
        close(state[name], tensor, 1e-9)
    inner = getattr(model, "module", model)
    assert inner.unused.weight.grad is None
    fresh = Block()
    fresh.load_state_dict(state)
    close(fresh(x), twin(x), 1e-9)


def missing_gradients(rank):
    """A gradient that only one rank has is halved; it is the same on both afterwards."""
    model = nn.ModuleDict({"mix": make_layer("btt"), "other": nn.Linear(3, 3).double()})
    el.shard_experts_(model)
    model["mix"](part(batch(), rank)).sum().backward()
    if rank == 0:
        model["other"](torch.ones(1, 3).double()).sum().backward()
    el.average_gradients_(model)
    close(model["other"].weight.grad, torch.full((3, 3), 0.5, dtype=torch.float64))


def states(rank, folder):
    """Whole states in and out, and torch's own checkpoints."""
    twin, model = Block(), Block()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    el.shard_experts_(model)
    model.load_state_dict(twin.state_dict())
    x = part(batch(), rank)
    close(model(x), twin(x))
    assert model.state_dict()["mix.A"].shape == twin.mix.A.shape
    assert model.mix.A.shape[0] == 2
    whole = el.full_state_dict(model)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(whole[name], tensor)
    whole["mix.A"].zero_()  # a copy
    close(model(x), twin(x))
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    close(copied(x), twin(x))

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    torchs = get_model_state_dict(model, options=options)
    assert rank == 1 or torch.equal(torchs["net.up"], twin.net.up)
    nn.init.zeros_(model.net.up)
    set_model_state_dict(model, copy.deepcopy(twin.state_dict()), options=options)
    close(model(x), twin(x))

    path = os.path.join(folder, "checkpoint")
    dcp.save(model.state_dict(), checkpoint_id=path)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    dcp.load(model.state_dict(), checkpoint_id=path)  # in place
    close(model(x), twin(x))
    alone = {name: torch.zeros_like(tensor) for name, tensor in twin.state_dict().items()}
    dcp.load(alone, checkpoint_id=path)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(alone[name], tensor)


def wrong_states(rank):
    model = make_layer("btt")
    state = model.state_dict()
    el.shard_experts_(model)
    for name, wrong in (("A", state["A"][:3]), ("B", state["B"][..., :1])):
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            model.load_state_dict({**state, name: wrong})


def starts(rank):
    """Fresh weights are those of one process, so that no two experts are the same."""
    twin, model = Block(), Block()
    el.shard_experts_(model)
    for draw in (
        lambda m: el.init_(m),
        lambda m: (m.mix.reset_parameters(), m.net.reset_parameters()),
    ):
        for each in (twin, model):
            torch.manual_seed(5)
            draw(each)
        for name, tensor in el.full_state_dict(model).items():
            assert torch.equal(tensor, twin.state_dict()[name]), name
    rates = [
        {row.name: row.rate for row in el.scaling_table(m, 1, base_width=8)} for m in (twin, model)
    ]
    assert rates[0] == rates[1]


def sharding_value(rank):
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    sharding = el.shard_experts_(model, dist.group.WORLD)
    assert (sharding.rank, sharding.num_ranks) == (rank, 2)
    assert sharding.experts("mix") == range(2 * rank, 2 * rank + 2)
    assert sharding.experts("net", 1) == range(1, 2)
    names = {"mix.A", "mix.B", "net.up", "net.down", "net.up_bias", "net.down_bias"}
    assert set(sharding.parameters) == names
    lines = ["rank 0 of 2", "mix: experts 0 to 1 of 4", "net: experts 0 to 0 of 2"]
    if rank == 1:
        lines = ["rank 1 of 2", "mix: experts 2 to 3 of 4", "net: experts 1 to 1 of 2"]
    assert str(sharding) == "\n".join(lines)
    assert f"num_experts=4, here {2 * rank} to {2 * rank + 1}, num_active=2" in repr(model.mix)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}  # the same objects


def refused(work):
    """The message of the error that work raises."""
    with pytest.raises(el.EinlinearError) as caught:
        work()
    return str(caught.value)


def errors(rank):
    odd = nn.Sequential(make_layer("btt"), make_layer("btt", num_experts=3))
    message = refused(lambda: el.shard_experts_(odd))
    assert "layer '1' has 3 experts, for 2 ranks" in message
    assert "take 2 or 4 experts" in message
    assert odd[0].shard is None  # nothing was done
    assert odd[0].A.shape[0] == 4
    assert "no layer with experts" in refused(lambda: el.shard_experts_(nn.Linear(2, 2)))
    layer = make_layer("btt")
    assert "in 0 groups" in refused(lambda: el.average_gradients_(layer))
    assert "in 0 groups" in refused(lambda: el.clip_grad_norm_(layer, 1.0))
    el.shard_experts_(layer)
    assert "sharded already, over 2 ranks" in refused(lambda: el.shard_experts_(layer))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "experts"))
    assert "the mesh has 2 axes" in refused(lambda: el.shard_experts_(make_layer("btt"), mesh))
    sharding = el.shard_experts_(make_layer("btt"), mesh["experts"])
    assert sharding.num_ranks == 2
    ddp = DistributedDataParallel(make_layer("btt"))
    assert "in DDP or has DTensors" in refused(lambda: el.shard_experts_(ddp))
    fsdp = fully_shard(make_layer("btt"), mesh=mesh["experts"])
    assert "in DDP or has DTensors" in refused(lambda: el.shard_experts_(fsdp))
    assert "given as 'all'" in refused(lambda: el.shard_experts_(make_layer("btt"), "all"))
    block = wrapped(Block(), "fsdp2")
    assert "FSDP2 averages" in refused(lambda: el.average_gradients_(block))


def ddp_on_a_part(rank):
    """DDP leaves experts alone also where it wraps a part of what was sharded."""
    model = nn.ModuleDict({"inner": Block()})
    el.shard_experts_(model)
    before = [p.detach().clone() for p in own(model["inner"].mix)]
    DistributedDataParallel(model["inner"])
    for parameter, kept in zip(own(model["inner"].mix), before, strict=True):
        assert torch.equal(parameter, kept)
    assert not torch.equal(before[0], Block().mix.A[2 * (1 - rank) : 2 * (1 - rank) + 2])


def shared(rank):
    """A parameter that two layers share stays shared."""
    model = nn.Sequential(make_layer("btt"), make_layer("btt"))
    model[1].A = model[0].A
    el.shard_experts_(model)
    assert model[1].A is model[0].A
    assert model[0].A.shape[0] == 2


def snippet(rank, code):
    """A program for torchrun, where the processes know each other already."""
    kept = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    try:
        names = {}
        exec(compile(code, "docs/moe.md", "exec"), names)
    finally:
        dist.init_process_group, dist.destroy_process_group = kept
    assert names["loss"] < 1.5  # 2.30 for equal logits
    plain = [p for n, p in names["model"].named_parameters() if "gate" in n or "bias" in n]
    for parameter in plain:
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter.detach())
        assert torch.equal(*both)
