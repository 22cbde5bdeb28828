"""Whole searches: decisions that repeat, kills, many searchers on one directory."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import einlinear as el
from einlinear.errors import EinlinearError
from einlinear.searches import decide
from einlinear.searches.answer import read_answer, read_choices
from einlinear.searches.decide import Outlook
from einlinear.searches.ladder import Ladder, Rungs
from einlinear.searches.next_run import chosen_label, next_run, stop_changes
from einlinear.searches.search import search, search_result
from einlinear.searches.space import Candidate, SearchSpace
from einlinear.searches.spec import read_spec
from einlinear.searches.state import SearchState
from einlinear.searches.stops import read_stops
from einlinear.searches.supply import RunFolder
from einlinear.searches.words import conclusions, leaderboard_table, paste_code
from einlinear.sweeps import run_job

SETTINGS = {"teacher_width": 8, "batch_size": 16, "eval_size": 64, "device": "cpu"}
SPACE = {"structures": ["btt", "low_rank"], "sample": 3}
TINY = {
    "task": "regression",
    "settings": SETTINGS,
    "space": SPACE,
    "widths": [16, 32],
    "steps": [4, 8, 16],
    "flops": 4e8,
    "executor": "inline",
}
SMALL = TINY | {"flops": 1.6e8, "space": {"structures": ["btt", "low_rank"], "sample": 2}}
TIMES = ("seconds_multiplier", "seconds_interval", "speed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("search")
    return search(**SMALL, out=out)


def untimed(answer):
    """An answer without what depends on the clock."""
    values = answer.as_dict()
    for row in values["rows"]:
        for name in TIMES:
            del row[name]
    return values


def test_a_search_ranks_what_it_trained(finished):
    answer = finished.answer
    labels = [row.label for row in finished.leaderboard]
    assert {"dense", "btt", "low_rank"} <= set(labels)
    losses = [row.predicted_loss for row in finished.leaderboard]
    assert losses == sorted(losses)
    assert finished.leaderboard[0].state == "leader"
    dense = next(row for row in finished.leaderboard if row.label == "dense")
    assert dense.multiplier == pytest.approx(1.0)
    assert dense.low == pytest.approx(1.0)
    for row in finished.leaderboard:
        assert row.low <= row.multiplier <= row.high
        assert row.loss_interval[0] <= row.predicted_loss <= row.loss_interval[1]
    assert sum(row.wins for row in finished.leaderboard) == pytest.approx(1.0)
    assert answer.spent <= SMALL["flops"]
    assert read_answer(finished.path) == answer
    assert len(read_choices(finished.path)) == len(list((finished.path / "runs").iterdir()))


def test_all_that_was_spent_was_within_the_budget_and_most_of_it_was_used(finished):
    records = [el.read_record(path) for path in (finished.path / "runs").iterdir()]
    assert 0.5 * SMALL["flops"] < finished.answer.spent <= SMALL["flops"]
    longest = {}
    for record in records:
        c = record.config
        key = c.structure, c.width, c.seed, c.lr
        longest[key] = max(longest.get(key, 0), 6 * record.curve[-1].macs)
    assert sum(longest.values()) == pytest.approx(finished.answer.spent)


def test_thawed_runs_are_those_that_were_never_stopped(finished):
    """Every run of the longest chain, trained in one go, has the same losses."""
    sources = {choice.id: choice.source for choice in read_choices(finished.path)}
    thawed = [name for name, source in sources.items() if source is not None]
    assert thawed
    for name in thawed[:3]:
        record = el.read_record(finished.path / "runs" / name)
        again = el.train(record.config, threads=1)
        assert [p.loss for p in again.curve] == [p.loss for p in record.curve]
        assert again.train_loss == record.train_loss


@pytest.mark.slow
@pytest.mark.no_cover
def test_the_same_search_makes_the_same_decisions(finished, tmp_path):
    again = search(**SMALL, out=tmp_path)
    assert untimed(again.answer) == untimed(finished.answer)
    assert [c.id for c in read_choices(tmp_path)] == [c.id for c in read_choices(finished.path)]


def test_a_finished_search_trains_nothing_and_a_larger_budget_goes_on(finished, tmp_path):
    before = sorted(path.name for path in (finished.path / "runs").iterdir())
    assert untimed(search(**SMALL, out=finished.path).answer) == untimed(finished.answer)
    assert sorted(path.name for path in (finished.path / "runs").iterdir()) == before


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_larger_budget_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(decide, "HOPELESS", 0.6)  # so that some candidates are stopped
    small = search(**SMALL | {"flops": 1.2e8}, out=tmp_path)
    larger = search(**SMALL | {"flops": 1.6e8}, out=tmp_path)
    assert small.answer.spent <= 1.2e8 < larger.answer.spent <= 1.6e8
    assert read_spec(tmp_path).flops == 1.6e8
    chosen = {choice.id: choice for choice in read_choices(tmp_path)}
    stops = read_stops(tmp_path)
    assert stops
    assert set(stops) < {candidate.label for candidate in read_spec(tmp_path).space.candidates}
    assert all(stop.spent == chosen[stop.before].spent for stop in stops.values())


def test_dense_has_the_same_seeds_and_tuning(finished):
    records = [el.read_record(path) for path in (finished.path / "runs").iterdir()]
    usual = el.RunConfig(task="regression").lr
    tuned = {}
    for record in records:
        if record.config.lr != usual:
            key = record.config.lr / usual, record.config.steps
            tuned.setdefault(record.config.structure, set()).add(key)
    assert tuned["dense"]
    assert all(found == tuned["dense"] for found in tuned.values())
    seeds = {r.config.seed for r in records if r.config.structure == "dense"}
    assert 0 in seeds


def test_words(finished):
    table = leaderboard_table(finished.leaderboard, 100)
    assert "dense" in table
    assert max(map(len, table.splitlines())) <= 100
    text = " ".join(conclusions(finished.answer))
    assert "FLOPs" in text
    first = finished.leaderboard[0]
    only_dense = replace(finished.answer, rows=(replace(first, label="dense"),))
    assert "Nothing beats dense" in conclusions(only_dense)[0]
    assert paste_code(replace(first, structure="btt", num_experts=0)) == (
        'el.convert_(model, el.parse("btt"))'
    )


def test_what_a_run_that_diverges_or_fails_means(finished):
    spec = read_spec(finished.path)
    records = list(RunFolder(finished.path).read().records)
    worst = [r for r in records if r.config.structure == "btt" and r.config.seed == 0]
    changed = [replace(r, status="diverged") if r in worst else r for r in records]
    state = SearchState(spec, Ladder(spec.settings, spec.rungs), changed)
    assert {state.candidates[k].label for k in state.diverged} == {"btt"}
    for _ in range(3):
        choice = next_run(state, (), spec.flops)
        assert choice is not None
        assert choice.config.structure != "btt"
    state = SearchState(spec, Ladder(spec.settings, spec.rungs), records)
    state.exclude([worst[0].config])
    assert all(state.candidates[k].label != "btt" for k in state.order)


def test_stops_are_changes_since_the_last_choice(finished):
    spec = read_spec(finished.path)
    records = RunFolder(finished.path).read().records
    state = SearchState(spec, Ladder(spec.settings, spec.rungs), records)
    labels = [state.candidates[number].label for number in state.order]
    count = len(state.trained)
    log_loss = np.tile(
        np.arange(len(labels), dtype=float), (400, 1)
    )  # each worse than the one before
    log_loss[:3, 1] = -1.0  # in too few draws to matter
    view = Outlook(log_loss[-1], log_loss, np.eye(len(labels))[0], 0)
    choice = replace(next_run(state, (), spec.flops), view=view)
    stops = stop_changes(state, choice, ())
    assert [stop.label for stop in stops] == labels[1:count]
    assert {(stop.state, stop.leader, stop.before) for stop in stops} == {
        ("stopped", labels[0], choice.config.id)
    }
    assert stops[0].chance == 3 / 400
    assert stops[0].spent == state.tally.spent
    assert stop_changes(state, choice, labels[1:count]) == ()
    log_loss[:5, 1] = -1.0
    (again,) = stop_changes(state, choice, labels[1:count])
    assert (again.label, again.state) == (labels[1], "open")
    assert stop_changes(state, replace(choice, view=None), ()) == ()


def test_a_run_is_called_by_the_name_of_its_space(finished):
    spec = read_spec(finished.path)
    ladder = Ladder(spec.settings, spec.rungs)
    state = SearchState(spec, ladder, ())
    sampled = spec.space.candidates[-1]
    config = ladder.config(sampled, 1, 2, 1, 0.5)
    assert sampled.label == "s2"
    assert chosen_label(state, config) == f"s2, width {config.width}, steps 16, seed 1, rate x 0.5"


@pytest.mark.slow
def test_a_run_that_fails_ends_only_its_candidate(tmp_path, monkeypatch):
    """As where btt does not fit into memory."""
    right = run_job.train

    def train(config, *given, **named):
        if config.structure == "btt":
            raise MemoryError("no room")
        return right(config, *given, **named)

    monkeypatch.setattr(run_job, "train", train)
    space = {"structures": ["btt", "low_rank"], "sample": 0}
    result = search(**SMALL | {"space": space}, out=tmp_path)
    assert {row.label for row in result.leaderboard} == {"dense", "low_rank"}
    assert result.answer.failed == ("btt",)
    assert "Runs of btt failed" in " ".join(conclusions(result.answer))


def test_dense_layers_that_diverge_end_the_search_with_a_reason(finished, tmp_path):
    spec = read_spec(finished.path)
    records = list(RunFolder(finished.path).read().records)
    dense = next(r for r in records if r.config.structure == "dense")
    changed = [replace(r, status="diverged") if r is dense else r for r in records]
    state = SearchState(spec, Ladder(spec.settings, spec.rungs), changed)
    if 0 in state.diverged:
        assert next_run(state, (), spec.flops) is None


def test_no_two_levels_have_the_same_width_and_dense_has_the_widths_that_were_given():
    ladder = Ladder({"task": "regression", **SETTINGS}, Rungs((16, 20, 24), (4, 8)))
    for candidate in SearchSpace(sample=5, num_experts=(0, 4)).candidates:
        widths = [ladder.width(candidate, level) for level in range(3)]
        assert len(set(widths)) == 3
        assert [ladder.level_of(candidate, width) for width in widths] == [0, 1, 2]
    assert [ladder.width(Candidate(), level) for level in range(3)] == [16, 20, 24]


def test_seconds_decide_if_they_are_the_objective(finished):
    spec = replace(read_spec(finished.path), objective="seconds")
    records = RunFolder(finished.path).read().records
    state = SearchState(spec, Ladder(spec.settings, spec.rungs), records)
    times = state.relative_times()
    assert times[0] == 1.0
    found = state.target.log_step
    assert [found[k] for k in range(len(state.trained))] == pytest.approx(
        [math.log(times[number]) for number in state.trained]
    )
    # A candidate that takes ten times as long per FLOP has a higher loss for the same time.
    slow = replace(state.target, log_step=found + math.log(10))
    assert (state.belief.middle().best(slow)[0] > state.belief.middle().best(state.target)[0]).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flops": None}, ["there is no budget"]),
        ({"minutes": 1}, ["both minutes and flops"]),
        ({"flops": -1}, ["budget is -1"]),
        ({"flops": 1e3}, ["a budget of 1", "FLOPs or more"]),
        ({"widths": None, "steps": None, "flops": 1e6}, ["a budget of", "FLOPs or more"]),
        ({"target_flops": 10.0}, ["a target of 10", "or more"]),
        ({"widths": [32, 16]}, ["widths are [32, 16]"]),
        ({"steps": [4]}, ["steps are [4]"]),
        ({"settings": {"structure": "btt"}}, ["structure is 'btt'", "space"]),
        ({"settings": {**SETTINGS, "schedule": "cosine"}}, ["cosine"]),
        ({"task": "text", "settings": {"data": "nowhere.txt"}}, ["nowhere.txt"]),
        ({"objective": "joules"}, ["joules"]),
        ({"seeds": 0}, ["seeds is 0"]),
        ({"steps": ["a", "b"]}, ["each of steps"]),
        ({"target_flops": "1e9"}, ["the target is '1e9'"]),
        ({"space": {"num_experts": [4], "num_active": 8}}, ["num_active"]),
        ({"space": {"head_aligned": True}}, ["head_aligned"]),
    ],
)
def test_what_is_refused_before_anything_is_spent(tmp_path, changes, words):
    with pytest.raises(EinlinearError) as raised:
        search(**TINY | changes, out=tmp_path / "out")
    for word in words:
        assert word in str(raised.value)
    assert not (tmp_path / "out" / "runs").exists()


def test_another_search_in_the_same_directory_is_refused(finished):
    with pytest.raises(EinlinearError, match="another space"):
        search(**SMALL | {"space": {"structures": ["btt"], "sample": 0}}, out=finished.path)


@pytest.mark.parametrize("changes", [{"widths": [16, 48]}, {"target_flops": 1e12}, {"seed": 7}])
def test_a_search_that_has_runs_keeps_all_but_its_budget(finished, changes):
    with pytest.raises(EinlinearError, match="is of a search with another"):
        search(**SMALL | changes, out=finished.path)


def test_a_result_needs_a_run_of_dense_layers(tmp_path):
    with pytest.raises(EinlinearError, match="cannot read"):
        search_result(tmp_path)


def command(path, out):
    study = path / "search.json"
    study.write_text(
        json.dumps(
            {
                "base": {"task": "regression", **SETTINGS},
                "search": {k: TINY[k] for k in ("widths", "steps", "flops")},
                "space": SPACE,
            }
        )
    )
    own = ["search", str(study), "--out", str(out), "--processes", "1"]
    return [sys.executable, "-m", "einlinear", *own]


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


@pytest.mark.slow
def test_twenty_kills_do_not_change_the_answer(tmp_path):
    """One worker, fixed seed: a search that dies again and again decides the same.

    It is killed shortly after it writes a new file, so that fast machines kill it as often.
    """
    out = tmp_path / "out"
    call = command(tmp_path, out)
    draw = random.Random(0)
    kills = 0
    while kills < 20:
        process = subprocess.Popen(
            call, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = sum(1 for _ in out.rglob("*"))
        while process.poll() is None and sum(1 for _ in out.rglob("*")) <= before:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        if process.poll() is not None:
            break
        kill_group(process)
        kills += 1
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kills >= 5
    whole = search(**TINY, out=tmp_path / "whole")
    assert untimed(read_answer(tmp_path / "out")) == untimed(whole.answer)


@pytest.mark.slow
def test_two_searchers_share_one_search(tmp_path):
    out = tmp_path / "out"
    call = command(tmp_path, out)
    pair = [
        subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in pair:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    answer = read_answer(out)
    assert answer.spent <= TINY["flops"] * 1.3  # each may start a run that the other did not see
    choices = [choice.id for choice in read_choices(out)]
    finished = [path.name for path in (out / "runs").iterdir()]
    assert set(finished) <= set(choices)


@pytest.mark.slow
def test_a_search_on_ray_gives_the_answer_of_one_here(tmp_path):
    call = [*command(tmp_path, tmp_path / "out"), "--executor", "ray"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = search(**TINY, out=tmp_path / "here")
    assert untimed(read_answer(tmp_path / "out")) == untimed(here.answer)
