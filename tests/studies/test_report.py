"""What a report reads and says, against records whose laws are known."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import einlinear as el
from einlinear.studies.reports.analyse import Settings, analyse, observe
from einlinear.studies.reports.gather import gather
from einlinear.studies.reports.words import conclude, facts
from report_records import (
    DENSE,
    KINDS,
    UNITS,
    Kind,
    make_record,
    write_claim,
    write_diverged,
    write_failure,
    write_record,
    write_runs,
    write_sweep,
    write_unfinished,
)

WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384)
QUICK = Settings(resamples=100)
TRUTH = {"btt(rank=2)": 1.6, "monarch": 1.0, "low_rank": 0.25, "monarch moe 2/8": 2.4}
SLOWNESS = {"btt(rank=2)": 1.25, "monarch": 1.3, "low_rank": 1.1, "monarch moe 2/8": 2.0}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep with every kind of run, and its finished records."""
    path = tmp_path_factory.mktemp("sweep")
    return path, write_sweep(path, widths=WIDTHS)


@pytest.fixture(scope="module")
def found(sweep):
    return analyse(gather(sweep[0]), Settings(resamples=200))


def said(directory, settings=QUICK):
    """All sentences about a directory."""
    return conclude(analyse(gather(directory), settings))


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
    assert running.curve[-1].spent["macs"] == running.macs * running.curve[-1].spent["units"]


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
    assert {run.id: run.state for run in gathered.runs} == {good.id: "finished", bad.id: "running"}


def test_nothing_to_report(tmp_path):
    with pytest.raises(el.EinlinearError, match="no runs in"):
        gather(tmp_path)
    with pytest.raises(el.EinlinearError, match="there is no"):
        gather(tmp_path / "nowhere")


@pytest.mark.parametrize("measure", ["macs", "linear_macs", "seconds", "params", "units"])
def test_what_is_fitted_are_the_points_of_the_records(sweep, measure):
    ids = {record.id for record in sweep[1]}
    runs = [run for run in gather(sweep[0]).runs if run.id in ids]
    records = {record.id: record for record in sweep[1]}
    ours = observe(runs, measure)
    theirs = el.Observations.from_records([records[run.id] for run in runs], measure)
    theirs = theirs.take(theirs.compute > 0)
    for column in ("run", "compute", "loss", "structure", "seed", "group"):
        assert np.array_equal(getattr(ours, column), getattr(theirs, column)), column


def test_multipliers_hold_the_truth(found):
    for measure, slowness in (("macs", {}), ("seconds", SLOWNESS)):
        for name, one in found.measured[measure].multipliers.items():
            truth = TRUTH[name] / slowness.get(name, 1.0)
            low, high = one.median_interval
            # Five sizes: three are inside, and intervals are too narrow. A per cent is their slack.
            assert 0.99 * low <= truth <= 1.01 * high, (measure, name, one.median_interval)
            assert one.median == pytest.approx(truth, rel=0.1)


def test_the_sentences_are_right(found):
    words = conclude(found)
    assert words.headline.startswith(
        "`monarch moe 2/8` needs the least compute for a loss: `dense`"
    )
    times, low, high = map(float, re.findall(r"(\d+\.\d+)", words.headline)[:3])
    assert 0.99 * low < 2.4 < 1.01 * high
    assert low < times < high
    by_name = {re.match("`([^`]*)`", text)[1]: text for text in words.results if text[0] == "`"}
    assert list(by_name) == ["monarch moe 2/8", "btt(rank=2)", "monarch", "low_rank"]
    assert "needs 1.5" in by_name["btt(rank=2)"] or "needs 1.6" in by_name["btt(rank=2)"]
    assert by_name["monarch"].startswith("`monarch` cannot be told apart from `dense` by compute")
    assert re.match(r"`low_rank` needs (3\.|4\.)\d+ times the compute of", by_name["low_rank"])
    assert "by seconds it needs more time (0.2" in by_name["low_rank"]
    assert any("exponents cannot be told apart" in text for text in words.results)
    cautions = " ".join(words.cautions)
    assert "1 run diverged (1 of `btt(rank=2)`)" in cautions
    assert "1 run failed" in cautions
    assert "1 run under way" in cautions
    for word in ("ends of runs", "decade", "one seed", "linf"):
        assert word not in cautions


