"""Decisions against brute force: Gaussian posteriors refitted with every option."""

from dataclasses import replace

import numpy as np
import pytest

from einlinear.searches.decide import (
    HOPELESS,
    Choice,
    Outlook,
    best_option,
    draw_rival,
    look_ahead,
    narrowing,
)
from einlinear.searches.draws import Cost
from einlinear.searches.surrogate import Trials, fit_surrogate

ANCHOR = (2.65, 3.35)
TARGET = Cost(6.0, anchor=ANCHOR)
LEVELS, RUNGS = (-0.7, 0.0, 0.7), (-1.4, -0.7, 0.0, 0.7, 1.4)


@pytest.fixture(scope="module")
def belief():
    """Five candidates, the last without a run; all runs are of seed 0, and reach rung 2."""
    random = np.random.default_rng(3)
    offsets = np.array([0.0, -0.05, -0.02, 0.6])
    c, level, rung = (x.ravel() for x in np.meshgrid(range(4), range(3), range(3), indexing="ij"))
    m, t = np.array(LEVELS)[level], np.array(RUNGS)[rung]
    run = 3 * c + level
    loss = 0.8 + np.exp(-0.8 + offsets[c] - 0.3 * m) + np.exp(-1.0 + offsets[c] - 0.4 * t)
    noise = 0.003 * random.standard_normal(12)[run] + 0.002 * random.standard_normal(len(c))
    trials = Trials(c, run, 0 * c, m, t, loss * np.exp(noise))
    features = np.array([[0.0], [0.1], [0.2], [0.9], [0.15]])
    kernel = 0.5 * np.eye(5) + 0.5
    return fit_surrogate(trials, features, kernel, ANCHOR)


def option(candidate, level, rung, seed=0, run=None, cost=1.0):
    held = 3 * candidate + level if run is None and candidate < 4 and seed == 0 else -1
    return Choice(candidate, level, rung, seed, cost, LEVELS[level], RUNGS[rung], held)


def goal(belief, pair):
    """The derivatives of the difference at the target, at sizes that are best now, numerically."""
    _, m = belief.middle().best(TARGET)

    def apart(mean):
        loss = replace(belief, mean=mean).middle().at(m, TARGET.steps(m))
        return np.log(loss[0, pair[0]] / loss[0, pair[1]])

    step = 1e-5 * np.eye(len(belief.mean))
    return np.array([apart(belief.mean + s) - apart(belief.mean - s) for s in step]) / 2e-5


def variance_after(belief, pair, views):
    """The variance of the difference when losses were seen: every noise is a parameter.

    views: candidate, level, rung, seed and number of the run, -1 for a new one.
    """
    size, spreads = len(belief.mean), belief.spreads
    names = list(dict.fromkeys((c, level, seed) for c, level, _, seed, _ in views))
    new_seeds = sorted({seed for *_, seed, _ in views if seed >= belief.seeds})
    total = size + len(names) + len(new_seeds)
    covariance = np.zeros((total, total))
    covariance[:size, :size] = belief.covariance
    link, own = np.zeros((len(names), size)), np.full(len(names), spreads.run**2)
    for k, name in enumerate(names):
        run = next(view[4] for view in views if (view[0], view[1], view[3]) == name)
        if run >= 0:  # its noise is what its residuals leave: -weight * row * error of the rest
            link[k] = -belief.runs.weight[run] * belief.runs.row[run]
            own[k] = belief.runs.variance[run]
    runs = slice(size, size + len(names))
    covariance[runs, :size] = link @ belief.covariance
    covariance[:size, runs] = covariance[runs, :size].T
    covariance[runs, runs] = link @ belief.covariance @ link.T + np.diag(own)
    for k, _ in enumerate(new_seeds):
        covariance[size + len(names) + k, size + len(names) + k] = spreads.seed**2
    wanted = np.zeros(total)
    wanted[:size] = goal(belief, pair)
    for c, level, rung, seed, _ in views:  # one loss after the other
        row = np.zeros(total)
        row[:size] = belief.rows(np.array([c]), np.array([LEVELS[level]]), np.array([RUNGS[rung]]))[
            0
        ]
        if seed < belief.seeds:
            row[size - belief.seeds + seed] = 1.0
        else:
            row[size + len(names) + new_seeds.index(seed)] = 1.0
        row[size + names.index((c, level, seed))] = 1.0
        spread = covariance @ row
        covariance = covariance - np.outer(spread, spread) / (row @ spread + spreads.noise**2)
    return wanted @ covariance @ wanted


