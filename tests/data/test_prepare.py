"""Folders of tokens: made of all kinds of sources, in parallel, within a bounded memory."""

import gzip
import hashlib
import json
import subprocess
import sys
import types
import zlib

import numpy as np
import pytest

import einlinear as el
from einlinear import EinlinearError
from einlinear.data import prepare
from einlinear.data.token_folder import TokenInfo, open_tokens
from einlinear.data.tokens import TokenCounts, is_validation, open_text, tail_length
from kit.texts import SMALL, contents, documents, encoded, save


def test_a_text_too_short_to_validate_with_is_noted(tmp_path):
    source = save(tmp_path / "a.txt", ["Hello."])
    for _ in range(2):  # also if the folder is complete
        with pytest.warns(UserWarning, match="has no tokens for validation") as told:
            info = el.prepare(source, tmp_path / "out", **SMALL)
        assert [line[:7] for line in str(told[0].message).splitlines()[1:]] == [
            "  rule:",
            "  fix: ",
        ]
    assert (info.train.tokens, info.validation.tokens) == (7, 0)


def test_by_hand(tmp_path):
    texts = documents()
    out = tmp_path / "out"
    info = el.prepare(save(tmp_path / "a.txt", texts), out, validation_share=0.1, **SMALL)
    assert sorted(contents(out)) == ["tokens.json", "train.bin", "validation.bin"]
    threshold = 0.1 * 2**64
    held_out = [
        int.from_bytes(hashlib.blake2b(t.encode(), digest_size=8).digest(), "big") < threshold
        for t in texts
    ]
    assert 5 < sum(held_out) < 40
    for name, is_held_out in (("train", False), ("validation", True)):
        wanted = encoded([t for t, h in zip(texts, held_out, strict=True) if h is is_held_out])
        raw = (out / f"{name}.bin").read_bytes()
        assert list(raw) == wanted
        assert getattr(info, name).tokens == len(wanted)
        assert getattr(info, name).checksums == (zlib.crc32(raw),)
    source = info.sources[0]
    raw = (tmp_path / "a.txt").read_bytes()
    assert (source.name, source.size, source.use) == ("a.txt", len(raw), "train")
    assert source.sha256 == hashlib.sha256(raw).hexdigest()
    assert info.counts == TokenCounts(200, 0, 0)
    assert (info.vocabulary, info.vocab_size, info.dtype) == ("ascii", 96, "uint8")
    assert TokenInfo.from_json(info.as_json()) == info


def test_in_memory_the_same(tmp_path):
    source = save(tmp_path / "a.txt", [*documents(), "caf\u00e9 \u4e2d"])
    for rule in ("drop", "fold"):
        el.prepare(source, tmp_path / rule, rule=rule, **SMALL)
        mapped, held = open_tokens(tmp_path / rule, whole=True), open_text(source, rule=rule)
        assert (mapped.train == held.train).all()
        assert (mapped.validation == held.validation).all()
        assert mapped.counts == held.counts
    assert open_tokens(tmp_path / "drop").counts == TokenCounts(201, 1, 0)
    assert open_tokens(tmp_path / "fold").counts == TokenCounts(201, 0, 1)


def test_byte_pairs(tmp_path):
    pytest.importorskip("tiktoken")
    texts = documents(50)
    info = el.prepare(save(tmp_path / "a.txt", texts), tmp_path / "out", vocabulary="gpt2", **SMALL)
    assert info.dtype == "uint16"
    held = open_tokens(tmp_path / "out", "gpt2")
    both = np.concatenate([held.train, held.validation])
    parts = np.split(both, np.flatnonzero(both == 50_256) + 1)[:-1]
    got = [held.vocabulary.decode(part[:-1].tolist()) for part in parts]
    if info.tail:  # one document may be cut
        assert "".join(got) == "".join(texts)
    else:
        assert sorted(got) == sorted(texts)


def test_forms_of_sources_and_files_for_validation(tmp_path):
    texts = documents(60)
    folder = tmp_path / "texts"
    folder.mkdir()
    save(folder / "a.txt", texts[:20])
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n\n\n".join(texts[20:30]).encode()))
    rows = [json.dumps({"text": text}) for text in texts[30:40]]
    (folder / "c.jsonl").write_text("\n".join(rows))
    held_out = save(tmp_path / "held_out.txt", texts[40:])
    info = el.prepare(folder, tmp_path / "out", validation=held_out, **SMALL)
    held = open_tokens(tmp_path / "out")
    assert held.train.tolist() == encoded(texts[:40])
    assert held.validation.tolist() == encoded(texts[40:])
    assert info.validation_share is None
    assert info.tail == 0
    assert [source.use for source in info.sources] == ["train"] * 3 + ["validation"]


