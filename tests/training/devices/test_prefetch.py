"""Batches that a thread makes ahead are those that are made when they are needed."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear.data.tasks.task import Batch
from einlinear.training import state
from einlinear.training.devices import prefetch
from einlinear.training.devices.prefetch import Prefetcher
from einlinear.training.train import train
from kit.runs import numbers, tiny, without_clock
from kit.train_processes import train_and_stop

NAME = "einlinear-batches"


def threads():
    return [t for t in threading.enumerate() if t.name.startswith(NAME)]


def numbered(step, part):
    return Batch(torch.tensor([step, part]), torch.tensor(0), 1)


def given_by(ahead, step, part):
    return tuple(ahead(step, part).inputs.tolist())


@settings(max_examples=30)
@given(
    num_parts=st.integers(1, 3),
    asked=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5)), max_size=5),
)
def test_any_order_gives_what_was_asked_for(num_parts, asked):
    """Runs of steps from anywhere, as when a run is measured, then starts, then resumes."""
    ahead = Prefetcher(numbered, 8, num_parts)
    try:
        for first, count in asked:
            for step in range(first, min(8, first + count)):
                for part in range(num_parts):
                    assert given_by(ahead, step, part) == (step, part)
    finally:
        ahead.close()


def test_each_batch_is_made_once_and_none_after_the_end():
    made = []

    def make(step, part):
        made.append((step, part))
        assert threading.current_thread().name.startswith(NAME)
        return numbered(step, part)

    ahead = Prefetcher(make, 5, 2)
    for number in range(10):
        ahead(*divmod(number, 2))
    ahead.close()
    assert made == [divmod(number, 2) for number in range(10)]


def test_the_next_batches_are_made_while_the_first_is_used():
    made = threading.Semaphore(0)

    def make(step, part):
        made.release()
        return numbered(step, part)

    ahead = Prefetcher(make, 100, 1)
    ahead(0, 0)
    for _ in range(1 + prefetch._AHEAD):
        assert made.acquire(timeout=30)
    time.sleep(0.05)
    assert not made.acquire(blocking=False)  # and no more than these
    ahead.close()


def test_an_error_is_raised_where_its_batch_is_asked_for():
    def make(step, part):
        if step == 2:
            raise OSError("the disk is gone")
        return numbered(step, part)

    ahead = Prefetcher(make, 9, 1)
    assert given_by(ahead, 0, 0) == (0, 0)
    assert given_by(ahead, 1, 0) == (1, 0)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead(2, 0)
    assert given_by(ahead, 3, 0) == (3, 0)
    ahead.close()


def test_no_thread_is_left():
    before = threads()
    ahead = Prefetcher(numbered, 9, 1)
    ahead(0, 0)
    assert len(threads()) == len(before) + 1
    ahead.close()
    assert threads() == before


@pytest.fixture
def _always_ahead(monkeypatch):
    """Every run has a prefetcher, without a GPU to copy to."""
    right = state.TrainState.__init__

    def init(self, config, *arguments):
        right(self, config, *arguments)
        assert self._ahead is None  # a CPU has better things to do than to run a thread
        self._ahead = Prefetcher(self._make_batch, config.steps, config.accumulation)

    monkeypatch.setattr(state.TrainState, "__init__", init)


@pytest.mark.usefixtures("_always_ahead")
def test_a_run_resumes_with_the_same_batches(tmp_path, monkeypatch):
    config = tiny(accumulation=2, structure="btt")
    train_and_stop(config, tmp_path / "ahead", 13)
    assert not threads()
    record = train(config, tmp_path / "ahead")
    assert not threads()
    assert 0 < record.curve[-1].data_seconds <= record.seconds
    monkeypatch.undo()
    plain = train(config, tmp_path / "plain")
    assert numbers(tmp_path / "ahead") == numbers(tmp_path / "plain")
    assert without_clock(record) == without_clock(plain)


def test_batches_for_a_gpu_are_pinned(monkeypatch):
    """Without a GPU there is no pinned memory: what would pin is replaced."""
    pinned, chosen = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t) or t.clone())
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = torch.device("cuda", 1)
    ahead = prefetch.prefetcher_for(device, numbered, 1, 1)
    assert given_by(ahead, 0, 0) == (0, 0)
    ahead.close()
    assert len(pinned) == 2
    assert chosen == [device]
