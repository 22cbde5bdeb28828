"""No step of training waits for a GPU; the meta device stands in for one."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from einlinear.layers.moe import operators
from einlinear.layers.moe.portable import PortableExperts
from einlinear.runs.config import RunConfig
from einlinear.training.devices.distributed import Place
from einlinear.training.plan import plan_run
from einlinear.training.state import TrainState
from kit.runs import tiny
from kit.stand_in import DEVICE, PLACE, WaitedError, watched

RUNS = {
    "dense": {},
    "btt": {"structure": "btt", "ema": 0.1, "grad_clip": 1.0},
    "low_rank": {"structure": "low_rank(rank=4)", "weight_norm": True, "accumulation": 2},
    "muon": {"structure": "btt", "optimizer": "muon", "weight_decay": 0.1, "grad_clip": 1.0},
    "learned": {"tied": True, "positions": "learned"},
    "rotary": {"positions": "rotary", "zero_query": True, "parametrization": "naive"},
    "experts": {"structure": "btt", "num_experts": 4, "balance": 0.01},
    "experts by muon": {"structure": "low_rank(rank=2)", "num_experts": 3, "optimizer": "muon"},
    "experts together": {
        "structure": "btt",
        "num_experts": 4,
        "expert_norm": "together",
        "expert_gain": True,
    },
    "dense experts": {"num_experts": 4, "weight_norm": True, "balance": 0},
    "nets": {"num_experts": 4, "experts": "ffn", "bias": True},
}
USUAL = ("btt", "muon", "rotary", "experts", "experts by muon", "nets")


def state_of(config):
    plan = plan_run(config, is_checked=False)
    return TrainState(config, plan.task, PLACE, plan.model)


@pytest.mark.parametrize(
    "name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_no_step_waits(name):
    config = tiny(**RUNS[name])
    state = state_of(config)
    with watched() as seen:
        state.step(0)
        seen.copies = 0
        state.step(1)
    assert seen.copies == 2 * config.accumulation  # inputs and targets


@pytest.mark.parametrize("task", ["regression", "cifar", "pixels"])
def test_no_step_of_another_task_waits(monkeypatch, task):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # meta has none
    common = {"task": task, "width": 16, "depth": 1, "batch_size": 4, "steps": 4, "device": "cpu"}
    own = {"regression": {"teacher_width": 16}, "cifar": {}, "pixels": {"head_size": 8}}
    state = state_of(RunConfig(**common, **own[task]))
    with watched():
        state.step(0)
        state.step(1)


WAITING = {
    "item": (lambda x: float(x.sum()), r"item\(\) cannot be called on meta"),
    "branch": (lambda x: 1 if x.sum() > 0 else 0, r"item\(\) cannot be called on meta"),
    "list": (lambda x: x.tolist(), "Cannot copy out of meta"),
    "shape": (lambda x: x.nonzero(), r"torch\.nonzero"),
    "mask": (lambda x: x[x > 0], r"torch\.nonzero"),
    "to the CPU": (lambda x: x.cpu(), "Cannot copy out of meta"),
    "numbers of a list": (lambda x: x.new_tensor([1.0, 2.0]), "new_tensor makes a tensor"),
    "a tensor of a list": (
        lambda x: torch.tensor([1.0], device=DEVICE),
        "makes a tensor of a list",
    ),
    "copied while it waits": (lambda x: x + torch.ones(4).to(DEVICE), "copies .* from the CPU"),
}
"""What would wait for a GPU, and the words with which torch or the stand-in refuse it."""


@pytest.mark.parametrize("name", WAITING)
def test_the_stand_in_sees_what_waits(name):
    wait, words = WAITING[name]
    x = torch.ones(4, device=DEVICE)
    with watched(), pytest.raises(Exception, match=words):
        wait(x)


def test_the_stand_in_sees_inside_operators(monkeypatch):
    monkeypatch.setattr(operators, "BlockedExperts", PortableExperts)
    state = state_of(tiny(**RUNS["experts"]))
    with watched(), pytest.raises(Exception, match="Cannot copy out of meta"):
        state.step(0)


class NoNumbers(TorchDispatchMode):
    """Refuses to read a number: for autocast, which the meta device does not have."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        reads = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        if function._schema.name.removeprefix("aten::") in reads:
            raise WaitedError(str(function))
        return function(*arguments, **options or {})


@pytest.mark.parametrize("name", ["btt", "low_rank", "experts"])
def test_no_step_in_bfloat16_reads_a_number(monkeypatch, name):
    monkeypatch.setattr(operators, "fitting_variants", lambda *_: ("einsum",))
    config = tiny(precision="bfloat16", **RUNS[name])
    plan = plan_run(config, is_checked=False)
    state = TrainState(config, plan.task, Place(0, 1, torch.device("cpu")), plan.model)
    with NoNumbers():
        state.step(0)
        state.step(1)
    with NoNumbers(), pytest.raises(WaitedError):
        float(state.losses)
