"""Finished runs whose files are damaged: noticed wherever they are read, and trained again."""

import json
import os
import shutil

import pytest

from einlinear import EinlinearError, RunRecord, load_config, read_record, train
from einlinear.runs.directory import DamagedError, RunDirectory
from einlinear.training.load import load_writer
from einlinear.training.state import TrainState
from kit.command import run
from kit.runs import numbers, tiny, without_clock

CONFIG = tiny(steps=6, eval_points=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that has finished."""
    out = tmp_path_factory.mktemp("finished")
    train(CONFIG, out)
    return out


@pytest.fixture
def out(tmp_path, finished):
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "a run")
    return tmp_path / "a run"


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


MODEL_DAMAGE = {
    "flipped": (lambda path: flip(path, -100), "the checksum of model.safetensors is wrong"),
    "header": (lambda path: flip(path, 20), "the checksum of model.safetensors is wrong"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "checksum"),
    "gone": (lambda path: path.unlink(), "No such file or directory"),
}


@pytest.mark.parametrize("damage", MODEL_DAMAGE)
def test_a_damaged_model_is_not_used_and_trained_again(capsys, out, finished, damage):
    act, words = MODEL_DAMAGE[damage]
    before = (out / "record.json").read_bytes()
    act(out / "model.safetensors")
    assert read_record(out) == read_record(finished)  # the record itself is whole
    with pytest.raises(DamagedError, match=words):
        load_writer(out)
    code, printed, err = run(capsys, "sample", str(out))
    assert (code, printed) == (2, "")
    assert err.count("\n") == 3
    fix = f"einlinear train --config '{out}/config.json' --out '{out}'"
    assert fix in err
    code, printed, err = run(capsys, "train", "--config", f"{out}/config.json", "--out", str(out))
    assert code == 0, err
    assert f"note: cannot read {out}/model.safetensors: " in err
    assert "training the run again" in err
    assert "the losses are not" not in err
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    assert numbers(out) == numbers(finished)
    assert without_clock(read_record(out)) == without_clock(read_record(finished))
    assert (out / "record.json.replaced-1").read_bytes() == before
    assert load_writer(out).step == 6


def test_a_damaged_record_is_put_aside(out, finished):
    flip(out / "record.json", 700)
    data = (out / "record.json").read_bytes()
    with pytest.raises(DamagedError, match=r"record.json"):
        load_writer(out)
    with pytest.warns(UserWarning, match=r"cannot read .*record\.json: .*; training the run again"):
        record = train(CONFIG, out)
    assert without_clock(record) == without_clock(read_record(finished))
    assert (out / "record.json.unreadable-1").read_bytes() == data


def test_a_run_that_comes_out_otherwise_says_so(out):
    values = read_record(out).as_dict()
    values["curve"][-1]["loss"] = 9.75
    RunDirectory(out).write_record(RunRecord.from_dict(values), "0" * 64)
    with (
        pytest.warns(UserWarning, match="training the run again"),
        pytest.warns(UserWarning, match=r"record.json.replaced-\*: 9.75 then, \d\.\d+ now"),
    ):
        train(CONFIG, out)


def test_a_changed_config_does_not_cost_a_finished_run(out, finished):
    """The record holds its seal, and that of the model: so config.json is what has changed."""
    config = out / "config.json"
    config.write_text(config.read_text().replace('"lr": 0.01', '"lr": 0.07'))
    assert load_config(config).lr == 0.07
    with pytest.raises(EinlinearError, match=r"holds another run: lr 0.01, not 0.07"):
        train(load_config(config), out)
    assert load_writer(out).config == CONFIG
    for name in ("record.json", "model.safetensors"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    with pytest.warns(UserWarning, match="config.json is damaged; writing it again"):
        assert train(CONFIG, out) == read_record(finished)
    assert config.read_bytes() == (finished / "config.json").read_bytes()


def test_a_model_that_cannot_be_read_now_is_left_alone(out):
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").symlink_to("model.safetensors")  # a loop
    for use in (load_writer, lambda path: train(CONFIG, path)):
        with pytest.raises(EinlinearError, match="Too many levels") as error:
            use(out)
        assert not isinstance(error.value, DamagedError)
    assert not list(out.glob("record.json.*"))


def test_a_record_stays_until_the_next_is_there(out, monkeypatch):
    """While a lost model is trained again, the result is still there to be read."""
    before = (out / "record.json").read_bytes()
    (out / "model.safetensors").unlink()
    monkeypatch.setattr(TrainState, "step", lambda *_: 1 / 0)
    with (
        pytest.warns(UserWarning, match="training the run again"),
        pytest.raises(ZeroDivisionError),
    ):
        train(CONFIG, out)
    assert (out / "record.json").read_bytes() == before
    assert read_record(out).status == "finished"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "record.json"])
def test_a_pipe_is_not_waited_for(out, name):
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(EinlinearError, match=f"{name} is not a file"):
        train(CONFIG, out)


def test_damaged_metrics_of_a_finished_run_are_told(out, finished):
    flip(out / "metrics.jsonl", 30)
    with pytest.warns(
        UserWarning, match=r"the checksum of metrics.jsonl is wrong.*record is not damaged"
    ):
        assert train(CONFIG, out) == read_record(finished)


def test_a_record_that_cannot_be_reached_is_left_alone(out):
    (out / "record.json").unlink()
    (out / "record.json").mkdir()
    with pytest.raises(EinlinearError, match=r"record.json is not a file"):
        train(CONFIG, out)
    assert (out / "record.json").is_dir()


def test_an_old_run_without_checksums(out):
    values = read_record(out).as_dict() | {"schema": 1}
    (out / "record.json").write_text(json.dumps(values), encoding="utf-8")
    assert load_writer(out).step == 6
    assert train(CONFIG, out) == read_record(out)
    (out / "model.safetensors").write_bytes(b"?")
    with pytest.raises(DamagedError, match=r"cannot read .*model.safetensors"):
        load_writer(out)
