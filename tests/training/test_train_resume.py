"""Runs that are stopped at any moment go on as if they had not been."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import einlinear as el
from einlinear import EinlinearError
from einlinear.files.tensors import read_tensors, write_tensors
from einlinear.runs.directory import MODEL, RunDirectory, read_record
from einlinear.runs.schedule import log_interval
from einlinear.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from einlinear.training.load import load_writer
from einlinear.training.train import train
from kit.forked import context
from kit.runs import killed, numbers, save_and_be_killed, tiny, without_clock
from kit.train_processes import train_and_stop

PLAIN = {"structure": "btt"}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Directory and record of a run that was not stopped."""
    out = tmp_path_factory.mktemp("whole")
    return out, train(tiny(**PLAIN), out)


def assert_same(out, other):
    assert numbers(out) == numbers(other)
    assert without_clock(read_record(out)) == without_clock(read_record(other))
    names = sorted(path.name for path in out.rglob("*"))
    assert names == sorted(path.name for path in other.rglob("*"))
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (other / weights).read_bytes()


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        ("in a step", 3),
        ("in a step", 18),
        ("in a line of metrics", 1),
        ("in a line of metrics", 20),
        ("before a checkpoint", 1),
        ("in the tensors of a checkpoint", 2),
        ("between its two files", 1),
        ("between its two files", 3),
        ("while an old one is removed", 1),
        ("in the model", 1),
        ("before the record", 1),
        ("after the record", 1),
    ],
)
def test_killed_and_started_again(tmp_path, whole_run, moment, calls):
    config = tiny(**PLAIN)
    assert killed(config, tmp_path, moment, calls)
    train(config, tmp_path)
    assert_same(tmp_path, whole_run[0])


def test_killed_again_and_again(tmp_path, whole_run):
    config = tiny(**PLAIN)
    deaths = 0
    while killed(config, tmp_path, "in a step", 8):
        deaths += 1
    assert deaths == 4  # in steps 8, 5 + 8, 10 + 8 and 15 + 8; from 20 on there are 4 left
    assert_same(tmp_path, whole_run[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"structure": "btt", "num_experts": 3, "num_active": 1},
        {"structure": "btt", "num_experts": 3, "optimizer": "muon"},
        {"precision": "bfloat16", "accumulation": 2, "schedule": "wsd", "ema": 0.0},
        {"task": "regression", "structure": "low_rank", "teacher_width": 8, "batch_size": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [pytest.param(7, marks=pytest.mark.slow), 19])
def test_every_kind_of_run_goes_on(tmp_path, settings, at):
    if "task" in settings:
        settings = {"head_size": None, "context": None, **settings}
    config = tiny(**settings)
    train(config, tmp_path / "whole")
    train_and_stop(config, tmp_path / "stopped", at)
    train(config, tmp_path / "stopped")
    assert_same(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_a_checkpoint_between_two_lines_of_metrics(tmp_path):
    settings = {"task": "regression", "teacher_width": 8, "head_size": None, "context": None}
    config = tiny(**settings, batch_size=64, steps=300, checkpoint_every=100)
    assert log_interval(300) == 3
    train(config, tmp_path / "whole")
    train_and_stop(config, tmp_path / "stopped", 110)
    train(config, tmp_path / "stopped")
    assert_same(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_a_damaged_checkpoint_is_not_used(tmp_path, whole_run, ending):
    config = tiny(**PLAIN)
    train_and_stop(config, tmp_path, 18)
    last = tmp_path / "checkpoints" / f"step-000000015.{ending}"
    last.write_bytes(last.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="step-000000015.json is damaged"):
        train(config, tmp_path)
    assert_same(tmp_path, whole_run[0])


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:90] + b"\0" + data[91:]],
    ids=["gone", "flipped"],
)
def test_damaged_metrics_are_restored(tmp_path, whole_run, damage):
    config = tiny(**PLAIN)
    train_and_stop(config, tmp_path, 8)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="metrics in .* were damaged; .* checkpoint of step 5"):
        train(config, tmp_path)
    assert_same(tmp_path, whole_run[0])


def test_data_that_has_changed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The first text. " * 400, encoding="utf-8")
    config = tiny(data=str(text))
    train_and_stop(config, tmp_path / "out", 8)
    text.write_text("Another one now. " * 400, encoding="utf-8")
    with pytest.raises(EinlinearError, match="the data has changed since step 5"):
        train(config, tmp_path / "out")


def test_a_run_that_another_process_has_just_finished(tmp_path, whole_run):
    out, record = whole_run
    directory = RunDirectory(out)
    with pytest.raises(EinlinearError, match="has just finished"):
        directory.open(record.config)
    directory.close()


def test_how_often_is_saved_changes_nothing(tmp_path, whole_run):
    train(tiny(**PLAIN, checkpoint_every=0), tmp_path)
    assert numbers(tmp_path) == numbers(whole_run[0])
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_was_stopped_can_be_loaded(tmp_path):
    config = tiny(**PLAIN)
    train_and_stop(config, tmp_path, 3)
    with pytest.raises(EinlinearError, match="no checkpoint yet"):
        load_writer(tmp_path)
    train_and_stop(config, tmp_path, 13)
    writer = load_writer(tmp_path)
    assert writer.step == 10
    held = load_checkpoint(tmp_path / "checkpoints").tensors
    assert writer.model.head.weight.equal(held["average.head.weight"])


