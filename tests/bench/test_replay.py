"""Replays on small tables: what methods pay, what they choose, and how they are scored."""

import json

import numpy as np
import pytest

import einlinear as el
from einlinear.bench.replay.compare import compare, read_results, write_results
from einlinear.bench.replay.families import FAMILIES, Family, synthetic_table
from einlinear.bench.replay.optuna_methods import gp_proposal
from einlinear.bench.replay.ours import propose_at_random, run_search
from einlinear.bench.replay.page import better_rules, search_page
from einlinear.bench.replay.rivals import full_grid, halving_level, random_search, rungs_of
from einlinear.bench.replay.score import BY_LAW, OURS, PROPOSERS, RIVALS, Score, mean_interval
from einlinear.bench.replay.tables import RunTable, Session
from einlinear.errors import EinlinearError
from einlinear.searches.draws import Draws
from einlinear.searches.surrogate import mixed_ideas
from kit.report_records import DENSE, KINDS, make_record, write_record

SMALL = Family("small", levels=2, rungs=5, seeds=2, sample=6)
TINY = Family("tiny", levels=2, rungs=3, seeds=1, sample=3)


@pytest.fixture(scope="module")
def table():
    return synthetic_table(SMALL, 0)


def test_a_session_pays_for_what_it_trains_and_no_more(table):
    session = Session(table, 30.0)
    assert session.train(0, 0, 2, 0) == table.loss[0, 0, 2, 0]
    assert session.spent == table.cost[0, 0, 2] == 4.0
    assert session.price(0, 0, 3, 0) == 4.0, "a run goes on from where it ended"
    assert session.price(0, 0, 1, 0) == 0.0, "what has been seen is free"
    session.train(0, 0, 3, 0)
    assert session.spent == 8.0
    assert session.train(1, 1, 4, 0) is None, "more than is left"
    assert session.spent == 8.0
    assert session.order == [0]
    session.choose(0)
    assert session.choice_at(7.9) is None
    assert session.choice_at(8.0) == 0


def test_the_grid_with_all_its_compute_finds_the_best_of_the_table(table):
    whole = table.full_analysis()
    session = full_grid(table, table.grid_cost, 0)
    assert session.spent == pytest.approx(table.grid_cost)
    assert (session.reached == table.rungs - 1).all()
    assert session.best_by_law() == whole.argmax()


def test_tables_without_noise_give_the_true_multipliers():
    table = synthetic_table(Family("quiet", noise=1e-3, sample=6), 1)
    assert table.truth is not None
    np.testing.assert_allclose(table.full_analysis(), table.truth, rtol=0.02)
    assert table.truth[0] == pytest.approx(1.0)


def test_nothing_is_better_than_dense_if_the_family_says_so():
    family = next(family for family in FAMILIES if family.dense_wins)
    for seed in range(2):
        truth = synthetic_table(family, seed).truth
        assert 0.85 <= np.sort(truth)[-2] <= 0.95
        assert truth.argmax() == 0


@pytest.mark.parametrize("name", [OURS, *RIVALS])
def test_methods_stay_within_their_budget_and_repeat_themselves(table, name):
    method = RIVALS.get(name, run_search)
    budget = table.grid_cost / 8
    one, two = (method(table, budget, 3) for _ in range(2))
    assert 0.3 * budget < one.spent <= budget * (1 + 1e-9)
    np.testing.assert_array_equal(one.reached, two.reached)
    seen = one.reached >= 0
    assert one.spent == pytest.approx(
        sum(
            table.cost[c, level, one.reached[c, level, seed]]
            for c, level, seed in np.argwhere(seen)
        )
    )


def test_methods_do_not_look_at_losses_that_they_have_not_paid_for(table):
    for method in (run_search, *RIVALS.values()):
        budget = table.grid_cost / 8
        session = method(table, budget, 0)
        hidden = np.arange(table.rungs)[None, None, :, None] > session.reached[:, :, None]
        loss = np.where(hidden, np.nan, table.loss)
        blind = RunTable(table.candidates, table.m, table.t, loss, table.cost, table.target)
        again = method(blind, budget, 0)
        np.testing.assert_array_equal(again.reached, session.reached)
        assert again.best_by_loss() == session.best_by_loss()
        assert again.best_by_law() == session.best_by_law()


@pytest.mark.slow
def test_the_search_is_better_than_random_search_with_as_much():
    ours, theirs = [], []
    for seed in range(4):
        table = synthetic_table(SMALL, seed)
        multipliers = table.full_analysis()
        budget = table.grid_cost / 8
        search = run_search(table, budget, seed)
        ours.append(multipliers[search.choice_at(budget)] / multipliers.max())
        other = random_search(table, budget, seed)
        theirs.append(multipliers[other.best_by_law()] / multipliers.max())
    assert np.mean(ours) >= np.mean(theirs)
    assert np.mean(ours) > 0.97


def test_a_proposer_names_the_next_structure(table):
    session = run_search(table, table.grid_cost / 16, 0, propose_at_random)
    assert len(session.order) == len(set(session.order)) > 6


def test_the_gaussian_process_proposes_where_losses_are_low():
    line = np.linspace(0, 1, 21)
    features = np.stack([line, 0.5 + 0 * line, 0.5 + 0 * line], 1)
    order = np.array([0, 5, 10, 15, 20, 2, 12, 17])
    order = np.concatenate([order, np.setdiff1d(np.arange(21), order)])
    values = (line[order[:8]] - 0.3) ** 2
    found = [gp_proposal(features[order], values, range(8, 21), seed) for seed in range(2)]
    assert all(abs(line[order[k]] - 0.3) <= 0.15 for k in found)


