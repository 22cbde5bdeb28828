"""Tables whose runs differ in length, or are missing: what they hold, and what methods do there."""

from dataclasses import replace
from math import log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear.bench.replay.families import Family, synthetic_table
from einlinear.bench.replay.ours import run_search
from einlinear.bench.replay.rivals import full_grid, halving_level, random_search, rungs_of
from einlinear.bench.replay.score import OURS, RIVALS
from einlinear.bench.replay.tables import TARGET_TIMES, RunTable, Session
from einlinear.errors import EinlinearError
from einlinear.show.numbers import FLOPS_PER_MAC
from kit.ragged_records import NOISE, ragged_records, widths_of
from kit.report_records import KINDS, LINF, POWER, make_record

SMALL = Family("small", levels=3, rungs=5, seeds=2, sample=4)
METHODS = {OURS: run_search, **RIVALS}


@pytest.fixture(scope="module")
def records():
    return ragged_records()


@pytest.fixture(scope="module")
def table(records):
    return RunTable.from_records(records)


def labels(table):
    return [candidate.label for candidate in table.candidates]


def test_a_table_has_what_runs_reached_and_nothing_else(table, records):
    assert labels(table)[0] == "dense"
    assert table.rungs >= 6
    np.testing.assert_allclose(np.exp(np.diff(table.t)), 10**0.25, rtol=0.02)
    reached = np.arange(table.rungs)[None, None, :, None] <= table.last[:, :, None]
    np.testing.assert_array_equal(np.isfinite(table.loss), reached)
    np.testing.assert_array_equal(np.isfinite(table.cost), reached.any(3))
    assert len({int(k) for k in table.last.ravel()}) >= 4, "runs differ in length"
    widths = {kind.structure: widths_of(kind) for kind in KINDS[:4]}
    for record in records:
        c = [k.structure for k in table.candidates].index(record.config.structure)
        level = widths[record.config.structure].index(record.config.width)
        cost = table.cost[c, level, : table.last[c, level, record.config.seed] + 1]
        points = {FLOPS_PER_MAC * p.macs: p.loss for p in record.curve}
        losses = table.loss[c, level, : len(cost), record.config.seed]
        assert [points[flops] for flops in cost] == list(losses)
        # Rungs are 10**(1/4) apart, and the end of a run is at most one below the next rung.
        assert record.curve[-1].macs * FLOPS_PER_MAC < 1.8 * cost[-1]


def test_the_target_is_ten_times_the_largest_run_of_dense(table, records):
    largest = max(r.curve[-1].macs for r in records if r.config.structure == "dense")
    assert table.target_flops == pytest.approx(TARGET_TIMES * FLOPS_PER_MAC * largest)


def test_the_whole_table_gives_the_multipliers_of_its_laws(table):
    """The error of a log multiplier is that of a log loss over the slope of the law.

    At the target a loss is LINF + r, of which r falls with exponent POWER / 2 in compute. A mean
    over the runs of two structures has the error NOISE sqrt(2 / runs); ten times beyond the largest
    run, three times that. Four standard deviations are allowed.
    """
    found = dict(zip(labels(table), table.full_analysis(), strict=True))
    draws = table.fit(range(len(table.candidates)), table.last).middle()
    loss = draws.best(table.target)[0][0, 0]
    slope = POWER / 2 * (loss - LINF) / loss
    runs = (table.last[0] >= 0).sum()
    tolerance = 4 * 3 * NOISE * sqrt(2 / runs) / slope
    assert tolerance < 0.35
    for kind in KINDS[:4]:
        assert abs(log(found[kind.structure] / kind.multiplier)) < tolerance, kind.structure


