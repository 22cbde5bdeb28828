"""Text as tokens: 96 symbols and byte pairs."""

import base64
import gzip
import string
import sys
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from einlinear import EinlinearError
from einlinear.data import vocabulary as module
from einlinear.data.vocabulary import fold, open_vocabulary

SYMBOLS = "\n " + string.punctuation + string.digits + string.ascii_letters
symbol_text = st.text(st.sampled_from(SYMBOLS))


def test_the_96_symbols():
    ascii96 = open_vocabulary("ascii")
    assert len(set(SYMBOLS)) == ascii96.size == 96
    tokens = ascii96.encode(b"\n ~A", "drop").tokens
    assert tokens.tolist() == [0, 1, 95, ord("A") - 31]
    assert tokens.dtype == ascii96.dtype == np.uint8
    assert ascii96.decode([0]) == "\n"  # what ends a document
    assert ascii96.end == 0


@given(symbol_text)
def test_symbols_there_and_back(text):
    ascii96 = open_vocabulary("ascii")
    for rule in ("drop", "fold"):
        encoded = ascii96.encode(text.encode(), rule)
        assert ascii96.decode(encoded.tokens) == text
        assert encoded.characters_dropped == 0


@given(st.text())
def test_other_characters_drop_the_document(text):
    encoded = open_vocabulary("ascii").encode(text.encode("utf-8", errors="replace"), "drop")
    assert (encoded.tokens is None) == bool(set(text) - set(SYMBOLS))


@given(st.text())
def test_folded_text_is_in_the_symbols_and_folds_to_itself(text):
    folded, dropped = fold(text)
    assert set(folded) <= set(SYMBOLS)
    assert fold(folded) == (folded, 0)
    assert 0 <= dropped <= len(text)


@pytest.mark.parametrize(
    ("text", "folded", "dropped"),
    [
        ("na\u00efve cafe\u0301", "naive cafe", 0),
        ("\u201cit\u2019s\u201d \u2013 \u2014 \u2026", '"it\'s" - - ...', 0),
        ("Stra\u00dfe, \u0141\u00f3d\u017a, \u00c6r\u00f8", "Strasse, Lodz, AEro", 0),
        ("a\u00a0b\tc", "a b c", 0),
        ("\ufb01ne x\u00b2", "fine x2", 0),
        ("5\u00b4", "5'", 0),
        ("\u4e2d\u6587 ok \u4e2d", " ok ", 3),
        ("\x00\x07bell", "bell", 2),
    ],
)
def test_folding_by_hand(text, folded, dropped):
    assert fold(text) == (folded, dropped)
    encoded = open_vocabulary("ascii").encode(text.encode(), "fold")
    assert open_vocabulary("ascii").decode(encoded.tokens) == folded
    assert encoded.characters_dropped == dropped


def test_bytes_that_are_no_text():
    ascii96 = open_vocabulary("ascii")
    assert ascii96.encode(b"ab\xff\xfec", "drop").tokens is None
    encoded = ascii96.encode(b"ab\xff\xfec", "fold")
    assert ascii96.decode(encoded.tokens) == "abc"
    assert encoded.characters_dropped == 2


def test_known_byte_pairs():
    pytest.importorskip("tiktoken")
    pairs = open_vocabulary("gpt2")
    assert pairs.size == 50_257
    assert pairs.end == 50_256
    assert pairs.dtype == np.uint16
    # As everywhere GPT-2 is used.
    assert pairs.encode(b"Hello world", "drop").tokens.tolist() == [15496, 995]
    assert pairs.encode(b"<|endoftext|>", "drop").tokens.max() < pairs.end
    assert pairs.decode([pairs.end]) == "<|endoftext|>"


@settings(max_examples=20)
@given(st.text(max_size=200))
def test_byte_pairs_there_and_back(text):
    pytest.importorskip("tiktoken")
    pairs = open_vocabulary("gpt2")
    encoded = pairs.encode(text.encode("utf-8", errors="replace"), "drop")
    assert pairs.decode(encoded.tokens.tolist()).encode() == text.encode("utf-8", errors="replace")


def merged_by_hand(word, ranks):
    """Byte pairs the slow way: again and again the pair of lowest rank."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        options = [(ranks.get(a + b, 10**9), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(options)
        if rank == 10**9:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


@given(st.text(st.sampled_from(string.ascii_letters + "\u00e9\u4e2d"), min_size=1, max_size=30))
def test_byte_pairs_of_a_word_by_hand(word):
    pytest.importorskip("tiktoken")
    pairs = open_vocabulary("gpt2")
    tokens = pairs.encode(word.encode(), "drop").tokens.tolist()
    assert tokens == merged_by_hand(word.encode(), ranks())


_ranks = {}


def ranks():
    if not _ranks:
        file = resources.files("einlinear").joinpath("data/embedded/r50k_base.tiktoken.gz")
        for line in gzip.decompress(file.read_bytes()).splitlines():
            token, rank = line.split()
            _ranks[base64.b64decode(token)] = int(rank)
    return _ranks


def test_without_tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    module._byte_pairs.cache_clear()
    with pytest.raises(EinlinearError, match=r"einlinear\[data\]"):
        open_vocabulary("gpt2")
    assert open_vocabulary("ascii").size == 96


def test_unknown_names():
    with pytest.raises(EinlinearError, match="the vocabulary is 'gpt3'"):
        open_vocabulary("gpt3")
    with pytest.raises(EinlinearError, match="'burn'"):
        module.check_rule("burn")
