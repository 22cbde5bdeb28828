"""Runs of a landscape: trained, stored, killed and resumed."""

import json
import math
import os
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
from einlinear.cli import main
from einlinear.studies import landscape_train
from einlinear.studies.images import load_images
from einlinear.studies.landscape_runs import Run
from einlinear.studies.landscape_sweep import read_results
from einlinear.studies.landscape_train import TensorImages, make_model, naive_starts, train_run
from forked import context

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
NAIVE = Run("naive", "dense", 24, -8, 0, 30, 16, "relu", False, None, "data")
MUP = replace(NAIVE, parametrization="mup", base_width=8)


@pytest.fixture(scope="module")
def images():
    return TensorImages.of(load_images())


def numbers(folder):
    """What the runs in a folder gave, without the time that they took."""
    results = read_results(folder / "landscape.jsonl")
    return {run: replace(result, seconds=0.0) for run, result in results.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of the command that nothing disturbed."""
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
    before = (whole / "landscape.jsonl").read_bytes()
    assert before.count(b"\n") == 32
    main(["landscape", "--out", str(whole), *OPTIONS])  # nothing is missing
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["32 of 32 runs, 0 s"]
    for name, flag in (
        ("naive", "--naive-rates"),
        ("muP", "--rates"),
    ):  # of two rates each is an end
        assert f"{name}: cannot be told; widen {flag}. " in captured.out
    assert (whole / "landscape.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--steps 1000000000", "steps 1000000000: a run would need 64 GB for the numbers of its"),
        ("--batch 1000000000", "batch 1000000000: a run would need 576 GB for its activations"),
        ("--widths 1000000", "widths 1000000: a run would need 32,00"),
        (
            "--structures low_rank(rank=1000000000)",
            "structures low_rank(rank=1000000000): a run would need 1,024 GB for its weights",
        ),
        ("--processes 100000", "processes is 100000"),
    ],
)
def test_settings_that_are_too_large(options, what, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(landscape_train, "memory_bytes", lambda: 24 * 10**9)
    with pytest.raises(SystemExit) as ended:
        main(["landscape", "--out", str(tmp_path), *OPTIONS, *options.split()])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"einlinear: {what}")
    assert [line.split()[0] for line in lines[1:]] == ["rule:", "fix:"]


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


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_a_killed_landscape_goes_on_where_it_was(whole, tmp_path):
    file = tmp_path / "landscape.jsonl"
    command = [sys.executable, "-m", "einlinear", "landscape", "--out", str(tmp_path), *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") >= 3)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert workers
    wait_for(lambda: not any(map(runs_still, workers)))  # nothing is left behind
    kept = file.read_bytes()
    count = kept[: kept.rfind(b"\n") + 1].count(b"\n")
    assert 3 <= count < 32
    with file.open("ab") as end:
        end.write(b'{"schema": 1, "run": {"param')  # killed while it wrote
    shown = []
    result = el.landscape(CONFIG, out=tmp_path, on_progress=shown.append)
    assert [at.done for at in shown] == list(range(count, 33))
    assert shown[-1].share == pytest.approx(1)
    after = file.read_bytes()
    assert after.startswith(kept[: kept.rfind(b"\n") + 1])
    assert after.count(b"\n") == 32
    assert numbers(tmp_path) == numbers(whole)
    held = json.loads((whole / "landscape.json").read_text())
    del held["machine"]
    assert json.loads(json.dumps(result.as_json())) == held


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_a_worker_that_dies_is_an_error_and_loses_nothing(tmp_path):
    file = tmp_path / "landscape.jsonl"
    command = [sys.executable, "-m", "einlinear", "landscape", "--out", str(tmp_path), *OPTIONS]
    command += ["--steps", "400"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: file.exists() and b"\n" in file.read_bytes())
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children(process.pid)}
    (worker,) = [pid for pid, line in lines.items() if "spawn_main" in line]
    os.kill(worker, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "a process that trains ended before its time" in error
    assert read_results(file)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")
def test_a_worker_that_dies_while_it_starts_is_not_waited_for(tmp_path):
    wanted = {"out": tmp_path, "processes": 2}
    process = context.Process(target=el.landscape, args=(CONFIG,), kwargs=wanted)
    process.start()
    wait_for(lambda: len(children(process.pid)) >= 2)  # the first is multiprocessing's own
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 1


def test_without_matplotlib_nothing_is_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        main(["landscape", "--out", str(tmp_path), *OPTIONS])
    assert "need matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_settings_share_the_folder(whole):
    fewer = replace(CONFIG, structures=("btt",))
    result = el.landscape(fewer, out=whole)  # all of these are there
    assert {cell.structure for cell in result.cells} == {"btt"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1"),
        ("nonsense", "line 1"),
        ('{"schema": 7, "run": {}, "result": {}}', "its schema is 7, not 1"),
        ('{"schema": 1, "run": {"colour": 1}, "result": {}}', "colour"),
    ],
)
def test_a_file_that_is_not_ours_is_kept(line, message, tmp_path):
    file = tmp_path / "landscape.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(el.EinlinearError, match=message):
        el.landscape(CONFIG, out=tmp_path)
    assert file.read_text() == line + "\n"


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["landscape", "--out", str(tmp_path / "file" / "folder"), *OPTIONS])
    assert stop.value.code == 2
    assert "cannot write" in capsys.readouterr().err
    with pytest.raises(el.EinlinearError, match="processes is 0"):
        el.landscape(CONFIG, out=tmp_path, processes=0)


def test_a_run_by_hand(images):
    """The naive dense run is that of plain layers under torch's Adam, from the same numbers."""
    generator = torch.Generator().manual_seed(NAIVE.seed)
    batches = torch.randint(1590, (30, 16), generator=generator)
    layers = [nn.Linear(i, o) for i, o in ((96, 24), (24, 24), (24, 24), (24, 10))]
    with torch.no_grad():
        for layer, transposed in zip(layers, (False, True, True, False), strict=True):
            # A factor has its input's axis first.
            shape = layer.weight.shape[::-1] if transposed else layer.weight.shape
            drawn = torch.empty(shape).normal_(0, layer.in_features**-0.5, generator=generator)
            layer.weight.copy_(drawn.T if transposed else drawn)
            layer.bias.zero_()
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1]
    optimizer = torch.optim.Adam(model.parameters(), lr=2**-8)
    losses = []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(images.train_x[batch]), images.train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = train_run(NAIVE, images)
    assert result.train_loss == pytest.approx(sum(losses[-3:]) / 3, rel=1e-4)
    right = (model(images.test_x).argmax(1) == images.test_y).float().mean().item()
    assert result.test_accuracy == pytest.approx(right, abs=0.005)
    assert result.steps_done == 30
    assert not result.diverged


