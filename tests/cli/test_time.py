"""The command time."""

import pytest

import einlinear as el
from kit.command import run
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
