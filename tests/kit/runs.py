"""Tiny training runs, and what processes of their own do with them."""

import functools
import json
import os
import resource
import signal
from pathlib import Path
from threading import Thread

import torch

from einlinear.files import tensors as tensor_files
from einlinear.files.whole import write_whole
from einlinear.runs import directory
from einlinear.runs.config import RunConfig
from einlinear.training import checkpoint, loop
from einlinear.training.state import TrainState
from einlinear.training.train import train
from kit.forked import context

TINY = {
    "width": 16,
    "depth": 1,
    "head_size": 8,
    "context": 16,
    "batch_size": 4,
    "steps": 24,
    "warmup": 4,
    "eval_points": 5,
    "eval_size": 8,
    "checkpoint_every": 5,
    "device": "cpu",
}
CLOCK = ("seconds", "data_seconds")


def tiny(**changes):
    """A run on text of a second."""
    return RunConfig(**TINY | changes)


def numbers(path):
    """The metrics of a run without what depends on the clock."""
    lines = (Path(path) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def without_clock(record):
    """A record without what depends on the clock, as JSON has it."""
    values = json.loads(json.dumps(record.as_dict()))
    for key in ("seconds", "units_per_second", "peak_bytes", "environment"):
        values.pop(key)
    for point in values["curve"]:
        for key in CLOCK:
            point.pop(key)
    return values


def die():
    """What kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way_in(self, values):
    """Write half of a line of metrics and die."""
    text = json.dumps(values).encode()
    self._metrics.write(text[: len(text) // 2])
    die()


def die_while_it_is_read(chunks):
    """The first part of a file, and death."""
    yield next(iter(chunks))
    die()


def half_of_tensors(path, tensors):
    """Write a part of a file of tensors, by the writer itself, and die."""
    write_whole(path, die_while_it_is_read(tensor_files._chunks(tensors)))


# Where a process may be killed: what is called then, and what it does instead.
MOMENTS = {
    "in a step": (TrainState, "step", lambda *_: die()),
    "in a line of metrics": (directory.RunDirectory, "append", die_half_way_in),
    "before a checkpoint": (loop, "save_checkpoint", lambda *_: die()),
    "in the tensors of a checkpoint": (checkpoint, "write_tensors", half_of_tensors),
    "between its two files": (checkpoint, "write_whole", lambda *_: die()),
    "while an old one is removed": (checkpoint, "_remove", lambda path: (path.unlink(), die())),
    "in the model": (loop, "write_tensors", half_of_tensors),
    "before the record": (directory.RunDirectory, "write_record", lambda *_: die()),
    "after the record": (directory.RunDirectory, "remove_checkpoints", lambda *_: die()),
}


def save_and_be_killed(folder):
    """Save a checkpoint of 40 MB, and be killed as soon as there is a file."""

    def watch():
        while not any(folder.iterdir()):
            pass
        die()

    folder.mkdir(parents=True)
    Thread(target=watch).start()
    tensors = {"a": torch.zeros(10**7)}
    checkpoint.save_checkpoint(folder, checkpoint.Checkpoint(5, tensors, {}))


def train_until(config, out, moment, calls, thaw=None):
    """Train, and die at a moment, when it comes for the given time."""
    owner, name, instead = MOMENTS[moment]
    right = getattr(owner, name)
    seen = []

    @functools.wraps(right)
    def counted(*arguments):
        seen.append(None)
        return (instead if len(seen) == calls else right)(*arguments)

    setattr(owner, name, counted)
    train(config, out, thaw=thaw)


def killed(config, out, moment, calls, thaw=None):
    """Whether a process that trains was killed at the moment; False if it came to its end."""
    process = context.Process(target=train_until, args=(config, out, moment, calls, thaw))
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def call_with_signals(signals, said, target, *arguments):
    """Call a function in which signals come in the middle of steps, and keep what it says."""
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 2)
    right = TrainState.batch

    def batch(self, step, part):
        for number in signals.get(step, ()):
            os.kill(os.getpid(), number)
        return right(self, step, part)

    TrainState.batch = batch
    target(*arguments)


def signalled(said, signals, target, *arguments):
    """The exit code of a process that gets signals in the middle of steps; what it has said.

    Steps count from 0; not in step 0, of which a run takes the batch before it begins.
    """
    process = context.Process(
        target=call_with_signals, args=(signals, str(said), target, *arguments)
    )
    process.start()
    process.join(120)
    return process.exitcode, Path(said).read_text(encoding="utf-8")


def call_with_little_room(size, said, answer, target, *arguments):
    """Call a function in a process whose files cannot grow beyond a size, as on a full disk."""
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    answer.send(target(*arguments))


def with_little_room(said, size, target, *arguments):
    """The exit code of a process whose files cannot grow; what it has said; what was returned."""
    mine, its = context.Pipe()
    process = context.Process(
        target=call_with_little_room, args=(size, str(said), its, target, *arguments)
    )
    process.start()
    its.close()
    process.join(120)
    returned = mine.recv() if process.exitcode == 0 else None
    mine.close()
    return process.exitcode, Path(said).read_text(encoding="utf-8"), returned
