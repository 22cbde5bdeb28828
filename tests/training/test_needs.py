"""What runs need in memory, and settings that are too large: each is named, nothing is built."""

import os
from dataclasses import replace
from time import process_time

import pytest
import torch

import einlinear as el
from einlinear.cli import main as cli
from einlinear.layers import machine
from einlinear.layers.machine import memory_bytes
from einlinear.sweeps.plan import PlanRequest
from einlinear.sweeps.planner import plan_study
from einlinear.sweeps.study import Study
from einlinear.training import needs as module
from einlinear.training.counting import count_model
from einlinear.training.devices.distributed import Place
from einlinear.training.model import make_shape
from einlinear.training.needs import check_needs, count_shape, needs
from einlinear.training.plan import cost_run
from einlinear.training.train import train
from kit.runs import TINY, tiny

GB = 10**9
HUGE = 10**9
PLAIN = {"context": None, "head_size": None}  # no attention
DEEP = {"width": 32, "depth": 16, "teacher_width": 4, "teacher_depth": 2}
REGRESSION = {"task": "regression", "device": "cpu"}

# Settings, the one that is named, and for what it would need too much.
TOO_LARGE = [
    ({"width": HUGE}, "width=1000000000", "more than 9.22 EB for the weights"),
    ({"width": HUGE, "structure": "btt"}, "width=1000000000", "more than 9.22 EB for the weights"),
    ({"width": 160_000}, "width=160000", "12.3 TB for the weights"),
    ({"task": "cifar", "width": 10**6}, "width=1000000", "32.0 TB for the weights"),
    ({"depth": HUGE}, "depth=1000000000", "8.39 PB for the activations of a batch"),
    (
        {"depth": HUGE, "structure": "btt"},
        "depth=1000000000",
        "8.39 PB for the activations of a batch",
    ),
    ({"task": "cifar", "depth": HUGE}, "depth=1000000000", "264 TB for the weights"),
    ({"num_experts": HUGE}, "num_experts=1000000000", "1.99 PB for the weights"),
    ({"num_experts": HUGE, "experts": "ffn"}, "num_experts=1000000000", "1.31 PB for the weights"),
    ({"batch_size": HUGE}, "batch_size=1000000000", "573 TB for the activations of a batch"),
    (
        {"structure": "low_rank(rank=1000000000)"},
        "structure=low_rank(rank=1000000000)",
        "46.1 TB for the weights",
    ),
    ({"context": HUGE}, "context=1000000000", "287 TB for the activations of a batch"),
    (REGRESSION | {"teacher_depth": HUGE}, "teacher_depth=1000000000", "4.19 PB for the teacher"),
    (REGRESSION | {"teacher_width": HUGE}, "teacher_width=1000000000", "16.0 EB for the teacher"),
    (REGRESSION | {"eval_size": HUGE}, "eval_size=1000000000", "36.0 GB for the validation set"),
    (REGRESSION | {"batch_size": HUGE}, "batch_size=1000000000", "6.92 TB for the activations"),
    (REGRESSION | {"width": HUGE}, "width=1000000000", "more than 9.22 EB for the weights"),
]


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """What torch loads for its first tensor without data takes seconds."""
    cost_run(tiny())


@pytest.fixture
def memory(monkeypatch):
    """A machine of 24 GB."""
    monkeypatch.setattr(module, "memory_bytes", lambda: 24 * GB)


@pytest.mark.parametrize(("settings", "named", "wants"), TOO_LARGE, ids=str)
def test_settings_that_are_too_large(memory, settings, named, wants):
    config = el.RunConfig(**{"device": "cpu"} | settings)
    begin = process_time()
    with pytest.raises(el.EinlinearError) as told:
        train(config)
    assert process_time() - begin < 1
    owner = "torch can address 9.22 EB" if "more than" in wants else "this machine has 24.0 GB"
    assert told.value.what.startswith(f"{named} would need {wants}")
    assert told.value.what.endswith(f"; {owner}")
    assert told.value.fix.startswith("give a smaller ")


