"""The command sweep and its display."""

import errno
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import einlinear as el
from einlinear.cli import progress, sweep_display
from einlinear.show.numbers import duration
from einlinear.sweeps import planner
from einlinear.sweeps.driver import Failure, Running, SweepProgress
from einlinear.sweeps.job import keep_failure
from einlinear.sweeps.planner import Timing, expand_study, kind_of
from kit.command import run
from kit.runs import TINY, tiny, without_clock


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.json"
    base = TINY | {"steps": 6, "warmup": 0}
    path.write_text(json.dumps({"base": base, "grid": {"seed": [0, 1], "width": [16, 32]}}))
    return path


def test_a_dry_run_says_everything_and_writes_nothing(capsys, tmp_path, study):
    out = tmp_path / "out"
    code, printed, err = run(capsys, "sweep", str(study), "--out", str(out), "--dry-run")
    assert code == 0, err
    plans = [expand_study(el.load_study(study))]
    assert f"4 runs, {sum(r.flops for r in plans[0]):.3g} training FLOPs in all" in printed
    assert "of 1 thread each; about" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith("dense")]
    assert [(row[0], row[1], row[3], row[4]) for row in rows] == [
        ("dense", "16", "2", "0"),
        ("dense", "32", "2", "0"),
    ]
    assert not out.exists()


def test_a_dry_run_for_ray_knows_no_cluster(capsys, tmp_path, study):
    command = ["sweep", str(study), "--out", str(tmp_path / "out"), "--dry-run", "--executor"]
    code, printed, _ = run(capsys, *command, "ray", "--address", "nowhere:1")
    assert code == 0
    assert "as many at once as there is room for, by tasks of Ray of 1 thread each; " in printed
    _, printed, _ = run(capsys, *command, "ray", "--devices", "2")
    assert "room for, on 2 devices each, by tasks of Ray of 1 thread per device; " in printed
    _, printed, _ = run(capsys, *command, "ray", "--processes", "3")
    assert "3 at once by tasks of Ray" in printed


def test_the_plan_fits_80_columns(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "study.json"
    names = ["theta(1/2,1/4,1/4,1/4,1/2,1/4,0)", "btt( rank=2 )"]
    path.write_text(json.dumps({"base": TINY, "grid": {"structure": names}}))
    _, printed, _ = run(capsys, "sweep", str(path), "--out", str(tmp_path / "out"), "--dry-run")
    table = printed.partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 80
    for name in names:
        assert any(line.startswith(name) for line in table[3:])


@pytest.mark.slow
def test_combinations_that_are_the_same_run(capsys, tmp_path):
    path = tmp_path / "study.json"
    grid = {"structure": ["monarch", "btt(rank=1)", "dense"]}
    path.write_text(json.dumps({"base": TINY, "grid": grid}))
    _, printed, _ = run(capsys, "sweep", str(path), "--out", str(tmp_path / "out"), "--dry-run")
    assert "2 runs, " in printed
    assert "FLOPs in all; combinations that repeat another: 1\n" in printed


def test_runs_here_and_what_is_done_is_done(capsys, tmp_path, study):
    out = tmp_path / "out of here"
    command = ["sweep", str(study), "--out", str(out), "--executor", "inline"]
    code, printed, err = run(capsys, *command)
    assert code == 0, err
    assert "4 runs finished, 0 of them diverged; 0 failed" in printed
    assert f"next: einlinear report '{out}'" in printed, "as a shell needs it"
    assert "4 of 4 runs done" in err
    config = tiny(steps=6, warmup=0, seed=1, width=32)
    path = out / "runs" / config.id
    assert without_clock(el.read_record(path)) == without_clock(el.train(config))
    assert not list(path.glob("claim-*")), "nobody has it any more"
    before = (path / "record.json").stat().st_mtime_ns
    code, printed, err = run(capsys, *command)
    assert code == 0, err
    assert "4 are done, 0 to go" in printed
    assert "finished" not in err, "what was done before is no news"
    assert (path / "record.json").stat().st_mtime_ns == before


def test_a_run_that_fails_is_tried_twice_and_shown(capsys, tmp_path, study):
    out = tmp_path / "out"
    broken = out / "runs" / tiny(steps=6, warmup=0).id
    (broken / "metrics.jsonl").mkdir(parents=True)  # it cannot be written
    code, printed, err = run(capsys, "sweep", str(study), "--out", str(out), "--executor", "inline")
    assert code == 1
    assert "3 runs finished, 0 of them diverged; 1 failed" in printed
    assert (
        f"failed: {broken.name} width 16, seed 0\n  {broken / 'metrics.jsonl'} is not a file"
        in printed
    )
    assert f"log: {broken / 'log.txt'}" in printed
    assert "run the same command again to retry" in printed
    assert f"failed    {broken.name} width 16, seed 0:" in err
    lines = [json.loads(line) for line in (broken / "failures.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["kind"]) for line in lines] == [(1, "error"), (2, "error")]
    assert (broken / "log.txt").read_text().count("is not a file") == 2


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--slurm", "partition"], "--slurm has 'partition'"),
        (["--slurm", "time=5"], "--slurm is 'time=5', the executor local"),
        (["--address", "auto"], "--address is 'auto'"),
        (["--processes", "0"], "--processes is 0"),
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "3"], "--devices are 3, and a run has a batch_size of 4"),
    ],
)
def test_bad_flags(capsys, tmp_path, study, flags, what):
    code, _, err = run(capsys, "sweep", str(study), "--out", str(tmp_path / "out"), *flags)
    assert code == 2
    assert what in err
    assert len(err.splitlines()) == 3