def test_halving_trains_at_the_largest_size_that_the_budget_allows(table):
    assert rungs_of(table, 0) == [0, 2, 4]
    # Of 12 structures: all to 1 step, a quarter on to 4, a sixteenth on to 16, at sizes 1 and 2.
    count = len(table.candidates)
    cost = count * (1 + 3 / 4 + 12 / 16)
    assert [halving_level(table, share * cost) for share in (0.5, 1.01, 1.99, 2.01)] == [0, 0, 0, 1]


def records(widths=(64, 128), seeds=2):
    return [
        make_record(kind, width, seed, steps=400)
        for kind in (DENSE, *KINDS[1:4])
        for width in widths
        for seed in range(seeds)
    ]


def test_a_table_of_real_runs(tmp_path):
    runs = records()
    for record in runs:
        write_record(tmp_path / "runs" / record.id, record)
    found = RunTable.from_records(el.read_records(tmp_path))
    assert found.candidates[0].structure == "dense"
    assert found.loss.shape == (4, 2, found.rungs, 2)
    last = next(r for r in runs if r.config.structure == "dense" and r.config.width == 128)
    assert found.loss[0, 1, -1, 0] == last.curve[-1].loss
    assert found.cost[0, 1, -1] == 6 * last.curve[-1].macs
    assert found.t[found.rungs // 2] == 0.0
    assert (np.exp(np.diff(found.t)) >= 1.7 * (1 - 1e-9)).all()
    names = [candidate.structure for candidate in found.candidates]
    multipliers = dict(zip(names, found.full_analysis(), strict=True))
    assert multipliers["btt(rank=2)"] > 1.2 > 0.8 > multipliers["low_rank"]
    session = full_grid(found, found.grid_cost, 0)
    assert session.spent == pytest.approx(found.grid_cost)


def test_a_table_needs_dense_and_common_steps():
    with pytest.raises(EinlinearError, match=r"a table of 3 structures .*, without dense"):
        RunTable.from_records(r for r in records() if r.config.structure != "dense")
    with pytest.raises(EinlinearError, match="a table of 0 structures with 0 lengths"):
        RunTable.from_records([])


def test_scores_and_the_page(tmp_path, monkeypatch):
    monkeypatch.setitem(PROPOSERS, "GPSampler", propose_at_random)  # which takes seconds
    methods, proposers = compare(2, 1, (TINY,))
    assert {s.method for s in methods} == {OURS, *RIVALS, *(name + BY_LAW for name in RIVALS)}
    assert all(0 <= regret < 1 for s in methods for regret in (*s.regrets, *s.true_regrets))
    write_results(methods, proposers, tmp_path)
    assert (tmp_path / "search.svg").stat().st_size > 5000
    again, _ = read_results(tmp_path / "search.json")
    assert [s.method for s in again] == [s.method for s in methods]
    np.testing.assert_allclose([s.regrets for s in again], [s.regrets for s in methods], atol=1e-5)
    assert json.loads((tmp_path / "search.json").read_text())["proposers"]


def test_the_page_says_what_the_scores_are():
    def scores(method, *regrets):
        return [Score("usual", method, share, regrets, regrets) for share in (1 / 16, 1 / 4)]

    methods = [*scores(OURS, 0.0, 0.01), *scores("random", 0.1, 0.0)]
    methods += scores("random" + BY_LAW, 0.03, 0.0)
    proposers = [Score("usual", name, 1 / 64, (0.0, 0.02)) for name in ("surrogate", "random")]
    page = search_page(methods, proposers)
    assert "within 2% of the best in 100% of the tables, with a mean regret of 0.50%" in page
    assert "The best of the others at 1/4, random, our law, is within 2% in 50%" in page
    assert "| random | 5.00% (0.00% to 10.00%) |" in page
    assert "| more than 1/4 | 5.00% |" in page
    assert "| random | 1.00%, +0.00% (+0.00% to +0.00%) |" in page
    assert better_rules(methods)["random"][0].method == "random" + BY_LAW


def test_an_interval_of_a_mean():
    values = np.random.default_rng(0).standard_normal(400)
    low, high = mean_interval(values)
    # 1.96 standard errors on each side: 2 * 1.96 / 20 = 0.196.
    assert high - low == pytest.approx(0.196, rel=0.15)
    assert low < values.mean() < high


@pytest.mark.slow
@pytest.mark.parametrize(("family", "least"), [(FAMILIES[0], 0.9), (FAMILIES[2], 0.75)])
def test_intervals_of_answers_hold_the_truth_of_tables(family, least):
    """Multipliers after a search with 1/64 of the grid, as `make_answer` mixes beliefs."""
    held = []
    for seed in range(6):
        table = synthetic_table(family, seed)
        session = run_search(table, table.grid_cost / 64, seed)
        order = [*session.order, *sorted(set(range(len(table.candidates))) - {*session.order})]
        random = np.random.default_rng(seed)
        draws = Draws.joined(
            table.fit(order, session.reached, bend=bend, centre=centre).draws(200, random)
            for bend, centre in mixed_ideas(table.target.anchor)
        )
        ratio = draws.take(slice(len(session.order))).multipliers(table.target)
        low, high = np.quantile(ratio, [0.05, 0.95], axis=0)
        truth = table.truth[session.order]
        held += list(((low <= truth) & (truth <= high))[1:])
    assert np.mean(held) > least