def test_parallel_equals_serial(tmp_path, monkeypatch):
    source = save(tmp_path / "a.txt", documents())
    el.prepare(source, tmp_path / "one", processes=1, chunk_bytes=4000)
    read, shown, ahead = [], [], []

    monkeypatch.setattr(prepare, "read_chunks", counted(prepare.read_chunks, read, shown, ahead))
    el.prepare(source, tmp_path / "two", processes=2, chunk_bytes=4000, on_progress=shown.append)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert shown[0].share == 0
    assert shown[-1].share == 1
    assert len(read) > 8
    assert max(ahead) <= 4  # chunks that are read and not yet encoded


def counted(read_chunks, read, shown, ahead):
    """read_chunks, noting how far it is ahead of what was shown as done."""

    def chunks(*arguments):
        for chunk in read_chunks(*arguments):
            ahead.append(len(read) - len(shown) + 1)  # the first that is shown is the start
            read.append(chunk)
            yield chunk

    return chunks


def test_from_the_hub(tmp_path, monkeypatch):
    texts = documents()
    rows = [{"text": text} for text in texts]
    hub = types.SimpleNamespace(load_dataset=lambda name, split, streaming: iter(rows))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    shown = []
    info = el.prepare("hub:some/name", tmp_path / "hub", **SMALL, on_progress=shown.append)
    el.prepare(save(tmp_path / "a.txt", texts), tmp_path / "file", **SMALL)
    one, other = contents(tmp_path / "hub"), contents(tmp_path / "file")
    assert one["train.bin"] == other["train.bin"]
    assert one["validation.bin"] == other["validation.bin"]
    assert info.sources[0].name == "hub:some/name"
    assert {(at.total, at.share) for at in shown[:-1]} == {(0, 0.0)}  # not known before the end
    assert shown[-1].share == 1
    assert el.prepare("hub:some/name", tmp_path / "hub", **SMALL) == info


def test_chunks_do_not_matter(tmp_path):
    source = save(tmp_path / "a.txt", documents())
    for size in (1, 3000, 10**7):
        el.prepare(source, tmp_path / str(size), processes=1, chunk_bytes=size)
    assert (
        contents(tmp_path / "1") == contents(tmp_path / "3000") == contents(tmp_path / "10000000")
    )


def test_few_documents_are_cut_near_the_end(tmp_path):
    text = "abc " * 1000
    info = el.prepare(save(tmp_path / "a.txt", [text]), tmp_path / "out", **SMALL)
    assert info.tail == info.validation.tokens == round(0.02 * 4001)
    held = open_tokens(tmp_path / "out")
    assert np.concatenate([held.train, held.validation]).tolist() == encoded([text])
    assert tail_length(9_800, 200, 0.02) == 0
    assert tail_length(9_960, 40, 0.02) == 199
    assert tail_length(100, 0, 0.0) == 0


def test_equal_documents_are_on_one_side_and_the_share_is_met():
    texts = [f"document {i}".encode() for i in range(20_000)]
    chosen = sum(is_validation(text, 0.02) for text in texts)
    assert abs(chosen - 400) < 5 * 20  # five deviations of a binomial
    assert not any(is_validation(text, 0.0) for text in texts[:100])
    assert all(is_validation(text, 1.0) for text in texts[:100])


def test_bad_calls(tmp_path):
    source = save(tmp_path / "a.txt", documents(10))
    for changes, message in [
        ({"rule": "burn"}, "'burn'"),
        ({"vocabulary": "gpt3"}, "'gpt3'"),
        ({"validation_share": 0}, "the share for validation is 0"),
        ({"processes": 0}, "processes is 0"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"validation": tmp_path / "none.txt"}, "there is no file"),
    ]:
        with pytest.raises(EinlinearError, match=message):
            el.prepare(source, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()
    with pytest.raises(EinlinearError, match="cannot write"):
        el.prepare(source, source / "out", **SMALL)


def test_when_nothing_is_left(tmp_path):
    source = save(tmp_path / "a.txt", ["caf\u00e9", "na\u00efve"])
    for folder in ("out", None):
        with pytest.raises(EinlinearError, match="of 2 documents none is left"):
            open_text(source) if folder is None else el.prepare(source, tmp_path / folder, **SMALL)
    with pytest.warns(UserWarning, match="no tokens for validation"):
        info = el.prepare(source, tmp_path / "out", rule="fold", **SMALL)
    assert info.counts == TokenCounts(2, 0, 0)


MEMORY = """
import resource, sys
import einlinear as el
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
el.prepare("{source}", "{out}", processes=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="kilobytes on Linux, bytes elsewhere")
@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    text = ("some words, " * 400 + "\n\n\n").encode()
    grown = []
    for count in (4_000, 20_000):  # 19 and 96 MB
        source = tmp_path / f"{count}.txt"
        with source.open("wb") as file:
            for number in range(count):
                file.write(b"%d " % number + text)
        code = MEMORY.format(source=source, out=tmp_path / str(count))
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        grown.append(int(out.stdout) / 1000)
        source.unlink()
    assert grown[1] < grown[0] + 20  # megabytes
