"""Tokens of texts: in memory, or in a folder of files that are mapped into memory.

A folder holds train.bin and validation.bin, plain numbers without a header, and tokens.json, which
is written last and says what they are. Without it, or where a file has another size or checksum
than it says, there is nothing to read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from einlinear.errors import EinlinearError
from einlinear.studies.documents import Reading, Source, find_sources, read_documents, size_of
from einlinear.studies.vocabulary import Rule, Vocabulary, check_rule, open_vocabulary

Array = npt.NDArray[Any]
INFO = "tokens.json"
VERSION = 1
BLOCK = 2**24
"""A checksum is of so many bytes of a file."""
IN_MEMORY = 2**26
"""Texts up to so many bytes need not be prepared."""
SHARE = 0.02
"""Of the documents, for validation, unless told otherwise."""

_CHECKED = 16  # blocks whose checksums are compared when a folder is opened
_FIX = "delete the folder and prepare the text again"


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of documents: how many there were, and what was dropped."""

    documents: int = 0
    documents_dropped: int = 0
    characters_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(self.parts(), other.parts(), strict=True)
        return Counts(*(mine + others for mine, others in pairs))

    def parts(self) -> tuple[int, int, int]:
        """The three numbers."""
        return self.documents, self.documents_dropped, self.characters_dropped


