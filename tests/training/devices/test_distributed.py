"""What the environment says of processes, and processes that stop or end."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import DistBackendError

from einlinear.cli import main as cli
from einlinear.errors import EinlinearError
from einlinear.training.devices import distributed
from einlinear.training.devices.distributed import explained, joined, numbers, patience
from kit.forked import context
from kit.runs import tiny
from kit.train_processes import stopping

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", distributed.MINUTES)


@pytest.fixture
def environment(monkeypatch):
    """Sets variables; those of distributed runs that are not set are absent."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(*pair) for pair in values.items()]


@pytest.mark.parametrize(
    ("values", "what", "rule"),
    [
        ({"RANK": "abc"}, "RANK='abc'", "RANK is a whole number of 0 or more"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2'", "RANK is a whole number from 0 to 1"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'", "WORLD_SIZE is a whole number of 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'", "WORLD_SIZE is a whole number of 1 or more"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999", "WORLD_SIZE is a whole number"),
        (
            {"WORLD_SIZE": "2", "MASTER_PORT": "http"},
            "MASTER_PORT='http'",
            "MASTER_PORT is a whole number from 0 to 65535",
        ),
        (
            {"WORLD_SIZE": "2", distributed.MINUTES: "0.5"},
            "EINLINEAR_RANK_MINUTES='0.5'",
            "EINLINEAR_RANK_MINUTES is a whole number from 1 to 10000",
        ),
    ],
)
def test_odd_variables(environment, values, what, rule):
    environment(**values)
    with pytest.raises(EinlinearError) as told, joined(tiny()):
        pass
    assert told.value.what.startswith(f"the environment has {what}")
    assert len(told.value.what) < 300
    assert told.value.rule.startswith(rule)


def test_the_command_says_so_too(environment, capsys, tmp_path):
    environment(RANK="abc")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("einlinear: the environment has RANK='abc'\n")
    assert not (tmp_path / "run").exists()


def test_numbers_and_patience(environment):
    assert (numbers(), patience()) == ((0, 1), timedelta(minutes=30))
    environment(RANK="1", WORLD_SIZE="3", **{distributed.MINUTES: "45"})
    assert (numbers(), patience()) == ((1, 3), timedelta(minutes=45))


def test_processes_that_know_nothing_of_each_other(environment):
    environment(WORLD_SIZE="2", RANK="1")
    with pytest.raises(EinlinearError, match=r"process 1 cannot find the others: .*MASTER_ADDR"):
        with joined(tiny()):
            pass


def test_other_errors_are_left_as_they_are():
    assert explained(RuntimeError("cannot allocate memory"), 0, 10) is None
    assert explained(ValueError("an odd value"), 0, 10) is None
    wrong = EinlinearError(what="timed out", rule="r", fix="f")
    assert explained(wrong, 0, 10) is None
    late = RuntimeError("CUDA error: the launch timed out and was terminated")
    assert explained(late, 0, 10) is None


def test_a_lone_run_has_no_other_process(environment):
    environment()
    with pytest.raises(RuntimeError, match=r"^gloo: timed out$"), joined(tiny()):
        raise RuntimeError("gloo: timed out")


def test_the_minutes_are_named_where_they_are_ours():
    error = DistBackendError("NCCL communicator: timed out")
    ours, theirs = explained(error, 1, 30), explained(error, 1, None)
    assert ours is not None
    assert theirs is not None
    assert ours.what == "process 1 had no answer from another process for 30 minutes"
    assert theirs.what == "process 1 had no answer from another process in time"
    assert distributed.MINUTES in ours.fix
    assert "init_process_group" in theirs.fix
    assert "minutes" not in str(theirs)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("stops", "process 0 had no answer from another process for 0.025 minutes"),
        ("ends", "another process of the run ended while process 0 waited for it"),
    ],
)
def test_a_process_that_stops_or_ends_is_not_waited_for_without_limit(how, what):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=stopping, args=(rank, port, how, pipes[rank][1]))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert pipes[0][0].poll(30), "it waits without limit"
        assert pipes[0][0].recv() == what
    finally:
        for process in processes:
            process.kill()
            process.join()
