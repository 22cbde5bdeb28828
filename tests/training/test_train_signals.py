"""Ctrl-C and SIGTERM, in real processes: a checkpoint is saved, and the run resumes from it."""

from signal import SIGINT, SIGTERM

import pytest

from einlinear import EinlinearError, load_config
from einlinear.cli.main import main
from einlinear.runs.directory import read_record
from einlinear.training.checkpoint import load_checkpoint
from einlinear.training.load import load_writer
from einlinear.training.train import train
from kit.runs import numbers, signalled, tiny, without_clock

WAIT = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The directory of a run that was not stopped."""
    out = tmp_path_factory.mktemp("whole")
    train(tiny(), out)
    return out


def assert_continues(config, out, whole):
    train(config, out)
    assert numbers(out) == numbers(whole)
    curves = [without_clock(read_record(path))["curve"] for path in (out, whole)]
    assert curves[0] == curves[1]
    assert sorted(p.name for p in out.rglob("*")) == sorted(p.name for p in whole.rglob("*"))
    name = "model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(("at", "every"), [(2, 5), (11, 5), (2, 0)])
def test_ctrl_c_saves_and_the_same_command_continues(tmp_path, whole_run, at, every):
    config = tiny(checkpoint_every=every)
    path, out = tmp_path / "run.toml", tmp_path / "out"
    path.write_text(config.to_toml(), encoding="utf-8")
    command = ["train", "--config", str(path), "--out", str(out)]
    code, said = signalled(tmp_path / "said", {at: [SIGINT]}, main, command)
    assert code == 130
    assert said.splitlines()[-4:] == [
        "",
        WAIT,
        f"note: saved a checkpoint of step {at + 1} of 24 in {out}; "
        "run the same command again to continue",
        "einlinear: interrupted",
    ]
    assert load_checkpoint(out / "checkpoints").step == at + 1
    assert_continues(config, out, whole_run)


def test_sigterm_saves_and_ends_the_process(tmp_path, whole_run):
    out = tmp_path / "out"
    code, said = signalled(tmp_path / "said", {7: [SIGTERM]}, train, tiny(), out)
    assert code == -SIGTERM
    assert f"saved a checkpoint of step 8 of 24 in {out}" in said
    assert_continues(tiny(), out, whole_run)


def test_ctrl_c_twice_stops_at_once(tmp_path, whole_run):
    out = tmp_path / "out"
    code, said = signalled(tmp_path / "said", {7: [SIGINT, SIGINT]}, train, tiny(), out)
    assert code == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert "saved a checkpoint" not in said
    assert load_checkpoint(out / "checkpoints").step == 5
    assert_continues(tiny(), out, whole_run)


def test_ctrl_c_in_the_last_step_ends_the_run(tmp_path, whole_run):
    out = tmp_path / "out"
    code, said = signalled(tmp_path / "said", {23: [SIGINT]}, train, tiny(), out)
    assert code == 1
    assert f"the run in {out} has finished" in said
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert without_clock(read_record(out)) == without_clock(read_record(whole_run))


def test_stopped_after_all_checkpoints_were_damaged(tmp_path, whole_run):
    """The checkpoint of the stop is kept, though it is of an earlier step than damaged ones."""
    out = tmp_path / "out"
    signalled(tmp_path / "said", {20: [SIGINT]}, train, tiny(), out)
    for path in (out / "checkpoints").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    _, said = signalled(tmp_path / "again", {7: [SIGINT]}, train, tiny(), out)
    assert "saved a checkpoint of step 8 of 24" in said
    assert load_checkpoint(out / "checkpoints").step == 8
    assert_continues(tiny(), out, whole_run)


def test_a_config_that_has_changed_since_the_checkpoint(tmp_path):
    out = tmp_path / "out"
    signalled(tmp_path / "said", {7: [SIGINT]}, train, tiny(), out)
    path = out / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.01', '"lr": 0.07'))
    for use in (lambda: train(load_config(path), out), lambda: load_writer(out)):
        with pytest.raises(EinlinearError, match=r"of a run with other settings: config\.json has"):
            use()


def test_ctrl_c_without_a_directory_is_as_ever(tmp_path):
    code, said = signalled(tmp_path / "said", {7: [SIGINT]}, train, tiny())
    assert code == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert WAIT not in said
