"""Tokens of texts: in memory, or in a folder of files that are mapped into memory.

A folder holds train.bin and validation.bin, plain numbers without a header, and tokens.json, which
is written last and says what they are. Without it, or where a file has another size or checksum
than it says, there is nothing to read.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from einlinear.errors import EinlinearError, quote, reason, shorten
from einlinear.files import as_path
from einlinear.studies.documents import Reading, Source, find_sources, read_documents, size_of
from einlinear.studies.token_info import FIX, INFO, Counts, Stream, read_info
from einlinear.studies.vocabulary import Rule, Vocabulary, check_rule, open_vocabulary

Array = npt.NDArray[Any]
BLOCK = 2**24
"""A checksum is of so many bytes of a file."""
IN_MEMORY = 2**26
"""Texts up to so many bytes need not be prepared."""
UNPACKED = 2**30
"""The same for texts in .gz files, in bytes after they are unpacked."""
SHARE = 0.02
"""Of the documents, for validation, unless told otherwise."""

_CHECKED = 16  # blocks whose checksums are compared when a folder is opened


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
        what=f"the share for validation is {quote(share)}",
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
    """The documents of all sources, unless they are too large for memory."""
    total = 0
    for source in sources:
        for document in read_documents(source, Reading(str(source))):
            total += len(document)
            if total > UNPACKED:
                raise _too_large(f"of more than {UNPACKED:,} bytes, unpacked,")
            yield document


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
        raise _too_large("from the hub" if None in sizes else f"of {total:,} bytes")


def _too_large(amount: str) -> EinlinearError:
    return EinlinearError(
        what=f"a text {amount} is given as it is",
        rule=f"text files of up to {IN_MEMORY:,} bytes in all are read as they are; larger "
        "ones are made into a folder of tokens first",
        fix="einlinear prepare, or einlinear.prepare in Python; then give the folder",
    )


def is_token_folder(path: Path) -> bool:
    """Whether a folder is meant to hold tokens, whole or not."""
    names = (INFO, "train.bin", "parts/00000000")
    return any(os.path.exists(path / name) for name in names)


def open_tokens(
    folder: str | Path, vocabulary: str | None = None, *, whole: bool = False
) -> Tokens:
    """The tokens in a folder, mapped into memory.

    Sizes are compared with tokens.json, and checksums of up to 16 blocks of 16 MiB in each file,
    spread over it; with `whole`, of all.
    """
    folder = as_path(folder, "the folder of tokens")
    info = read_info(folder)
    if vocabulary is not None and vocabulary != info.vocabulary:
        raise EinlinearError(
            what=f'the tokens in {folder} are of the vocabulary "{shorten(info.vocabulary)}", and '
            f'"{shorten(str(vocabulary))}" is asked for',
            rule="a folder of tokens has one vocabulary",
            fix=f'give vocabulary "{shorten(info.vocabulary)}", or prepare the text into another '
            "folder",
        )
    known = open_vocabulary(info.vocabulary)
    if (known.size, np.dtype(known.dtype).name) != (info.vocab_size, info.dtype):
        raise EinlinearError(
            what=f"{folder / INFO} says {info.vocab_size} tokens of {shorten(info.dtype)}",
            rule=f'the vocabulary "{known.name}" has {known.size} tokens of '
            f"{np.dtype(known.dtype).name}",
            fix=FIX,
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
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    if size != stream.tokens * dtype.itemsize or -(-size // BLOCK) != len(stream.checksums):
        raise EinlinearError(
            what=f"{path} has {size:,} bytes",
            rule=f"{INFO} says {stream.tokens:,} tokens of {dtype.itemsize} bytes each, with "
            f"{len(stream.checksums)} checksums",
            fix=FIX,
        )
    if not size:
        return np.array([], dtype)
    try:
        tokens: Array = np.asarray(np.memmap(path, dtype, "r"))  # plain ones are quicker to index
    except (OSError, ValueError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule="a file of tokens is mapped into memory",
            fix="check its permissions, and that the file system can map files",
        ) from error
    raw = tokens.view(np.uint8)
    count = len(stream.checksums)
    chosen = range(count) if whole else np.linspace(0, count - 1, min(count, _CHECKED)).astype(int)
    for index in chosen:
        block = raw[index * BLOCK : (index + 1) * BLOCK]
        if zlib.crc32(block.data) != stream.checksums[index]:
            raise EinlinearError(
                what=f"block {index} of {path} is damaged",
                rule=f"the checksum of every block is that in {INFO}",
                fix=FIX,
            )
        highest = int(block.view(dtype).max())
        if highest >= vocabulary.size:
            raise EinlinearError(
                what=f"block {index} of {path} has the token {highest}",
                rule=f'the vocabulary "{vocabulary.name}" has {vocabulary.size} tokens, from 0',
                fix=FIX,
            )
    return tokens
