import json
from typing import get_args

import pytest

from einlinear.bench.doctor.examine import CHECKS
from einlinear.cli.commands import doctor as command
from kit.command import run
from kit.doctor import named, without_inductor

SLOW_CHECKS = ("compile", "onnx", "speed", "speed-training")


def test_without_a_model_it_shows_the_installation(capsys):
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    assert "engine " in out


def test_a_model_for_which_all_works(capsys, tmp_path):
    words = ["--structure", "btt(rank=2)", "--skip", *SLOW_CHECKS]
    path = tmp_path / "a.json"
    code, out, err = run(capsys, "doctor", named("HandWrittenGPT"), *words, "--json", str(path))
    assert code == 0
    assert "model      kit.doctor_models:HandWrittenGPT (HandWrittenGPT)\n" in out
    assert "input      int64 8 x 32 (made up)\n" in out
    assert f"\nAll 7 checks passed.\nwrote {path}\n" in out
    assert err.splitlines()[3] == "check 4 of 7: backward"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["structure"] == "btt(rank=2)"
    assert [c["name"] for c in data["checks"]][:2] == ["convert", "project"]
    assert data["checks"][0]["numbers"]["layers"] == 6


def test_a_model_for_which_some_things_fail(capsys):
    words = ["--structure", "btt(rank=2)", "--skip", *SLOW_CHECKS]
    code, out, _ = run(capsys, "doctor", named("Gained"), *words)
    assert code == 1
    assert "mup: paste this once, before the call, and check it:\n\nimport einlinear" in out
    assert out.endswith("\n1 of 7 checks failed: mup.\n")
    code, out, _ = run(capsys, "doctor", named("Spare"), *words)
    assert (code, out.splitlines()[-1]) == (1, "1 of 7 checks failed: backward.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [named("Two")],
            ["--structure is missing", "fix:  einlinear doctor kit.doctor_models:Two"],
        ),
        (["--structure", "btt"], ["--structure without a model"]),
        (["--inputs", "a:b"], ["--inputs without a model"]),
        (["--json", "a.json"], ["--json without a model", "or leave --json out"]),
        (["Two", "--structure", "btt"], ["the model is 'Two'", "rule: a model is named MODULE:F"]),
        (
            [named("Two"), "--structure", "bt"],
            ["there is no structure named 'bt'", "did you mean 'btt"],
        ),
        ([named("Two"), "--structure", "btt", "--inputs", "x"], ["the input is 'x'"]),
        ([named("Two"), "--structure", "btt", "--skip", "onxx"], ["--skip is 'onxx'", "onnx"]),
        ([named("Picky"), "--structure", "btt"], ["no input is known for Picky", "give --inputs"]),
    ],
)
def test_bad_input_has_three_lines(capsys, words, message):
    code, out, err = run(capsys, "doctor", *words)
    assert (code, out) == (2, "")
    assert [line[:7] for line in err.splitlines()] == ["einline", "  rule:", "  fix: "]
    for part in message:
        assert part in err


def test_checks_that_can_be_skipped():
    names = [check.name for check in CHECKS]
    assert [name for name in names if name not in ("convert", "forward")] == [
        *get_args(command._Skipped)
    ]


@pytest.mark.slow
def test_every_check_of_a_model_of_hugging_face(capsys, monkeypatch):
    pytest.importorskip("transformers")
    without_inductor(monkeypatch)
    code, out, _ = run(capsys, "doctor", named("gpt2"), "--structure", "btt(rank=2)")
    assert code == 0, out
    assert "pretrained " in out
