"""The surrogate against laws that are known, and against Gaussian formulas written out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear.searches.decide import look_ahead
from einlinear.searches.draws import Cost, Draws
from einlinear.searches.surrogate import BEND, Spreads, Trials, fit_surrogate

ANCHOR = (2.65, 3.35)
TARGET = Cost(6.0, anchor=ANCHOR)
QUIET = Spreads(noise=1e-5, run=1e-5, seed=1e-5)


def laws(random, candidates, spread=0.05, exponent=0.03, effect=0.2):
    """Features, how alike the candidates are, and laws of all of them as one draw."""
    features = np.vstack([np.zeros(2), random.uniform(0, 1, (candidates - 1, 2))])
    apart = ((features[:, None] - features[None]) ** 2).sum(-1)
    kernel = 0.6 * np.exp(-apart / 0.3) + 0.4 * np.eye(candidates)
    root = np.linalg.cholesky(kernel)

    def offsets(level, slope):
        return level + features @ slope + spread * root @ random.standard_normal(candidates)

    size = 1, candidates
    truth = Draws(
        linf=np.array([random.uniform(0.6, 1.1)]),
        anchor=np.array([ANCHOR]),
        centre=np.zeros((1, 2)),
        bend=np.zeros((1, 3)),
        a=offsets(-0.8, effect * random.standard_normal(2))[None],
        b=offsets(-1.0, effect * random.standard_normal(2))[None],
        alpha=random.uniform(0.25, 0.4) * np.exp(exponent * random.standard_normal(size)),
        beta=random.uniform(0.3, 0.5) * np.exp(exponent * random.standard_normal(size)),
        own_bend=np.zeros((1, candidates, 3)),
    )
    return features, kernel, truth


def with_bends(truth, seed, centre):
    """The same laws with bends as the surrogate expects them."""
    random = np.random.default_rng((seed, 1))
    return truth._replace(
        centre=np.array([centre]),
        bend=BEND * random.standard_normal((1, 3)),
        own_bend=Spreads().bend * random.standard_normal(truth.own_bend.shape),
    )


def observe(random, truth, candidates, spreads, levels=3, rungs=5, seeds=2):
    """Losses of all runs, drawn in float64 from the law, with its bends."""
    c, level, seed, rung = (
        x.ravel()
        for x in np.meshgrid(*map(np.arange, (candidates, levels, seeds, rungs)), indexing="ij")
    )
    run = np.ravel_multi_index((c, level, seed), (candidates, levels, seeds))
    m, t = 0.7 * (level - 1.0), 0.7 * (rung - 2.0)
    loss = truth.linf[0] + np.exp(truth.a[0, c] - truth.alpha[0, c] * m)
    loss += np.exp(truth.b[0, c] - truth.beta[0, c] * t)
    for (x, y), weights in ((truth.anchor[0], truth.bend), (truth.centre[0], truth.own_bend[0, c])):
        squares = np.stack([(m - x) ** 2, (m - x) * (t - y), (t - y) ** 2], 1)
        loss *= np.exp((weights * squares).sum(1))
    noise = spreads.noise * random.standard_normal(len(c))
    noise += spreads.run * random.standard_normal(run.max() + 1)[run]
    noise += spreads.seed * random.standard_normal(seeds)[seed]
    return Trials(c, run, seed, m, t, loss * np.exp(noise))


def fitted(seed=0, candidates=6, trained=None, spreads=None, centre=None, **how):
    random = np.random.default_rng(seed)
    features, kernel, truth = laws(random, candidates, **how)
    if centre is not None:
        truth = with_bends(truth, seed, centre)
    trials = observe(random, truth, trained or candidates, spreads or Spreads())
    belief = fit_surrogate(trials, features, kernel, ANCHOR, centre=centre or (0.0, 0.0))
    return belief, truth, (trials, features, kernel)


@pytest.mark.parametrize("seed", range(3))
def test_known_laws_are_recovered_from_losses_without_noise(seed):
    belief, truth, _ = fitted(seed, spreads=QUIET)
    middle = belief.middle()
    m, t = np.full((1, 6), 0.5), np.full((1, 6), 1.2)  # between and at trials
    found = belief.loss(np.arange(6), m[0], t[0])
    np.testing.assert_allclose(found, truth.at(m, t)[0], rtol=5e-4)
    np.testing.assert_allclose(middle.alpha, truth.alpha, rtol=0.1)
    np.testing.assert_allclose(middle.beta, truth.beta, rtol=0.1)
    np.testing.assert_allclose(middle.linf, truth.linf, rtol=0.1)
    loss, guess = truth.best(TARGET)[0][0], middle.best(TARGET)[0][0]
    np.testing.assert_allclose(guess / guess[0], loss / loss[0], rtol=0.01)


@pytest.mark.parametrize("centre", [None, (0.0, 0.0)])
def test_intervals_hold_the_truth_as_often_as_they_say(centre):
    scores = []
    how = {"spread": Spreads().offset, "exponent": Spreads().exponent, "effect": 0.5}
    for seed in range(40):  # laws as the surrogate expects them; two candidates have no run
        belief, truth, _ = fitted(seed, trained=4, centre=centre, **how)
        random = np.random.default_rng(seed)
        log_loss = np.log(belief.draws(300, random).best(TARGET)[0])
        away = np.log(truth.best(TARGET)[0][0]) - log_loss.mean(0)
        # Differences decide a search; linf and exponents, which all share, cancel in them.
        pair = log_loss - log_loss[:, :1]
        apart = away - away[0]
        scores.append(apart[1:] / pair.std(0)[1:])
    scores = np.array(scores)
    # 40 tables: the mean of 40 squares of N(0, 1) has a standard deviation of 0.22, so three of it.
    assert 0.34 < np.mean(scores[:, :3] ** 2) < 1.66, "trained"
    assert 0.34 < np.mean(scores[:, 3:] ** 2) < 1.66, "not trained"
    # Four candidates hardly tell how much curves bend: without bends, intervals are too wide.
    assert 0.8 < np.mean(np.abs(scores) < 1.645) <= (0.98 if centre else 1.0)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 5),
    st.floats(-1.5, 1.5),
    st.floats(-2.0, 2.0),
    st.integers(0, 1000),
)
def test_rows_are_derivatives(candidate, m, t, seed):
    belief = BELIEF
    random = np.random.default_rng(seed)
    belief = replace(belief, mean=belief.mean + 0.1 * random.standard_normal(len(belief.mean)))
    at = np.array([candidate]), np.array([m]), np.array([t])
    step = 1e-5

    def log_loss(mean):
        return np.log(replace(belief, mean=mean).loss(*at))[0]

    (row,) = belief.rows(*at)
    numeric = [
        (log_loss(belief.mean + step * unit) - log_loss(belief.mean - step * unit)) / (2 * step)
        for unit in np.eye(len(row))
    ]
    np.testing.assert_allclose(row, numeric, atol=2e-8)
    drawn = belief.middle().at(np.full((1, 6), m), np.full((1, 6), t))[0, candidate]
    assert belief.loss(*at)[0] == pytest.approx(drawn)  # two ways to the same loss


def test_candidates_without_a_run_are_less_certain():
    belief, _, _ = fitted(trained=4)
    view = look_ahead(belief, TARGET, np.random.default_rng(0), np.arange(4))
    apart = (view.log_loss - view.log_loss[:, :1]).std(0)
    assert apart[4:].mean() > 1.4 * apart[1:4].mean()


def test_the_order_of_trials_and_the_names_of_runs_change_nothing():
    belief, _, (trials, features, kernel) = fitted()
    random = np.random.default_rng(1)
    rename = random.permutation(trials.run.max() + 1)
    order = random.permutation(len(trials.loss))
    mixed = Trials(*(column[order] for column in trials._replace(run=rename[trials.run])))
    other = fit_surrogate(mixed, features, kernel, ANCHOR)
    np.testing.assert_allclose(other.mean, belief.mean, atol=1e-7)
    np.testing.assert_allclose(other.covariance, belief.covariance, atol=1e-9)
    np.testing.assert_allclose(other.runs.row[rename], belief.runs.row, atol=1e-7)


def test_a_start_changes_the_result_by_little():
    belief, _, (trials, features, kernel) = fitted()
    part = Trials(*(column[trials.candidate < 3] for column in trials))
    start = fit_surrogate(part, features, kernel, ANCHOR)
    for _ in range(6):
        start = fit_surrogate(trials, features, kernel, ANCHOR, start)
    one, two = (np.log(x.middle().best(TARGET)[0]) for x in (belief, start))
    spread = np.log(belief.draws(200, np.random.default_rng(0)).best(TARGET)[0]).std(0)
    assert np.abs(one - two).max() < 0.3 * spread.min()
    assert start.spreads.run == pytest.approx(belief.spreads.run, rel=0.2)


def settled():
    """A belief whose spreads do not change any more, and its trials."""
    belief, _, (trials, features, kernel) = fitted(candidates=6, trained=5)
    for _ in range(60):
        belief = fit_surrogate(trials, features, kernel, ANCHOR, belief)
    return belief, trials


def test_noise_of_runs_is_integrated_out_as_if_it_were_a_parameter():
    belief, trials = settled()
    rows = belief.rows(trials.candidate, trials.m, trials.t)
    rows[np.arange(len(rows)), len(belief.mean) - belief.seeds + trials.seed] = 1.0
    same = trials.run[:, None] == trials.run[None]
    noise = belief.spreads.noise**2 * np.eye(len(rows)) + belief.spreads.run**2 * same
    told = rows.T @ np.linalg.solve(noise, rows)
    prior = np.linalg.inv(belief.covariance) - told
    runs = trials.run[:, None] == np.arange(trials.run.max() + 1)
    both = np.hstack([rows, runs]).astype(float)
    precision = both.T @ both / belief.spreads.noise**2
    precision[: len(prior), : len(prior)] += prior
    precision[len(prior) :, len(prior) :] += np.eye(runs.shape[1]) / belief.spreads.run**2
    joint = np.linalg.inv(precision)
    np.testing.assert_allclose(joint[: len(prior), : len(prior)], belief.covariance, atol=1e-7)
    # Given the other parameters, the noise of a run is what its residuals leave.
    row, weight, variance = belief.runs
    whole = (weight[:, None] * row) @ belief.covariance @ (weight[:, None] * row).T
    expected = np.diag(whole) + variance
    np.testing.assert_allclose(np.diag(joint)[len(prior) :], expected, rtol=0.02)


BELIEF = fitted()[0]