def test_runs_that_are_missing_do_not_exist(records):
    small, large = widths_of(KINDS[2])[0], widths_of(KINDS[3])[-1]
    missing = {("monarch", small, 0), ("low_rank", large, 0), ("low_rank", large, 1)}

    def is_kept(record):
        config = record.config
        return (config.structure, config.width, config.seed) not in missing

    table = RunTable.from_records(filter(is_kept, records))
    monarch, low = (labels(table).index(name) for name in ("monarch", "low_rank"))
    assert table.last[monarch, 0, 0] == -1 < table.last[monarch, 0, 1]
    assert (table.last[low, 3] == -1).all()
    assert np.isnan(table.m[low, 3])
    assert table.num_runs == len(records) - 3
    ends = [table.cost[c, level, k] for (c, level, _), k in np.ndenumerate(table.last) if k >= 0]
    assert table.grid_cost == pytest.approx(sum(ends))
    session = full_grid(table, table.grid_cost, 0)
    np.testing.assert_array_equal(session.reached, table.last)
    assert session.spent == pytest.approx(table.grid_cost)
    with pytest.raises(AssertionError, match="no run reached"):
        Session(table, np.inf).train(monarch, 0, 0, 0)


def test_halving_trains_to_the_end_of_runs_that_are_shorter(table):
    level = table.levels - 1
    tops = table.longest[:, level]
    assert rungs_of(table, level)[-1] == tops.max() > tops.min()
    session = RIVALS["ASHA"](table, table.grid_cost, 0)
    np.testing.assert_array_equal(session.reached, table.last)


def test_methods_start_at_a_size_that_all_structures_have(table):
    short = table.last.copy()
    short[1, -1] = -1
    smaller = with_ends(table, short)
    assert halving_level(table, np.inf) == table.levels - 1
    assert halving_level(smaller, np.inf) == table.levels - 2
    first = random_search(smaller, smaller.costs_up_to(smaller.longest)[:, -2].sum(), 0)
    np.testing.assert_array_equal(first.reached[:, -2, 0], smaller.last[:, -2, 0])
    assert (first.reached[:, -1] == -1).all()


def test_the_lowest_loss_is_taken_at_steps_that_all_runs_have(table):
    """The longest run has the lowest loss of all by its length alone."""
    session = full_grid(table, table.grid_cost, 0)
    level = table.levels - 1
    common = int(table.longest[:, level].min())
    means = table.loss[:, level, common].mean(1)
    ends = [table.loss[c, level, table.longest[c, level]].mean() for c in range(len(means))]
    assert session.best_by_loss() == means.argmin()
    assert int(np.argmin(ends)) == table.longest[:, level].argmax() != means.argmin()
    short = table.last.copy()
    worst = labels(table).index("low_rank")
    short[worst, level] = 2
    session = full_grid(with_ends(table, short), np.inf, 0)
    assert session.best_by_loss() == means.argmin() != worst


def with_ends(table, last):
    """The table without what lies beyond `last`."""
    beyond = np.arange(table.rungs)[None, None, :, None] > last[:, :, None]
    loss = np.where(beyond, np.nan, table.loss)
    cost = np.where(beyond.all(3), np.nan, table.cost)
    m = np.where((last < 0).all(2), np.nan, table.m)
    return RunTable(table.candidates, m, table.t, loss, cost, table.target, ends=last)


BASE = synthetic_table(SMALL, 0)


@st.composite
def ragged(draw):
    """Any ends of runs; a candidate has its first size, and no gap between its sizes."""
    shape = BASE.last.shape
    last = np.full(shape, -1)
    for c in range(shape[0]):
        for level in range(draw(st.integers(1, shape[1]))):
            ends = draw(st.lists(st.integers(-1, BASE.rungs - 1), min_size=2, max_size=2))
            last[c, level] = ends if max(ends) >= 0 else (0, -1)
    return with_ends(BASE, last)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=12, deadline=None)
