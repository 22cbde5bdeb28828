import csv
import json
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.studies.law import BELOW
from einlinear.studies.record import Counts, Point
from einlinear.studies.resample import draw, make_column, make_problem

A, B, LINF = 0.3, 300.0, 1.5


def law(compute, a=A, b=B, linf=LINF):
    return linf + b * compute**-a


def optima(random, runs, noise, *, name="dense", factor=1.0, decades=(6, 10)):
    """One point for each run, at the law; with `factor` times less compute."""
    compute = np.geomspace(10.0 ** decades[0], 10.0 ** decades[1], runs)
    compute = compute * np.exp(0.1 * random.normal(size=runs))
    loss = law(compute) * np.exp(noise * random.normal(size=runs))
    return [f"{name} {i}" for i in range(runs)], compute / factor, loss, [name] * runs


def together(*parts):
    return el.Observations(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def beats(c, loss, other_c, other_loss):
    return other_c <= c and other_loss <= loss and (other_c, other_loss) != (c, loss)


SOME_POINTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from("ab")), min_size=1, max_size=25
).filter(lambda points: {s for c, _, s in points} == {s for c, _, s in points if c})


@given(SOME_POINTS)
def test_the_frontier_is_what_no_point_beats(points):
    compute, loss, names = zip(*points, strict=True)
    runs = [str(i) for i in range(len(points))]
    found = el.frontier(el.Observations(runs, compute, loss, names))
    expected = {
        (c, v, s)
        for c, v, s in points
        if c and not any(t == s and oc and beats(c, v, oc, ov) for oc, ov, t in points)
    }
    rows = list(zip(found.compute, found.loss, found.structure, strict=True))
    assert set(rows) == expected
    assert len(rows) == len(expected)


def hull_by_force(points, tolerance):
    """A point is near the hull if no line between two others is far below it."""
    front = [p for p in points if not any(beats(*p, *q) for q in points)]
    last = max(c for c, _ in front)
    near = []
    for c, loss in points:
        heights = [log(v) for x, v in front if x == c]
        for left, low in front:
            for right, high in front:
                if left < c < right:
                    share = (log(c) - log(left)) / (log(right) - log(left))
                    heights.append((1 - share) * log(low) + share * log(high))
        if c <= last and heights and log(loss) <= min(heights) + log(1 + tolerance) + 1e-9:
            near.append((c, loss))
    return sorted(near)


