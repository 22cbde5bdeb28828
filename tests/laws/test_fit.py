from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from einlinear.laws.law import BELOW
from kit.scaling import LINF, A, curves, law, optima, together


@settings(max_examples=25)
@given(st.floats(0.05, 0.8), st.floats(0.5, 3.0), st.floats(0.0, 2.0))
def test_exact_curves_give_the_law_back(a, top, linf):
    compute = np.geomspace(1e6, 1e11, 12)
    b = top * 1e6**a  # the part that can be reduced is `top` at the start
    data = el.Observations([str(i) for i in range(12)], compute, law(compute, a, b, linf))
    found = el.fit_power_law(data, resamples=0).laws[0]
    assert (found.a, found.linf) == (pytest.approx(a, rel=1e-3), pytest.approx(linf, abs=1e-3))
    assert found.b == pytest.approx(b, rel=2e-2)
    assert found.rms < 1e-5
    assert found.decades == pytest.approx(5 * 9 / 11)  # without both ends
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


@pytest.mark.parametrize("points", ["inner", "frontier", "all"])
@pytest.mark.parametrize("linf", ["fitted", "shared", 1.5])
def test_one_run_far_off_at_an_end_does_not_matter(points, linf):
    run, compute, loss, name = optima(np.random.default_rng(9), 20, 0.002)
    for place, factor in ((1, 100), (1, 1e6), (19, 1e6)):  # after the end, which is left out
        wrong = loss.copy()
        wrong[[0, place]] *= factor
        data = el.Observations(run, compute, wrong, name)
        found = el.fit_power_law(data, linf=linf, points=points, resamples=0).laws[0]
        assert found.a == pytest.approx(A, rel=0.05)
        assert found.linf == pytest.approx(LINF, rel=0.05)


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


def test_rows_written_twice_count_once():
    data = together(curves(np.random.default_rng(3), 8, 0.005))
    twice = data.take(np.r_[np.arange(len(data)), np.arange(100)])
    for how in ({}, {"points": "frontier"}, {"method": "paper", "linf": 1.2}):
        one, other = (el.fit_power_law(d, resamples=20, **how).laws[0] for d in (data, twice))
        assert one == other
    one, other = (el.frontier(d, hull=True, linf=1.2) for d in (data, twice))
    assert len(one) == len(other)


@pytest.mark.parametrize("scale", [1e-9, 1e16])
@pytest.mark.parametrize("unit", [1e-3, 1e6])
def test_units_of_compute_and_loss_do_not_matter(scale, unit):
    random = np.random.default_rng(12)
    run, compute, loss, name = optima(random, 14, 0.005)
    one = el.fit_power_law(el.Observations(run, compute, loss, name), resamples=40).laws[0]
    other = el.Observations(run, compute * scale, loss * unit, name)
    found = el.fit_power_law(other, resamples=40).laws[0]
    assert found.a == pytest.approx(one.a, rel=1e-4)
    assert found.linf == pytest.approx(one.linf * unit, rel=1e-4)
    assert found.a_interval == pytest.approx(one.a_interval, rel=1e-3)
    assert found.loss(1e8 * scale) == pytest.approx(one.loss(1e8) * unit, rel=1e-5)


def test_a_law_does_not_depend_on_other_structures():
    random = np.random.default_rng(13)
    calm = optima(random, 20, 0.003)
    wild = optima(random, 60, 0.2, name="btt")
    alone = el.fit_power_law(together(calm), points="all", resamples=0)["dense"]
    found = el.fit_power_law(together(calm, wild), points="all", resamples=0)["dense"]
    assert (found.a, found.linf) == (pytest.approx(alone.a), pytest.approx(alone.linf))


def test_a_seed_that_went_wrong_leaves_frontier_and_law_as_they_are():
    data = together(curves(np.random.default_rng(14), 9, 0.0))
    bad = np.isin(data.run, ["dense 4", "dense 13", "dense 20"])  # one of three seeds, three sizes
    loss = np.where(bad, 2 * data.loss, data.loss)
    wrong = el.Observations(data.run, data.compute, loss, None, data.seed, data.group)
    good, found = (el.fit_power_law(d, resamples=0).laws[0] for d in (data, wrong))
    assert (found.num_points, found.compute_range) == (good.num_points, good.compute_range)
    assert found.a == pytest.approx(good.a, rel=0.05)


def test_compute_beyond_the_points_is_marked():
    data = together(optima(np.random.default_rng(15), 12, 0.0))
    found = el.fit_power_law(data, resamples=0)
    least, most = found.points.compute.min(), found.points.compute.max()
    assert found.laws[0].compute_range == (least, most)
    marks = [found.laws[0].is_extrapolated(c) for c in (least / 1.1, least, most, most * 1.1)]
    assert marks == [True, False, False, True]


@pytest.mark.parametrize("points", ["inner", "frontier", "all"])
@pytest.mark.parametrize("linf", ["fitted", "shared", 0.0])
def test_losses_from_one_end_of_the_range_to_the_other(points, linf):
    """Nothing overflows: warnings are errors here."""
    compute = np.geomspace(1e-90, 1e90, 9)
    for loss in (np.geomspace(1e100, 1e-100, 9), np.r_[1e100, np.geomspace(2, 1, 7), 1e-100]):
        data = el.Observations(list("abcdefghi"), compute, loss)
        found = el.fit_power_law(data, points=points, linf=linf, resamples=5).laws[0]
        assert found.a > 0