@pytest.mark.slow
def test_the_command_is_killed_from_outside(tmp_path, whole_run):
    """The same command line again, after kill -9 at a moment that nothing has chosen."""
    config = tmp_path / "run.toml"
    config.write_text(tiny(**PLAIN).to_toml(), encoding="utf-8")
    out = tmp_path / "out"
    words = ["train", "--config", str(config), "--out", str(out)]
    command = [sys.executable, "-m", "einlinear", *words]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while not list(out.glob("checkpoints/*.json")) and process.poll() is None:
            time.sleep(0.002)
        process.kill()
    assert process.returncode != 0
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "resumes at step" in again.stdout
    assert_same(out, whole_run[0])


def test_a_killed_save_leaves_nothing_behind(tmp_path, whole_run):
    config = tiny(**PLAIN)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".tmpAb12Xy").write_bytes(b"as safetensors left it")
    for moment, calls in (("in the tensors of a checkpoint", 2), ("in the model", 1)):
        assert killed(config, tmp_path, moment, calls)
        parts = [path.name for path in tmp_path.rglob("*.part")]
        assert len(parts) == 1, parts
        assert not list(tmp_path.rglob(".tmp*"))
    train(config, tmp_path)
    assert_same(tmp_path, whole_run[0])


def test_a_save_that_is_killed_from_outside_leaves_nothing_behind(tmp_path):
    directory = RunDirectory(tmp_path)
    process = context.Process(target=save_and_be_killed, args=(directory.checkpoints,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in directory.checkpoints.iterdir()] == [
        "step-000000005.safetensors.part"
    ]
    directory.open(tiny())
    directory.close()
    assert not list(directory.checkpoints.iterdir())


def test_all_files_of_a_run_can_be_shared(tmp_path):
    held = os.umask(0o022)
    try:
        train_and_stop(tiny(**PLAIN), tmp_path, 8)
        assert_shared(tmp_path, ["config.json", "metrics.jsonl", "step-000000005.json"])
        train(tiny(**PLAIN), tmp_path)
    finally:
        os.umask(held)
    assert_shared(tmp_path, ["config.json", "metrics.jsonl", "model.safetensors", "record.json"])


def assert_shared(path, names):
    files = {file.name: file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()}
    assert set(names) <= files.keys()
    assert set(files.values()) == {0o644}, files


def test_a_run_stopped_before_its_record_keeps_its_accuracy(tmp_path, monkeypatch):
    config = el.RunConfig(
        task="cifar", width=16, steps=4, batch_size=16, eval_size=64, checkpoint_every=2
    )

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_record", stop)
        with pytest.raises(KeyboardInterrupt):
            el.train(config, out=tmp_path / "stopped")
    resumed = el.train(config, out=tmp_path / "stopped")
    straight = el.train(config, out=tmp_path / "straight")
    assert resumed.accuracy == straight.accuracy is not None
    assert resumed.train_loss == straight.train_loss


def with_other_sizes(tensors):
    """The tensors as a version would have written them that chose other sizes for one factor."""
    return {
        name: tensor.reshape(2, -1, *tensor.shape[2:])
        if name.endswith("q_proj.A") and tensor.dim()  # the number of steps has no axes
        else tensor
        for name, tensor in tensors.items()
    }


def rewrite_checkpoint(folder, config, change=lambda tensors: tensors):
    """Rewrite the last checkpoint as an earlier version would have, with its id of the run."""
    held = load_checkpoint(folder)
    values = held.values | {"config": config.earlier_id}
    save_checkpoint(folder, Checkpoint(held.step, change(held.tensors), values))


@pytest.mark.parametrize("is_finished", [False, True])
def test_weights_of_a_version_that_chose_other_sizes(tmp_path, is_finished):
    config = tiny(**PLAIN, steps=8)
    if is_finished:
        record = train(config, tmp_path)
        weights = with_other_sizes(read_tensors(tmp_path / MODEL))
        seal = write_tensors(tmp_path / MODEL, weights)
        RunDirectory(tmp_path).write_record(record, seal)
    else:
        assert killed(config, tmp_path, "in a step", 7)
        rewrite_checkpoint(tmp_path / "checkpoints", config, with_other_sizes)
    uses = [load_writer] if is_finished else [load_writer, lambda out: train(config, out)]
    for use in uses:
        with pytest.raises(EinlinearError) as caught:
            use(tmp_path)
        shapes = r"blocks\.0\.attention\.q_proj\.A has the shape \(2, .*; in the model .* \(4, "
        assert re.search(shapes, caught.value.what)
        assert "older version of einlinear chose other sizes" in caught.value.rule
        assert "version that started the run" in caught.value.fix


def test_runs_of_earlier_versions_resume_where_sizes_are_the_same(tmp_path, whole_run):
    config = tiny(**PLAIN)
    assert killed(config, tmp_path, "in a step", 18)
    rewrite_checkpoint(tmp_path / "checkpoints", config)
    train(config, tmp_path)
    assert_same(whole_run[0], tmp_path)
