"""Runs of a landscape: trained as a sweep, killed and resumed."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.cli.main import main
from einlinear.data.images import load_images
from einlinear.data.tasks.catalogue import open_task
from einlinear.landscapes.config import make_study
from einlinear.training.model import make_model
from kit.forked import context
from kit.runs import without_clock

OPTIONS = (
    "--structures dense btt --widths 8 16 --rates -8 -7 --naive-rates -9 -8 --seeds 2 "
    "--steps 20 --batch 8 --processes 1"
).split()
CONFIG = el.LandscapeConfig(
    structures=("dense", "btt"),
    widths=(8, 16),
    rates=(-8, -7),
    naive_rates=(-9, -8),
    seeds=2,
    steps=20,
    batch=8,
)
ONE = el.LandscapeConfig(
    structures=("dense",), widths=(24,), rates=(-8, -8), seeds=1, steps=30, batch=16
)
NAIVE, MUP = (cell.config for cell in make_study(ONE).cells)


def records(folder):
    """The files of all records below a folder."""
    return sorted(folder.glob("runs/*/record.json"))


def numbers(folder):
    """What the runs in a folder gave, without the time that they took."""
    return [without_clock(el.read_record(path)) for path in records(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a command that nothing disturbed."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("whole")
    main(["landscape", "--out", str(folder), *OPTIONS])
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_the_command(whole, capsys):
    held = json.loads((whole / "landscape.json").read_text())
    assert len(held["cells"]) == 8
    assert len(held["verdict"]) == 3
    assert held["config"]["widths"] == [8, 16]
    assert held["machine"]["torch"] == torch.__version__
    assert (whole / "landscape.png").stat().st_size > 10_000
    assert "learning rate" in (whole / "landscape.svg").read_text()
    before = {path: path.stat().st_mtime_ns for path in records(whole)}
    assert len(before) == 32
    main(["landscape", "--out", str(whole), *OPTIONS])  # nothing is missing
    captured = capsys.readouterr()
    assert re.fullmatch(r"32 of 32 runs, \d+ s\n", captured.err)
    for name, flag in (
        ("naive", "--naive-rates"),
        ("µP", "--rates"),
    ):  # of two rates each is an end
        assert f"{name}: cannot be told; widen {flag}. " in captured.out
    assert {path: path.stat().st_mtime_ns for path in records(whole)} == before
    assert not list(whole.glob("runs/*/model.safetensors"))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            "--batch 1000000000 --widths 4096",
            "--batch 1000000000 would need 24.6 TB for the act",
        ),
        ("--widths 1000000", "--widths 1000000 would need 32.0 TB for the weights"),
        (
            "--structures low_rank(rank=1000000000) --widths 4096",
            "--structures low_rank(rank=1000000000) would need 262 TB for the weights",
        ),
        ("--processes 100000", "--processes is 100000"),
    ],
)
def test_settings_that_are_too_large(options, what, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["landscape", "--out", str(tmp_path), *OPTIONS, *options.split()])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"einlinear: {what}")
    assert [line.split()[0] for line in lines[1:]] == ["rule:", "fix:"]
    assert not list(tmp_path.iterdir())


def children(pid):
    """The processes that a process has started and that still run."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def runs_still(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_a_killed_landscape_resumes(whole, tmp_path):
    command = [sys.executable, "-m", "einlinear", "landscape", "--out", str(tmp_path), *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(records(tmp_path)) >= 3)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert workers
    wait_for(lambda: not any(map(runs_still, workers)))  # nothing is left behind
    kept = {path: path.stat().st_mtime_ns for path in records(tmp_path)}
    assert 3 <= len(kept) < 32
    shown = []
    result = el.landscape(CONFIG, out=tmp_path, on_progress=shown.append)
    done = [at.done for at in shown]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (len(kept), 32)
    assert shown[-1].share == pytest.approx(1)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert numbers(tmp_path) == numbers(whole)
    held = json.loads((whole / "landscape.json").read_text())
    del held["machine"]
    assert json.loads(json.dumps(result.as_json())) == held


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_a_worker_that_dies_is_replaced(whole, tmp_path):
    wanted = {"out": tmp_path, "processes": 2}
    process = context.Process(target=el.landscape, args=(CONFIG,), kwargs=wanted)
    process.start()
    wait_for(lambda: len(children(process.pid)) >= 2)
    os.kill(children(process.pid)[-1], signal.SIGKILL)  # while it starts
    wait_for(lambda: records(tmp_path))
    os.kill(children(process.pid)[0], signal.SIGKILL)  # while it trains
    process.join(60)
    assert process.exitcode == 0
    assert numbers(tmp_path) == numbers(whole)


def test_without_matplotlib_nothing_is_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main(["landscape", "--out", str(tmp_path), *OPTIONS])
    assert "need matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_settings_share_the_folder(whole, monkeypatch):
    monkeypatch.setattr("einlinear.landscapes.landscape.sweep", None)  # all of these are there
    result = el.landscape(replace(CONFIG, structures=("btt",)), out=whole)
    assert {cell.structure for cell in result.cells} == {"btt"}


