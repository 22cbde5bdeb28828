"""What a sweep will be: runs, steps, costs, times, processes."""

import itertools
import json
import os
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.runs.identity import canonical_text
from einlinear.sweeps import placing as placings
from einlinear.sweeps import planner
from einlinear.sweeps.executors.local import _environment
from einlinear.sweeps.placing import Placing, count_gpus, place
from einlinear.sweeps.plan import PlannedRun, PlanRequest, makespan
from einlinear.sweeps.planner import (
    Timing,
    estimate,
    expand_study,
    kind_of,
    plan_study,
    time_steps,
)
from einlinear.sweeps.study import Study
from einlinear.training.plan import cost_run, plan_run
from kit.runs import TINY, tiny

BASE = {key: value for key, value in TINY.items() if key not in ("steps", "warmup")}


def tiny_study(*grids, **base):
    return Study("tiny", BASE | base, grids or ({},))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"structure": "btt"},
        {"structure": "low_rank", "num_experts": 4},
        {"experts": "ffn", "num_experts": 2},
        {"task": "cifar"},
        {"task": "pixels", "structure": "btt", "head_aligned": True, "width": 32},
        {"task": "regression", "teacher_width": 8, "structure": "kronecker"},
    ],
    ids=str,
)
def test_costs_without_weights_are_those_of_the_run(settings):
    config = el.RunConfig(**settings)
    cost, plan = cost_run(config), plan_run(config, is_checked=False)
    assert cost.counts == plan.counts
    assert (cost.units_per_step, cost.unit) == (plan.units_per_step, plan.unit)
    validation = plan.task.validation(config.eval_size, batch=config.batch_size)
    assert cost.eval_rows == sum(len(batch.targets) for batch in validation)


def test_a_budget_buys_the_steps_it_is_worth():
    runs = expand_study(tiny_study({"width": [16, 32], "flops": [1e9, 2e9]}))
    for run, flops in zip(runs, (1e9, 2e9, 1e9, 2e9), strict=True):
        step = 2 * 3 * cost_run(run.config).counts.macs * 4 * 16  # rows of 16 tokens
        assert abs(run.config.steps * step - flops) <= step / 2
        assert run.flops == run.config.steps * step
    assert runs[0].config.steps > 3 * runs[2].config.steps / 2, "a wider model has fewer"
    assert runs[1].config.warmup <= runs[1].config.steps // 10


def test_a_budget_below_one_step():
    with pytest.raises(el.EinlinearError, match="enough for one step"):
        expand_study(tiny_study(flops=10.0))


def test_runs_that_budgets_make_equal_are_one():
    flops = 6 * cost_run(el.RunConfig(**BASE, steps=1)).counts.macs * 64
    study = tiny_study({"flops": [7.01 * flops, 6.99 * flops]})
    assert [run.config.steps for run in expand_study(study)] == [7]


def test_labels_say_what_differs():
    study = tiny_study({"seed": [0, 1], "structure": ["dense", "btt"]}, steps=3)
    labels = [run.label for run in expand_study(study)]
    assert labels == ["dense, seed 0", "btt, seed 0", "dense, seed 1", "btt, seed 1"]
    assert [run.label for run in expand_study(tiny_study(steps=3))] == ["dense, width 16"]


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 3))
def test_makespan_is_near_the_best_there_is(seconds, slots):
    ways = itertools.product(range(slots), repeat=len(seconds))
    best = min(
        max(sum(s for s, at in zip(seconds, way, strict=True) if at == slot) for slot in range(3))
        for way in ways
    )
    # The longest first is never more than a third above the best way. Ref: Graham 1969.
    assert best <= makespan(seconds, slots) <= best * 4 / 3


