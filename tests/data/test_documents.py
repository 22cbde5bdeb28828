"""Documents out of files."""

import gzip
import hashlib
import json
import re
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear import EinlinearError
from einlinear.data import documents as module
from einlinear.data.documents import Reading, find_sources, read_documents, split_documents

texts = st.lists(st.sampled_from([b"\n", b"\n", b"a", b"\r", b"\r\n", b"\xc3\xa9"]), max_size=20)


def read(path):
    return list(read_documents(path, Reading("it")))


@settings(max_examples=400)
@given(texts.map(b"".join), st.integers(1, 6))
def test_splitting_does_not_depend_on_blocks(text, size):
    blocks = [text[i : i + size] for i in range(0, len(text), size)]
    got = [d.strip(b"\n") for d in split_documents(blocks)]
    wanted = [d.strip(b"\n") for d in re.split(rb"\n{3,}", text.replace(b"\r\n", b"\n"))]
    assert [d for d in got if d] == [d for d in wanted if d]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_forms_of_text(suffix, tmp_path):
    def save(name, content):
        path = tmp_path / (name + suffix)
        path.write_bytes(gzip.compress(content) if suffix else content)
        return path

    text = save("a.txt", b"\nOne\n\nparagraph\n\n\nTwo\n\n\n\n\n\n\nThree\n")
    assert read(text) == [b"One\n\nparagraph", b"Two", b"Three"]
    rows = [{"text": "One\r\n\n\nstill one", "id": 1}, {"text": ""}, {"text": "tw\u00f6"}]
    lines = save("b.jsonl", b"\n\n".join(json.dumps(row).encode() for row in rows))
    assert read(lines) == [b"One\n\n\nstill one", "tw\u00f6".encode()]


def test_what_was_read_is_known(tmp_path):
    content = b"some text\n\n\n" * 300_000
    for name, raw in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(raw)
        reading = Reading("it")
        seen = []
        for _ in read_documents(tmp_path / name, reading):
            seen.append(reading.bytes_read)
        assert len(seen) == 300_000
        assert reading.bytes_read == len(raw)
        assert reading.digest.hexdigest() == hashlib.sha256(raw).hexdigest()
        assert name != "a.txt" or seen[0] < len(raw)  # not read in one piece


def test_long_documents_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_DOCUMENT", 64)
    monkeypatch.setattr(module, "_BLOCK", 40)
    words = " ".join(f"w{i}" for i in range(200))
    unbroken = "x" + "\u00e9" * 100
    (tmp_path / "a.txt").write_text(f"{words}\n\n\n{unbroken}\n\n\nshort", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": words}))
    got = read(tmp_path / "a.txt")
    assert max(map(len, got)) <= 64
    assert got[-1] == b"short"
    assert "".join(piece.decode() for piece in got[:-1]) == words + unbroken
    assert b"".join(read(tmp_path / "b.jsonl")).decode() == words


def test_folders(tmp_path):
    for name in ("b.txt", "sub/a.jsonl", "c.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "x"}')
    assert find_sources(tmp_path) == (tmp_path / "b.txt", tmp_path / "sub" / "a.jsonl")
    both = find_sources([str(tmp_path / "b.txt"), "hub:some/name"])
    assert both == (tmp_path / "b.txt", "hub:some/name")


def test_bad_sources(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "table.csv").write_text("x")
    (tmp_path / "no").mkdir()
    for source, message in [
        (tmp_path / "none.txt", "there is no file"),
        (tmp_path / "empty.txt", "is empty"),
        (tmp_path / "table.csv", "does not have the name of a text"),
        (tmp_path / "no", "holds no text"),
        ([], "no text is given"),
    ]:
        with pytest.raises(EinlinearError, match=message):
            find_sources(source)


@pytest.mark.parametrize("line", [b'{"text": ', b'{"body": "x"}', b'"x"', b'{"text": 3}', b"\xff"])
def test_bad_lines(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(EinlinearError, match=r"line 2 of .*a.jsonl holds no text"):
        read(path)


def test_damaged_gz(tmp_path):
    raw = gzip.compress(b"some text" * 1000)
    (tmp_path / "short.txt.gz").write_bytes(raw[:-10])
    (tmp_path / "plain.txt.gz").write_bytes(b"not packed")
    for name in ("short.txt.gz", "plain.txt.gz"):
        with pytest.raises(EinlinearError, match="cannot read"):
            read(tmp_path / name)


def fake_hub(monkeypatch, rows):
    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ("some/name", "train", True)
        return iter(rows)

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_the_hub_row_by_row(monkeypatch):
    fake_hub(monkeypatch, [{"text": "one\n\n\nstill one"}, {"text": "two"}])
    reading = Reading("hub")
    got = list(read_documents("hub:some/name", reading))
    assert got == [b"one\n\n\nstill one", b"two"]
    assert reading.bytes_read == sum(map(len, got))


def test_bad_hubs(monkeypatch):
    fake_hub(monkeypatch, [{"body": "one"}])
    with pytest.raises(EinlinearError, match="cannot read hub:some/name: KeyError"):
        read("hub:some/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EinlinearError, match=r"einlinear\[hub\]"):
        read("hub:some/name")


@pytest.mark.filterwarnings("ignore")
def test_a_real_data_set(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": f"document {i}"} for i in range(100)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(f"hub:{folder}") == [row["text"].encode() for row in rows]