CASES = {
    "longer": [option(1, 1, 3), option(1, 1, 4)],
    "new seed": [option(1, 0, rung, seed=1) for rung in range(3)],
    "new candidate": [option(4, 2, rung, run=-1) for rung in range(5)],
}


@pytest.mark.parametrize("name", CASES)
def test_narrowing_is_what_a_refit_would_give(belief, name):
    options, pair = CASES[name], (1, 4 if name == "new candidate" else 2)
    before = variance_after(belief, pair, [])
    after = []
    for count in range(1, len(options) + 1):
        views = [(o.candidate, o.level, o.rung, o.seed, o.run) for o in options[:count]]
        after.append(variance_after(belief, pair, views))
    found = narrowing(belief, TARGET, pair, options[::-1])[::-1]
    np.testing.assert_allclose(found, before - np.array(after), rtol=1e-4)
    assert (np.diff(found) >= 0).all(), "a longer run tells more"


def test_runs_that_are_running_count_as_done(belief):
    running = [option(2, 2, 3), option(2, 2, 4)]
    (gain,) = narrowing(belief, TARGET, (1, 2), [option(1, 0, 3)], running)
    views = [(o.candidate, o.level, o.rung, o.seed, o.run) for o in running]
    before = variance_after(belief, (1, 2), views)
    after = variance_after(belief, (1, 2), [*views, (1, 0, 3, 0, 3)])
    assert gain == pytest.approx(before - after, rel=1e-3)
    assert gain != pytest.approx(narrowing(belief, TARGET, (1, 2), [option(1, 0, 3)])[0], rel=1e-3)


def test_the_best_option_has_the_most_gain_for_its_cost(belief):
    options = [option(c, level, 3, cost=2.0**level) for c in (1, 2) for level in range(3)]
    gain = narrowing(belief, TARGET, (1, 2), options)
    for overhead in (0.0, 100.0):
        cost = np.array([o.cost for o in options]) + overhead
        expected = options[int((gain / cost).argmax())]
        assert best_option(belief, TARGET, (1, 2), options, (), overhead) == expected
    assert best_option(belief, TARGET, (1, 2), [], (), 1.0) is None


def test_a_candidate_that_is_far_behind_is_hopeless(belief):
    view = look_ahead(belief, TARGET, np.random.default_rng(0), np.arange(4))
    assert view.hopeless.tolist() == [view.chances[0] < HOPELESS, False, False, True, False]
    assert view.leader in (1, 2)
    assert view.wins.sum() == pytest.approx(1.0)


def outlook(middle, spread, leader):
    middle = np.array(middle)
    draws = middle + spread * np.random.default_rng(0).standard_normal((400, len(middle)))
    wins = np.bincount(draws.argmin(1), minlength=len(middle)) / 400
    return Outlook(middle, draws, wins, leader)


def test_rivals_are_drawn_by_how_likely_they_win():
    view = outlook([0.0, 0.01, 0.03, 0.5], 0.02, leader=0)
    random = np.random.default_rng(1)
    drawn = np.bincount([draw_rival(view, np.arange(4), random) for _ in range(2000)], minlength=4)
    assert drawn[0] == 0, "the leader is not its own rival"
    assert drawn[3] == 0
    # The lowest of candidates 1 and 2: P(N(0.01, 0.02) < N(0.03, 0.02)) = 0.76.
    assert drawn[1] / 2000 == pytest.approx(0.76, abs=0.05)


def test_one_new_candidate_takes_part():
    view = outlook([0.0, 0.05, -0.01, -0.02, -0.02, 0.04], 0.02, leader=0)
    random = np.random.default_rng(1)
    drawn = {draw_rival(view, np.arange(2), random) for _ in range(300)}
    best = 2 + int(view.chances[2:].argmax())
    assert drawn <= {1, best}
    assert best in drawn
