"""Reports whose seconds are steps times the measured time of a step."""

import csv
from dataclasses import replace

import pytest

import einlinear as el
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.gather import gather
from einlinear.reports.reproduce import report_command
from einlinear.reports.words import conclude
from einlinear.runs.step_times import StepTimes
from kit.command import run
from kit.report_records import DENSE, KINDS, write_bent, write_runs, write_unfinished
from kit.times import times_of

WIDTHS = (32, 64, 96)


@pytest.fixture
def timed(tmp_path):
    """A sweep, its records, and a file of times: half a second a step at width 32, and so on."""
    records = write_runs(tmp_path / "sweep", KINDS[:2], WIDTHS, 1, points=6)
    times = times_of(*(record.config for record in records))
    rows = [replace(row, seconds=s, low=s, high=s) for row in times.rows for s in [row.width / 64]]
    times = replace(times, rows=tuple(rows))
    times.save(tmp_path / "steps.json")
    return tmp_path / "sweep", records, tmp_path / "steps.json"


def analysed(folder, path):
    return analyse(gather(folder), ReportSettings(resamples=0, times=path))


def test_seconds_are_steps_times_the_time_of_a_step(timed):
    folder, records, path = timed
    found = analysed(folder, path)
    by_id = {record.id: record for record in records}
    assert len(found.runs) == 6
    for shown in found.runs:
        record, step = by_id[shown.id], shown.width / 64
        expected = tuple(point.step * step for point in record.curve)
        assert shown.spent["seconds"] == expected
        assert shown.seconds == expected[-1] != record.seconds
        assert shown.units_per_second == pytest.approx(2048 / step)
        assert shown.spent["flops"] == tuple(6.0 * point.macs for point in record.curve)
    data = found.measured["seconds"].data
    direct = el.Observations.from_records(records, "seconds", times=path)
    assert set(data.compute) == set(direct.compute[direct.compute > 0])
    assert {final.seconds for final in found.finals} <= {run.seconds for run in found.runs}


def test_the_report_says_what_seconds_are(timed):
    folder, _, path = timed
    words = conclude(analysed(folder, path))
    assert words.results[-1].startswith(
        "Seconds are steps times the time of a step of each model, measured on 2026-01-02 in 9"
    )
    assert "1 thread" in words.results[-1]
    plain = conclude(analyse(gather(folder), ReportSettings(resamples=0)))
    assert not any("Seconds are" in text for text in plain.results)


def test_different_machines_matter_only_to_clocks(timed):
    folder, records, path = timed
    other = replace(records[0], environment=records[0].environment | {"threads": 2})
    el.runs.directory.RunDirectory(folder / "runs" / other.id).write_record(other)
    caution = "different numbers of threads"
    clocks = conclude(analyse(gather(folder), ReportSettings(resamples=0)))
    assert any(caution in text for text in clocks.cautions)
    assert not any(caution in text for text in conclude(analysed(folder, path)).cautions)


def test_a_run_whose_model_was_not_measured_is_refused(timed):
    folder, records, path = timed
    full = el.read_step_times(path)
    StepTimes(full.rows[1:], full.measured, full.rounds, full.machine).save(path)
    with pytest.raises(el.EinlinearError, match=records[0].id) as caught:
        analysed(folder, path)
    assert "einlinear time" in caught.value.fix


def test_an_unfinished_run_whose_model_was_not_measured_has_no_seconds(timed):
    folder, _, path = timed
    write_unfinished(folder, DENSE, 768)
    (running,) = [run for run in analysed(folder, path).runs if run.record is None]
    assert running.curve
    assert (running.seconds, running.units_per_second) == (None, None)
    assert "seconds" not in running.spent


def test_the_page_and_its_tables(timed, capsys):
    folder, records, path = timed
    code, out, err = run(capsys, "report", str(folder), "--times", str(path), "--resamples", "0")
    assert (code, err) == (0, "")
    assert "Seconds are steps times the time of a step" in " ".join(out.split())
    page = (folder / "report" / "index.html").read_text(encoding="utf-8")
    assert "Seconds are steps times" in page
    assert f"--times {path}" in page
    with (folder / "report" / "tables" / "runs.csv").open(encoding="utf-8") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    for record in records:
        seconds = float(rows[record.id]["seconds"])
        assert seconds == pytest.approx(record.steps_done * record.config.width / 64)


def test_a_table_has_no_models(tmp_path, timed):
    table = write_bent(tmp_path / "a.csv")
    with pytest.raises(el.EinlinearError, match=r"a.csv is a table"):
        analysed(table, timed[2])


def test_the_command_of_a_report_has_its_times(tmp_path):
    command = report_command(tmp_path, ReportSettings(times=tmp_path / "my steps.json"))
    assert command.endswith(f"--times '{tmp_path}/my steps.json'")


def test_a_bad_file_of_times_is_three_lines(timed, capsys):
    folder, _, path = timed
    path.write_text("{}")
    code, _, err = run(capsys, "report", str(folder), "--times", str(path))
    assert code == 2
    assert err.startswith(f"einlinear: cannot read {path}: it has no seal")
