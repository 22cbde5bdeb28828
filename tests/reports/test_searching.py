"""What a report reads of a search: its answer, its candidates, and which runs it analyses."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

import einlinear as el
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.figures.lanes import lane_data
from einlinear.reports.gather import fingerprint, gather
from einlinear.searches.space import SearchSpace
from einlinear.searches.stops import Stop, add_stops, read_stops
from kit.report_records import page_of, write_runs
from kit.search_records import CANDIDATES, SAMPLED, STEPS, make_answer, usual_rows, write_search


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("search")
    return path, write_search(path)


def test_only_the_longest_run_of_each_chain_is_analysed(made):
    path, records = made
    found = gather(path)
    longest = {r.id for r in records if r.config.steps == STEPS[-1] or r.status == "diverged"}
    assert {run.id for run in found.runs} == longest
    assert found.search.num_runs == len(records)
    assert found.problems == ()


def test_costs_are_those_of_each_chain_once(made):
    path, records = made
    found = gather(path)
    runs = [one for lane in found.search.lanes for one in lane.runs]
    chains = {}
    for record in records:
        chain = (record.config.structure, record.config.width, record.config.lr)
        chains[chain] = max(chains.get(chain, 0), 6 * record.curve[-1].macs)
    assert sum(one.flops for one in runs) == pytest.approx(sum(chains.values()))
    assert sum(run.total("flops") for run in found.runs) == pytest.approx(sum(chains.values()))


def test_runs_are_in_the_order_of_the_choices(made):
    path, records = made
    runs = [one for lane in gather(path).search.lanes for one in lane.runs]
    runs.sort(key=lambda one: one.number)
    assert [one.run.id for one in runs] == [record.id for record in records]
    assert [one.why for one in runs] == [f"reason {k}" for k in range(len(records))]
    assert [one.number for one in runs if one.rate != 1] == [len(records)]
    assert runs[-1].rate == 2.0
    for before, after in pairwise(runs):
        assert after.spent == pytest.approx(before.spent + before.flops)


def test_candidates_have_the_names_of_the_leaderboard(made):
    found = gather(made[0])
    lanes = found.search.lanes
    assert [lane.name for lane in lanes] == [*(label for _, label, *_ in CANDIDATES), "kronecker"]
    assert [lane.state for lane in lanes] == ["leader", "open", "stopped", "stopped", "diverged"]
    assert {run.structure for run in found.runs} == {lane.name for lane in lanes}
    by_text = {run.label.structure: run.structure for run in found.runs}
    assert by_text[SAMPLED] == "s1", "the full text is kept"
    assert lanes[2].ending.startswith("Its last run was number 23 of 26; it can hardly win;")
    assert [lane.stopped_after for lane in lanes] == [None, None, 23, 25, 5]
    assert lanes[4].ending.startswith("Stopped after run 5 of 26, with")
    assert lanes[4].ending.endswith("diverged.")


def test_a_candidate_that_was_stopped_says_when_and_why(tmp_path):
    records = write_search(tmp_path)
    spent = sum(one.flops for one in _chosen(tmp_path)[:9])
    stop = Stop("low_rank", "stopped", "monarch", 0.0025, records[9].id, spent)
    again = replace(stop, state="open", before=records[12].id)
    last = replace(stop, chance=0.005, before=records[14].id, spent=2 * spent)
    twice = replace(last, before=records[16].id)  # as a second search on the directory writes
    add_stops([stop, again], tmp_path)
    add_stops([last, twice], tmp_path)
    with (tmp_path / "stops.jsonl").open("a") as file:
        file.write('{"label": "low_r')  # killed
    assert read_stops(tmp_path) == {"low_rank": last}
    search = gather(tmp_path).search
    lane = next(lane for lane in search.lanes if lane.name == "low_rank")
    assert lane.stopped_after == 14
    share = f"{2 * spent / search.answer.spent:.0%}"
    assert lane.ending.startswith(
        f"Stopped after run 14 of 26, with {share} of the FLOPs spent: it beat monarch in 0.5% of "
        "draws; its predicted loss is "
    )
    later = sum(one.number > 14 for one in lane.runs)
    assert lane.ending.endswith(f"It got {later} more runs.")
    drawn = next(one for one in lane_data(search)["lanes"] if one["name"] == "low_rank")
    assert drawn["after"] == 14


def _chosen(path):
    runs = [one for lane in gather(path).search.lanes for one in lane.runs]
    return sorted(runs, key=lambda one: one.number)


def test_a_candidate_that_diverged_has_the_name_that_its_space_gave(tmp_path):
    write_search(tmp_path)
    rows = [row for row in usual_rows() if row.structure != SAMPLED]
    write_search(tmp_path, make_answer(rows))
    space = SearchSpace(structures=("monarch", "kronecker", SAMPLED), sample=0)
    (tmp_path / "search.json").write_text(json.dumps({"space": space.as_dict()}))
    assert [lane.name for lane in gather(tmp_path).search.lanes] == [
        *(row.label for row in rows),
        "kronecker",
        "s1",
    ]


def test_two_rows_with_one_label_stay_apart(tmp_path):
    rows = usual_rows()
    rows[3] = replace(rows[3], label=rows[0].label)
    write_search(tmp_path, make_answer(rows))
    names = {run.structure for run in gather(tmp_path).runs}
    assert {rows[0].structure, rows[3].structure} <= names


def test_any_spelling_of_the_reference_is_found(made):
    gathered = gather(made[0])
    for spelling in (SAMPLED, "s1"):
        found = analyse(gathered, ReportSettings(reference=spelling, resamples=0))
        assert found.reference == "s1"


def test_without_choices_the_order_is_that_of_the_files(tmp_path):
    records = write_search(tmp_path, with_choices=False)
    search = gather(tmp_path).search
    assert search.num_runs == len(records)
    assert {one.why for lane in search.lanes for one in lane.runs} == {""}
    assert page_of(tmp_path).count("reason ") == 0


def test_without_an_answer_the_page_is_that_of_a_sweep(tmp_path):
    write_search(tmp_path)
    (tmp_path / "answer.json").unlink()
    found = gather(tmp_path)
    assert found.search is None
    assert len(found.runs) == 2 * len(CANDIDATES) + 2, "chains still count once"
    assert "figure-lanes" not in page_of(tmp_path)


def test_a_sweep_keeps_runs_that_differ_in_their_steps(tmp_path):
    write_runs(tmp_path, widths=(32,), seeds=1, steps=40)
    write_runs(tmp_path, widths=(32,), seeds=1, steps=80)
    steps = [run.steps_done for run in gather(tmp_path).runs]
    assert steps.count(40) == steps.count(80) > 0


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}'])
def test_an_answer_that_cannot_be_read_is_named(tmp_path, text):
    write_search(tmp_path)
    (tmp_path / "answer.json").write_text(text, encoding="utf-8")
    found = gather(tmp_path)
    assert found.search is None
    assert [path for path, _ in found.problems] == [str(tmp_path / "answer.json")]


def test_an_empty_leaderboard_is_named(tmp_path):
    write_search(tmp_path, make_answer([]))
    assert gather(tmp_path).problems[0][1] == "its leaderboard is empty"


def test_a_live_report_notices_an_answer(tmp_path):
    write_search(tmp_path)
    before = fingerprint(tmp_path)
    path = tmp_path / "answer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
    assert fingerprint(tmp_path) != before


def test_the_tables_have_the_search(made):
    path, records = made
    files = el.report(path, resamples=0)
    tables = {
        file.stem: list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
        for file in files.tables
    }
    assert [row["label"] for row in tables["leaderboard"]] == [label for _, label, *_ in CANDIDATES]
    assert float(tables["leaderboard"][0]["loss_low"]) == 2.4
    chosen = tables["chosen-runs"]
    assert [row["run"] for row in chosen] == [record.id for record in records]
    assert [row["why"] for row in chosen] == [f"reason {k}" for k in range(len(records))]
    assert {"lanes.svg", "lanes.png", "exponents.svg"} <= {file.name for file in files.figures}
    assert files.words.headline.startswith("monarch is best")


def test_the_page_of_a_search_needs_no_torch(made):
    code = (
        "import sys; from einlinear.reports.write import gather; "
        "from einlinear.reports.leaderboard import make_board; "
        f"make_board(gather({str(made[0])!r}).search); print('torch' in sys.modules)"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "False\n"