def test_a_law_far_beyond_its_points():
    compute = 10.0 ** np.arange(2, 9)
    data = el.Observations(list("abcdefg"), compute, 2 * compute**-0.005)
    found = el.fit_power_law(data, linf=0.0, points="frontier", resamples=0).laws[0]
    assert found.compute(1e-3) == np.inf
    with pytest.raises(el.EinlinearError, match=r"compute is 0\n.*\n.*between 100 and 1e"):
        found.loss(0)


def extreme(compute=4, loss=2.4):
    return el.Observations(list("abcde"), [1, 2, 3, 3.5, compute], [4.0, 3.0, 2.5, 2.45, loss])


ONE = el.Observations(["a", "b", "c", "d"], [1, 2, 3, 4], [4.0, 3.0, 2.5, 2.4])
SAME = el.Observations(["a", "b", "c", "d"], [1, 1, 3, 3], [4.0, 3.9, 2.5, 2.6])
RISING = el.Observations(list("abcdef"), 10.0 ** np.arange(6), 10 ** (0.08 * np.arange(6)))
FLAT = el.Observations(list("abcdef"), 10.0 ** np.arange(6), np.ones(6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: el.fit_power_law(ONE, linf=2.4), "linf is 2.4, the lowest loss is 2.4"),
        (lambda: el.fit_power_law(ONE, linf="free"), "linf is 'free'"),
        (lambda: el.fit_power_law(ONE, method="ours"), "method is 'ours'"),
        (lambda: el.fit_power_law(ONE, points="some"), "points is 'some'"),
        (lambda: el.fit_power_law(ONE, method="paper"), "method is \"paper\", linf 'fitted'"),
        (lambda: el.fit_power_law(ONE, level=90), "level is 90"),
        (lambda: el.fit_power_law(ONE, resamples=-1), "resamples"),
        (lambda: el.fit_power_law(ONE, level="90"), "level is '90'"),
        (lambda: el.fit_power_law(ONE, seed=-1), "seed is -1"),
        (lambda: el.fit_power_law(ONE, linf=None), "linf is None"),
        (lambda: el.fit_power_law(ONE, linf=True), "linf is True"),
        (
            lambda: el.fit_power_law(ONE.take(np.arange(2)), points="frontier"),
            "'all' has 2 usable points",
        ),
        (
            lambda: el.fit_power_law(ONE),
            "'all' has 2 usable points .*\n.*ends .*\n.*points=\"frontier\"",
        ),
        (
            lambda: el.fit_power_law(SAME, points="all"),
            "'all' has 2 usable points at different compute",
        ),
        (lambda: el.fit_power_law(SAME, points="frontier"), "'all' has 2 usable points"),
        (lambda: el.fit_power_law(RISING, points="all"), "loss of 'all' does not fall .*-0.08"),
        (lambda: el.fit_power_law(FLAT, points="all", linf=0.0), "loss of 'all' does not fall"),
        (lambda: el.fit_power_law(ONE, linf=0.0, resamples=0)["btt"], "no law for 'btt'"),
        (lambda: el.frontier(ONE, hull=True, linf=3.0), "linf is 3, the lowest loss is 2.4"),
        (lambda: el.frontier(ONE, hull=True, linf=None), "linf is None"),
        (lambda: el.frontier(ONE, tolerance=-1.0), "tolerance is -1.0"),
        (lambda: el.frontier(ONE, tolerance="x"), "tolerance is 'x'"),
        (lambda: el.fit_power_law(None), "observations are None"),
        (lambda: el.fit_power_law(extreme(loss=5e-324)), "'all' has a loss of 4.94e-324"),
        (lambda: el.fit_power_law(extreme(compute=1e300)), "'all' has a compute of 1e\\+300"),
        (lambda: el.linf_table(ONE, 0.5), "values are 0.5"),
        (lambda: el.linf_table(ONE, ["a"]), "linf is 'a'"),
        (lambda: el.fit_power_law(ONE.take(np.arange(1))), "'all' has 0 usable points"),
        (lambda: el.frontier(el.Observations(["a"], [0], [1])), "no point with compute above 0"),
        (lambda: el.compute_multiplier(ONE), "no structure 'dense' in the observations"),
        (lambda: el.compute_multiplier(ONE, "all"), "'all' is the only structure"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(el.EinlinearError, match=message):
        call()


def test_a_law_so_steep_that_b_is_no_number():
    """Losses that fall within one per cent of compute: b underflows, its logarithm does not."""
    compute = np.array([2.50e-3, 2.51e-3, 2.52e-3, 2.53e-3, 2.54e-3])
    loss = 0.4 + np.exp(-400 * np.log(compute / 2.5e-3))
    table = el.Observations(run=["a"] * 5, compute=compute, loss=loss)
    law = el.fit_power_law(table, linf=0.4, points="all", resamples=0).laws[0]
    assert law.b == 0.0
    assert law.loss(2.52e-3) == pytest.approx(loss[2], rel=1e-6)
    assert law.compute(loss[3]) == pytest.approx(2.53e-3, rel=1e-6)
    assert law.loss(1e-9) == np.inf
