"""What each of two processes trains, in a module that a spawned process can import."""

import math
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from einlinear.errors import EinlinearError
from einlinear.training import loop
from einlinear.training.devices import distributed
from einlinear.training.state import TrainState
from einlinear.training.train import train
from kit.runs import die, numbers, tiny


def assert_close(record, wanted, tolerance=1e-4):
    """The losses are those of one process."""
    losses = [(p.loss, p.train_loss or 0.0) for p in record.curve]
    for got, old in zip(losses, wanted, strict=True):
        for a, b in zip(got, old, strict=True):
            assert math.isclose(a, b, rel_tol=tolerance), (losses, wanted)


class StopHereError(Exception):
    pass


def train_and_stop(config, out, at):
    """Train up to a step in which every process stops."""
    right = TrainState.step

    def step(self, number):
        if number == at:
            raise StopHereError
        right(self, number)

    TrainState.step = step
    try:
        train(config, out)
    except StopHereError:
        return
    finally:
        TrainState.step = right
    raise AssertionError("the run went past the step")


def train_in_two(rank, out, settings, wanted):
    """All ways to spread a run over two processes, with a stop in the middle."""
    out = Path(out)
    for shard in ("ddp", "fsdp2"):
        config = tiny(shard=shard, **settings)
        record = train(config, out / shard)
        assert_close(record, wanted)
        assert record.environment["processes"] == 2
        train_and_stop(config, out / f"{shard} again", 13)
        dist.barrier()
        again = train(config, out / f"{shard} again")
        assert [p.loss for p in again.curve] == [p.loss for p in record.curve]
        dist.barrier()
        assert numbers(out / shard) == numbers(out / f"{shard} again")
    check_errors(rank, out)


def train_in_two_with_muon(rank, out):
    """FSDP2 splits some momenta along their batch axes, others through their matrices."""
    config = tiny(structure="btt", optimizer="muon", shard="fsdp2", weight_decay=0.1)
    whole = train(config, Path(out) / "whole")
    train_and_stop(config, Path(out) / "again", 13)
    dist.barrier()
    again = train(config, Path(out) / "again")
    assert [p.loss for p in again.curve] == [p.loss for p in whole.curve]


def go_on_in_two(rank, out):
    """A checkpoint between two lines of metrics; the first batches of validation differ in size."""
    out = Path(out)
    loop.log_interval = lambda steps: 4
    config = tiny(structure="btt", num_experts=3, eval_size=6)
    whole = train(config, out / "whole")
    train_and_stop(config, out / "again", 13)
    dist.barrier()
    again = train(config, out / "again")
    assert [p.loss for p in again.curve] == [p.loss for p in whole.curve]
    if rank == 0:
        assert [p.routing for p in again.curve] == [p.routing for p in whole.curve]
    assert_close(again, [(p.loss, p.train_loss or 0.0) for p in whole.curve], 1e-9)


def thaw_in_two(rank, out):
    """A shorter run, its continuation, and the same without a break."""
    settings = {"structure": "btt", "num_experts": 3, "shard": "fsdp2", "keep_state": True}
    short, long = (tiny(steps=n, eval_spacing="fixed", **settings) for n in (8, 14))
    out = Path(out)
    train(short, out / "short")
    dist.barrier()
    thawed = train(long, out / "long", thaw=out / "short")
    whole = train(long, out / "whole")
    assert [p.loss for p in thawed.curve] == [p.loss for p in whole.curve]
    assert thawed.train_loss == whole.train_loss
    if rank == 0:
        assert numbers(out / "long") == numbers(out / "whole")


def check_errors(rank, out):
    """What goes wrong in one process is raised by both, with its message."""
    data = out / f"only {rank}.txt"
    if rank == 0:
        data.write_text("a text that is there. " * 50, encoding="utf-8")
    dist.barrier()
    for config, words in (
        (tiny(batch_size=3), "the batch_size is 3, for 2 processes"),
        (tiny(data=str(data)), "process 1: "),
    ):
        with pytest.raises(EinlinearError) as caught:
            train(config)
        assert words in caught.value.what


def stopping(rank, port, how, pipe):
    """Train in two processes; the second stops or ends in the middle."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    distributed.patience = lambda: timedelta(seconds=1.5)
    right = TrainState.step

    def step(self, number):
        if rank == 1 and number == 5:
            die() if how == "ends" else os.kill(os.getpid(), signal.SIGSTOP)
        right(self, number)

    TrainState.step = step
    try:
        train(tiny())
    except EinlinearError as error:
        pipe.send(error.what)
    else:
        pipe.send("it went on")
    os._exit(0)  # gloo's threads may hang
