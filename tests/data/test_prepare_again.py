"""Folders of tokens: killed, resumed, left alone, damaged."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib

import pytest

import einlinear as el
from einlinear import EinlinearError
from einlinear.data import token_folder, token_parts
from einlinear.data.token_folder import open_tokens
from kit.texts import SMALL, contents, documents, save

SCRIPT = """
import sys, time
from einlinear.data import prepare as module

def slow(path, digest, chunk, settings, write=module.write_part):
    time.sleep(0.02)
    write(path, digest, chunk, settings)

if __name__ == "__main__":
    module.write_part = slow
    module.prepare(sys.argv[1], sys.argv[2], processes=int(sys.argv[3]), chunk_bytes=2000)
"""


def start(tmp_path, source, out, processes):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen([sys.executable, str(script), str(source), str(out), str(processes)])


def finished(out):
    parts = out / "parts"
    return {p.name: p.stat().st_ino for p in parts.glob("*[0-9]")} if parts.exists() else {}


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_started_again(processes, tmp_path, monkeypatch):
    source = save(tmp_path / "a.txt", documents())
    out = tmp_path / "out"
    for least in (3, 8):  # killed twice
        process = start(tmp_path, source, out, processes)
        wait_for(lambda least=least: len(finished(out)) >= least)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    kept = finished(out)
    assert len(kept) >= 8
    with pytest.raises(EinlinearError, match=r"there is no tokens\.json"):
        open_tokens(out)
    with pytest.raises(EinlinearError, match=r"there is no tokens\.json"):
        el.open_task("text", out)
    made = []
    monkeypatch.setattr(
        "einlinear.data.prepare.write_part",
        lambda path, *rest: made.append(path.name) or token_parts.write_part(path, *rest),
    )
    el.prepare(source, out, **SMALL)
    assert made
    assert not set(made) & set(kept)  # nothing is done twice
    el.prepare(source, tmp_path / "whole", **SMALL)
    assert contents(out) == contents(tmp_path / "whole")


def interrupted(tmp_path, monkeypatch, texts):
    """A folder where everything was done but the joining."""
    source, out = save(tmp_path / "a.txt", texts), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("einlinear.data.prepare.join_parts", stop)
        with pytest.raises(KeyboardInterrupt):
            el.prepare(source, out, **SMALL)
    return source, out


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokens.json"])
def test_killed_while_joining(name, tmp_path, monkeypatch):
    source, out = interrupted(tmp_path, monkeypatch, documents())
    (out / f"{name}.part").write_bytes(b"half")  # as a kill leaves it
    if name != "train.bin":
        (out / "train.bin").write_bytes(b"of another start")
    with pytest.raises(EinlinearError, match="no complete set of tokens"):
        el.open_task("text", out)
    el.prepare(source, out, **SMALL)
    el.prepare(source, tmp_path / "whole", **SMALL)
    assert contents(out) == contents(tmp_path / "whole")


def test_only_parts_that_are_right_are_kept(tmp_path, monkeypatch):
    texts = documents()
    source, out = interrupted(tmp_path, monkeypatch, texts)
    before = finished(out)
    parts = out / "parts"
    (parts / "00000001").write_bytes((parts / "00000001").read_bytes()[:-5])  # cut off
    damaged = bytearray((parts / "00000002").read_bytes())
    damaged[-3] ^= 1
    (parts / "00000002").write_bytes(damaged)
    (parts / "00000003").write_bytes(b"{}\n")
    texts[-1] += " changed"
    save(source, texts)
    made = []
    monkeypatch.setattr(
        "einlinear.data.prepare.write_part",
        lambda path, *rest: made.append(path.name) or token_parts.write_part(path, *rest),
    )
    el.prepare(source, out, **SMALL)
    assert made == ["00000001", "00000002", "00000003", max(before)]
    el.prepare(source, tmp_path / "whole", **SMALL)
    assert contents(out) == contents(tmp_path / "whole")


def test_other_settings_do_not_use_old_parts(tmp_path, monkeypatch):
    texts = [*documents(), "caf\u00e9"]
    source, out = interrupted(tmp_path, monkeypatch, texts)
    el.prepare(source, out, rule="fold", **SMALL)
    el.prepare(source, tmp_path / "whole", rule="fold", **SMALL)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_finished_folder_is_left_alone(tmp_path):
    texts = documents()
    source, out = save(tmp_path / "a.txt", texts), tmp_path / "out"
    info = el.prepare(source, out, **SMALL)
    before = contents(out)
    assert el.prepare(source, out, **SMALL) == info
    for change in ({"rule": "fold"}, {"validation_share": 0.5}, {"validation": source}):
        with pytest.raises(EinlinearError, match="is not written again"):
            el.prepare(source, out, **SMALL, **change)
    other = save(tmp_path / "b.txt", texts)
    with pytest.raises(EinlinearError, match=r"not of b\.txt"):
        el.prepare(other, out, **SMALL)
    save(source, [*texts, "more"])
    with pytest.raises(EinlinearError, match="which have changed since"):
        el.prepare(source, out, **SMALL)
    assert contents(out) == before


def damage(path, how):
    raw = bytearray(path.read_bytes())
    if how == "cut":
        raw = raw[:-1]
    elif how == "long":
        raw += b"\0"
    elif how == "flipped":
        raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "long", "flipped", "gone"])
@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_damaged_tokens(name, how, tmp_path):
    out = tmp_path / "out"
    el.prepare(save(tmp_path / "a.txt", documents()), out, **SMALL)
    damage(out / name, how)
    message = "is damaged" if how == "flipped" else "bytes"
    with pytest.raises(EinlinearError, match=message):
        el.open_task("text", out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "its version is 2"),
        ({"vocabulary": "gpt4"}, "the vocabulary is 'gpt4'"),
        ({"vocab_size": 95}, "says 95 tokens of uint8"),
        ({"dtype": "int32"}, "says 96 tokens of int32"),
        ({"train": {"tokens": 3}}, "info.train lacks checksums"),
        ({"train": {"tokens": 10**9, "checksums": [0]}}, "1,000,000,000 tokens"),
        ({"more": 1}, "info has a field 'more'"),
        (None, "Expecting"),
    ],
)
def test_damaged_facts(change, message, tmp_path):
    out = tmp_path / "out"
    el.prepare(save(tmp_path / "a.txt", documents()), out, **SMALL)
    path = out / "tokens.json"
    text = path.read_text()
    path.write_text(text[:-20] if change is None else json.dumps({**json.loads(text), **change}))
    with pytest.raises(EinlinearError, match=message):
        el.open_task("text", out)


def test_blocks_of_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr(token_folder, "BLOCK", 100)
    monkeypatch.setattr(token_parts, "BLOCK", 100)
    out = tmp_path / "out"
    info = el.prepare(save(tmp_path / "a.txt", documents()), out, **SMALL)
    raw = (out / "train.bin").read_bytes()
    blocks = [raw[i : i + 100] for i in range(0, len(raw), 100)]
    assert info.train.checksums == tuple(map(zlib.crc32, blocks))
    damaged = bytearray(raw)
    damaged[150] ^= 1  # in a block that is not looked at when the folder is opened
    (out / "train.bin").write_bytes(damaged)
    open_tokens(out)
    with pytest.raises(EinlinearError, match=r"block 1 of .*train\.bin is damaged"):
        open_tokens(out, whole=True)
