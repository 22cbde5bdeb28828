"""Times of training steps, measured in turns."""

from dataclasses import replace
from random import Random
from statistics import median

import pytest

import einlinear as el
from einlinear.bench import steps
from einlinear.bench.steps import distinct_models, measure_steps, median_interval
from einlinear.layers import machine
from einlinear.runs.shape import step_key
from kit.runs import tiny

MODELS = [tiny(), tiny(structure="btt"), tiny(optimizer="muon")]


def test_three_models_are_measured_in_turns():
    seen = []
    runs = [*MODELS, tiny(seed=1), tiny(structure="monarch", lr=0.1, steps=2)]
    times = measure_steps(runs, repeats=2, on_progress=seen.append)
    assert {row.key for row in times.rows} == set(map(step_key, MODELS))
    assert {row.label for row in times.rows} == {"dense", "btt", "dense muon"}
    assert {(row.width, row.units, row.unit) for row in times.rows} == {(16, 64, "token")}
    assert times.rounds == 2
    assert times.machine["threads"] == 1
    assert [at.done for at in seen] == list(range(1, 10))
    assert seen[-1].share == 1
    for run in runs:
        assert times.seconds_of(run) > 0


def test_every_round_has_all_models_in_another_order(monkeypatch):
    turns = []
    monkeypatch.setattr(steps, "_turn", lambda loop: turns.append(loop.config.id) or 1.0)
    times = measure_steps(MODELS, repeats=6)
    rounds = [tuple(turns[k : k + 3]) for k in range(0, 18, 3)]
    assert all(len(set(models)) == 3 for models in rounds)
    assert len(set(rounds)) > 1
    assert [row.seconds for row in times.rows] == [1.0] * 3


def test_the_time_is_the_median_over_rounds(monkeypatch):
    values = iter([5.0, 1.0, 9.0, 2.0, 3.0])
    monkeypatch.setattr(steps, "_turn", lambda loop: next(values))
    (row,) = measure_steps(MODELS[:1], repeats=5).rows
    assert (row.low, row.seconds, row.high) == (1.0, 3.0, 9.0)


def test_records_are_timed_with_the_threads_that_they_were_trained_with(monkeypatch):
    monkeypatch.setattr(steps, "_turn", lambda loop: 1.0)
    record = el.train(tiny(steps=1, eval_points=1, warmup=0))
    for trained, used in (([2, 2], 2), ([1, 2], 1), ([], 1)):
        records = [replace(record, environment={"threads": number}) for number in trained]
        times = measure_steps(records or MODELS[:1], repeats=1)
        assert times.machine["threads"] == used


def test_the_model_of_the_processor(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: EPYC  7763\nmodel name\t: Other\n")
    monkeypatch.setattr(machine, "_PROCESSORS", str(path))
    assert machine.processor_model() == "EPYC 7763"
    path.write_text("processor\t: 0\n")
    assert machine.processor_model() is None
    monkeypatch.setattr(machine, "_PROCESSORS", str(tmp_path / "none"))
    assert machine.processor_model() is None


def test_labels_tell_models_apart():
    deep = [tiny(), tiny(depth=2), tiny(depth=2, batch_size=8), tiny(width=32)]
    labels = steps._labels(deep)
    assert labels[3] == "dense"
    assert labels[2] == "dense, depth 2, batch_size 8"
    assert len(set(labels)) == 4


def test_dense_models_come_first():
    runs = [tiny(structure="btt"), tiny(width=32), tiny(), replace(tiny(), seed=4)]
    assert [config.width for config in distinct_models(runs).values()] == [16, 32, 16]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_few_values_give_their_range(count):
    values = [float(k) for k in range(count)]
    assert median_interval(values) == (0.0, count - 1.0)


def test_intervals_of_medians_cover():
    random = Random(0)
    assert median_interval(range(9)) == (1, 7)
    assert median_interval(range(5)) == (0, 4)
    for count, level in ((9, 0.9), (20, 0.9), (21, 0.5)):
        draws = [[random.gauss(0, 1) for _ in range(count)] for _ in range(2000)]
        ends = [median_interval(values, level) for values in draws]
        covered = sum(low <= 0 <= high for low, high in ends) / 2000
        assert covered >= level - 0.03  # three standard errors: 0.02 and 0.033
        assert covered <= level + 0.17, "the next larger k covers less than the level"
        assert all(
            low <= median(values) <= high for values, (low, high) in zip(draws, ends, strict=True)
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure_steps([]), "there are no runs"),
        (lambda: measure_steps(MODELS, repeats=0), "repeats"),
        (lambda: measure_steps(MODELS, threads=0), "threads"),
    ],
)
def test_what_cannot_be_measured(call, message):
    with pytest.raises(el.EinlinearError, match=message):
        call()


def test_models_that_do_not_fit_together_are_refused(monkeypatch):
    monkeypatch.setattr(steps, "memory_bytes", lambda: 1000)
    with pytest.raises(el.EinlinearError, match=r"3 models would need .* has 1.00 kB"):
        measure_steps(MODELS)