@pytest.mark.parametrize(
    ("flag", "value", "most"),
    [
        ("width", "9" * 30, "1,000,000,000"),
        ("depth", 10**10, "1,000,000,000"),
        ("eval-points", HUGE, "1,000,000"),
        ("steps", 10**15, "1,000,000,000,000"),
        ("eval-size", 10**12, "1,000,000,000"),
    ],
)
def test_settings_beyond_all_bounds(flag, value, most, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", f"--{flag}", str(value), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert said.startswith(f"einlinear: --{flag} is ")
    assert f"rule: --{flag} is a whole number from 1 to {most}" in said


def test_sweeps_are_refused_where_they_would_run(memory, tmp_path):
    study = Study("large", TINY, ({"width": [16, 160_000]},))
    request = PlanRequest(study.as_dict(), str(tmp_path), 1)
    with pytest.raises(el.EinlinearError, match=r"width=160000 .*; this machine has 24.0 GB"):
        plan_study(request)
    planned = plan_study(replace(request, is_here=False))
    assert [run.config.width for run in planned] == [16, 160_000]
    assert planned[1].seconds > 1000 * planned[0].seconds, "it was not timed here, but estimated"


@pytest.mark.parametrize(
    "settings", [{}, {"task": "cifar"}, {"structure": "btt", "num_experts": 3}]
)
def test_counts_of_deep_models(settings):
    config = el.RunConfig(**settings | {"depth": 7})
    sizes = (96, 64) if config.task == "text" else (20, 10)
    with torch.device("meta"):
        assert count_shape(config, sizes, 64) == count_model(make_shape(config, sizes), 64)


def test_costs_do_not_depend_on_data_that_is_made():
    cost = cost_run(el.RunConfig(**REGRESSION, teacher_width=HUGE, batch_size=HUGE, depth=HUGE))
    assert cost.units_per_step == HUGE
    assert cost.counts.params > 10**13
    with pytest.raises(el.EinlinearError, match="a teacher generates the data"):
        cost_run(el.RunConfig(**REGRESSION, data="x.txt"))
    with pytest.raises(el.EinlinearError, match="teacher_depth"):
        cost_run(el.RunConfig(**REGRESSION, teacher_depth=1))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"structure": "btt", "ema": 0.0},
        {"num_experts": 3},
        {"structure": "btt", "optimizer": "muon"},
        {"precision": "bfloat16"},
        {"task": "pixels", "context": None, "width": 32},
        PLAIN | {"task": "regression", "batch_size": 512},
        PLAIN | {"task": "regression", "batch_size": 4096, "precision": "bfloat16"} | DEEP,
        PLAIN | {"task": "cifar"},
    ],
    ids=str,
)
def test_needs_are_below_what_was_measured(settings):
    """A run is refused only if it cannot work; what it needs is no less than an eighth of it."""
    config = tiny(**{"batch_size": 64} | settings | {"steps": 1, "warmup": 0, "eval_points": 1})
    record = train(config)
    measured = ("the weights", "the activations of a batch", "the teacher's answers")
    held = [part.bytes for part in needs(config) if part.name in measured]
    assert record.peak_bytes / 8 < sum(held) < record.peak_bytes


def test_memory_of_machines(tmp_path, monkeypatch):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_LIMITS", (str(tmp_path / "none"), str(limit)))
    assert memory_bytes() == pages
    limit.write_text("max\n")
    assert memory_bytes() == pages
    limit.write_text("123456\n")
    assert memory_bytes() == 123456


def test_processes_and_gpus_share_the_work(memory, monkeypatch):
    config = el.RunConfig(width=8192, shard="fsdp2", device="cuda", batch_size=64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 16 * GB))
    with pytest.raises(el.EinlinearError, match=r"width=8192 .* the weights; the GPU has 16.0 GB"):
        check_needs(config, Place(0, 1, torch.device("cuda", 0)))
    check_needs(config, Place(0, 8, torch.device("cuda", 0)))
    monkeypatch.setattr(module, "memory_bytes", lambda: None)
    check_needs(config)