def test_a_directory_of_a_single_run_is_refused(capsys, tmp_path, study):
    el.train(tiny(steps=1, warmup=0), tmp_path / "out")
    for flags in (["--executor", "inline"], ["--dry-run"]):
        code, _, err = run(capsys, "sweep", str(study), "--out", str(tmp_path / "out"), *flags)
        assert code == 2
        assert "is the directory of a single run" in err
    code, _, err = run(capsys, "sweep", str(study), "--out", str(study), "--dry-run")
    assert (code, err.splitlines()[0]) == (2, f"einlinear: {study} is a file")


def test_failures_are_kept_in_order(tmp_path):
    keep_failure(tmp_path, "error", "first\n")
    keep_failure(tmp_path, "killed", "second\n")
    lines = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["error"]) for line in lines] == [(1, "first\n"), (2, "second\n")]


RUNNING = (
    Running("a", "btt [bold]x", 420, 1000, 1.91234, 75.0, False),
    Running("b", "dense", 0, 1000, None, None, True),
)
AT = SweepProgress(24, 9, 1, 1, RUNNING, 0.4, 4000.0)


def test_a_live_picture_in_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=110, color_system=None)
    failure = Failure("c", "low", "Traceback\n  [red]\nValueError: no", None)
    with sweep_display.sweep_display(console, {"c": "low"}) as show:
        show(AT)
        show(SweepProgress(24, 9, 1, 1, (), 0.4, 1.0, (failure,)))
    shown = file.getvalue()
    assert "10 of 24 runs done, 1 diverged, 1 failed, 2 running, about 66.7 min left" in shown
    assert "btt [bold]x" in shown
    assert "420/1,000  train loss 1.9123  75.0 s left" in shown
    assert "dense (another sweep)" in shown
    assert "failed    c low: ValueError: no" in shown


@pytest.mark.parametrize(("width", "has_bars"), [(54, False), (77, False), (78, True)])
def test_names_are_seen_in_a_narrow_terminal(width, has_bars):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system=None)
    with sweep_display.sweep_display(console, {}) as show:
        show(AT)
    shown = file.getvalue()
    assert "btt [bold]x" in shown
    assert "420/1,000  train loss 1.9123" in shown
    assert ("━" in shown) == has_bars


