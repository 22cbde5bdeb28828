"""Sweeps in processes of their own, whose workers can be made to fail.

Torch takes seconds to load, so that commands and workers are forked from a process that has it:
all else about them is as on the command line.
"""

import ctypes
import os
import time
from collections import Counter
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

from einlinear.cli import main as cli
from einlinear.sweeps import claims, run_job
from einlinear.sweeps.executors import child
from einlinear.sweeps.study import Study
from einlinear.training.state import TrainState
from kit.forked import context, fork_workers
from kit.runs import TINY, die

SECONDS = 90  # in which everything here has ended, however busy the machine is


def write_study(path, seeds, **base):
    """A study of tiny runs, dense and structured, of some seeds; gives its file."""
    grid = {"structure": ["dense", "btt"], "seed": list(seeds)}
    path.write_text(Study("tiny", TINY | base, (grid,)).to_toml(), encoding="utf-8")
    return path


@contextmanager
def sweeping(study, out, *words, faults=None):
    """A sweep under way in a process of its own; `faults` are FAULTS by structure and seed."""
    process = context.Process(target=_command, args=(str(study), str(out), words, faults or {}))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def swept(study, out, *words, faults=None):
    """The exit code of a sweep, and what it has printed."""
    printed = printed_file(out)
    before = printed.stat().st_size if printed.exists() else 0
    with sweeping(study, out, *words, faults=faults) as process:
        process.join(SECONDS)
        code = process.exitcode
    return code, printed.read_bytes()[before:].decode()


def printed_file(out):
    """What all sweeps of a directory have printed."""
    return Path(f"{out}.printed")


def until(condition):
    """Wait for something that happens soon; gives what it was."""
    for _ in range(SECONDS * 200):
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError("it has not happened")


def workers(out):
    """The numbers of all worker processes of a directory that live."""
    return [int(path.name) for path in Path(f"{out}.workers").glob("*") if lives(path.name)]


def trainings(out):
    """The ids of runs, once for every time that one was begun."""
    path = Path(f"{out}.trainings")
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def lives(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


def _command(study, out, words, faults):
    printed = os.open(printed_file(out), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    _few_seconds_to_be_stale()

    # Its workers come from the process that it comes from, not from another one like that.
    forkserver._forkserver.ensure_running = lambda: None
    child.subprocess = fork_workers(_begin, out, faults)
    cli.main(["sweep", study, "--out", out, *words])


def _few_seconds_to_be_stale():
    claims.Watch.__init__.__defaults__ = (2.0,)


def _begin(out, faults):
    folder = Path(f"{out}.workers")
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    right = run_job.train
    are_made = []

    def train(config, *arguments, **options):
        if not are_made:  # the plan, which comes before, has none
            are_made.append(_make_faulty(faults))
        with open(f"{out}.trainings", "a", encoding="utf-8") as file:
            file.write(f"{config.id}\n")
        return right(config, *arguments, **options)

    run_job.train = train


def _make_faulty(faults):
    right, calls = TrainState.step, Counter()

    def step(self, number):
        name = (self.config.structure, self.config.seed)
        calls[name] += 1
        if name in faults:
            FAULTS[faults[name]](calls[name])
        right(self, number)

    TrainState.step = step


def boom(call):
    """What a bug does."""
    if call >= 9:
        raise RuntimeError("boom")


# What may happen in a step of a run, the first in this process being 1.
FAULTS = {
    "raises": boom,
    "is killed": lambda call: die() if call == 3 else None,  # checkpoints are after 5, 10, ...
    "is killed further on": lambda call: die() if call == 8 else None,
    "segfaults": lambda call: ctypes.string_at(0),
    "is slow": lambda call: time.sleep(0.1),
}