def test_the_line_of_facts(found):
    line = " · ".join(facts(found))
    assert "83 runs: 80 finished, 1 diverged, 1 failed, 1 running" in line
    assert "task: text" in line
    assert "widths 32 to 1024" in line
    assert "3 seeds" in line


def test_slower_in_seconds_though_cheaper(tmp_path):
    kinds = (DENSE, Kind("btt", 2.0, slowness=6.0))
    write_runs(tmp_path, kinds, WIDTHS, 2)
    (text, *_) = said(tmp_path).results
    assert text.startswith("`btt`: `dense` needs")
    assert "by seconds, however, it needs more time" in text


def test_the_reference_may_be_the_best(tmp_path):
    write_runs(tmp_path, (DENSE, KINDS[3]), WIDTHS, 2)
    assert said(tmp_path).headline == "`dense` needs the least compute for a loss."
    swapped = said(tmp_path, replace(QUICK, reference="low_rank"))
    assert swapped.headline.startswith("`dense` needs the least compute for a loss: `low_rank`")


def test_structures_that_are_alike(tmp_path):
    write_runs(tmp_path, (DENSE, KINDS[2]), WIDTHS, 2)
    headline = said(tmp_path).headline
    assert headline.startswith("No structure was shown to need less compute than `dense`")
    assert "`monarch` cannot be told apart" in headline


def test_a_cap_on_steps_is_noticed(tmp_path):
    """Every run stops at the same step: the trap in which multipliers look too large."""
    write_runs(tmp_path / "capped", (DENSE, KINDS[1]), WIDTHS, 1, steps=20)
    (caution,) = [text for text in said(tmp_path / "capped").cautions if "ends of runs" in text]
    assert "`dense` (7 of 7)" in caution
    assert "may be far off" in said(tmp_path / "capped").headline
    write_runs(tmp_path / "long", (DENSE, KINDS[1]), WIDTHS, 1)
    assert not [text for text in said(tmp_path / "long").cautions if "ends of runs" in text]
    assert "far off" not in said(tmp_path / "long").headline


def test_what_few_runs_cannot_say(tmp_path):
    write_runs(tmp_path, (DENSE, KINDS[1]), (64, 80), 1, overtime=1.2, points=6)
    cautions = " ".join(said(tmp_path).cautions)
    assert "Every setting has one seed" in cautions
    assert "few sizes of" in cautions


def test_a_limit_that_the_data_do_not_show(tmp_path):
    random = np.random.default_rng(0)
    table = tmp_path / "runs.csv"
    compute = np.geomspace(1e9, 3e10, 12)
    loss = (1 + 50 * compute**-0.2) * np.exp(0.02 * random.normal(size=12))
    rows = [f"r{k},{c},{y}" for k, (c, y) in enumerate(zip(compute, loss, strict=True))]
    table.write_text("\n".join(["run,compute,loss", *rows]), encoding="utf-8")
    assert "The data do not say what linf is" in " ".join(said(table).cautions)


def test_less_than_a_decade(tmp_path):
    table = tmp_path / "runs.csv"
    compute = np.geomspace(1e9, 4e9, 8)
    rows = [f"r{k},{c},{1 + 50 * c**-0.2},dense" for k, c in enumerate(compute)]
    table.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    cautions = " ".join(said(table).cautions)
    assert "less than one decade" in cautions
    assert "Every run has one point" in cautions


