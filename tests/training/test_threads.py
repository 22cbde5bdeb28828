"""Threads of runs: chosen by the size of a step, given back, no part of what a run is."""

import os
import subprocess
import sys

import pytest
import torch

import einlinear as el
from einlinear.sweeps.executors.executor import InlineExecutor
from einlinear.sweeps.executors.local import _environment
from einlinear.sweeps.placing import Placing, place
from einlinear.sweeps.planner import expand_study
from einlinear.sweeps.study import Study
from einlinear.sweeps.sweep import SweepPlan, run_sweep
from einlinear.training import needs as module
from einlinear.training.needs import choose_threads, step_macs
from einlinear.training.plan import plan_run
from einlinear.training.train import train
from kit.runs import TINY, tiny, without_clock


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ({}, 1),
        ({"width": 128}, 1),
        ({"width": 256}, 6),
        ({"width": 512}, 8),
        ({"width": 256, "structure": "btt"}, 1),
        ({"task": "cifar"}, 1),
        ({"task": "cifar", "width": 4096}, 8),
        ({"task": "regression"}, 3),  # its teacher is a thousand wide
        ({"task": "regression", "teacher_width": 16}, 1),
        ({"depth": 10**9}, 8),
    ],
    ids=str,
)
def test_threads_by_the_size_of_a_step(settings, threads):
    assert choose_threads(el.RunConfig(device="cpu", **settings), 8) == threads


@pytest.mark.parametrize("settings", [{}, {"structure": "btt"}, {"task": "pixels"}], ids=str)
def test_the_size_of_a_step_is_what_its_plan_says(settings):
    config = el.RunConfig(**settings)
    plan = plan_run(config, is_checked=False)
    assert step_macs(config) == plan.counts.macs * plan.units_per_step


@pytest.fixture
def held(monkeypatch):
    """Three threads, as a user may have set them; and all numbers that were set."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen = []
    right = torch.set_num_threads

    def set_threads(number):
        seen.append(number)
        right(number)

    monkeypatch.setattr(module.torch, "set_num_threads", set_threads)
    yield seen
    right(before)


def test_the_threads_of_the_caller_are_given_back(held):
    train(tiny(steps=2, warmup=0))
    assert (held, torch.get_num_threads()) == ([1, 3], 3)
    with pytest.raises(el.EinlinearError, match="no file"):
        train(tiny(data="no-such-file.txt"))
    assert (held, torch.get_num_threads()) == ([1, 3, 1, 3], 3)


def test_threads_that_are_given(held):
    record = train(tiny(steps=4, warmup=0), threads=2)
    assert held == [2, 3]
    assert record.environment["threads"] == 2
    assert record.id == train(tiny(steps=4, warmup=0)).id, "they are no part of the id"
    with pytest.raises(el.EinlinearError, match="threads is 0"):
        train(tiny(), threads=0)


def test_a_run_goes_on_with_its_own_threads(held, tmp_path):
    """Chosen anew from the same config, so that the numbers are those of a run without a stop."""

    class StopError(Exception):
        pass

    def stop(at):
        if at.done >= 12:
            raise StopError

    with pytest.raises(StopError):
        train(tiny(), tmp_path, stop)
    assert without_clock(train(tiny(), tmp_path)) == without_clock(train(tiny()))
    assert set(held) == {1, 3}


def test_threads_of_processes_sleep_while_they_wait(monkeypatch):
    """Those of a sweep, and of the command: libgomp reads the variable when torch is loaded."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert _environment(0, 1, 0)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert _environment(0, 1, 0)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_command_waits_passively_before_it_loads_torch(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os; print(os.environ['OMP_WAIT_POLICY']); os._exit(0)", encoding="utf-8"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-m", "einlinear", "train", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, "--threads", "1"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "PASSIVE\n", ended.stderr


@pytest.mark.parametrize(("given", "threads"), [(None, 1), (2, 2)])
def test_a_run_of_a_sweep_uses_no_more_than_its_steps_can_use(
    held, monkeypatch, tmp_path, given, threads
):
    """It has a share of three cores, as the environment of its process says."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    study = Study("s", TINY | {"steps": 4, "warmup": 0})
    placing = place(study, Placing(threads=given))
    own = given or placing.most_threads
    assert own == given or own == torch.get_num_threads() == 3
    plan = SweepPlan(study, tmp_path, expand_study(study), {}, placing, 1)
    result = run_sweep(plan, InlineExecutor(), lambda _: None)
    (record,) = result.records
    assert record.environment["threads"] == threads
