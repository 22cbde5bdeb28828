"""The command reproduce."""

import json

import pytest

from einlinear.reproductions.catalogue import REPRODUCTIONS, SCALES
from einlinear.reproductions.costs import stored_costs
from kit.command import run

TINY = "steps=6 batch_size=2 context=16 eval_points=2 eval_size=8 seed=0 width=[32,48]".split()


def test_the_list_fits_80_columns_and_has_every_figure(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, "reproduce")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    for name, found in REPRODUCTIONS.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{name} "))
        for scale in SCALES:
            cost = stored_costs().get((name, scale))
            if cost is not None:
                assert f" {cost.runs} " in lines[at]
                assert f"{cost.flops:.1e}" in lines[at]
        assert lines[at + 1] == f"  {found.about}"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["fronteirs", "--out", "x"], "named 'fronteirs'", "did you mean 'frontiers'?"),
        (["heads", "--out", "x", "--scale", "papr"], "--scale is 'papr'", "did you mean 'paper'?"),
        (["heads"], "--out is missing", "einlinear reproduce heads --out heads"),
        (["heads", "--out", "x", "--data", "no/where"], "file or folder no/where", "check the"),
        (["landscape", "--out", "x", "--data", "no/where"], "folder no/where", "check the path"),
        (["taxonomy", "--out", "x", "--data", "a"], "--data is 'a'", "leave --data out"),
        (["landscape", "--out", "x", "--validation", "a"], "--validation is 'a'", "leave --val"),
        (["taxonomy", "--out", "x", "--settings", "a=1"], "trains nothing", "einlinear atlas"),
        (["heads", "--out", "x", "--settings", "steps"], "--settings has 'steps'", "steps=100"),
        (["heads", "--out", "x", "--processes", "0"], "--processes is 0", "1"),
    ],
)
def test_bad_input_is_told_in_three_lines(capsys, tmp_path, monkeypatch, words, what, fix):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "reproduce", *words)
    lines = err.splitlines()
    assert (code, len(lines)) == (2, 3)
    assert what in lines[0]
    assert fix in lines[2]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_at_the_scale_of_the_paper_counts_and_writes_nothing(capsys, tmp_path):
    """Most of these models do not fit into the memory of a small machine."""
    out = tmp_path / "out"
    words = ["heads", "--scale", "paper", "--out", str(out), "--dry-run", "--executor", "inline"]
    code, printed, err = run(capsys, "reproduce", *words)
    assert code == 0, err
    cost = stored_costs()["heads", "paper"]
    assert f"{cost.runs} runs, {cost.flops:.3g} training FLOPs in all" in printed
    assert "no run could be timed" in printed
    assert not out.exists()


def test_a_dry_run_of_the_atlas(capsys, tmp_path):
    code, printed, _ = run(capsys, "reproduce", "taxonomy", "--out", str(tmp_path), "--dry-run")
    assert (code, printed) == (0, f"trains nothing\nwrites {tmp_path / 'atlas.html'}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", [name for name in REPRODUCTIONS if name != "taxonomy"])
def test_every_dry_run(capsys, tmp_path, name, scale):
    words = ["--scale", scale, "--out", str(tmp_path / "out"), "--dry-run", "--executor", "inline"]
    code, printed, err = run(capsys, "reproduce", name, *words)
    assert code == 0, err
    cost = stored_costs()[name, scale]
    assert f"{cost.runs} runs, {cost.flops:.3g} training FLOPs in all" in printed


@pytest.mark.slow
def test_a_small_one_from_beginning_to_page(capsys, tmp_path):
    out = tmp_path / "out"
    words = ["reproduce", "heads", "--out", str(out), "--settings", *TINY, "--executor", "inline"]
    code, printed, err = run(capsys, *words)
    assert code == 0, err
    assert "6 runs finished, 0 of them diverged; 0 failed" in printed
    assert f"wrote {out / 'report' / 'index.html'}" in printed
    assert "next: " not in printed
    assert (out / "report" / "index.html").stat().st_size > 10_000
    records = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/record.json")}
    assert len(records) == 6
    code, printed, err = run(capsys, *words)
    assert code == 0, err
    assert "6 are done, 0 to go" in printed
    assert records == {path: path.stat().st_mtime_ns for path in records}


@pytest.mark.slow
def test_a_run_that_fails_is_shown_and_the_others_are_reported(capsys, tmp_path):
    out = tmp_path / "out"
    words = ["reproduce", "heads", "--out", str(out), "--settings", *TINY, "--executor", "inline"]
    assert run(capsys, *words)[0] == 0
    broken = next((out / "runs").iterdir())
    (broken / "record.json").unlink()
    (broken / "metrics.jsonl").unlink()
    (broken / "metrics.jsonl").mkdir()
    (out / "report" / "index.html").unlink()
    code, printed, _ = run(capsys, *words)
    assert code == 1
    assert "5 runs finished, 0 of them diverged; 1 failed" in printed
    assert (out / "report" / "index.html").exists()


@pytest.mark.slow
def test_the_landscape_and_the_atlas(capsys, tmp_path):
    small = ['structures=["dense","btt"]', "widths=[16,32]", "rates=[-8,-6]", "seeds=1"]
    small += ["naive_rates=[-8,-6]", "steps=10"]
    words = ["reproduce", "landscape", "--out", str(tmp_path), "--settings", *small]
    code, printed, err = run(capsys, *words, "--executor", "inline")
    assert code == 0, err
    assert "24 runs finished" in printed
    assert f"wrote {tmp_path / 'landscape.svg'}" in printed
    facts = json.loads((tmp_path / "landscape.json").read_text())
    assert "machine" in facts
    code, printed, err = run(capsys, "reproduce", "taxonomy", "--out", str(tmp_path))
    assert code == 0, err
    assert f"wrote {tmp_path / 'atlas.html'}" in printed
