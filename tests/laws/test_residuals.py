"""Laws that do not hold are told from those that do: linf at a bound, residuals with a bend."""

import re

import numpy as np
import pytest

import einlinear as el
from einlinear.laws.fit import is_overshot, is_undercut, percent_of_loss
from einlinear.laws.law import BELOW
from einlinear.laws.residuals import in_thirds, is_systematic
from kit.scaling import curves, optima, together

LOWEST = 2.1640337


def bent(top=1.0, seeds=1):
    """Dense layers reach LOWEST by a law; the losses of others stay at 2.6, as no law does."""
    place = np.repeat(np.linspace(0, 1, 12), seeds)
    compute = 10 ** (12 + 2 * place)
    dense = LOWEST + 0.5 * (np.exp(-3 * place) - np.exp(-3))
    flat = 2.6 + top * np.exp(-6 * place)
    size = np.repeat(np.arange(12), seeds)
    return el.Observations(
        run=[f"{name} {k}" for name in "ab" for k in range(12 * seeds)],
        compute=np.tile(compute, 2),
        loss=np.r_[dense, flat],
        structure=np.repeat(["dense", "low_rank"], 12 * seeds),
        group=[f"{name} {k}" for name in "ab" for k in size],
    )


def test_linf_at_its_bound_is_said():
    """A report had linf 2.164031, lowest loss 2.164034, 0.1 off at both ends."""
    data = bent()
    fit = el.fit_power_law(data, linf="shared", points="frontier", resamples=60)
    assert fit["dense"].linf == fit["low_rank"].linf == pytest.approx(BELOW * LOWEST, abs=1e-9)
    assert [law.at_bound for law in fit.laws] == ["lowest loss", "lowest loss"]
    assert fit.at_bound == ("dense", "low_rank")
    flat = data.of("low_rank")
    off = flat.loss - [fit["low_rank"].loss(compute) for compute in flat.compute]
    assert off[0] > 0.1
    assert off[-1] > 0.1
    assert fit["low_rank"].is_systematic
    assert not fit["dense"].is_systematic
    first, middle, last = fit["low_rank"].thirds
    assert first > 0.01 > 0 > middle
    assert last > 0.01
    assert str(fit).splitlines()[4:] == [
        "dense: linf is at its bound (lowest loss), so it is not measured",
        "low_rank: linf is at its bound (lowest loss), so it is not measured",
        "low_rank: the points are off the law by +1.4 %, -2.9 %, +3.1 % in the first, middle and "
        "last third, more than noise explains",
    ]


@pytest.mark.parametrize("points", ["inner", "frontier"])
@pytest.mark.parametrize("linf", ["shared", "fitted"])
def test_no_linf_is_above_a_loss_that_was_observed(points, linf):
    """Neither the estimate nor its interval, though inner points and samples lack the lowest."""
    data = bent(top=1.5, seeds=2)
    fit = el.fit_power_law(data, linf=linf, points=points, resamples=100)
    for law in fit.laws:
        lowest = LOWEST if linf == "shared" else data.of(law.structure).loss.min()
        assert law.linf < lowest
        assert law.linf_interval[1] < lowest


def test_a_limit_of_zero_is_a_bound():
    compute = np.geomspace(1e6, 1e9, 10)
    data = el.Observations(list("abcdefghij"), compute, 8 - 0.5 * np.log10(compute))
    law = el.fit_power_law(data, resamples=0).laws[0]
    assert (law.linf, law.at_bound) == (0.0, "zero")
    given = el.fit_power_law(data, linf=0.0, resamples=0).laws[0]
    assert given.at_bound == ""  # it was not looked for


@pytest.mark.parametrize(
    "make",
    [
        lambda random: optima(random, 20, 0.02),
        lambda random: optima(random, 8, 0.005),
        lambda random: curves(random, 8, 0.005),
        lambda random: curves(random, 8, 0.002, seeds=1),
    ],
)
def test_noise_is_not_systematic(make):
    random = np.random.default_rng(5)
    laws = [el.fit_power_law(together(make(random)), resamples=0).laws[0] for _ in range(20)]
    assert sum(law.is_systematic for law in laws) <= 1
    assert sum(law.at_bound == "lowest loss" for law in laws) == 0


