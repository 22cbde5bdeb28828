"""Records from any place that holds some."""

import warnings
from dataclasses import replace

import pytest

import einlinear as el
from einlinear import EinlinearError
from einlinear.runs.directory import RunDirectory
from einlinear.runs.packed import write_packed
from einlinear.runs.sources import collect_records, without_record
from kit.report_records import DENSE, make_record, write_diverged, write_runs, write_unfinished


@pytest.fixture
def sweep(tmp_path):
    """A sweep, and the ids of its runs that have a record."""
    folder = tmp_path / "sweep"
    records = write_runs(folder, kinds=[DENSE], widths=(32, 64), points=4)
    ids = {record.id for record in [*records, write_diverged(folder)]}
    write_unfinished(folder)
    return folder, ids


def test_every_place_gives_the_same_records(tmp_path, sweep):
    folder, ids = sweep
    records = el.read_records(folder)
    assert {record.id for record in records} == ids
    assert el.read_records(folder / "runs") == records
    run = folder / "runs" / records[0].id
    assert el.read_records(run) == el.read_records(str(run / "record.json")) == records[:1]
    write_packed(records, tmp_path / "records.jsonl")
    packed = el.read_records(tmp_path / "records.jsonl")
    assert {record.id: record.status for record in packed} == {r.id: r.status for r in records}


def test_places_without_records(tmp_path):
    for path, words in [
        (tmp_path / "none", "there is no .*none"),
        (tmp_path, "there are no records in .*, and 0 runs without one"),
        (3, "the source of records is given as 3"),
    ]:
        with pytest.raises(EinlinearError, match=words):
            el.read_records(path)
    write_unfinished(tmp_path)
    with pytest.raises(EinlinearError, match="and 1 run without one"):
        el.read_records(tmp_path)


def test_a_damaged_record_is_an_error(sweep):
    folder, ids = sweep
    (folder / "runs" / min(ids) / "record.json").write_text("{", encoding="utf-8")
    with pytest.raises(EinlinearError, match=f"cannot read .*{min(ids)}"):
        el.read_records(folder)


def test_the_first_record_of_a_run_is_kept(tmp_path, sweep):
    folder = sweep[0]
    records = el.read_records(folder)
    same, other = tmp_path / "same.jsonl", tmp_path / "other.jsonl"
    write_packed([*records, make_record(DENSE, 96, 0)], same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rounding is no difference
        found = collect_records([folder, same])
    assert found[: len(records)] == records
    assert len(found) == len(records) + 1
    worse = [replace(point, loss=9.0) for point in records[0].curve]
    write_packed([replace(records[0], curve=tuple(worse))], other)
    with pytest.warns(UserWarning, match=f"1 run found .* losses.*: run {records[0].id} in"):
        assert collect_records([folder, other]) == records


@pytest.mark.parametrize("is_finished_first", [True, False])
def test_a_finished_record_goes_before_one_that_diverged(tmp_path, is_finished_first):
    finished = make_record(DENSE, 96, 0)
    diverged = replace(finished, status="diverged", curve=finished.curve[:3])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    pair = [finished, diverged] if is_finished_first else [diverged, finished]
    for path, record in zip(paths, pair, strict=True):
        write_packed([record], path)
    with pytest.warns(UserWarning, match="one of them diverged, of which the finished record"):
        (kept,) = collect_records(paths)
    assert (kept.status, len(kept.curve)) == ("finished", len(finished.curve))


def test_runs_without_a_record_are_counted_once(sweep):
    folder = sweep[0]
    left = without_record([folder, folder / "runs"], el.read_records(folder))
    assert len(left) == 1
    assert not (left[0] / "record.json").exists()
    config = RunDirectory(left[0]).read_config()
    other = replace(make_record(DENSE, 96, 0), config=config)
    assert without_record([folder], [other]) == ()
