"""The command time."""

from dataclasses import replace

import pytest

import einlinear as el
from einlinear.runs.packed import write_packed
from kit.command import run
from kit.report_records import DENSE, make_record
from kit.runs import tiny
from kit.times import times_of

QUICK = {"steps": 2, "eval_points": 1, "warmup": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in (("a", {}), ("b", {"seed": 1}), ("c", {"structure": "btt"})):
        el.train(tiny(**QUICK, **settings), folder / name)
    return folder


def test_models_of_runs_are_timed(runs, tmp_path, capsys):
    path = tmp_path / "new folder" / "steps.json"
    code, out, _ = run(capsys, "time", str(runs), "--out", str(path), "--repeats", "2")
    assert code == 0
    assert f"wrote {path}" in out
    assert f"next: einlinear report {runs} --times '{path}'" in out
    times = el.read_step_times(path)
    assert [row.label for row in times.rows] == ["dense", "btt"]
    assert out.startswith(times.table(80))
    records = [el.read_record(runs / name) for name in "abc"]
    data = el.Observations.from_records(records, "seconds", times=path)
    assert data.compute.max() == 2 * max(row.seconds for row in times.rows)


def test_single_runs_and_sweeps_are_sources(runs, tmp_path, capsys, monkeypatch):
    (tmp_path / "sweep" / "runs").mkdir(parents=True)
    (tmp_path / "sweep" / "runs" / "c").symlink_to(runs / "c")
    seen = []

    def measured(records, **options):
        seen.extend(record.config.structure for record in records)
        assert (options["repeats"], options["threads"]) == (9, 1)
        return times_of(tiny())

    monkeypatch.setattr("einlinear.bench.steps.measure_steps", measured)
    sources = [str(runs / "a"), str(tmp_path / "sweep")]
    code, out, _ = run(capsys, "time", *sources, "--out", str(tmp_path / "steps.json"))
    assert code == 0
    assert seen == ["dense", "btt"]
    assert "next:" not in out


@pytest.mark.parametrize(
    ("trained", "given", "used", "note"),
    [
        ([2, 2], [], 2, ""),
        ([1, 2], [], 1, "trained with 1 and 2 threads, and steps are timed with 1 thread;"),
        ([2, 2], ["--threads", "1"], 1, "with 2 threads, and steps are timed with 1 thread;"),
        ([1, 1], ["--threads", "3"], 3, "with 1 thread, and steps are timed with 3 threads;"),
        ([2, 2], ["--threads", "2"], 2, ""),
        ([None, None], [], 1, ""),
    ],
)
def test_threads_are_those_of_the_runs(tmp_path, capsys, monkeypatch, trained, given, used, note):
    seen = []
    records = [
        replace(make_record(DENSE, 32, seed), environment={"threads": number})
        for seed, number in enumerate(trained)
    ]
    write_packed(records, tmp_path / "a.jsonl")

    def measured(records, **options):
        seen.append(options["threads"])
        return times_of(tiny())

    monkeypatch.setattr("einlinear.bench.steps.measure_steps", measured)
    words = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "steps.json"), *given]
    code, _, err = run(capsys, "time", *words)
    assert (code, seen) == (0, [used])
    assert note in err if note else "note" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none", "--out", "a.json"], "there is no none"),
        (["x" * 300, "--out", "a.json"], "cannot read xxx"),
        ([".", "--out", "a.json"], "there are no records in ."),
        (["{runs}", "--out", "."], ". is a folder"),
        (["{runs}", "--out", "a.json", "--repeats", "0"], "--repeats is 0"),
        (["{runs}", "--out", "a.json", "--threads", "0"], "--threads is 0"),
        (["--out", "a.json"], ""),
    ],
)
def test_wrong_words_are_three_lines(runs, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "time", *(word.format(runs=runs) for word in words))
    assert code == 2
    assert err.startswith(f"einlinear: {message}")
    assert [line[:7] for line in err.splitlines()[1:]] == ["  rule:", "  fix: "]
    assert list(tmp_path.iterdir()) == []
