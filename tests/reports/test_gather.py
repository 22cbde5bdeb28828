"""Packed records in a report: the same runs as in the folder that they come from."""

import pytest

import einlinear as el
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.gather import fingerprint, gather
from einlinear.runs.packed import write_packed
from kit.report_records import KINDS, write_diverged, write_runs


@pytest.fixture
def both(tmp_path):
    """A folder of runs, and a file of their packed records."""
    folder = tmp_path / "sweep"
    write_runs(folder, kinds=KINDS[:2], widths=(32, 64, 128, 256))
    write_diverged(folder)
    path = tmp_path / "study.jsonl"
    write_packed(el.read_records(folder), path)
    return folder, path


def test_packed_records_give_the_same_numbers(both):
    folder, packed = map(gather, both)
    assert (packed.kind, packed.title, packed.problems) == ("runs", "study", ())
    runs = {run.id: run for run in folder.runs}
    assert {run.id for run in packed.runs} == set(runs)
    for run in packed.runs:
        other = runs[run.id]
        assert (run.state, run.label, run.group, run.size) == (
            other.state,
            other.label,
            other.group,
            other.size,
        )
        assert run.spent.keys() == other.spent.keys()
        for name, values in run.spent.items():
            assert values == pytest.approx(other.spent[name], rel=1e-3)
        assert [p.loss for p in run.curve] == pytest.approx([p.loss for p in other.curve], rel=1e-7)
    fits = [analyse(found, ReportSettings(resamples=0)) for found in (folder, packed)]
    left, right = ({k: m.median for k, m in f.main.multipliers.items()} for f in fits)
    assert left
    assert right == pytest.approx(left, rel=1e-4)


def test_a_table_is_told_from_packed_records_by_its_first_line(both, tmp_path):
    table = tmp_path / "table.jsonl"
    lines = [f'{{"run": "a", "compute": {k}, "loss": {3 / k}}}' for k in (1, 2, 3)]
    table.write_text("\n".join(lines), encoding="utf-8")
    assert gather(table).kind == "table"
    both[1].rename(tmp_path / "records.csv")
    assert gather(tmp_path / "records.csv").kind == "runs"  # whatever its name
    assert fingerprint(tmp_path / "records.csv")


def test_a_damaged_header_is_not_read_as_a_table(both):
    path = both[1]
    path.write_bytes(path.read_bytes().replace(b'{"format"', b'{"kind"', 1))
    with pytest.raises(el.EinlinearError, match="line 1: "):
        gather(path)


def test_a_run_that_cannot_be_shown_is_a_problem(tmp_path):
    records = write_runs(tmp_path / "sweep", kinds=KINDS[:1], widths=(32, 64), seeds=1)
    bad = el.RunRecord.from_dict(records[0].as_dict() | {"peak_bytes": 10**200})
    write_packed([bad, records[1]], tmp_path / "a.jsonl")
    found = gather(tmp_path / "a.jsonl")
    assert [run.id for run in found.runs] == [records[1].id]
    [(where, why)] = found.problems
    assert where.endswith(f"a.jsonl, run {bad.id}")
    assert why.startswith("its peak_bytes is ")
