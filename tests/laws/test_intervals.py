import numpy as np
import pytest

import einlinear as el
from einlinear.laws import resample
from einlinear.laws.resample import draw, make_problem
from kit.scaling import CURVES_LAW, LINF, A, B, curves, law, optima, together


def covers(data, truth, seed, **how):
    found = el.fit_power_law(data, resamples=40, seed=seed, **how).laws[0]
    ends = (found.linf_interval, found.b_interval, found.a_interval)
    return [low <= value <= high for value, (low, high) in zip(truth, ends, strict=True)]


@pytest.mark.slow
def test_intervals_of_optima_cover():
    random = np.random.default_rng(0)
    tables = [together(optima(random, 20, 0.005)) for _ in range(200)]
    share = np.mean([covers(data, (LINF, B, A), k) for k, data in enumerate(tables)], axis=0)
    assert (share >= 0.80).all()
    assert (share <= 0.97).all()


@pytest.mark.slow
def test_intervals_of_curves_cover():
    """Three seeds of eight sizes; the ends of the frontier are not on the law, nor are curves."""
    random = np.random.default_rng(1)
    tables = [together(curves(random, 8, 0.005)) for _ in range(200)]
    share = np.mean([covers(data, CURVES_LAW, k) for k, data in enumerate(tables)], axis=0)
    assert (share >= 0.80).all()
    assert (share <= 0.97).all()
    every = [covers(data, CURVES_LAW, 0, points="all") for data in tables[:3]]
    assert np.mean(every) < 0.2


def test_one_run_has_no_intervals():
    compute = np.geomspace(1e6, 1e9, 20)
    data = el.Observations(["a"] * 20, compute, law(compute))
    found = el.fit_power_law(data, points="frontier").laws[0]
    assert found.a == pytest.approx(A)
    assert np.isnan([found.a_interval, found.b_interval, found.linf_interval]).all()


def test_inner_points_leave_out_the_runs_at_both_ends():
    """Curves that touch the law at one point each; outside of all of those they leave it."""
    best = np.repeat(np.geomspace(1e6, 1e10, 30), 2)  # two seeds of each size
    compute = best[:, None] * np.geomspace(0.02, 50, 60)
    off = 0.05 * np.log(compute / best[:, None]) ** 2
    loss = LINF + B * compute**-A * (1 + off)
    loss[1::2] *= 1 + 1e-9  # the second seed is a little worse
    run = np.repeat([str(i) for i in range(60)], 60)
    group = np.repeat([str(i // 2) for i in range(60)], 60)
    data = el.Observations(run, compute.ravel(), loss.ravel(), group=group)
    inner = el.fit_power_law(data, points="inner", resamples=50)
    whole = el.fit_power_law(data, points="frontier", resamples=0)
    assert inner.laws[0].a == pytest.approx(A, rel=0.01)
    assert inner.laws[0].linf == pytest.approx(LINF, rel=0.01)
    assert abs(whole.laws[0].a - A) > 3 * abs(inner.laws[0].a - A)
    front = whole.points
    ends = {front.group[front.compute.argmin()], front.group[front.compute.argmax()]}
    kept = sorted(c for c, g in zip(front.compute, front.group, strict=True) if g not in ends)
    assert sorted(inner.points.compute) == kept
    assert len(kept) < len(front)


@pytest.mark.parametrize(("few", "share"), [(3, 1 / 2), (4, 1)])
def test_groups_are_drawn_and_then_their_seeds(monkeypatch, few, share):
    """In every second sample, or in all if there are few groups."""
    monkeypatch.setattr(resample, "FEW_GROUPS", few)
    groups = np.array(["one", "two", "two", "four", "four", "four", "four"])
    runs = [str(i) for i in range(7)]
    data = el.Observations(runs, np.arange(1, 8), np.ones(7), group=groups)
    runs = make_problem(data, "all", "fitted").runs[0]
    counts = draw(runs, np.random.default_rng(0), 4000)[:, runs.run]
    drawn = [counts[:, groups == g].sum(-1) / n for g, n in (("one", 1), ("two", 2), ("four", 4))]
    assert (np.mod(drawn, 1) == 0).all()
    assert (np.sum(drawn, axis=0) == 3).all()
    # Variances: groups 2/3; a seed of n, n draws of share 1/n for each group drawn, adds (n - 1)/n
    # in those samples that draw seeds.
    # The mean of 4000 has a deviation of 0.02 at most.
    assert counts.mean(0) == pytest.approx(np.ones(7), abs=0.1)
    expected = [2 / 3 + share * (n - 1) / n for n in (1, 2, 2, 4, 4, 4, 4)]
    assert counts.var(0) == pytest.approx(np.array(expected), abs=0.15)


def test_seeds_of_a_group_are_drawn_inside_it():
    """Ten equal seeds of each size carry no more news than one, if the groups say so."""
    random = np.random.default_rng(5)
    run, compute, loss, name = optima(random, 12, 0.02)
    runs = [f"{r} {k}" for r in run for k in range(10)]
    many = [np.repeat(v, 10) for v in (compute, loss, name, run)]
    kinds = {"points": "all", "linf": 1.4, "resamples": 400}
    one = el.fit_power_law(el.Observations(run, compute, loss, name), **kinds).laws[0]
    grouped = el.Observations(runs, *many[:3], group=many[3])
    alone = el.Observations(runs, *many[:3])
    widths = [
        np.ptp(el.fit_power_law(data, **kinds).laws[0].a_interval) for data in (grouped, alone)
    ]
    assert widths[0] == pytest.approx(np.ptp(one.a_interval), rel=0.25)
    assert widths[1] < 0.6 * np.ptp(one.a_interval)


def test_intervals_do_not_hang_on_the_order_of_rows():
    random = np.random.default_rng(7)
    data = together(curves(random, 8, 0.01), curves(random, 8, 0.01, name="btt"))
    other = data.take(random.permutation(len(data)))
    assert data.structures == other.structures[::-1]
    laws = [el.fit_power_law(d, resamples=30) for d in (data, other)]
    found = [el.compute_multiplier(d, linf=1.2, resamples=30)["btt"] for d in (data, other)]
    for name in ("dense", "btt"):
        assert laws[0][name] == laws[1][name]
    assert found[0].median_interval == pytest.approx(found[1].median_interval, rel=1e-9)


def test_seeds_under_one_name_are_runs_of_a_group():
    data = together(curves(np.random.default_rng(6), 8, 0.01))
    named = el.Observations(data.group, data.compute, data.loss, None, data.seed)
    one, other = (el.fit_power_law(d, resamples=100).laws[0] for d in (data, named))
    assert (one.a, one.a_interval, one.num_runs) == (other.a, other.a_interval, other.num_runs)
    assert one.num_runs > len(set(data.group)) - 2
