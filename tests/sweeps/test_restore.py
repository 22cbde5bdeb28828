"""A sweep that continues from records of another: nothing is trained or written twice."""

from dataclasses import replace

import pytest

import einlinear as el
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import RunDirectory
from einlinear.runs.packed import write_packed
from einlinear.sweeps.placing import Placing, place
from einlinear.sweeps.restore import can_restore, restore
from einlinear.sweeps.study import Study
from einlinear.sweeps.sweep import plan_sweep
from kit.report_records import DENSE, make_record
from kit.runs import TINY

STUDY = Study("small", TINY | {"steps": 4, "warmup": 0}, ({"seed": [0, 1, 2]},))
OTHER = make_record(DENSE, 32, 0, points=3)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Packed records of two runs of the study and of one that does not belong to it."""
    path = tmp_path_factory.mktemp("packed")
    smaller = replace(STUDY, grids=({"seed": [0, 1]},))
    records = el.sweep(smaller, path / "sweep", executor="inline").records
    write_packed([*records, OTHER], path / "records.jsonl")
    return path / "records.jsonl"


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.json")}


def test_only_the_missing_run_is_trained(tmp_path, packed):
    plans, out = [], tmp_path / "out"
    given = {record.id: record for record in el.read_records(packed) if record.id != OTHER.id}
    result = el.sweep(STUDY, out, executor="inline", records=packed, on_plan=plans.append)
    assert plans[0].finished == plans[0].restored == set(given)
    assert [record.config.seed for record in result.records] == [0, 1, 2]
    assert {path.name for path in (out / "runs").iterdir()} == {r.id for r in result.records}
    for record in result.records:
        directory = RunDirectory(out / "runs" / record.id)
        assert directory.read_config() == record.config
        assert directory.read_record() == given.get(record.id, record)
        assert (directory.path / "metrics.jsonl").exists() == (record.id not in given)
    before = files(out)
    again = el.sweep(STUDY, out, executor="inline", records=[packed, packed])
    assert again.plan.restored == frozenset()
    assert files(out) == before


def test_a_plan_writes_nothing(tmp_path, packed):
    out = tmp_path / "out"
    placing = place(STUDY, Placing("inline"))
    plan = plan_sweep(STUDY, out, placing, given=el.read_records(packed))
    assert len(plan.restored) == 2
    assert not out.exists()
    counted = plan_sweep(STUDY, out, placing, is_timed=False, given=el.read_records(packed))
    assert not any(run.is_guessed for run in counted.runs)  # the records hold times
    assert all(run.is_guessed for run in plan_sweep(STUDY, out, placing, is_timed=False).runs)


def test_a_directory_that_is_not_free_stays_as_it_is(tmp_path):
    """It has a record, even a damaged one, is in use, or belongs to another run."""
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "record.json").write_text("{", encoding="utf-8")
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "config.json").write_text("{", encoding="utf-8")
    RunDirectory(tmp_path / "another").keep_config(RunConfig(seed=5))
    busy = RunDirectory(tmp_path / "busy")
    busy.open(OTHER.config)
    before = files(tmp_path)
    for name in ("damaged", "unreadable", "another", "busy"):
        assert not can_restore(tmp_path / name, OTHER)
        restore(tmp_path / name, OTHER)
    assert files(tmp_path) == before
    busy.close()
    assert can_restore(tmp_path / "busy", OTHER)
    restore(tmp_path / "busy", OTHER)
    assert RunDirectory(tmp_path / "busy").read_record() == OTHER


def test_records_that_cannot_be_read_stop_a_sweep_before_it_begins(tmp_path, packed):
    packed_text = packed.read_text(encoding="utf-8")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text(packed_text[:-100], encoding="utf-8")
    with pytest.raises(el.EinlinearError, match=r"cannot read .*damaged.jsonl, line 4"):
        el.sweep(STUDY, tmp_path / "out", executor="inline", records=[damaged])
    assert not (tmp_path / "out").exists()
