"""A folder of tokens: files that are mapped into memory, and tokens.json, which describes them.

train.bin and validation.bin hold plain numbers without a header. tokens.json is written last. If
it is missing, or if the size or checksum of a file differs from it, the folder is not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.data.tokens import TokenCounts, Tokens
from einlinear.data.vocabulary import Vocabulary, open_vocabulary
from einlinear.errors import EinlinearError, quote, shorten
from einlinear.files.arrays import Array
from einlinear.files.fields import typed
from einlinear.files.whole import as_path, checked_reading, parse_object

INFO = "tokens.json"
TOKENS_VERSION = 1
BLOCK = 2**24
"""How many bytes of a file share a checksum."""

_CHECKED = 16  # blocks whose checksums are compared when a folder is opened
_FIX = "delete the folder and prepare the text again"


@dataclass(frozen=True, slots=True)
class Stream:
    """A file of tokens: how many there are, and the CRC-32 of every block."""

    tokens: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A text that was read; sha256 is of the file on disk."""

    name: str
    size: int
    sha256: str
    use: str


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """The contents of tokens.json.

    validation_share: None if texts for validation were given.
    tail: how many tokens at the end of the training text were used for validation, because too
        few documents were.
    """

    vocabulary: str
    vocab_size: int
    dtype: str
    rule: str
    validation_share: float | None
    tail: int
    counts: TokenCounts
    train: Stream
    validation: Stream
    sources: tuple[SourceFacts, ...]
    version: int = TOKENS_VERSION

    def as_json(self) -> str:
        """The text of tokens.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TokenInfo:
        """Read the text of tokens.json; raises ValueError if anything is missing or wrong."""
        values = parse_object(text)
        version = values.get("version")
        if version != TOKENS_VERSION:
            raise ValueError(f"its version is {quote(version)}, not {TOKENS_VERSION}")
        info: TokenInfo = typed(cls, values, "info")
        if info.validation_share is not None and not 0 < info.validation_share < 1:
            raise ValueError(f"its validation_share is {quote(info.validation_share)}")
        return info


def read_info(folder: Path) -> TokenInfo:
    """Read tokens.json."""
    path = folder / INFO
    with checked_reading(path, rule=f"{INFO} is as einlinear prepare wrote it", fix=_FIX):
        try:
            return TokenInfo.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise EinlinearError(
                what=f"{folder} holds no complete set of tokens: there is no {INFO}",
                rule=f"{INFO} is written last",
                fix="run the same einlinear prepare again, which resumes where it stopped",
            ) from error


def is_token_folder(path: Path) -> bool:
    """Whether a folder is meant to hold tokens, complete or not."""
    return any(os.path.exists(path / name) for name in (INFO, "train.bin", "parts/00000000"))


def open_tokens(
    folder: str | Path, vocabulary: str | None = None, *, whole: bool = False
) -> Tokens:
    """Map the tokens in a folder into memory.

    Compares sizes with tokens.json, and the checksums of up to 16 blocks of 16 MiB spread over
    each file; with `whole`, of all blocks.
    """
    folder = as_path(folder, "the folder of tokens")
    info = read_info(folder)
    if vocabulary is not None and vocabulary != info.vocabulary:
        raise EinlinearError(
            what=f'the tokens in {folder} have the vocabulary "{shorten(info.vocabulary)}", not '
            f'"{shorten(str(vocabulary))}"',
            rule="a folder of tokens has one vocabulary",
            fix=f'use the vocabulary "{shorten(info.vocabulary)}", or prepare the text into '
            "another folder",
        )
    known = open_vocabulary(info.vocabulary)
    if (known.size, np.dtype(known.dtype).name) != (info.vocab_size, info.dtype):
        raise EinlinearError(
            what=f"{folder / INFO} says {info.vocab_size} tokens of {shorten(info.dtype)}",
            rule=f'the vocabulary "{known.name}" has {known.size} tokens of '
            f"{np.dtype(known.dtype).name}",
            fix=_FIX,
        )
    train = _mapped(folder / "train.bin", info.train, known, whole)
    validation = _mapped(folder / "validation.bin", info.validation, known, whole)
    fingerprint = hashlib.sha256(info.as_json().encode()).hexdigest()[:16]
    return Tokens(train, validation, known, info.counts, fingerprint)


def stored_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """The dtype of a file of tokens: little-endian on every machine."""
    dtype: np.dtype[Any] = np.dtype(vocabulary.dtype).newbyteorder("<")
    return dtype


def _mapped(path: Path, stream: Stream, vocabulary: Vocabulary, whole: bool) -> Array:
    dtype = stored_dtype(vocabulary)
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    if size != stream.tokens * dtype.itemsize or -(-size // BLOCK) != len(stream.checksums):
        raise EinlinearError(
            what=f"{path} has {size:,} bytes",
            rule=f"{INFO} says {stream.tokens:,} tokens of {dtype.itemsize} bytes each, with "
            f"{len(stream.checksums)} checksums",
            fix=_FIX,
        )
    if not size:
        return np.array([], dtype)
    fix = "check its permissions, and that the file system can map files"
    with checked_reading(path, rule="a file of tokens is mapped into memory", fix=fix):
        tokens: Array = np.asarray(np.memmap(path, dtype, "r"))  # plain arrays index faster
    raw = tokens.view(np.uint8)
    count = len(stream.checksums)
    chosen = range(count) if whole else np.linspace(0, count - 1, min(count, _CHECKED)).astype(int)
    for index in chosen:
        block = raw[index * BLOCK : (index + 1) * BLOCK]
        if zlib.crc32(block.data) != stream.checksums[index]:
            raise EinlinearError(
                what=f"block {index} of {path} is damaged",
                rule=f"the checksum of every block is that in {INFO}",
                fix=_FIX,
            )
        highest = int(block.view(dtype).max())
        if highest >= vocabulary.size:
            raise EinlinearError(
                what=f"block {index} of {path} has the token {highest}",
                rule=f'the vocabulary "{vocabulary.name}" has {vocabulary.size} tokens, from 0',
                fix=_FIX,
            )
    return tokens
