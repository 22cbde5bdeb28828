"""Hidden losses: predicted from what is shown, and how many the intervals hold."""

import numpy as np
import pytest

from einlinear.bench.replay.calibrate import HIDDEN, calibrate
from einlinear.bench.replay.families import Family, synthetic_table
from einlinear.bench.replay.tables import RunTable
from kit.ragged_records import ragged_records

FAMILY = Family("some", levels=3, rungs=5, seeds=2, sample=6)


def hidden_of(table, hidden):
    """Where losses are hidden, found cell by cell."""
    found = np.zeros(table.loss.shape, dtype=bool)
    for (c, level, seed), last in np.ndenumerate(table.last):
        largest = max(k for k in range(table.levels) if table.last[c, k].max() >= 0)
        for rung in range(last + 1):
            is_last = rung > last - 2
            found[c, level, rung, seed] = level == largest if hidden == HIDDEN[0] else is_last
    return found


def changed(table, hidden, factor):
    loss = np.where(hidden_of(table, hidden), factor * table.loss, table.loss)
    return RunTable(
        table.candidates, table.m, table.t, loss, table.cost, table.target, ends=table.last
    )


@pytest.mark.parametrize("hidden", HIDDEN)
def test_intervals_hold_losses_that_follow_the_law(hidden):
    """90 % of independent losses; but those of a run, a seed and a table go astray together.

    The 3 tables share a law within, so hidden losses count as about 12 independent ones each: four
    standard deviations of a share of 0.9 are 4 sqrt(0.09 / 36) = 0.2.
    """
    rows = [calibrate(synthetic_table(FAMILY, seed), hidden) for seed in range(3)]
    for kind in zip(*rows, strict=True):
        assert sum(row.held for row in kind) / sum(row.count for row in kind) > 0.7


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_ragged_table_hides_what_it_has(hidden):
    table = RunTable.from_records(ragged_records())
    rows = calibrate(table, hidden)
    assert [(row.bend, row.centre) for row in rows] == [
        (0.005, "runs"),
        (0.005, "target"),
        (0.05, "runs"),
        (0.05, "target"),
        (None, None),
    ]
    where = hidden_of(table, hidden)
    for row in rows:
        assert row.count == where.sum()
        counts = {one.structure: one.count for one in row.structures}
        for c, candidate in enumerate(table.candidates):
            assert counts[candidate.label] == where[c].sum()
        assert sum(one.held for one in row.structures) == row.held
        assert row.error < 0.005
        assert row.held > 0.9 * row.count


@pytest.mark.parametrize("hidden", HIDDEN)
def test_hidden_losses_are_not_seen_and_worse_ones_are_missed(hidden):
    table = synthetic_table(FAMILY, 0)
    usual, worse = calibrate(table, hidden), calibrate(changed(table, hidden, 1.1), hidden)
    for one, other in zip(usual, worse, strict=True):
        assert other.spread == pytest.approx(one.spread)
        assert other.bias == pytest.approx(one.bias + np.log(1.1))
        assert other.held < 0.1 * other.count


def test_a_run_that_goes_on_keeps_its_noise():
    """Without the noise that it has shown, its losses would be off by about 3 %."""
    table = synthetic_table(FAMILY, 0)
    off = 0.03 * np.random.default_rng(0).choice([-1, 1], size=table.last.shape)
    loss = table.loss * np.exp(off)[:, :, None]
    noisy = RunTable(table.candidates, table.m, table.t, loss, table.cost, table.target)
    assert calibrate(noisy, "last rungs")[-1].error < 0.01
    assert calibrate(noisy, "largest size")[-1].error > 0.02


def test_a_table_of_one_size_has_no_larger_one_to_hide():
    small = synthetic_table(Family("one", levels=1, rungs=3, seeds=1, sample=3), 0)
    assert calibrate(small, "largest size") == ()
    assert len(calibrate(small, "last rungs")) == 5
