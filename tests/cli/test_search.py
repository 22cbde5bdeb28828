"""The command search."""

import json
from unittest.mock import Mock

import pytest

from kit.command import run

FILE = {
    "base": {"task": "regression", "teacher_width": 8, "batch_size": 16, "eval_size": 64},
    "search": {"widths": [16, 32], "steps": [4, 8], "flops": 1e8},
    "space": {"structures": ["btt"], "sample": 0},
}


def write(tmp_path, **changes):
    path = tmp_path / "search.json"
    path.write_text(json.dumps(FILE | changes))
    return str(path)


def test_a_search_ends_with_a_leaderboard_and_code(capsys, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr("einlinear.reports.write.report", reported := Mock())
    code, printed, err = run(
        capsys, "search", write(tmp_path), "--out", str(out), "--executor", "inline"
    )
    assert code == 0, err
    assert reported.call_args.args == (out,)
    assert f"open {reported.return_value.page}" in printed
    assert "search: 2 candidates" in printed
    assert "sizes:  dense widths 16, 32; steps 4, 8" in printed
    lines = printed.splitlines()
    assert any(line.startswith("dense") for line in lines)
    assert any(line.startswith("btt") for line in lines)
    assert 'el.convert_(model, el.parse("btt"))' in printed or "# stay dense" in printed
    assert (out / "answer.json").exists()
    assert "dense is the reference" in err
    assert max(map(len, lines)) <= 100
    runs = len(list((out / "runs").iterdir()))
    board = printed[printed.index("structure") : printed.index("wrote")]
    code, printed, err = run(
        capsys, "search", write(tmp_path), "--out", str(out), "--executor", "inline"
    )
    assert code == 0, err
    assert f"The search is complete: {runs} runs, " in printed
    assert board in printed
    assert err.startswith(f"{runs} runs, ")
    assert "0 runs" not in err


def test_flags_replace_what_the_file_says(capsys, tmp_path):
    out = str(tmp_path / "out")
    flags = ["--flops", "1e3", "--structures", "low_rank", "--space", "sample=0"]
    flags += ["--executor", "inline"]
    code, _, err = run(capsys, "search", write(tmp_path), "--out", out, *flags)
    assert code == 2
    assert "a budget of 1" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--space", "omega"], ["--space has 'omega'", "--space omega=0 psi=1"]),
        (["--space", "omega=x"], ["omega=x", "a range LOW:HIGH"]),
        (["--space", "omga=0"], ["unknown key 'omga'"]),
        (["--space", "omega=0", "psi=1", "nu=0.31:0.311", "sample=9"], ["nu"]),
        (["--minutes", "1", "--flops", "1e9"], ["both minutes and flops"]),
        (["--task", "txt"], ["txt"]),
    ],
)
def test_bad_flags(capsys, tmp_path, flags, words):
    code, _, err = run(capsys, "search", write(tmp_path), "--out", str(tmp_path / "out"), *flags)
    assert code == 2
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": {}}, ["unknown key 'grid'", "[base], [search] and [space]"]),
        ({"search": {"minute": 1}}, ["unknown key 'minute' in [search]", "minutes"]),
        ({"search": {"target": 1}}, ["'target_flops', 'widths'", "mean 'target_flops'?"]),
        ({"space": 3}, ["[space] is 3", "[space] is a table"]),
        ({"search": {}}, ["there is no budget"]),
    ],
)
def test_bad_files(capsys, tmp_path, changes, words):
    path = write(tmp_path, **changes)
    code, _, err = run(capsys, "search", path, "--out", str(tmp_path / "out"))
    assert code == 2
    for word in words:
        assert word in err
    assert ("--" in err) == ("no budget" in err), "keys of a file are not flags"
