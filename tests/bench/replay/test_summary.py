"""The summary of a replay on one table: its numbers, its file, and what it says without Optuna."""

import sys

import numpy as np
import pytest

from einlinear.bench.replay import compare, summary
from einlinear.bench.replay.score import BUDGETS, BY_LAW, OURS, RIVALS
from einlinear.bench.replay.summary import read_summary, replay_summary, write_summary
from einlinear.bench.replay.tables import RunTable
from einlinear.errors import EinlinearError
from kit.ragged_records import ragged_records
from kit.report_records import write_record


@pytest.fixture(scope="module")
def table():
    return RunTable.from_records(ragged_records())


@pytest.fixture(scope="module")
def found(table):
    return replay_summary(table, 2)


def test_the_best_is_that_of_all_runs(found, table):
    labels = [candidate.label for candidate in table.candidates]
    multipliers = dict(zip(labels, table.full_analysis(), strict=True))
    assert found.best == max(multipliers, key=multipliers.__getitem__) == "btt(rank=2)"
    assert [row.structure for row in found.standings] == sorted(
        labels, key=multipliers.__getitem__, reverse=True
    )
    for row in found.standings:
        assert row.multiplier == pytest.approx(multipliers[row.structure])
        assert row.low <= row.middle <= row.high
    assert sum(row.wins for row in found.standings) == pytest.approx(1.0)
    assert (found.grid_flops, found.grid_runs) == (table.grid_cost, table.num_runs)


def test_every_method_is_scored_at_every_budget(found, table):
    names = {OURS, *RIVALS, *(name + BY_LAW for name in RIVALS)}
    assert {(row.method, row.share) for row in found.methods} == {
        (name, share) for name in names for share in BUDGETS
    }
    multipliers = {row.structure: row.multiplier for row in found.standings}
    for row in found.methods:
        assert row.flops == row.share * table.grid_cost
        assert 0 <= row.spent <= row.flops * (1 + 1e-9)
        regrets = [1 - multipliers[pick] / multipliers[found.best] for pick in row.picks]
        np.testing.assert_allclose(row.regrets, regrets, atol=1e-12)
        assert row.low - 1e-12 <= row.regret == pytest.approx(np.mean(regrets))
        assert row.regret <= row.high + 1e-12


def test_a_path_says_when_the_search_knew(found):
    last = [row.picks for row in found.methods if row.method == OURS][-1]
    for path in found.paths:
        assert path.picks[-1].structure == path.first.structure == last[path.seed]
        assert path.first in path.picks
        assert path.settled == path.picks[-1]
        assert 0 < path.first.flops <= path.settled.flops <= path.flops
        assert path.flops <= max(BUDGETS) * found.grid_flops
        assert 1 <= path.first.runs <= path.settled.runs <= path.runs <= found.grid_runs
        assert all(
            a.structure != b.structure for a, b in zip(path.picks, path.picks[1:], strict=False)
        )
        assert path.is_within == (path.high >= 1)
        if path.picks[-1].structure == found.best:
            assert (path.regret, path.chance, path.low, path.high) == (0.0, 1.0, 1.0, 1.0)


def test_a_wrong_choice_is_told_from_the_best(table):
    """A search that ends with low rank, which needs four times the compute of dense."""
    session = summary.run_search(table, table.grid_cost / 16, 0)
    labels = [candidate.label for candidate in table.candidates]
    session.choose(labels.index("low_rank"))
    ratio = summary._mixture(table).multipliers(table.target)
    relative = ratio / ratio[:, [labels.index("btt(rank=2)")]]
    path = summary._path(0, session, 0.8, relative)
    assert path.high < 0.6
    assert not path.is_within
    assert path.chance < 0.01


def test_a_summary_is_read_as_it_was_written(found, tmp_path):
    write_summary(found, tmp_path / "a" / "b.json")
    assert read_summary(tmp_path / "a" / "b.json") == found
    (tmp_path / "c.json").write_text('{"seeds": 2}')
    with pytest.raises(EinlinearError, match=r"cannot read .*c\.json"):
        read_summary(tmp_path / "c.json")


def test_without_optuna_its_method_is_left_out(table, monkeypatch):
    monkeypatch.setattr(summary, "has_optuna", lambda: False)
    methods = {row.method for row in replay_summary(table, 1).methods}
    assert methods == {
        OURS,
        *(name + rule for name in set(RIVALS) - {"TPE + Hyperband"} for rule in ("", BY_LAW)),
    }


def test_a_table_has_its_own_file(tmp_path, monkeypatch, capsys):
    for record in ragged_records(seeds=1):
        write_record(tmp_path / "runs" / record.id, record)
    out = tmp_path / "out"
    given = ["compare", "--table", str(tmp_path), "--seeds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(compare.os, "environ", {})
    compare.main()
    assert [path.name for path in out.iterdir()] == ["replay-table.json"]
    assert capsys.readouterr().out.strip() == str(out / "replay-table.json")
    assert read_summary(out / "replay-table.json").grid_runs == 16
