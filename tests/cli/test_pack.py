"""The command pack, and the commands that read its file."""

import json

import einlinear as el
from einlinear.runs.packed import read_packed
from kit.command import run
from kit.report_records import (
    DENSE,
    make_record,
    write_diverged,
    write_record,
    write_runs,
    write_unfinished,
)
from kit.runs import TINY


def test_runs_are_packed_once_and_reported(capsys, tmp_path):
    records = write_runs(tmp_path / "a", kinds=[DENSE], widths=(32, 64, 128))
    write_diverged(tmp_path / "a")
    write_record(tmp_path / "b", make_record(DENSE, 96, 0, data="/somewhere/texts"))
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    code, out, err = run(capsys, "pack", str(tmp_path / "a"), "--out", str(first))
    assert (code, err) == (0, "")
    assert out == (
        f"packed {len(records) + 1} runs in {first.stat().st_size:,} bytes\nwrote {first}\n"
    )
    sources = [str(first), str(tmp_path / "b"), str(tmp_path / "a" / "runs")]
    code, out, err = run(capsys, "pack", *sources, "--out", str(second))
    assert code == 0
    assert err == "note: the settings hold an absolute path: /somewhere/texts\n"
    assert f"packed {len(records) + 2} runs in " in out
    assert len(read_packed(second)) == len(records) + 2
    code, out, err = run(capsys, "report", str(first), "--resamples", "0")
    assert code == 0, err
    assert "dense" in out
    assert (tmp_path / "report" / "index.html").exists()


def test_bad_input_is_three_lines(capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    table = tmp_path / "table.csv"
    table.write_text("run,compute,loss\na,1,2\n", encoding="utf-8")
    for sources, words in [
        ([str(tmp_path / "none")], "there is no "),
        ([str(table)], "table.csv does not hold packed records"),
        ([str(tmp_path)], "there are no records in "),
        ([], ""),
    ]:
        code, printed, err = run(capsys, "pack", *sources, "--out", str(out))
        assert (code, printed, len(err.splitlines())) == (2, "", 3), err
        assert words in err
        assert not out.exists()


def test_a_dry_run_counts_given_records_as_done(capsys, tmp_path):
    study = tmp_path / "study.json"
    base = TINY | {"steps": 4, "warmup": 0}
    study.write_text(json.dumps({"base": base, "grid": {"seed": [0, 1]}}))
    el.train(el.RunConfig(**base, seed=1), tmp_path / "run")
    packed, out = str(tmp_path / "records.jsonl"), str(tmp_path / "out")
    assert run(capsys, "pack", str(tmp_path / "run"), "--out", packed)[0] == 0
    words = ["sweep", str(study), "--out", out, "--executor", "inline", "--records", packed]
    code, printed, err = run(capsys, *words, "--dry-run")
    assert code == 0, err
    assert "; 1 are done, 1 to go; 1 from --records" in printed
    assert "1 of 1 given record belongs to this study" in printed
    assert not (tmp_path / "out").exists()


def test_files_that_hold_something_else_stay_as_they_are(capsys, tmp_path):
    write_runs(tmp_path / "a", kinds=[DENSE], widths=(32, 64))
    write_runs(tmp_path / "b", kinds=[DENSE], widths=(128,))
    write_unfinished(tmp_path / "a")
    notes, packed = tmp_path / "notes.txt", tmp_path / "packed.jsonl"
    notes.write_text("a year of notes\n", encoding="utf-8")
    code, _, err = run(capsys, "pack", str(tmp_path / "a"), "--out", str(notes))
    assert (code, notes.read_text(encoding="utf-8")) == (2, "a year of notes\n")
    assert "does not hold packed records" in err
    code, _, err = run(capsys, "pack", str(tmp_path / "a"), "--out", str(packed))
    assert (code, err) == (0, "note: 1 run has no record and is left out\n")
    before = packed.read_bytes()
    code, _, err = run(capsys, "pack", str(tmp_path / "b"), "--out", str(packed))
    held = len(read_packed(packed))
    assert (code, packed.read_bytes()) == (2, before)
    assert f"has {held} runs that the new file would not have" in err
    both = [str(packed), str(tmp_path / "b")]
    assert run(capsys, "pack", *both, "--out", str(packed))[0] == 0
    assert len(read_packed(packed)) > held
