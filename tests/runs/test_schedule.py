from itertools import pairwise
from math import cos, isclose, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from einlinear import RunConfig
from einlinear.runs.schedule import (
    average_weight,
    eval_steps,
    fixed_interval,
    freeze_step,
    log_interval,
    rate_multiplier,
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant", "warmup": 0}, {0: 1, 99: 1}),
        ({"schedule": "constant", "warmup": 4}, {0: 1 / 4, 2: 3 / 4, 3: 1, 50: 1}),
        ({"schedule": "cosine", "warmup": 0}, {0: 1, 25: (1 + cos(pi / 4)) / 2, 50: 1 / 2}),
        ({"schedule": "cosine", "warmup": 20}, {9: 1 / 2, 19: 1, 20: 1, 60: 1 / 2}),
        ({"schedule": "cosine", "warmup": 0, "final_rate": 0.2}, {50: 0.6}),
        ({"schedule": "wsd", "warmup": 0}, {0: 1, 80: 1, 90: 1 / 2, 95: 1 / 4}),
        ({"schedule": "wsd", "warmup": 10, "final_rate": 0.5}, {4: 1 / 2, 90: 3 / 4}),
        ({"schedule": "wsd", "warmup": 0, "decay_share": 1.0}, {0: 1, 50: 1 / 2}),
    ],
)
def test_rates_by_hand(settings, expected):
    config = RunConfig(steps=100, **settings)
    for step, multiplier in expected.items():
        assert isclose(rate_multiplier(config, step), multiplier), step


@given(st.integers(1, 10**6), st.integers(1, 60))
def test_evaluations(steps, num_points):
    points = eval_steps(steps, num_points)
    assert points[0] == 0
    assert points[-1] == steps
    assert list(points) == sorted(set(points))
    assert len(points) <= num_points + 1
    ratios = [b / a for a, b in pairwise(points) if a > 1000]
    if len(ratios) > 2:
        assert max(ratios) / min(ratios) < 1.01


def test_evaluations_by_hand():
    assert eval_steps(1000, 4) == (0, 1, 10, 100, 1000)
    assert eval_steps(8, 4) == (0, 1, 2, 4, 8)
    assert eval_steps(7, 1) == (0, 7)


@given(st.integers(1, 10**6), st.integers(1, 60))
def test_even_evaluations(steps, num_points):
    points = eval_steps(steps, num_points, "even")
    assert (points[0], points[-1]) == (0, steps)
    assert len(points) == min(steps, num_points) + 1
    gaps = [b - a for a, b in pairwise(points)]
    assert max(gaps) - min(gaps) <= 1


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 60))
def test_fixed_evaluations_do_not_depend_on_the_steps(steps, more, num_points):
    short, long = (eval_steps(n, num_points, "fixed") for n in (steps, steps + more))
    assert (short[0], short[-1]) == (0, steps)
    assert short[:-1] == tuple(step for step in long if step < steps)


def test_fixed_evaluations_by_hand():
    assert eval_steps(1000, 1, "fixed") == (0, 1, 10, 100, 1000)
    assert eval_steps(60, 2, "fixed") == (0, 1, 3, 10, 32, 60)
    assert len(eval_steps(10**6, 20, "fixed")) - len(eval_steps(10**5, 20, "fixed")) == 20


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 200), st.floats(0, 1), st.data())
def test_the_rates_before_the_freeze_are_those_of_any_longer_run(steps, more, warmup, share, data):
    settings = {"warmup": warmup, "decay_share": share, "final_rate": 0.1, "eval_spacing": "fixed"}
    schedule = data.draw(st.sampled_from(["constant", "wsd"]))
    short, long = (RunConfig(steps=n, schedule=schedule, **settings) for n in (steps, steps + more))
    frozen = freeze_step(short)
    assert frozen <= freeze_step(long)
    for step in {*range(min(frozen, 300)), *range(max(0, frozen - 300), frozen)}:
        assert rate_multiplier(short, step) == rate_multiplier(long, step)


def test_where_runs_freeze():
    def frozen(**changes):
        return freeze_step(RunConfig(steps=500, eval_spacing="fixed", **changes))

    assert frozen(schedule="constant") == 500
    assert frozen(schedule="wsd") == 400
    assert frozen(schedule="cosine") is None
    assert freeze_step(RunConfig(schedule="constant", eval_spacing="even")) is None


def test_fixed_logs():
    steps = (1, 127, 128, 255, 256, 1000, 4096, 10**6)
    assert [fixed_interval(step) for step in steps] == [1, 1, 2, 2, 4, 8, 64, 64]


def test_logs():
    assert [log_interval(steps) for steps in (1, 99, 250, 10**6)] == [1, 1, 2, 100]


def test_the_average_is_over_the_last_share():
    # The weight of step t in the average after step n, from the recursion.
    ema, end = 0.1, 2000
    weights = []
    for step in range(1, end + 1):
        weight = average_weight(ema, step)
        weights = [w * (1 - weight) for w in weights] + [weight]
    assert isclose(sum(weights), 1)
    mean_age = sum(w * (end - step) for step, w in enumerate(weights, 1)) / end
    assert 0.08 < mean_age < 0.1  # ema / (1 + ema) in the limit: 0.0909
    assert sum(weights[: end // 2]) < 0.01
