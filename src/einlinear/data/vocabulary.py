"""Text as numbers: 96 symbols, or the byte pairs of GPT-2."""

from __future__ import annotations

import base64
import gzip
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Protocol, get_args

import numpy as np
import numpy.typing as npt

from einlinear.data.choices import CharacterRule, VocabularyName
from einlinear.errors import EinlinearError, quote

if TYPE_CHECKING:
    import tiktoken

RULES: tuple[CharacterRule, ...] = get_args(CharacterRule)

_SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
_OUTSIDE = 255
_TABLE = np.full(256, _OUTSIDE, np.uint8)
_TABLE[np.frombuffer(_SYMBOLS.encode(), np.uint8)] = np.arange(len(_SYMBOLS))
_BYTES = np.frombuffer(_SYMBOLS.encode(), np.uint8)

# Common characters that the compatibility decomposition of Unicode leaves outside ASCII.
_ALIKE = {
    "\t": " ",
    "\r": "\n",
    "\u2028": "\n",
    "\u2029": "\n",
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc\u00b4", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u2022\u00b7\u2219", "*"),
    **dict(zip("ßæœøłđðþıÆŒØŁĐÐÞ", "ss ae oe o l d d th i AE OE O L D D TH".split(), strict=True)),
    "\u00d7": "x",
    "÷": "/",
    "€": "EUR",
    "£": "GBP",
    "©": "(c)",
    "®": "(R)",
}

# Word endings, words, numbers, other signs, white space: merges never cross these.
_GPT2_PIECES = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_END = 50_256


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a document without its end token; None if it was dropped.

    characters_dropped counts characters without a counterpart among the symbols.
    """

    tokens: npt.NDArray[np.unsignedinteger] | None
    characters_dropped: int = 0


class Vocabulary(Protocol):
    """Encodes text into tokens and decodes tokens into text."""

    @property
    def name(self) -> VocabularyName:
        """The name of the vocabulary in settings."""

    @property
    def size(self) -> int:
        """How many tokens there are."""

    @property
    def end(self) -> int:
        """The token that ends a document."""

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest unsigned integer that holds every token."""

    def encode(self, document: bytes, rule: CharacterRule) -> Encoded:
        """Encode a document in UTF-8, without its end token."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens."""


@dataclass(frozen=True, slots=True)
class Ascii:
    """Newline and ASCII 32 to 126: 96 symbols; newline is token 0 and ends a document.

    A document with any other character is dropped (rule "drop", as in [P24]), or folded to the
    symbols (rule "fold"): accents are removed, quotes and dashes become plain, and characters
    without a counterpart are left out.
    """

    name: VocabularyName = "ascii"
    size: int = len(_SYMBOLS)
    end: int = 0
    dtype: type[np.unsignedinteger] = np.uint8

    def encode(self, document: bytes, rule: CharacterRule) -> Encoded:
        """Encode each symbol as one token."""
        tokens = _TABLE[np.frombuffer(document, np.uint8)]
        if not (tokens == _OUTSIDE).any():
            return Encoded(tokens)
        if rule == "drop":
            return Encoded(None)
        text, dropped = fold(document.decode("utf-8", errors="replace"))
        return Encoded(_TABLE[np.frombuffer(text.encode("ascii"), np.uint8)], dropped)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode each token into its symbol."""
        return _BYTES[np.fromiter(tokens, np.int64)].tobytes().decode("ascii")


@dataclass(frozen=True, slots=True)
class BytePairs:
    """GPT-2's 50,257 tokens, which encode any text: nothing is dropped or folded.

    Invalid UTF-8 becomes the replacement character.
    """

    name: VocabularyName = "gpt2"
    size: int = _GPT2_END + 1
    end: int = _GPT2_END
    dtype: type[np.unsignedinteger] = np.uint16

    def encode(self, document: bytes, rule: CharacterRule = "drop") -> Encoded:
        """Encode byte pairs; text that looks like a special token is encoded as text."""
        text = document.decode("utf-8", errors="replace")
        return Encoded(np.array(_byte_pairs().encode_ordinary(text), np.uint16))

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens; half a character becomes the replacement character."""
        text: str = _byte_pairs().decode(list(tokens), errors="replace")
        return text


def open_vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary with this name; "gpt2" needs tiktoken."""
    if isinstance(name, str) and name == "ascii":
        return Ascii()
    if isinstance(name, str) and name == "gpt2":
        _byte_pairs()
        return BytePairs()
    raise EinlinearError(
        what=f"the vocabulary is {quote(name)}",
        rule='a vocabulary is "ascii" (96 symbols) or "gpt2" (50,257 byte pairs)',
        fix='use "ascii"',
    )


def check_rule(rule: str) -> CharacterRule:
    """Return the rule for characters outside the symbols, or refuse it."""
    if isinstance(rule, str) and rule in RULES:
        return rule
    raise EinlinearError(
        what=f"the rule for other characters is {quote(rule)}",
        rule='"drop" leaves out documents with any character outside the 96 symbols, "fold" '
        "turns them into plain ASCII",
        fix='use "drop" or "fold"',
    )


def fold(text: str) -> tuple[str, int]:
    """Return the text in the 96 symbols, and how many characters were left out.

    Combining marks, such as accents, are not counted.
    """
    used = set(text)
    lost = {c for c in used if not _folded(c) and not unicodedata.combining(c)}
    folded = text.translate({ord(c): _folded(c) for c in used if c not in _SYMBOLS})
    return folded, sum(text.count(c) for c in lost)


@cache
def _folded(character: str) -> str:
    if character in _ALIKE:
        return _ALIKE[character]
    parts = unicodedata.normalize("NFKD", character)
    return "".join(c if c in _SYMBOLS else _ALIKE.get(c, "") for c in parts)


@cache
def _byte_pairs() -> tiktoken.Encoding:
    """GPT-2's byte pairs, from the ranks in the package, without network access."""
    try:
        import tiktoken
    except ImportError as error:
        raise EinlinearError(
            what="the byte pairs of GPT-2 need tiktoken, which is not installed",
            rule="tiktoken is an optional package",
            fix='pip install "einlinear[data]"',
        ) from error
    file = resources.files("einlinear").joinpath("data/embedded/r50k_base.tiktoken.gz")
    lines = gzip.decompress(file.read_bytes()).splitlines()
    pairs = (line.split() for line in lines if line)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=_GPT2_PIECES,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in pairs},
        special_tokens={"<|endoftext|>": _GPT2_END},
        explicit_n_vocab=_GPT2_END + 1,
    )
