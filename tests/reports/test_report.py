"""What a report reads and concludes from records whose laws are known."""

import json
import re

import numpy as np
import pytest

import einlinear as el
from einlinear.reports.analyse import ReportSettings, analyse, observe
from einlinear.reports.gather import gather
from einlinear.reports.words import conclude, facts
from einlinear.show.numbers import short
from kit.report_records import (
    DENSE,
    WIDTHS,
    write_claim,
    write_failure,
    write_record,
    write_runs,
    write_sweep,
    write_unfinished,
)

TRUTH = {"btt(rank=2)": 1.6, "monarch": 1.0, "low_rank": 0.25, "monarch moe 2/8": 2.4}
SLOWNESS = {"btt(rank=2)": 1.25, "monarch": 1.3, "low_rank": 1.1, "monarch moe 2/8": 2.0}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep with every kind of run, and its finished records."""
    path = tmp_path_factory.mktemp("sweep")
    return path, write_sweep(path, widths=WIDTHS)


@pytest.fixture(scope="module")
def found(sweep):
    return analyse(gather(sweep[0]), ReportSettings(resamples=200))


def test_every_run_has_its_state(sweep):
    gathered = gather(sweep[0])
    states = [run.state for run in gathered.runs]
    counts = {state: states.count(state) for state in set(states)}
    assert counts == {"finished": len(sweep[1]), "diverged": 1, "failed": 1, "running": 1}
    assert gathered.title == "structures at equal compute"
    assert gathered.problems == ()
    failed = next(run for run in gathered.runs if run.state == "failed")
    assert failed.message == "RuntimeError: out of memory"
    running = next(run for run in gathered.runs if run.state == "running")
    assert running.seconds_left == 1234.0
    assert running.width == 768
    assert 5 < len(running.curve) < 21  # the line that is half written is no point
    assert running.total("flops") == 6 * running.macs * running.curve[-1].units


@pytest.mark.parametrize(
    ("claim", "failure", "state"),
    [
        (None, False, "running"),
        (0.0, False, "running"),
        (0.0, True, "running"),
        (3600.0, False, "stopped"),
        (3600.0, True, "failed"),
        (None, True, "failed"),
    ],
)
def test_the_state_of_a_run_without_a_record(tmp_path, claim, failure, state):
    folder = write_unfinished(tmp_path)
    if claim is not None:
        write_claim(folder, age=claim)
    if failure:
        write_failure(folder)
    assert [run.state for run in gather(tmp_path).runs] == [state]


def test_a_run_alone_and_a_folder_of_runs(tmp_path, sweep):
    record = sweep[1][0]
    write_record(tmp_path / "a", record)
    assert gather(tmp_path / "a").kind == "run"
    assert gather(tmp_path).kind == "runs"
    for path in (tmp_path, tmp_path / "a"):
        (run,) = gather(path).runs
        assert (run.id, run.loss, run.seconds) == (record.id, record.final_loss, record.seconds)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 99}',
        "no curve",
        "a loss of text",
        "\x00",
    ],
)
def test_a_damaged_record_is_named_and_the_rest_is_shown(tmp_path, damage):
    good, bad = write_runs(tmp_path, (DENSE,), (32, 64), 1)
    values = bad.as_dict()
    if damage == "no curve":
        damage = json.dumps(values | {"curve": []})
    elif damage == "a loss of text":
        damage = json.dumps(values | {"curve": [values["curve"][0] | {"loss": "low"}]})
    (tmp_path / "runs" / bad.id / "record.json").write_text(damage, encoding="utf-8")
    (tmp_path / "runs" / good.id / "record.json.unreadable-1").write_text("?", encoding="utf-8")
    gathered = gather(tmp_path)
    ((path, why),) = gathered.problems
    assert path.endswith(f"{bad.id}/record.json")
    assert why
    assert {run.id: run.state for run in gathered.runs} == {
        good.id: "finished",
        bad.id: "unreadable",
    }


def test_failures_that_cannot_be_read(tmp_path):
    folder = write_unfinished(tmp_path)
    for line in ("[" * 10**5, "{", "[]"):
        (folder / "failures.jsonl").write_text(line, encoding="utf-8")
        (run,) = gather(tmp_path).runs
        assert (run.state, run.message) == (
            "failed",
            "an attempt failed; failures.jsonl cannot be read",
        )


def test_nothing_to_report(tmp_path):
    with pytest.raises(el.EinlinearError, match="no runs in"):
        gather(tmp_path)
    with pytest.raises(el.EinlinearError, match="there is no"):
        gather(tmp_path / "nowhere")


@pytest.mark.parametrize("measure", ["flops", "linear_flops", "seconds", "params", "units"])
def test_what_is_fitted_are_the_points_of_the_records(sweep, measure):
    ids = {record.id for record in sweep[1]}
    runs = [run for run in gather(sweep[0]).runs if run.id in ids]
    records = {record.id: record for record in sweep[1]}
    ours = observe(runs, measure)
    theirs = el.Observations.from_records([records[run.id] for run in runs], measure)
    theirs = theirs.take(theirs.compute > 0)
    for column in ("run", "compute", "loss", "structure", "seed", "group"):
        assert np.array_equal(getattr(ours, column), getattr(theirs, column)), column


def test_multipliers_hold_the_truth(sweep):
    """Eight intervals at once: of 90 % ones some would not."""
    found = analyse(gather(sweep[0]), ReportSettings(resamples=400, level=0.99))
    for measure, slowness in (("flops", {}), ("seconds", SLOWNESS)):
        for name, one in found.measured[measure].multipliers.items():
            truth = TRUTH[name] / slowness.get(name, 1.0)
            low, high = one.median_interval
            assert low <= truth <= high, (measure, name, one.median_interval)
            assert one.median == pytest.approx(truth, rel=0.1)


def test_the_sentences_are_right(found):
    words = conclude(found)
    assert words.headline.startswith(
        "`monarch moe 2/8` needs the least compute to reach a given loss: `dense`"
    )
    times, low, high = map(float, re.findall(r"(\d+\.\d+)", words.headline)[:3])
    assert times == pytest.approx(2.4, rel=0.1)
    assert low < times < high
    by_name = {re.match("`([^`]*)`", text)[1]: text for text in words.results if text[0] == "`"}
    assert list(by_name) == ["monarch moe 2/8", "btt(rank=2)", "monarch", "low_rank"]
    assert "needs 1.5" in by_name["btt(rank=2)"] or "needs 1.6" in by_name["btt(rank=2)"]
    assert by_name["monarch"].startswith("`monarch` cannot be distinguished from `dense` by")
    assert re.match(r"`low_rank` needs (3\.|4\.)\d+ times the compute of", by_name["low_rank"])
    assert "in seconds, it needs more time (0.2" in by_name["low_rank"]
    assert any("exponents cannot be distinguished" in text for text in words.results)
    cautions = " ".join(words.cautions)
    assert "1 run diverged (1 of `btt(rank=2)`)" in cautions
    assert "1 run failed" in cautions
    assert "1 run still running" in cautions
    for word in ("ends of runs", "decade", "one seed", "L∞"):
        assert word not in cautions


def test_the_line_of_facts(found):
    line = " · ".join(facts(found))
    assert "83 runs: 80 finished, 1 diverged, 1 failed, 1 running" in line
    assert "task: text" in line
    assert "widths 32 to 1024" in line
    assert "3 seeds" in line
    macs = [run.record.curve[-1].macs for run in found.gathered.runs if run.record]
    open_runs = [run.total("units") * run.macs for run in found.gathered.runs if not run.record]
    assert f"{short(6 * (sum(macs) + sum(open_runs)))} FLOPs" in line
    assert "multiply-add" not in line


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        pytest.param("btt(rank=1)", "monarch", marks=pytest.mark.slow),
        pytest.param("btt", "monarch", marks=pytest.mark.slow),
        ("btt(rank=1) moe 2/8", "monarch moe 2/8"),
        ("btt(rank = 2)", "btt(rank=2)"),
        pytest.param("dense", "dense", marks=pytest.mark.slow),
    ],
)
def test_the_reference_in_another_spelling(sweep, given, meant):
    settings = ReportSettings(resamples=0, reference=given)
    found = analyse(gather(sweep[0]), settings)
    assert found.reference == meant
    assert found.structures[0] == meant
    assert all(one.reference == meant for one in found.main.multipliers.values())