def test_a_run_is_a_function_of_its_settings(images):
    first, again = train_run(MUP, images), train_run(MUP, images)
    assert replace(first, seconds=0) == replace(again, seconds=0)
    assert first.start_loss == pytest.approx(math.log(10), rel=1e-6)  # a head of zeros
    changes = ({"seed": 1}, {"rate": -7}, {"base_width": 24}, {"batch": 8}, {"structure": "btt"})
    changes += ({"activation": "gelu"}, {"weight_norm": True})
    fast = replace(MUP, rate=-5)  # so fast that factors grow, which weight normalisation prevents
    losses = [train_run(replace(fast, **change), images).train_loss for change in ({}, *changes)]
    assert len(set(losses)) == len(losses)


def test_naive_starts_have_unit_variance_for_the_fan_in():
    model = make_model(96, 10, replace(NAIVE, structure="btt", width=64))
    stds = {start.name: start.std for start in naive_starts(model)}
    assert stds["input.weight"] == pytest.approx(96**-0.5)
    assert stds["blocks.0.A"] == stds["blocks.1.B"] == pytest.approx(8**-0.5)
    assert stds["head.weight"] == pytest.approx(64**-0.5)
    assert stds["blocks.0.bias"] == stds["head.bias"] == 0


def test_a_run_that_diverges_is_given_up(images):
    result = train_run(replace(NAIVE, rate=3, steps=100), images)
    assert result.diverged
    assert result.loss == math.inf
    assert result.steps_done in (30, 40)  # after the third tenth, in which it may still be high
    broken = TensorImages(images.train_x * np.inf, images.train_y, images.test_x, images.test_y, 10)
    result = train_run(NAIVE, broken)
    assert (result.train_loss, result.steps_done, result.diverged) == (None, 0, True)