@given(
    st.dictionaries(st.integers(1, 30), st.integers(20, 60), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.04]),
)
def test_the_hull_by_brute_force(points, tolerance):
    rows = [(float(c), float(loss)) for c, loss in points.items()]
    runs = [str(i) for i in range(len(rows))]
    compute, loss = zip(*rows, strict=True)
    data = el.Observations(runs, compute, np.array(loss) + 2.0)
    found = el.frontier(data, hull=True, linf=2.0, tolerance=tolerance)
    assert sorted(zip(found.compute, found.loss - 2.0, strict=True)) == hull_by_force(
        rows, tolerance
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_hull_of_points_near_a_law_by_brute_force(seed):
    _, compute, loss, _ = optima(np.random.default_rng(seed), 30, 0.03)
    rows = list(zip(compute.tolist(), loss.tolist(), strict=True))
    data = el.Observations([str(i) for i in range(30)], compute, loss)
    found = el.frontier(data, hull=True, tolerance=0.01)
    assert sorted(zip(found.compute, found.loss, strict=True)) == hull_by_force(rows, 0.01)


@pytest.mark.parametrize("seed", range(5))
def test_only_points_behind_many_runs_are_dropped(seed):
    random = np.random.default_rng(seed)
    compute, loss = random.uniform(1, 9, (2, 300))
    run = random.integers(0, 40, 300)
    data = el.Observations([str(r) for r in run], compute, loss)
    kept = make_problem(data, "frontier", "given").columns[0].index
    for i in range(300):
        better = (compute <= compute[i]) & (loss <= loss[i]) & (np.arange(300) != i)
        behind = set(run[better])
        if run[i] in behind:
            assert i not in kept
        elif len(behind) < 8:
            assert i in kept
    assert 0 < len(kept) < 300


@given(st.floats(0.05, 0.8), st.floats(0.5, 3.0), st.floats(0.0, 2.0))
def test_exact_curves_give_the_law_back(a, top, linf):
    compute = np.geomspace(1e6, 1e11, 12)
    b = top * 1e6**a  # the part that can be reduced is `top` at the start
    data = el.Observations([str(i) for i in range(12)], compute, law(compute, a, b, linf))
    found = el.fit_power_law(data, resamples=0).laws[0]
    assert (found.a, found.linf) == (pytest.approx(a, rel=1e-3), pytest.approx(linf, abs=1e-3))
    assert found.b == pytest.approx(b, rel=2e-2)
    assert found.rms < 1e-5
    assert found.decades == pytest.approx(5)
    assert found.loss(1e8) == pytest.approx(law(1e8, a, b, linf), rel=1e-4)
    assert found.compute(found.loss(1e8)) == pytest.approx(1e8, rel=1e-6)


def test_noise_is_averaged_out_and_outliers_do_not_matter():
    random = np.random.default_rng(0)
    run, compute, loss, name = optima(random, 200, 0.005)
    loss[::20] *= 1.5  # one run in twenty went wrong
    found = el.fit_power_law(el.Observations(run, compute, loss, name), points="all").laws[0]
    assert found.a == pytest.approx(A, abs=0.02)
    assert found.linf == pytest.approx(LINF, abs=0.02)
    assert found.a_interval[0] < A < found.a_interval[1]
    assert found.rms == pytest.approx(log(1.5) / 20**0.5, rel=0.1)  # they are in the residuals


def test_goodness_of_fit_by_hand():
    random = np.random.default_rng(1)
    data = together(optima(random, 20, 0.02))
    found = el.fit_power_law(data, points="all", resamples=0).laws[0]
    residual = [log(v) - log(found.loss(c)) for c, v in zip(data.compute, data.loss, strict=True)]
    spread = np.log(data.loss) - np.log(data.loss).mean()
    assert found.rms == pytest.approx(np.sqrt(np.mean(np.square(residual))))
    assert found.r2 == pytest.approx(1 - np.sum(np.square(residual)) / np.sum(spread**2))
    assert (found.num_points, found.num_runs) == (20, 20)


def test_no_other_law_has_a_lower_cost():
    """The fit against a fine grid of laws, by the same cost written down again."""
    random = np.random.default_rng(2)
    data = together(optima(random, 25, 0.02))
    found = el.fit_power_law(data, points="all", resamples=0).laws[0]

    def cost(a, b, linf, bend):
        size = np.abs(np.log(data.loss) - np.log(law(data.compute, a, b, linf)))
        return np.where(size < bend, size**2 / 2, bend * (size - bend / 2)).sum()

    residual = np.log(data.loss) - np.log([found.loss(c) for c in data.compute])
    bend = 1.345 * 1.4826 * np.median(np.abs(residual))
    best = cost(found.a, found.b, found.linf, bend)
    middle = exp(np.log(data.compute).mean())
    for da in np.linspace(-0.03, 0.03, 13):
        for dlinf in np.linspace(-0.05, 0.05, 11):
            for rise in np.linspace(0.97, 1.03, 13):
                a, linf = found.a + da, found.linf + dlinf
                b = rise * (found.loss(middle) - linf) * middle**a
                assert cost(a, b, linf, bend) >= best * (1 - 1e-4)


def covers(seed, runs):
    data = together(optima(np.random.default_rng(seed), runs, 0.01))
    found = el.fit_power_law(data, resamples=200, seed=seed).laws[0]
    truth = (LINF, B, A)
    ends = (found.linf_interval, found.b_interval, found.a_interval)
    return [low <= value <= high for value, (low, high) in zip(truth, ends, strict=True)]


def test_intervals_cover():
    share = np.mean([covers(seed, 16) for seed in range(200)], axis=0)
    assert (share >= 0.80).all()
    assert (share <= 0.97).all()


def test_a_shared_linf_is_one_number_and_a_given_one_stays():
    random = np.random.default_rng(3)
    data = together(optima(random, 20, 0.003), optima(random, 20, 0.003, name="btt", factor=4.0))
    shared = el.fit_power_law(data, linf="shared", resamples=50)
    assert shared["dense"].linf == shared["btt"].linf == pytest.approx(LINF, abs=0.03)
    assert shared["dense"].linf_interval == shared["btt"].linf_interval
    alone = el.fit_power_law(data, resamples=50)
    assert alone["dense"].linf != alone["btt"].linf
    given = el.fit_power_law(data, linf=1.4, resamples=50)
    assert given["btt"].linf == 1.4
    assert given["btt"].linf_interval == (1.4, 1.4)
    assert "btt" in str(given)


def test_the_law_of_a_frontier_reaches_all_of_it():
    compute = np.geomspace(1e6, 1e8, 10)
    loss = np.r_[np.linspace(3, 2, 5), np.linspace(1.99, 1.95, 5)]
    data = el.Observations([str(i) for i in range(10)], compute, loss)
    found = el.fit_power_law(data, resamples=20).laws[0]
    assert found.linf <= BELOW * 1.95
    assert found.linf_interval[0] >= 0


def test_the_recipe_of_the_paper_is_least_squares_on_the_hull():
    random = np.random.default_rng(4)
    data = together(optima(random, 40, 0.05))
    found = el.fit_power_law(data, linf=1.0, method="paper", tolerance=0.03, resamples=50)
    points = el.frontier(data, hull=True, linf=1.0, tolerance=0.03)
    slope, offset = np.polyfit(np.log(points.compute), np.log(points.loss - 1.0), 1)
    assert found.laws[0].a == pytest.approx(-slope)
    assert log(found.laws[0].b) == pytest.approx(offset)
    assert len(found.points) == len(points) == found.laws[0].num_points < 40
    assert found.laws[0].a_interval[0] < found.laws[0].a < found.laws[0].a_interval[1]


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
    whole = el.fit_power_law(data, resamples=0)
    assert inner.laws[0].a == pytest.approx(A, rel=0.01)
    assert inner.laws[0].linf == pytest.approx(LINF, rel=0.01)
    assert abs(whole.laws[0].a - A) > 3 * abs(inner.laws[0].a - A)
    front = el.frontier(data)
    ends = {front.group[front.compute.argmin()], front.group[front.compute.argmax()]}
    kept = sorted(c for c, g in zip(front.compute, front.group, strict=True) if g not in ends)
    assert sorted(inner.points.compute) == kept
    assert len(kept) < len(front)


def test_groups_are_drawn_and_then_their_seeds():
    groups = np.array(["one", "two", "two", "four", "four", "four", "four"])
    runs = [str(i) for i in range(7)]
    data = el.Observations(runs, np.arange(1, 8), np.ones(7), group=groups)
    counts = draw(make_column(data, "all"), np.random.default_rng(0), 4000)
    drawn = [counts[:, groups == g].sum(-1) / n for g, n in (("one", 1), ("two", 2), ("four", 4))]
    assert (np.mod(drawn, 1) == 0).all()
    assert (np.sum(drawn, axis=0) == 3).all()
    # Variances: groups 2/3; a seed of n, n draws of share 1/n for each group drawn, adds (n - 1)/n.
    # The mean of 4000 has a deviation of 0.02 at most.
    assert counts.mean(0) == pytest.approx(np.ones(7), abs=0.1)
    expected = [2 / 3 + (n - 1) / n for n in (1, 2, 2, 4, 4, 4, 4)]
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


@given(st.floats(0.2, 8.0))
def test_a_curve_shifted_by_a_factor_has_that_multiplier(factor):
    random = np.random.default_rng(6)
    data = together(optima(random, 16, 0.0), optima(random, 16, 0.0, name="btt", factor=factor))
    found = el.compute_multiplier(data, resamples=0)["btt"]
    assert found.mean == pytest.approx(factor, rel=1e-3)
    assert found.median == pytest.approx(factor, rel=1e-3)
    assert found.std < 1e-2 * factor
    assert found.values == pytest.approx(np.full(41, factor), rel=1e-3)


def test_the_multiplier_of_noisy_curves_is_inside_its_interval():
    random = np.random.default_rng(7)
    data = together(optima(random, 30, 0.003), optima(random, 30, 0.003, name="btt", factor=3.0))
    found = el.compute_multiplier(data)["btt"]
    inside = ~found.is_extrapolated
    assert found.mean_interval[0] < 3 < found.mean_interval[1] < 5
    assert found.median_interval[0] < 3 < found.median_interval[1] < 5
    assert (found.low[inside] < 3.3).all()
    assert (found.high[inside] > 2.7).all()
    assert (found.low <= found.high).all()


def test_what_is_beyond_the_data_is_marked():
    random = np.random.default_rng(8)
    early = optima(random, 15, 0.0, decades=(6, 8))
    late = optima(random, 15, 0.0, name="btt", decades=(7, 10))
    losses = np.linspace(law(2e10), law(5e5), 30)
    found = el.compute_multiplier(together(early, late), losses=losses, resamples=0)["btt"]
    low = max(early[2].min(), late[2].min())
    high = min(early[2].max(), late[2].max())
    assert (found.is_extrapolated == ((losses < low) | (losses > high))).all()
    assert 0 < found.is_extrapolated.sum() < 30
    covered = (late[2] >= early[2].min()) & (late[2] <= early[2].max())
    assert (found.num_points, found.mean_is_extrapolated) == (covered.sum(), False)
    apart = optima(random, 15, 0.0, name="btt", decades=(9, 10))
    found = el.compute_multiplier(together(early, apart), resamples=0)["btt"]
    assert (found.num_points, found.mean_is_extrapolated) == (15, True)
    assert found.mean == pytest.approx(1, rel=0.02)


def test_mean_deviation_and_median_by_hand():
    random = np.random.default_rng(9)
    data = together(optima(random, 20, 0.01), optima(random, 21, 0.01, name="btt", factor=2.0))
    found = el.compute_multiplier(data, linf=1.3, resamples=0)["btt"]
    reference = el.fit_power_law(data, linf=1.3, resamples=0)["dense"]
    front = el.frontier(data)
    of_dense, of_btt = front.of("dense"), front.of("btt")
    ratios = [
        reference.compute(v) / c
        for c, v in zip(of_btt.compute, of_btt.loss, strict=True)
        if of_dense.loss.min() <= v <= of_dense.loss.max()
    ]
    assert found.num_points == len(ratios)
    assert found.mean == pytest.approx(np.mean(ratios))
    assert found.std == pytest.approx(np.std(ratios, ddof=1))
    assert found.median == pytest.approx(np.median(ratios))


def test_the_table_of_linf():
    random = np.random.default_rng(10)
    data = together(optima(random, 20, 0.0), optima(random, 20, 0.0, name="btt", factor=2.0))
    rows = el.linf_table(data, [0.0, LINF])
    assert [(row.linf, row.structure) for row in rows] == [
        (linf, name) for linf in (0.0, LINF) for name in ("dense", "btt")
    ]
    assert rows[2].a == pytest.approx(A)
    assert rows[0].a < 0.5 * A
    assert rows[0].rms > 100 * rows[2].rms
    assert rows[3].multiplier == pytest.approx(2)
    assert len(el.linf_table(data)) == 10


def record(seed=0, structure="btt", losses=(4.5, 3.0, None, 2.5)):
    curve = tuple(
        Point(10 * i, 100 * i, 700 * i, 2.0 * i, 0.1 * i, loss, None, 0.1)
        for i, loss in enumerate(losses)
    )
    config = el.RunConfig(structure=structure, seed=seed, width=64)
    counts = Counts(33, 7, 4, 1, 1, 1)
    return el.RunRecord(config, "finished", 30, curve, "token", counts, 5, {})


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ("macs", [0, 700, 2100]),
        ("linear_macs", [0, 400, 1200]),
        ("seconds", [0, 2, 6]),
        ("params", [33] * 3),
        ("units", [0, 100, 300]),
    ],
)
def test_observations_of_records(compute, expected):
    data = el.Observations.from_records([record(0), record(1)], compute)
    assert data.compute.tolist() == expected * 2
    assert data.loss.tolist() == [4.5, 3.0, 2.5] * 2
    assert data.left_out == 2
    assert data.seed.tolist() == [0] * 3 + [1] * 3
    assert len(set(data.run)) == 2
    assert len(set(data.group)) == 1
    assert set(data.structure) == {"btt"}
    assert set(data.more["width"]) == {64}


