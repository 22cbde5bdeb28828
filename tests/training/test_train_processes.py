"""One run in two processes: the numbers of one, only the first writes, errors end both."""

import pytest

from einlinear.training.train import train
from kit.pair import run_two
from kit.runs import tiny
from kit.train_processes import go_on_in_two, thaw_in_two, train_in_two, train_in_two_with_muon

SETTINGS = {"structure": "btt", "accumulation": 2, "lr": 3e-3}


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    one = train(tiny(**SETTINGS))
    wanted = [(p.loss, p.train_loss or 0.0) for p in one.curve]
    run_two(train_in_two, str(tmp_path), SETTINGS, wanted)


@pytest.mark.slow
def test_two_processes_go_on_with_experts(tmp_path):
    run_two(go_on_in_two, str(tmp_path))


@pytest.mark.slow
def test_two_processes_go_on_with_muon(tmp_path):
    run_two(train_in_two_with_muon, str(tmp_path))


@pytest.mark.slow
def test_two_processes_continue_a_shorter_run(tmp_path):
    run_two(thaw_in_two, str(tmp_path))