@dataclass(frozen=True, slots=True)
class Stream:
    """A file of tokens: how many there are, and the crc32 of every block of bytes."""

    tokens: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A text that was read; sha256 is of the file as it is on the disk."""

    name: str
    size: int
    sha256: str
    use: str


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What tokens.json says.

    validation_share is None where texts for validation were given. tail is how many tokens at the
    end of the training text were used for validation, because too few documents were.
    """

    vocabulary: str
    vocab_size: int
    dtype: str
    rule: str
    validation_share: float | None
    tail: int
    counts: Counts
    train: Stream
    validation: Stream
    sources: tuple[SourceFacts, ...]
    version: int = VERSION

    def as_json(self) -> str:
        """The text of tokens.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TokenInfo:
        """The same back; ValueError, KeyError or TypeError if something is missing or wrong."""
        held = json.loads(text)
        if held["version"] != VERSION:
            raise ValueError(f"its version is {held['version']}, and this is version {VERSION}")
        streams = {
            part: Stream(int(held[part]["tokens"]), tuple(map(int, held[part]["checksums"])))
            for part in ("train", "validation")
        }
        counts = Counts(**held["counts"])
        sources = tuple(SourceFacts(**source) for source in held["sources"])
        if set(held) != {field.name for field in fields(cls)}:
            raise ValueError("it lacks a field or has another")
        return cls(**{**held, **streams, "counts": counts, "sources": sources})


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Two streams of tokens and what they mean."""

    train: Array
    validation: Array
    vocabulary: Vocabulary
    counts: Counts
    fingerprint: str


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The tokens of some documents, each with its end, and what was dropped."""

    train: Array
    validation: Array
    counts: Counts


def encode_documents(
    documents: Iterable[bytes], vocabulary: Vocabulary, rule: Rule, share: float
) -> Encoding:
    """The documents as tokens; about `share` of them, chosen by a hash, are for validation."""
    end = np.array([vocabulary.end], vocabulary.dtype)
    empty = np.array([], vocabulary.dtype)
    train, validation, counts = [empty], [empty], Counts()
    for document in documents:
        encoded = vocabulary.encode(document, rule)
        is_dropped = encoded.tokens is None or not encoded.tokens.size
        counts += Counts(1, int(is_dropped), encoded.characters_dropped)
        if encoded.tokens is not None and not is_dropped:
            chosen = validation if is_validation(document, share) else train
            chosen += [encoded.tokens, end]
    return Encoding(np.concatenate(train), np.concatenate(validation), counts)


def is_validation(document: bytes, share: float) -> bool:
    """Whether a document is for validation; equal documents are on the same side."""
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big")
    return number < share * 2**64


def tail_length(train: int, validation: int, share: float) -> int:
    """How many of the last training tokens are for validation, too few documents being so.

    Too few: less than a quarter of the share. A single long document is then cut near its end.
    """
    is_enough = validation >= share * (train + validation) / 4
    return 0 if is_enough else round(share * train)


def check_share(share: object) -> float:
    """The share of the documents that is for validation, if it is one."""
    if isinstance(share, (int, float)) and 0 < share < 1:
        return float(share)
    raise EinlinearError(
        what=f"the share for validation is {share!r}",
        rule="the share of the documents for validation lies between 0 and 1",
        fix=f"give a number such as {SHARE}, or files for validation",
    )


def open_text(
    sources: Source | Sequence[Source],
    *,
    validation: Source | Sequence[Source] | None = None,
    vocabulary: str = "ascii",
    rule: str = "drop",
    validation_share: float = SHARE,
) -> Tokens:
    """The tokens of texts of moderate size, in memory.

    The same tokens as those of `prepare`.
    """
    known, checked = open_vocabulary(vocabulary), check_rule(rule)
    share = 0.0 if validation is not None else check_share(validation_share)
    parts = [(find_sources(sources), share)]
    if validation is not None:
        parts.append((find_sources(validation), 1.0))
    _check_size([source for files, _ in parts for source in files])
    return text_tokens(
        ((read_all(files), part_share) for files, part_share in parts), known, checked
    )


def text_tokens(
    parts: Iterable[tuple[Iterable[bytes], float]], vocabulary: Vocabulary, rule: Rule
) -> Tokens:
    """The tokens of documents, each part of them with its share for validation."""
    encodings, share = [], 0.0
    for documents, part_share in parts:
        encodings.append(encode_documents(documents, vocabulary, rule, part_share))
        share = share or part_share
    counts = sum((encoding.counts for encoding in encodings), Counts())
    check_kept(counts, rule)
    train, validation = (
        np.concatenate([getattr(encoding, name) for encoding in encodings])
        for name in ("train", "validation")
    )
    tail = tail_length(len(train), len(validation), share if share < 1 else 0.0)
    cut = len(train) - tail
    validation = np.concatenate([validation, train[cut:]])
    digest = hashlib.sha256(vocabulary.name.encode())
    for stream in (train[:cut], validation):
        digest.update(f" {len(stream)} ".encode() + stream.tobytes())
    return Tokens(train[:cut], validation, vocabulary, counts, digest.hexdigest()[:16])


def read_all(sources: Sequence[Source]) -> Iterator[bytes]:
    """The documents of all sources."""
    for source in sources:
        yield from read_documents(source, Reading(str(source)))


def check_kept(counts: Counts, rule: str) -> None:
    """Raise if no document is left."""
    if counts.documents_dropped == counts.documents:
        raise EinlinearError(
            what=f"of {counts.documents} documents none is left",
            rule="a document is dropped if it has characters outside the 96 symbols, under the "
            f'rule "drop", or if nothing is left of it; the rule is "{rule}"',
            fix='use the rule "fold", or other texts',
        )


def _check_size(sources: Sequence[Source]) -> None:
    sizes = [size_of(source) for source in sources]
    total = sum(size or 0 for size in sizes)
    if None in sizes or total > IN_MEMORY:
        amount = "from the hub" if None in sizes else f"of {total:,} bytes"
        raise EinlinearError(
            what=f"a text {amount} is given as it is",
            rule=f"text files of up to {IN_MEMORY:,} bytes in all are read as they are; larger "
            "ones are made into a folder of tokens first",
            fix="einlinear prepare, or einlinear.prepare in Python; then give the folder",
        )


def is_token_folder(path: Path) -> bool:
    """Whether a folder is meant to hold tokens, whole or not."""
    names = (INFO, "train.bin", "parts/00000000")
    return any((path / name).exists() for name in names)


def read_info(folder: Path) -> TokenInfo:
    """What tokens.json says."""
    path = folder / INFO
    try:
        return TokenInfo.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EinlinearError(
            what=f"{folder} holds no whole set of tokens: there is no {INFO}",
            rule=f"{INFO} is written when everything else is",
            fix="prepare the text to the end: the same command again goes on where it stopped",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {type(error).__name__}: {error}",
            rule=f"{INFO} is as einlinear prepare wrote it",
            fix=_FIX,
        ) from error


def open_tokens(
    folder: str | Path, vocabulary: str | None = None, *, whole: bool = False
) -> Tokens:
    """The tokens in a folder, mapped into memory.

    Sizes are compared with tokens.json, and checksums of up to 16 blocks of 16 MiB in each file,
    spread over it; with `whole`, of all.
    """
    folder = Path(folder)
    info = read_info(folder)
    if vocabulary is not None and vocabulary != info.vocabulary:
        raise EinlinearError(
            what=f'the tokens in {folder} are of the vocabulary "{info.vocabulary}", and '
            f'"{vocabulary}" is asked for',
            rule="a folder of tokens has one vocabulary",
            fix=f'give vocabulary "{info.vocabulary}", or prepare the text into another folder',
        )
    known = open_vocabulary(info.vocabulary)
    if (known.size, np.dtype(known.dtype).name) != (info.vocab_size, info.dtype):
        raise EinlinearError(
            what=f"{folder / INFO} says {info.vocab_size} tokens of {info.dtype}",
            rule=f'the vocabulary "{known.name}" has {known.size} tokens of '
            f"{np.dtype(known.dtype).name}",
            fix=_FIX,
        )
    streams: Mapping[str, Stream] = {"train": info.train, "validation": info.validation}
    train, validation = (
        _mapped(folder / f"{name}.bin", stream, known, whole) for name, stream in streams.items()
    )
    fingerprint = hashlib.sha256(info.as_json().encode()).hexdigest()[:16]
    return Tokens(train, validation, known, info.counts, fingerprint)


def stored_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """The numbers in a file of tokens: low byte first, on every machine."""
    dtype: np.dtype[Any] = np.dtype(vocabulary.dtype).newbyteorder("<")
    return dtype


def _mapped(path: Path, stream: Stream, vocabulary: Vocabulary, whole: bool) -> Array:
    dtype = stored_dtype(vocabulary)
    size = path.stat().st_size if path.exists() else 0
    if size != stream.tokens * dtype.itemsize or -(-size // BLOCK) != len(stream.checksums):
        raise EinlinearError(
            what=f"{path} has {size:,} bytes",
            rule=f"{INFO} says {stream.tokens:,} tokens of {dtype.itemsize} bytes each, with "
            f"{len(stream.checksums)} checksums",
            fix=_FIX,
        )
    if not size:
        return np.array([], dtype)
    tokens: Array = np.asarray(np.memmap(path, dtype, "r"))  # plain arrays are quicker to index
    raw = tokens.view(np.uint8)
    count = len(stream.checksums)
    chosen = range(count) if whole else np.linspace(0, count - 1, min(count, _CHECKED)).astype(int)
    for index in chosen:
        if zlib.crc32(raw[index * BLOCK : (index + 1) * BLOCK].data) != stream.checksums[index]:
            raise EinlinearError(
                what=f"block {index} of {path} is damaged",
                rule=f"the checksum of every block is that in {INFO}",
                fix=_FIX,
            )
    return tokens
