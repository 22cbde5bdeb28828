"""A sweep that continues from records of another: nothing is trained or written twice."""

from dataclasses import replace
from pathlib import Path

import pytest

import einlinear as el
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import RunDirectory
from einlinear.runs.packed import write_packed
from einlinear.sweeps import planner
from einlinear.sweeps.placing import Placing, place
from einlinear.sweeps.restore import can_restore, restore
from einlinear.sweeps.study import Study
from einlinear.sweeps.sweep import plan_sweep
from einlinear.training.plan import task_of
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


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A study of two runs on a text, packed records of both, and the text changed since then."""
    monkeypatch.chdir(tmp_path)
    write_text("first")
    base = TINY | {"steps": 2, "warmup": 0, "eval_points": 1, "data": "text.txt"}
    study = Study("on a text", base, ({"seed": [0, 1]},))
    write_packed(el.sweep(study, "first", executor="inline").records, "records.jsonl")
    write_text("second")
    return study


def write_text(word):
    Path("text.txt").write_text(f"{word} words of a text, and more of them.\n" * 200)


def larger(study):
    return replace(study, grids=({"seed": [0, 1, 2]},))


def test_records_of_other_data_are_refused_before_anything_is_written(changed, monkeypatch):
    opened = []
    monkeypatch.setattr(planner, "task_of", lambda c: opened.append(c) or task_of(c))
    with pytest.raises(el.EinlinearError, match=r"records of 2 runs are of other .*text\.txt"):
        el.sweep(larger(changed), "out", executor="inline", records="records.jsonl")
    assert not Path("out").exists()
    assert len(opened) == 1
    write_text("first")
    result = el.sweep(larger(changed), "out", executor="inline", records="records.jsonl")
    assert len(result.plan.restored) == 2


def test_the_process_that_plans_refuses_records_of_other_data(changed):
    with pytest.raises(el.EinlinearError, match="records of 2 runs are of other data"):
        el.sweep(larger(changed), "out", processes=1, records="records.jsonl")
    assert not Path("out").exists()


def test_data_does_not_matter_if_nothing_is_left_to_train(changed, monkeypatch):
    result = el.sweep(changed, "out", executor="inline", records="records.jsonl")
    assert len(result.plan.restored) == 2
    monkeypatch.setattr(planner, "task_of", _no_data)
    result = el.sweep(larger(changed), "more", executor="inline", records="records.jsonl")
    assert len(result.plan.restored) == 2


def _no_data(config):
    raise el.EinlinearError(what="there is no data", rule="there is some", fix="get it")


def test_given_records_of_other_studies_are_counted(tmp_path, packed):
    records = el.read_records(packed)
    plan = plan_sweep(STUDY, tmp_path / "out", place(STUDY, Placing("inline")), given=records)
    assert (plan.num_given, plan.num_belonging) == (3, 2)