@given(table=ragged(), share=st.floats(0.01, 1.0), seed=st.integers(0, 3))
def test_no_method_buys_what_no_run_reached(name, table, share, seed):
    session = METHODS[name](table, share * table.grid_cost, seed)
    assert (session.reached <= table.last).all()
    assert session.spent <= share * table.grid_cost * (1 + 1e-9)
    assert session.spent == pytest.approx(table.costs_up_to(session.reached).sum())
    for choice in (session.best_by_loss(), session.best_by_law()):
        assert not session.order or choice in session.order


@pytest.mark.parametrize("name", RIVALS)
def test_a_method_with_all_the_compute_trains_the_whole_table(name, table):
    session = RIVALS[name](table, table.grid_cost * (1 + 1e-9), 0)
    np.testing.assert_array_equal(session.reached, table.last)


PINNED = {
    OURS: (30, 70, 279.0, 1, 1),
    "full grid": (13, 65, 256.0, 6, 1),
    "random": (17, 85, 272.0, 1, 1),
    "ASHA": (20, 40, 272.0, 1, 1),
    "TPE + Hyperband": (5, 23, 272.0, 8, 1),
}
"""Runs, losses seen, compute and both choices, from before tables could be ragged."""


@pytest.mark.parametrize("name", METHODS)
def test_methods_search_synthetic_tables_as_they_always_did(name):
    session = METHODS[name](BASE, BASE.grid_cost / 8, 0)
    seen = int((session.reached >= 0).sum()), int((session.reached + 1).sum())
    found = (*seen, session.spent, session.best_by_loss(), session.best_by_law())
    assert found == PINNED[name]
    assert BASE.full_analysis()[1] == pytest.approx(1.35354033, abs=1e-6)


def changed(record, **settings):
    return replace(record, config=replace(record.config, **settings))


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"factor_init": "fan_in"}, "factor_init is 'spectral' .* and 'fan_in'"),
        ({"lr": 0.5}, "lr is .* and 0.5"),
        ({"seed": 9, "lr": 0.5}, "lr is .* and 0.5"),
        ({"seed": 9, "width": 96, "factor_init": "fan_in"}, "factor_init is"),
        ({"eval_size": 77}, "eval_size is .* and 77"),
        ({"context": 16}, "context is .* and 16"),
        (
            {"task": "pixels", "context": None, "vocabulary": None, "rule": None},
            "task is 'text' .* and 'pixels'",
        ),
    ],
)
def test_runs_that_differ_in_more_than_length_do_not_share_a_place(records, settings, values):
    run = next(record for record in records if record.config.structure == KINDS[1].structure)
    other = changed(run, **settings)
    for mixed in ([*records, other], [*records, replace(other, steps_done=run.steps_done + 1)]):
        with pytest.raises(EinlinearError, match=f"{values}.* in run {other.id}"):
            RunTable.from_records(mixed)
    RunTable.from_records([*records, replace(other, status="diverged")])  # it has no place


def test_runs_on_other_data_are_refused(records):
    other = replace(records[0], environment=records[0].environment | {"data": "other"})
    with pytest.raises(EinlinearError, match=r"data is '5f3a' in .*, and 'other' in"):
        RunTable.from_records([*records, other])
    moved = [changed(record, data="elsewhere") for record in records[:2]]
    RunTable.from_records([*records[2:], *moved])  # the same data in another place
    unknown = [replace(record, environment={}) for record in (*records[2:], *moved)]
    with pytest.raises(EinlinearError, match=r"data is None in .*, and 'elsewhere' in"):
        RunTable.from_records(unknown)


def test_runs_may_differ_in_length_and_in_what_changes_no_number(records, table):
    cells = table.num_runs
    shorter = make_record(KINDS[0], 64, 0, steps=60, warmup=1, eval_spacing="fixed", eval_points=8)
    shorter = changed(shorter, checkpoint_every=7, save_model=False)
    found = RunTable.from_records([*records, shorter])
    assert found.num_runs == cells
    dense = [changed(r, factor_init="fan_in") for r in records if r.config.structure == "dense"]
    RunTable.from_records([*records, *dense])  # layers without factors ignore it
