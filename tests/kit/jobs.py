"""Jobs of tiny runs, and what tests of executors do with them."""

import os
import time
from pathlib import Path

from einlinear.runs.directory import read_record
from einlinear.sweeps.claims import claimed
from einlinear.sweeps.job import Job
from einlinear.training.train import train
from kit.runs import numbers, tiny, without_clock


def tiny_job(out, **settings):
    """A job of a sweep in a directory."""
    (Path(out) / "studies").mkdir(exist_ok=True)
    config = tiny(**settings)
    return Job(config.id, str(out), config.as_dict(), 1, os.getcwd())


def wait_for(condition, seconds=180):
    """What a condition gives as soon as it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it does not happen")


def all_ended(executor, count, seconds=180):
    """The outcomes of so many jobs, by id."""
    found = {}

    def is_complete():
        for outcome in executor.ended(0.2):
            assert outcome.id not in found, "a job ends once"
            found[outcome.id] = outcome
        return len(found) >= count

    wait_for(is_complete, seconds)
    return found


def first_checkpoint(job):
    """Wait until a run has a checkpoint; gives the process that trains it."""
    wait_for(lambda: list(job.directory.glob("checkpoints/*.json")))
    return claimed(job.directory)["pid"]


def is_gone(pid):
    """Whether no process has this number, other than one that nobody has asked for yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def assert_trained(job, out, **settings):
    """The run of a job has what a plain call of train gives."""
    train(tiny(**settings), out)
    assert numbers(job.directory) == numbers(out)
    assert without_clock(read_record(job.directory)) == without_clock(read_record(out))
    assert not list(job.directory.glob("claim-*"))
