"""Runs on several devices: each device is a process, here without a GPU."""

import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import einlinear as el
from einlinear.runs.directory import read_record
from einlinear.sweeps import peers
from einlinear.sweeps.executors.local import LocalExecutor
from einlinear.sweeps.peers import peers_of
from einlinear.training.train import train
from kit.jobs import all_ended, first_checkpoint, is_gone, tiny_job, wait_for
from kit.runs import tiny

ENDLESS = {"steps": 10**6, "checkpoint_every": 5}


def on_two(out, **settings):
    return replace(tiny_job(out, **settings), devices=2)


def children(pid):
    """The processes that a process has started and that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def executor():
    made = LocalExecutor(1, 1, devices=2)
    yield made
    made.close()


@pytest.mark.slow
def test_two_runs_on_two_devices_each(executor, tmp_path):
    jobs = [on_two(tmp_path), on_two(tmp_path, structure="btt")]
    for job, structure in zip(jobs, ("dense", "btt"), strict=True):
        executor.start(job)
        outcome = all_ended(executor, 1)[job.id]
        assert outcome.end == "done", outcome.text
        record = read_record(job.directory)
        assert record.environment["processes"] == 2
        alone = train(tiny(structure=structure))
        assert record.id == alone.id
        for here, there in zip(record.curve, alone.curve, strict=True):
            assert math.isclose(here.loss, there.loss, rel_tol=1e-4)


def test_a_peer_that_dies_ends_the_run_and_not_the_worker(executor, tmp_path):
    job = on_two(tmp_path, **ENDLESS)
    executor.start(job)
    worker = first_checkpoint(job)
    (peer,) = children(worker)
    os.kill(peer, signal.SIGKILL)
    outcome = all_ended(executor, 1)[job.id]
    assert outcome.end == "error"
    assert "another process of the run ended" in outcome.text
    assert executor._idle[0].is_alive()
    assert not children(worker)


@pytest.mark.slow
def test_peers_leave_with_a_worker_that_is_killed(executor, tmp_path):
    job = on_two(tmp_path, **ENDLESS)
    executor.start(job)
    worker = first_checkpoint(job)
    (peer,) = children(worker)
    os.kill(worker, signal.SIGKILL)
    assert all_ended(executor, 1)[job.id].end == "killed"
    wait_for(lambda: is_gone(peer), 30)


@pytest.mark.slow
def test_what_a_peer_says_when_it_fails_is_in_the_log(executor, tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    import sys\n"
        "    sys.modules['torch'] = None\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("EINLINEAR_RANK_MINUTES", "1")
    made = LocalExecutor(1, 1, devices=2)
    try:
        monkeypatch.setattr(peers, "HANG_SECONDS", 0.0)
        job = on_two(tmp_path)
        made.start(job)
        assert all_ended(made, 1)[job.id].end == "killed"
    finally:
        made.close()
    log = (job.directory / "log.txt").read_text(encoding="utf-8")
    assert "process 1 of the run:" in log
    assert "import of torch halted" in log


def test_variables_are_those_of_torchrun_and_are_restored(monkeypatch, tmp_path):
    started = []

    class Idle:
        """A peer that does nothing."""

        process = type("process", (), {"poll": lambda self: None})()

        def __init__(self, module, arguments, environment):
            started.append(environment)

        def send(self, values):
            started[-1]["job"] = values["devices"]

        def leave(self, seconds):
            started[-1]["left"] = True

    monkeypatch.setattr(peers, "Child", Idle)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    threads = threading.active_count()
    job = tiny_job(tmp_path)
    with peers_of(replace(job, devices=3)):
        own = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        assert own == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
        assert [peer["RANK"] for peer in started] == ["1", "2"]
        assert [peer["LOCAL_RANK"] for peer in started] == ["1", "2"]
        assert {peer["MASTER_PORT"] for peer in started} == {os.environ["MASTER_PORT"]}
        assert [peer["job"] for peer in started] == [3, 3]
    assert "RANK" not in os.environ
    assert os.environ["MASTER_ADDR"] == "elsewhere"
    assert started[-1]["left"]
    wait_for(lambda: threading.active_count() == threads, 10)
    with peers_of(job):
        assert len(started) == 2


@pytest.mark.slow
def test_a_sweep_on_two_devices(tmp_path):
    base = {k: v for k, v in tiny().as_dict().items() if k in ("task", "width", "depth")}
    base |= {"steps": 4, "eval_points": 1, "batch_size": 4, "context": 16, "device": "cpu"}
    base |= {"head_size": 8, "eval_size": 8}
    study = el.Study("s", base, ({"structure": ["dense", "btt"]},))
    result = el.sweep(study, tmp_path, devices=2, processes=1, threads=1)
    assert not result.failures
    assert [record.environment["processes"] for record in result.records] == [2, 2]