def test_losses_below_a_law_are_seen_also_where_they_do_not_count():
    """The largest size is left out of the fit; here it is far better than the law there."""
    run, compute, loss, _ = optima(np.random.default_rng(6), 12, 0.0)
    columns = [run[-1] + "b", *run], np.r_[compute[-1], compute], np.r_[loss[-1], loss]
    columns += (None, None, [run[-1], *run])  # two seeds of the largest
    law = el.fit_power_law(el.Observations(*columns), resamples=0).laws[0]
    assert law.undercut < 1e-6
    columns[2][[0, -1]] *= 0.9
    fit = el.fit_power_law(el.Observations(*columns), resamples=0)
    assert fit.laws[0].undercut == pytest.approx(-np.log(0.9), rel=0.02)
    assert fit.warnings == ("all: some losses are below the law, by up to 10 %",)


def test_losses_before_the_points_of_a_law_do_not_count():
    """Runs begin at the loss of a guess, which is far below where a law leads to."""
    run, compute, loss, name, seed, group = curves(np.random.default_rng(3), 8, 0.002)
    data = el.Observations(run, compute, np.minimum(loss, 2.2), name, seed, group)
    law = el.fit_power_law(data, resamples=0).laws[0]
    assert law.loss(compute.min()) > 3
    assert not is_undercut(law)


@pytest.mark.parametrize("floor", [0.0, 1.65])
def test_losses_that_stay_above_a_law_are_seen(floor):
    """Beyond the points no loss is lower than before, so none of them is on the frontier."""
    run, compute, loss, name, seed, group = curves(np.random.default_rng(3), 8, 0.002)
    data = el.Observations(run, compute, np.maximum(loss, floor), name, seed, group)
    fit = el.fit_power_law(data, resamples=0)
    law = fit.laws[0]
    best = np.log(data.loss.min() / law.loss(compute.max()))
    assert is_overshot(law) == (best > 0.03) == (floor > 0)
    assert any("stay above the law" in text for text in fit.warnings) == (floor > 0)


@pytest.mark.parametrize("linf", ["shared", "fitted"])
def test_a_stray_run_moves_no_law(linf):
    random = np.random.default_rng(4)
    parts = [curves(random, 8, 0.004), curves(random, 8, 0.004, name="btt")]
    odd = ["odd"], [1e13], [1.2], ["dense"], [0], ["odd"]
    how = {"linf": linf, "resamples": 50}
    good = el.fit_power_law(together(*parts), **how)
    fit = el.fit_power_law(together(*parts, odd), **how)
    for name in ("dense", "btt"):
        assert fit[name].a == pytest.approx(good[name].a, rel=0.05)
        assert fit[name].linf_interval == pytest.approx(good[name].linf_interval, rel=0.03)
        assert not fit[name].at_bound
    assert [law.stray for law in fit.laws] == ["odd", ""]
    assert fit.warnings == (
        "dense: run odd is far below the law and all other runs; the bounds of linf ignore it",
    )


@pytest.mark.parametrize(("sizes", "seeds", "noise"), [(6, 3, 0.004), (18, 1, 0.001)])
def test_a_bend_is_seen_though_one_end_is_on_the_law(sizes, seeds, noise):
    off = noise * np.random.default_rng(1).normal(size=sizes * seeds)
    run = np.arange(sizes * seeds)
    bend = np.repeat([0.003, -0.013, 0.015], sizes * seeds // 3)
    assert is_systematic(bend + off, run, run // seeds)
    assert not is_systematic(off, run, run // seeds)
    assert not is_systematic(bend + 10 * off, run, run // seeds)


def test_a_printed_linf_is_inside_its_printed_interval():
    data = together(optima(np.random.default_rng(8), 24, 0.0005))
    row = str(el.fit_power_law(data, resamples=50)).splitlines()[1]
    for value, low, high in re.findall(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", row):
        assert float(low) <= float(value) <= float(high)
        assert low != high


def test_percent():
    assert percent_of_loss(np.log(1.5)) == pytest.approx(50)
    assert -percent_of_loss(-8.5) == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0], (1, 2, 3)),
        ([1.0, 3.0, 5.0, 7.0, 9.0, 11.0], (2, 6, 10)),
        ([1.0, 2.0, 2.0, 4.0], (1, 2, 4)),
    ],
)
def test_thirds(values, expected):
    assert in_thirds(np.array(values)) == expected