def test_estimates_between_and_beyond_what_was_timed():
    runs = expand_study(tiny_study({"width": [16, 32, 64, 128]}, steps=30))
    kind = kind_of(runs[0].config)
    timings = [Timing(kind, runs[1].macs, 1.0), Timing(kind, runs[2].macs, 2.0)]
    low, first, second, high = estimate(runs, timings)
    steps = first  # of a second
    assert 30 < steps < 40, "evaluations come on top"
    assert low == pytest.approx(steps), "a step of a small model takes no less"
    assert second == pytest.approx(2 * steps)
    assert high == pytest.approx(2 * steps * runs[3].macs / runs[2].macs)
    middle = Timing(kind, (runs[1].macs + runs[2].macs) // 2, 0.0)
    between = [Timing(kind, runs[0].macs, 1.0), Timing(kind, 2 * middle.macs - runs[0].macs, 3.0)]
    share = (runs[1].macs - between[0].macs) / (between[1].macs - between[0].macs)
    assert estimate(runs[1:2], between)[0] == pytest.approx(steps * (1 + 2 * share))


def test_the_time_to_start_counts_once_for_each_run():
    runs = expand_study(tiny_study({"width": [16, 32]}, steps=30))
    kind = kind_of(runs[0].config)
    bare, started = (
        estimate(runs, [Timing(kind, runs[0].macs, 1.0, start)]) for start in (None, 5.0)
    )
    assert started == pytest.approx([seconds + 5 for seconds in bare])
    (timing,) = time_steps(runs[:1])
    assert timing.start > 0


def test_a_kind_that_was_not_timed_has_the_rate_of_all():
    runs = expand_study(tiny_study({"structure": ["dense", "btt"]}, steps=30))
    timings = [Timing(kind_of(runs[0].config), runs[0].macs, 1.0)]
    dense, btt = estimate(runs, timings)
    assert btt == pytest.approx(dense * runs[1].macs / runs[0].macs)


@pytest.mark.parametrize(
    "change",
    [
        {"structure": "btt(rank=2)"},
        {"optimizer": "muon"},
        {"head_aligned": True},
        {"num_experts": 4},
        {"num_experts": 4, "expert_layers": "vo"},
        {"weight_norm": False},
        {"precision": "bfloat16"},
    ],
)
def test_what_changes_the_speed_makes_another_kind(change):
    usual = tiny(structure="btt")
    assert kind_of(replace(usual, **change)) != kind_of(usual)
    if "expert_layers" in change:
        assert kind_of(tiny(structure="btt", num_experts=4)) != kind_of(replace(usual, **change))


def test_size_and_spelling_make_no_other_kind():
    others = {"width": 32, "batch_size": 8, "seed": 1, "lr": 0.1, "steps": 9, "head_init": "small"}
    assert kind_of(tiny(structure="monarch", **others)) == kind_of(tiny(structure="btt"))


def test_timing_takes_the_ends_of_each_kind_and_no_longer_than_allowed():
    widths = [16, 32, 48]
    runs = expand_study(
        tiny_study({"structure": ["dense", "btt"], "width": widths, "seed": [0, 1]})
    )
    assert len(runs) == 12
    timings = time_steps(runs, seconds=100.0)
    assert len(timings) == 6, "seeds cost the same"
    assert all(timing.seconds > 0 for timing in timings)
    ends = [(timing.kind[1], timing.macs) for timing in timings[:4]]
    macs = {(run.config.structure, run.config.width): run.macs for run in runs}
    texts = {"btt": canonical_text("btt"), "dense": "dense"}
    assert ends == [(texts[s], macs[s, w]) for w in (16, 48) for s in ("btt", "dense")]
    assert len(time_steps(runs, seconds=0.0)) == 1, "something is always timed"
    assert time_steps(runs, timings, seconds=100.0) == timings, "nothing is timed twice"


def test_the_first_steps_do_not_count_and_the_median_of_the_others_does(monkeypatch):
    """A first step takes ten times as long as others, and one in the middle is disturbed."""
    taken = []

    class Clock:
        seconds = 0.0

        def go(self):
            taken.append([1.0, 0.1, 0.1, 0.1, 5.0, 0.1, 0.1][len(taken)])

        def stop(self):
            self.seconds += taken[-1]

    state = SimpleNamespace(step=lambda number: None)
    run = SimpleNamespace(watch=Clock(), state=state)
    monkeypatch.setattr(planner, "RunLoop", lambda *_: run)
    monkeypatch.setattr(planner, "_STEP_SECONDS", 5.25)
    monkeypatch.setattr(planner, "_COLD_SECONDS", 1.15)
    monkeypatch.setattr(planner, "plan_run", lambda *_, **__: None)
    assert planner._timed(el.RunConfig(**BASE), 1)[0] == pytest.approx(0.1)
    assert len(taken) == 3 + 4, "no more than they may take"


def test_evaluations_go_over_the_rows_that_there_are():
    """The images of the package are 530 for validation; 10,000 are asked for."""
    (run,) = expand_study(Study("s", {"task": "cifar", "steps": 400}))
    assert (run.eval_rows, run.config.eval_size) == (530, 10_000)
    (seconds,) = estimate([run], [Timing(kind_of(run.config), run.macs, 1.0)])
    assert seconds == pytest.approx(400 + 21 * 530 / 128 / 3)
    fixed = {"task": "cifar", "steps": 400, "eval_spacing": "fixed", "eval_points": 1}
    (run,) = expand_study(Study("s", fixed))  # evaluated at 0, 1, 10, 100 and 400
    (seconds,) = estimate([run], [Timing(kind_of(run.config), run.macs, 1.0)])
    assert seconds == pytest.approx(400 + 5 * 530 / 128 / 3)


def test_a_run_that_cannot_be_timed_stops_nothing(monkeypatch):
    runs = expand_study(tiny_study({"width": [16, 32]}, steps=30))
    right = planner._timed

    def timed(config, threads):
        if config.width == 32:
            raise MemoryError
        return right(config, threads)

    monkeypatch.setattr(planner, "_timed", timed)
    assert [timing.macs for timing in time_steps(runs)] == [runs[0].macs]
    small, large = estimate(runs, [])
    assert 0 < small < large, "a guess is enough for the order"


def test_runs_that_cannot_be_timed_take_no_longer_than_others(monkeypatch):
    tried = []

    def timed(config, threads):
        tried.append(config.width)
        raise MemoryError

    monkeypatch.setattr(planner, "_timed", timed)
    runs = expand_study(tiny_study({"width": [16, 32, 48]}, steps=30))
    assert time_steps(runs, seconds=100.0) == []
    assert tried == [16, 48, 32]
    assert time_steps(runs, seconds=0.0) == []
    assert tried == [16, 48, 32, 16], "the first alone may take longer than all may"


def test_runs_of_one_shape_are_counted_once(monkeypatch):
    counted = []
    monkeypatch.setattr(planner, "cost_run", lambda c: counted.append(c.width) or cost_run(c))
    same = {"seed": [0, 3], "steps": [8, 9], "lr": [0.5, 0.1], "flops": [1e9]}
    expand_study(tiny_study(*({"width": [16, 32], name: same[name]} for name in same)))
    assert counted == [16, 32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_of_other_machines(tmp_path):
    request = PlanRequest(tiny_study({"device": ["cuda", "cpu"]}).as_dict(), str(tmp_path), 1)
    with pytest.raises(el.EinlinearError, match="the device is cuda"):
        plan_study(request)
    planned = plan_study(replace(request, is_here=False))
    assert [run.config.device for run in planned] == ["cuda", "cpu"]
    assert all(run.seconds > 0 for run in planned)


def test_a_plan_has_times_and_survives_json(tmp_path):
    study = tiny_study({"width": [16, 32]}, steps=30)
    planned = plan_study(PlanRequest(study.as_dict(), str(tmp_path), 1))
    assert [run.config for run in planned] == [cell.config for cell in study.cells]
    assert all(run.seconds > 0 for run in planned)
    assert [PlannedRun.from_dict(json.loads(json.dumps(r.as_dict()))) for r in planned] == [
        *planned
    ]


@pytest.mark.parametrize(
    ("runs", "given", "cores", "processes", "threads"),
    [
        (12, {}, 4, 4, 1),
        (2, {}, 8, 2, 4),
        (3, {}, 8, 3, 2),
        (12, {"processes": 3}, 8, 3, 2),
        (12, {"threads": 4}, 8, 8, 4),
        (1, {"processes": 5}, 2, 1, 1),
        (12, {"executor": "inline"}, 4, 1, None),
        (100, {"executor": "slurm"}, 4, 64, 1),
        (100, {"executor": "ray"}, 4, None, 1),
        (100, {"executor": "ray", "processes": 3, "threads": 2}, 4, 3, 2),
    ],
)
def test_processes_and_threads(monkeypatch, runs, given, cores, processes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    study = Study("s", {"task": "cifar", "device": "cpu"}, ({"seed": list(range(runs))},))
    placed = place(study, Placing(**given))
    assert (placed.processes, placed.threads or placed.most_threads, placed.gpus) == (
        processes,
        threads,
        0,
    )
    is_chosen_by_runs = "threads" not in given and given.get("executor") in (None, "inline")
    assert (placed.threads is None) == is_chosen_by_runs


def test_a_process_for_every_gpu(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\necho "GPU 0: some (UUID: GPU-1)"\necho "GPU 1: some (UUID: GPU-2)"\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus() == 2
    study = Study("s", {"task": "cifar"}, ({"seed": [0, 1, 2]},))
    assert (place(study, Placing()).processes, place(study, Placing()).gpus) == (2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert count_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert place(study, Placing()).gpus == 0


def test_each_process_sees_its_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = [_environment(number, 1, 2)["CUDA_VISIBLE_DEVICES"] for number in range(3)]
    assert seen == ["3", "5", "3"]


@pytest.mark.parametrize(
    ("gpus", "devices", "processes", "seen"),
    [
        ("0,1,2,3", 2, 2, ["0,1", "2,3"]),
        ("7,5,3", 2, 1, ["7,5"]),
        ("a,b,c,d", 4, 1, ["a,b,c,d"]),
        ("4,5", None, 2, ["4", "5"]),
        ("4,5", 1, 2, ["4", "5"]),
    ],
)
def test_each_run_has_gpus_of_its_own(monkeypatch, gpus, devices, processes, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    study = Study("s", {"task": "cifar", "batch_size": 8}, ({"seed": list(range(9))},))
    placed = place(study, Placing(devices=devices))
    assert (placed.processes, placed.gpus) == (processes, len(gpus.split(",")))
    assert placed.most_threads == 16 // (processes * placed.num_devices)
    own = [
        _environment(number, 1, placed.gpus, placed.num_devices)["CUDA_VISIBLE_DEVICES"]
        for number in range(processes + 1)
    ]
    assert own == [*seen, seen[0]]  # one more than there is room for shares


def test_devices_without_gpus_are_processes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    study = Study("s", {"task": "cifar", "batch_size": 8}, ({"seed": list(range(9))},))
    placed = place(study, Placing(devices=4))
    assert (placed.processes, placed.most_threads, placed.gpus) == (2, 1, 0)
    assert place(study, Placing(devices=8)).processes == 1
    assert "CUDA_VISIBLE_DEVICES" not in _environment(0, 1, 0, 4)


def test_devices_that_a_run_cannot_have(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    study = Study("s", {"task": "cifar", "batch_size": 12, "accumulation": 2})
    with pytest.raises(el.EinlinearError, match="devices are 3, and this machine has 2"):
        place(study, Placing(devices=3))
    on_cpu = Study("s", {"task": "cifar", "batch_size": 12, "device": "cpu"})
    assert place(on_cpu, Placing(devices=3)).gpus == 0
    with pytest.raises(el.EinlinearError, match="a batch_size of 12 and an accumulation of 2") as e:
        place(study, Placing("ray", devices=4))
    assert e.value.fix == "give a batch_size that is a multiple of 8"


@pytest.mark.parametrize(
    ("device", "devices", "gpus"),
    [("auto", 2, 2), ("auto", 1, 1), ("auto", None, 0), ("cpu", 2, 0)],
)
def test_slurm_is_asked_for_gpus_that_runs_can_use(device, devices, gpus):
    study = Study("s", {"task": "cifar", "batch_size": 8, "device": device})
    assert place(study, Placing("slurm", devices=devices)).gpus == gpus


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"devices": 0}, "devices"),
        ({"devices": 2, "executor": "inline"}, "devices are 2, the executor inline"),
        ({"executor": "cloud"}, "executor is 'cloud'"),
        ({"processes": 0}, "processes"),
        ({"processes": 100_000}, "processes is 100000"),
        ({"threads": -1}, "threads"),
        ({"executor": "inline", "processes": 2}, "processes are 2, the executor inline"),
        ({"address": "auto"}, "address is 'auto', the executor local"),
        ({"slurm": {"time": "1"}, "executor": "ray"}, "the executor ray"),
    ],
)
def test_bad_places(given, what):
    with pytest.raises(el.EinlinearError, match=what):
        placings.Placing(**given)
