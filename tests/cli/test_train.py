"""The commands train, sample and prepare."""

import json
import os
import socket
import subprocess
import sys

import pytest

from einlinear import Study, read_record
from einlinear.cli.commands.prepare import kept_text
from einlinear.data.tokens import TokenCounts
from einlinear.runs.record import RunRecord
from einlinear.sweeps.planner import expand_study
from kit.command import run
from kit.runs import TINY, tiny

FLAGS = [
    word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))
]


def test_train_sample(capsys, tmp_path):
    out = tmp_path / "run"
    command = ["train", *FLAGS, "--structure", "btt(rank=2)", "--out", str(out)]
    code, printed, err = run(capsys, *command)
    assert code == 0, err
    record = read_record(out)
    assert record.config == tiny(structure="btt(rank=2)")
    for words in (
        record.id,
        f"{record.counts.params:,}",
        f"FLOPs/token (forward)  {2 * record.counts.macs:,}, in linear layers "
        f"{2 * record.counts.linear_macs:,}",
        f"training FLOPs         {6 * record.counts.macs * 1536:.3g}, forward and backward",
        "24 of 64 tokens, 1,536 in all",
        str(out),
        f"finished with a validation loss of {record.final_loss:.4f} after 24 steps",
        f"wrote {out / 'record.json'}",
    ):
        assert words in printed
    table = printed.partition("\n---")[2].splitlines()[1 : len(record.curve) + 1]
    assert len(table) == len(record.curve)
    (planned,) = expand_study(Study("one", {**TINY, "structure": "btt(rank=2)"}))
    assert table[-1].split()[2] == f"{planned.flops:.3g}", "what sweep calls FLOPs"
    assert max(map(len, table)) <= 80
    assert "step 24 of 24, training loss" in err
    again = run(capsys, *command)
    assert again[0] == 0
    assert "finished with a validation loss" in again[1]
    assert f"read {out / 'record.json'}" in again[1]
    assert f"run {record.id} in {out} is already finished" in " ".join(again[1].split())
    assert "already finished" not in printed
    text = ["sample", str(out), "--prompt", "We ", "--tokens", "9", "--seed", "3"]
    code, first, _ = run(capsys, *text)
    assert code == 0
    assert first.startswith("We ")
    assert len(first) == len("We ") + 9 + 1
    assert run(capsys, *text)[1] == first
    assert run(capsys, *text[:-1], "4")[1] != first


def test_a_file_of_settings_and_flags_before_it(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(tiny(weight_norm=True, compile=False).to_toml(), encoding="utf-8")
    out = tmp_path / "out"
    flags = ["--steps", "3", "--weight-norm", "False", "--betas", "0.8", "0.9", "--ema", "0"]
    code, _, err = run(capsys, "train", "--config", str(path), *flags, "--out", str(out))
    assert code == 0, err
    config = read_record(out).config
    assert config == tiny(steps=3, weight_norm=False, betas=(0.8, 0.9), ema=0.0, checkpoint_every=5)


def test_a_study_is_trained_by_another_command(capsys, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(Study("many", TINY, ({"width": [16, 32]},)).to_toml(), encoding="utf-8")
    code, _, err = run(capsys, "train", "--config", str(path), "--out", str(tmp_path / "out"))
    assert code == 2
    assert err.startswith(f"einlinear: {path} is a study: it has [base] and [grid]\n")
    assert err.endswith(f"  fix:  einlinear sweep {path} --out DIR\n")


def test_one_document_is_no_documents():
    assert kept_text(TokenCounts(1, 0, 1)) == "1 document, 0 dropped; 1 character dropped"
    assert kept_text(TokenCounts(2, 1, 0)) == "2 documents, 1 dropped; 0 characters dropped"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--structure", "btx"], "btx"),
        (["--data", "no such file"], "no such file"),
        (["--width", "60"], "the --head-size 16"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--mirror", "wandb"], "wandb is not installed"),
    ],
)
def test_bad_input_is_three_lines(capsys, tmp_path, monkeypatch, flags, words):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = run(capsys, "train", *flags, "--out", str(tmp_path / "out"))
    assert code == 2
    assert words in err
    assert err.count("\n") == 3
    assert not (tmp_path / "out").exists()


def test_help_says_what_each_setting_is(capsys):
    code, out, _ = run(capsys, "train", "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    assert "--structure" in words
    assert 'Structure of the linear layers; "dense" keeps nn.Linear. (default: dense)' in words
    assert "Width of an attention head. (default: by task and preset)" in words


def test_a_run_that_writes_no_text(capsys, tmp_path):
    code, _, err = run(capsys, "sample", str(tmp_path))
    assert code == 2
    assert "holds no run" in err
    config = json.dumps({"task": "cifar"})
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    code, _, err = run(capsys, "sample", str(tmp_path))
    assert code == 2
    assert "the task of the run" in err


def test_prepare_then_train(capsys, tmp_path):
    text = tmp_path / "text.txt"
    documents = [f"Document {i} has a few words, and a number: {i * i}." for i in range(300)]
    text.write_text("\n\n\n".join([*documents, "ünfoldable ß"]), encoding="utf-8")
    out = tmp_path / "tokens"
    code, printed, err = run(capsys, "prepare", str(text), "--out", str(out), "--processes", "1")
    assert code == 0, err
    assert "301 documents, 1 dropped" in printed
    assert f"wrote {out}" in printed
    flags = [*FLAGS, "--data", str(out), "--out", str(tmp_path / "run")]
    code, printed, err = run(capsys, "train", *flags)
    assert code == 0, err
    record = read_record(tmp_path / "run")
    assert isinstance(record, RunRecord)
    assert record.final_loss < record.curve[0].loss


def torchrun(*words):
    """What the command gives when torchrun starts it in two processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), "-m", "einlinear", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_torchrun(tmp_path):
    out = tmp_path / "out"
    result = torchrun(*FLAGS, "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert read_record(out).environment["processes"] == 2
    assert result.stdout.count("finished with a validation loss") == 1


@pytest.mark.slow
def test_torchrun_says_an_error_once(tmp_path):
    result = torchrun("--data", "no such file", "--out", str(tmp_path / "out"))
    assert result.returncode != 0
    assert result.stderr.count("einlinear: ") == 1
    assert "no such file" in result.stderr