@pytest.mark.parametrize("seeds", [1, 3])
def test_runs_of_one_name_in_a_table(tmp_path, seeds):
    """Of other structures or with other seeds they are other runs, in reports as in fits."""
    random = np.random.default_rng(0)
    table = tmp_path / "runs.csv"
    rows = [
        f"r{k},{c},{(1 + 50 * (gain * c) ** -0.2) * np.exp(0.001 * random.normal())},{name},{seed}"
        for name, gain in (("dense", 1), ("btt", 2))
        for k, c in enumerate(np.geomspace(1e8, 1e12, 12))
        for seed in range(seeds)
    ]
    table.write_text("\n".join(["run,compute,loss,structure,seed", *rows]), encoding="utf-8")
    runs = gather(table).runs
    assert len({run.id for run in runs}) == len(runs) == 24 * seeds
    assert runs[0].id == ("r0 dense" if seeds == 1 else "r0 dense seed 0")
    words = said(table)
    assert words.headline.startswith("`btt` needs the least compute")
    assert ("one seed" in " ".join(words.cautions)) == (seeds == 1)


def test_losses_that_the_reference_does_not_reach(tmp_path):
    """Beyond the limit of the reference there is no multiplier; before it, it is extrapolated."""
    table = tmp_path / "runs.csv"
    rows = [
        f"{name}{k},{c},{linf + 50 * c**-0.2},{name}"
        for name, linf in (("dense", 3.0), ("btt", 1.0))
        for k, c in enumerate(np.geomspace(1e8, 1e12, 24))
    ]
    table.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    words = said(table, replace(QUICK, linf="fitted"))
    assert words.results[0] == "`btt`: `dense` never reaches its losses, by its law."
    words = said(table)
    assert "extrapolated: the two have no losses in common" in words.headline
    assert "ended early" not in words.headline  # which single points do not show


def test_a_given_linf_is_said(tmp_path):
    write_runs(tmp_path, (DENSE,), WIDTHS, 1)
    assert "linf was given as 0.5" in " ".join(said(tmp_path, replace(QUICK, linf=0.5)).cautions)


def test_no_dense_run(tmp_path):
    write_runs(tmp_path, KINDS[1:3], WIDTHS, 1)
    cautions = " ".join(said(tmp_path).cautions)
    assert "no dense run. The reference is `btt(rank=2)`" in cautions or "`monarch`" in cautions
    with pytest.raises(el.EinlinearError, match="'dense', which was not run"):
        said(tmp_path, replace(QUICK, reference="dense"))


def test_tasks_are_not_mixed(tmp_path):
    write_runs(tmp_path, (DENSE,), WIDTHS, 1)
    other = make_record(Kind("dense", settings={"task": "pixels"}), 64, 0)
    write_record(tmp_path / "runs" / other.id, other)
    found = analyse(gather(tmp_path), QUICK)
    assert found.task == "text"
    assert other.id not in set(found.main.data.run)
    assert any("1 run of the task pixels" in text for text in conclude(found).cautions)
    assert analyse(gather(tmp_path), replace(QUICK, task="pixels")).runs[0].id == other.id
    with pytest.raises(el.EinlinearError, match="no runs of the task 'cifar'"):
        analyse(gather(tmp_path), replace(QUICK, task="cifar"))


def test_data_are_not_mixed(tmp_path):
    write_runs(tmp_path, (DENSE,), (32, 64), 1)
    other = make_record(DENSE, 128, 0)
    other = replace(other, environment={**other.environment, "data": "other"})
    write_record(tmp_path / "runs" / other.id, other)
    waiting = write_unfinished(tmp_path).name
    found = analyse(gather(tmp_path), QUICK)
    assert other.id not in set(found.main.data.run)
    assert {run.id for run in gather(tmp_path).runs} - {run.id for run in found.runs} == {other.id}
    assert waiting in {run.id for run in found.runs}
    assert any(text.startswith("1 run on other data") for text in conclude(found).cautions)


@pytest.mark.parametrize("name", ["device", "processor", "threads"])
def test_other_machines_are_said(tmp_path, name):
    first, second = (make_record(DENSE, width, 0) for width in (32, 64))
    write_record(tmp_path / "a", first)
    write_record(tmp_path / "b", second)
    assert "seconds may not compare" not in " ".join(said(tmp_path).cautions)
    write_record(tmp_path / "b", replace(second, environment={**second.environment, name: "new"}))
    assert f"differ in their {name}, so their seconds" in " ".join(said(tmp_path).cautions)