def test_records_are_observations_by_their_multiply_adds():
    found = el.frontier([record(0), record(1, "dense")])
    assert found.compute.tolist() == [700, 2100] * 2  # the start has no compute


def test_tables_are_read(tmp_path):
    rows = [
        {"run": "a", "compute": 1e3, "loss": 2.5, "structure": "btt", "seed": 3, "note": "x"},
        {"run": "b", "compute": 2e3, "loss": None, "structure": "dense", "seed": 4, "note": "y"},
        {"run": "c", "compute": 0, "loss": 1.5, "structure": "dense", "seed": 5, "note": "z"},
    ]
    lines = tmp_path / "runs.jsonl"
    lines.write_text("\n\n".join(json.dumps(row) for row in rows))
    table = tmp_path / "runs.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for path in (lines, table):
        data = el.read_observations(path)
        assert data.run.tolist() == ["a", "c"]
        assert data.compute.tolist() == [1e3, 0]
        assert data.loss.tolist() == [2.5, 1.5]
        assert data.structures == ("btt", "dense")
        assert data.seed.tolist() == [3, 5]
        assert data.more["note"].tolist() == ["x", "z"]
        assert data.left_out == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv holds no observations"),
        ("a.csv", "run,compute,loss\n", "a.csv holds no observations"),
        ("a.csv", "run,loss\na,2\n", "a.csv, line 2: there is no 'compute'"),
        ("a.csv", "run,compute,loss\na,1,2\nb,1\n", "line 3: there is no 'loss'"),
        ("a.csv", "run,compute,loss\na,1,2\nb,1e9 F,2\n", "line 3: compute is '1e9 F'"),
        ("a.csv", "run,compute,loss\na,-4,2\n", "line 2: compute is -4"),
        ("a.csv", "run,compute,loss\na,inf,2\n", "line 2: compute is inf"),
        ("a.csv", "run,compute,loss\na,4,-2\n", "line 2: loss is -2"),
        ("a.csv", "run,compute,loss\na,4,low\n", "line 2: loss is 'low'"),
        ("a.csv", "run,compute,loss\na,4,2,7\n", "line 2: there are more values"),
        ("a.csv", "run,compute,loss\na,4,\n", "no observations \\(1 points had no loss"),
        ("a.csv", "run,compute,loss,seed\na,4,2,1.5\n", "line 2: seed is '1.5'"),
        ("a.jsonl", '{"run": 1, "compute": 2, "loss": 3}\n[1]\n', "line 2: there is no JSON"),
        ("a.jsonl", '{"run": 1, "compute": 2, "loss"\n', "line 1: there is no JSON"),
        ("a.jsonl", '{"run": 1, "compute": true, "loss": 3}\n', "line 1: compute is True"),
        ("a.jsonl", '\n{"run": 1, "loss": 3}\n', "line 2: there is no 'compute'"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(el.EinlinearError, match=message):
        el.read_observations(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(el.EinlinearError, match="cannot read"):
        el.read_observations(tmp_path / "none.csv")


ONE = el.Observations(["a", "b", "c", "d"], [1, 2, 3, 4], [4.0, 3.0, 2.5, 2.4])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: el.Observations(["a"], [1.0, 2.0], [1.0]), "compute has 2 values, run has 1"),
        (lambda: el.Observations(["a"], [-1.0], [1.0]), "point 0 of the observations: compute"),
        (lambda: el.Observations(["a"], [1.0], [0.0]), "point 0 of the observations: loss is 0"),
        (lambda: el.Observations.from_records([]), "there are no observations"),
        (lambda: el.Observations.from_records([record()], "flops"), "compute is 'flops'"),
        (lambda: el.fit_power_law(ONE, linf=2.4), "linf is 2.4, the lowest loss is 2.4"),
        (lambda: el.fit_power_law(ONE, linf="free"), "linf is 'free'"),
        (lambda: el.fit_power_law(ONE, method="ours"), "method is 'ours'"),
        (lambda: el.fit_power_law(ONE, points="some"), "points is 'some'"),
        (lambda: el.fit_power_law(ONE, method="paper"), "method is \"paper\", linf 'fitted'"),
        (lambda: el.fit_power_law(ONE, level=90), "level is 90"),
        (lambda: el.fit_power_law(ONE, resamples=-1), "resamples"),
        (lambda: el.fit_power_law(ONE.take(np.arange(2))), "'all' has 2 points"),
        (lambda: el.fit_power_law(ONE, linf=0.0, resamples=0)["btt"], "no law of 'btt'"),
        (lambda: el.frontier(ONE, hull=True, linf=3.0), "linf is 3, the lowest loss is 2.4"),
        (lambda: el.frontier(ONE, tolerance=-1.0), "tolerance is -1.0"),
        (lambda: el.frontier(el.Observations(["a"], [0], [1])), "no point of some compute"),
        (lambda: el.compute_multiplier(ONE), "no structure 'dense' in the observations"),
        (lambda: el.compute_multiplier(ONE, "all"), "no structure but 'all'"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(el.EinlinearError, match=message):
        call()


def test_a_bad_grid_of_losses():
    random = np.random.default_rng(11)
    data = together(optima(random, 9, 0.0), optima(random, 9, 0.0, name="btt"))
    with pytest.raises(el.EinlinearError, match="losses are finite numbers above 0"):
        el.compute_multiplier(data, losses=[-1.0])