def test_results_of_earlier_versions_are_refused(tmp_path):
    file = tmp_path / "landscape.jsonl"
    file.write_text('{"schema": 1}\n')
    with pytest.raises(el.EinlinearError, match="by an earlier version of einlinear"):
        el.landscape(CONFIG, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["landscape.jsonl"]


def test_runs_on_other_images_are_refused(tmp_path):
    """The file has the same name, so the settings of the runs are the same."""
    draw = np.random.default_rng(0)
    parts = {f"{part}_x": draw.integers(256, size=(20, 2, 2, 3)) for part in ("train", "test")}
    classes = {f"{part}_y": np.arange(20) % 3 for part in ("train", "test")}
    file = tmp_path / "images.npz"
    small = replace(ONE, steps=10)
    np.savez(file, **{k: x.astype(np.uint8) for k, x in parts.items()}, **classes)
    el.landscape(small, out=tmp_path / "out", data=file)
    np.savez(file, **{k: 255 - x.astype(np.uint8) for k, x in parts.items()}, **classes)
    with pytest.raises(el.EinlinearError, match="the images have changed since run"):
        el.landscape(replace(small, seeds=2), out=tmp_path / "out", data=file)
    assert len(records(tmp_path / "out")) == 2


def test_runs_that_fail_are_an_error(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / NAIVE.id).write_text("in the way")
    with pytest.raises(el.EinlinearError, match="1 of 2 runs failed; the first: "):
        el.landscape(ONE, out=tmp_path)


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["landscape", "--out", str(tmp_path / "file" / "folder"), *OPTIONS])
    assert stop.value.code == 2
    assert "cannot write" in capsys.readouterr().err
    with pytest.raises(el.EinlinearError, match="processes is 0"):
        el.landscape(CONFIG, out=tmp_path, processes=0)


def test_a_run_by_hand():
    """The naive dense run is that of plain layers with torch's Adam, from the same numbers."""
    images, task = load_images(), open_task("cifar")
    generator = torch.Generator().manual_seed(NAIVE.seed)
    layers = [nn.Linear(i, o) for i, o in ((96, 24), (24, 24), (24, 24), (24, 10))]
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_(0, layer.in_features**-0.5, generator=generator)
            layer.bias.zero_()
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1]
    optimizer = torch.optim.Adam(model.parameters(), lr=2**-8)
    losses = []
    for step in range(30):
        batch = task.batch(step, 16, seed=NAIVE.seed)
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    record = el.train(NAIVE)
    assert record.train_loss == pytest.approx(sum(losses[-3:]) / 3, rel=1e-4)
    test_x, test_y = torch.from_numpy(images.test_x), torch.from_numpy(images.test_y)
    right = (model(test_x).argmax(1) == test_y).float().mean().item()
    assert record.accuracy == pytest.approx(right, abs=0.005)
    assert [point.step for point in record.curve] == [0, 30]


@pytest.mark.slow
def test_a_run_is_a_function_of_its_settings():
    first, again = el.train(MUP), el.train(MUP)
    assert without_clock(first) == without_clock(again)
    zero = el.train(replace(MUP, head_init="zero"))
    assert zero.curve[0].loss == pytest.approx(math.log(10), rel=1e-6)
    fast = replace(MUP, lr=2**-5, structure="XA^1 YA^1")  # so fast that factors grow
    changes = ({}, {"seed": 1}, {"lr": 2**-7}, {"base_width": 12}, {"batch_size": 8})
    changes += ({"structure": "btt"}, {"activation": "gelu"}, {"weight_norm": True}, {"pool": 2})
    changes += ({"parametrization": "naive"},)
    losses = [el.train(replace(fast, **change)).train_loss for change in changes]
    assert len(set(losses)) == len(losses)


def test_naive_starts_have_unit_variance_for_the_fan_in():
    model = make_model(replace(NAIVE, structure="btt", width=256), (4096, 10))
    fans = {"input.weight": 4096, "blocks.0.A": 16, "blocks.1.B": 16, "head.weight": 256}
    for name, parameter in model.named_parameters():
        if name in fans:
            # Of n draws the deviation is known to within 1 / sqrt(2 n), here five times.
            error = 5 / math.sqrt(2 * parameter.numel())
            assert float(parameter.detach().std()) * math.sqrt(fans[name]) == pytest.approx(
                1, rel=error
            )
        elif name.endswith("bias"):
            assert not parameter.any()


def test_a_run_that_diverges_is_given_up():
    record = el.train(replace(NAIVE, lr=8.0, steps=100))
    assert record.status == "diverged"
    assert record.train_loss is None
    assert record.steps_done in (20, 30)  # after the first tenth, in which it may be high