def test_lines_in_a_log(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    done = SweepProgress(24, 23, 1, 0, (), 1.0, 0.0)
    with sweep_display.sweep_display(Console(file=io.StringIO()), {}) as show:
        for seconds, at in ((0, AT), (5, AT), (20, AT), (36, done)):
            now[0] = seconds
            show(at)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "24 of 24 runs done, 1 diverged"


def test_a_log_that_is_full(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sweep_display.sys, "stderr", Full())
    with sweep_display.sweep_display(Console(file=io.StringIO()), {}) as show:
        show(SweepProgress(4, 0, 0, 0, (), 0.0, 1.0))


def test_no_more_rows_than_fit():
    many = SweepProgress(99, 0, 0, 0, RUNNING * 15, 0.0, 1.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(sweep_display.picture(many, 120, "all"))
    assert "and 10 more" in console.file.getvalue()


def test_names_that_look_like_markup(capsys, tmp_path):
    path = tmp_path / "study.toml"
    text = el.Study("[/b] [red]name", TINY).to_toml()
    path.write_text(text, encoding="utf-8")
    code, printed, err = run(capsys, "sweep", str(path), "--out", str(tmp_path), "--dry-run")
    assert code == 0, err
    assert "[/b] [red]name" in printed


def test_the_plan_names_structures_as_reports_do(capsys, tmp_path):
    path = tmp_path / "study.json"
    grid = {"structure": ["btt", "dense"], "num_experts": [4]}
    path.write_text(json.dumps({"base": TINY, "grid": grid}))
    code, printed, err = run(capsys, "sweep", str(path), "--out", str(tmp_path), "--dry-run")
    assert code == 0, err
    assert "btt moe 2/4" in printed
    assert "dense moe 2/4" in printed


def test_the_reason_of_a_failure_in_a_line():
    traceback = "Traceback (most recent call last):\n  File x\nValueError: no\n"
    error = str(el.EinlinearError(what="what", rule="rule", fix="fix"))
    for text, reason in [(traceback, "ValueError: no"), (error, "what"), ("", "")]:
        assert Failure("id", "label", text, Path()).reason == reason


def test_a_time_that_nothing_tells_is_not_told(capsys, tmp_path, study, monkeypatch):
    monkeypatch.setattr(planner, "time_steps", lambda runs, known, **_: known)
    given = ["--dry-run", "--executor", "inline"]
    _, printed, _ = run(capsys, "sweep", str(study), "--out", str(tmp_path / "out"), *given)
    assert "one after the other in this process; no run could be timed\n" in printed
    assert printed.count("unknown") == 2


def test_what_it_does_is_said_before_the_plan(capsys, tmp_path, study, monkeypatch):
    class StopError(Exception):
        pass

    def stopped(*_):
        raise StopError

    monkeypatch.setattr(planner, "expand_study", stopped)
    command = ["sweep", str(study), "--out", str(tmp_path / "out"), "--executor", "inline"]
    with pytest.raises(StopError):
        run(capsys, *command)
    assert capsys.readouterr().out == (
        "study: study\nplanning 4 combinations: counts FLOPs, times a few steps\n"
    )


def test_a_run_that_is_half_done_takes_half_as_long(capsys, tmp_path, study, monkeypatch):
    def timed(runs, known, **_):
        return [Timing(kind_of(run.config), run.macs, 100.0) for run in runs]

    monkeypatch.setattr(planner, "time_steps", timed)
    flags = ["--dry-run", "--executor", "inline"]
    command = ["sweep", str(study), "--out", str(tmp_path / "out"), *flags]
    before = run(capsys, *command)[1]
    (one,) = {run.seconds for run in estimated(study, timed)}
    assert f"; about {duration(4 * one)}\n" in before
    checkpoints = tmp_path / "out" / "runs" / tiny(steps=6, warmup=0).id / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step in (1, 3):
        (checkpoints / f"step-{step}.json").touch()
    after = run(capsys, *command)[1]
    assert "in all; 1 run will resume from a checkpoint\n" in after
    assert f"; about {duration(3.5 * one)}\n" in after


def estimated(study, timed):
    """The runs of a study with their times."""
    runs = expand_study(el.load_study(study))
    times = planner.estimate(runs, timed(runs, ()))
    return [replace(run, seconds=seconds) for run, seconds in zip(runs, times, strict=True)]


def test_a_wrong_study_is_not_kept(capsys, tmp_path):
    path, out = tmp_path / "wrong.toml", tmp_path / "out"
    path.write_text('[base]\ntask = "text"\nwidth = 16\nflops = 10\n', encoding="utf-8")
    code, _, err = run(capsys, "sweep", str(path), "--out", str(out), "--executor", "inline")
    assert (code, out.exists()) == (2, False), "reports give a command for every study that is kept"
    assert "a budget is enough for one step" in err