def test_what_is_spent_in_the_warm_up_is_no_frontier(tmp_path):
    """While the rate grows losses hardly fall: laws must not follow that."""
    record = make_record(DENSE, 64, 0, warmup=100)
    early = [p.step for p in record.curve if p.step < 100]
    assert len(early) > 3
    write_record(tmp_path / "a", record)
    (run,) = gather(tmp_path).runs
    assert [p.step for p in run.curve if not run.counts(p)] == early
    data = observe([run], "units")
    assert min(data.compute) >= 100 * UNITS
    assert len(data) == len(record.curve) - len(early)
    short = make_record(DENSE, 64, 0, warmup=100, steps=40)  # never warm: its end still counts
    write_record(tmp_path / "b", short)
    assert len(el.Observations.from_records([short])) == 1


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("btt(rank=1)", "monarch"),
        ("btt", "monarch"),
        ("btt(rank=1) moe 2/8", "monarch moe 2/8"),
        ("btt(rank = 2)", "btt(rank=2)"),
        ("dense", "dense"),
    ],
)
def test_the_reference_in_another_spelling(sweep, given, meant):
    settings = Settings(resamples=0, reference=given)
    found = analyse(gather(sweep[0]), settings)
    assert found.reference == meant
    assert found.structures[0] == meant
    assert all(one.reference == meant for one in found.main.multipliers.values())


def test_a_law_that_misses_its_points_is_said(tmp_path):
    """A frontier with a step in it has a law, and intervals, but does not follow it."""
    compute = np.geomspace(1e8, 1e12, 24)
    for size, is_said in ((0.0, False), (0.25, True)):
        loss = (1 + 50 * compute**-0.2) * np.exp(-size * (compute > 1e10))
        rows = [f"r{k},{c},{y}" for k, (c, y) in enumerate(zip(compute, loss, strict=True))]
        table = tmp_path / "runs.csv"
        table.write_text("\n".join(["run,compute,loss", *rows]), encoding="utf-8")
        assert any("Laws miss" in text for text in said(table).cautions) is is_said


def test_a_multiplier_that_changes_with_the_loss_is_said(tmp_path):
    """Laws that cross: one number hides that the other structure is better later."""
    compute = np.geomspace(1e8, 1e12, 24)
    laws = {"dense": 50 * compute**-0.20, "low_rank": 16 * compute**-0.15}
    rows = [
        f"{name}{k},{c},{1 + y},{name}"
        for name, losses in laws.items()
        for k, (c, y) in enumerate(zip(compute, losses, strict=True))
    ]
    table = tmp_path / "runs.csv"
    table.write_text("\n".join(["run,compute,loss,structure", *rows]), encoding="utf-8")
    (text,) = [text for text in said(table).results if "The multiplier" in text]
    first, high, last, low = map(
        float, re.search(r"falls from (.*) at loss (.*) to (.*) at loss (.*), by", text).groups()
    )

    def truth(loss):
        return ((loss - 1) / 50) ** -5 / ((loss - 1) / 16) ** (-1 / 0.15)

    assert high > low
    assert first == pytest.approx(truth(high), rel=0.1)
    assert last == pytest.approx(truth(low), rel=0.1)


def test_few_sizes_fall_back_to_the_whole_frontier(tmp_path):
    write_runs(tmp_path, (DENSE,), WIDTHS, 1)
    write_runs(tmp_path, (KINDS[3],), (64, 128), 1)
    laws = analyse(gather(tmp_path), QUICK).main.laws
    assert laws["dense"].points == "inner"
    assert laws["dense"].note == ""
    assert laws["low_rank"].points == "frontier"
    assert "few sizes" in laws["low_rank"].note
    assert laws["low_rank"].law.linf == laws["dense"].law.linf


def test_runs_that_diverge_count_until_then(tmp_path):
    bad = write_diverged(tmp_path)
    data = observe(gather(tmp_path).runs, "macs")
    assert len(data) == sum(p.loss is not None and p.step >= bad.config.warmup for p in bad.curve)
