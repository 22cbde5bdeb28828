"""Tokens of texts, in memory. A folder of tokens (token_folder) holds the same for larger texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from einlinear.data.choices import CharacterRule
from einlinear.data.documents import Reading, Source, find_sources, read_documents, size_of
from einlinear.data.vocabulary import Vocabulary, check_rule, open_vocabulary
from einlinear.errors import EinlinearError, quote
from einlinear.files.arrays import Array

IN_MEMORY = 2**26
"""Texts of up to this many bytes need not be prepared."""
UNPACKED = 2**30
"""The same for texts in .gz files, in unpacked bytes."""
SHARE = 0.02
"""Default share of the documents for validation."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How many documents were read, and how many documents and characters were dropped."""

    documents: int = 0
    documents_dropped: int = 0
    characters_dropped: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens for training and validation, and their vocabulary."""

    train: Array
    validation: Array
    vocabulary: Vocabulary
    counts: TokenCounts
    fingerprint: str


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The tokens of some documents, each with its end token, and what was dropped."""

    train: Array
    validation: Array
    counts: TokenCounts


def encode_documents(
    documents: Iterable[bytes], vocabulary: Vocabulary, rule: CharacterRule, share: float
) -> Encoding:
    """Encode documents; about `share` of them, chosen by a hash, are for validation."""
    end = np.array([vocabulary.end], vocabulary.dtype)
    empty = np.array([], vocabulary.dtype)
    train, validation, counts = [empty], [empty], TokenCounts()
    for document in documents:
        encoded = vocabulary.encode(document, rule)
        is_dropped = encoded.tokens is None or not encoded.tokens.size
        counts += TokenCounts(1, int(is_dropped), encoded.characters_dropped)
        if encoded.tokens is not None and not is_dropped:
            chosen = validation if is_validation(document, share) else train
            chosen += [encoded.tokens, end]
    return Encoding(np.concatenate(train), np.concatenate(validation), counts)


def is_validation(document: bytes, share: float) -> bool:
    """Whether a document is for validation; equal documents are always on the same side."""
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big")
    return number < share * 2**64


def tail_length(train: int, validation: int, share: float) -> int:
    """How many of the last training tokens to use for validation if it has too few tokens.

    Too few is less than a quarter of the share. A single long document is thus cut near its end.
    """
    is_enough = validation >= share * (train + validation) / 4
    return 0 if is_enough else round(share * train)


def check_validation_share(share: object) -> float:
    """Return the share of the documents for validation, or refuse it."""
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
    """Encode texts of moderate size in memory, into the same tokens as `prepare`."""
    known, checked = open_vocabulary(vocabulary), check_rule(rule)
    share = 0.0 if validation is not None else check_validation_share(validation_share)
    parts = [(find_sources(sources), share)]
    if validation is not None:
        parts.append((find_sources(validation), 1.0))
    sizes = [size_of(source) for files, _ in parts for source in files]
    total = sum(size or 0 for size in sizes)
    if None in sizes or total > IN_MEMORY:
        raise _too_large("from the hub" if None in sizes else f"of {total:,} bytes")
    documents = ((_read_all(files), part_share) for files, part_share in parts)
    return text_tokens(documents, known, checked)


def text_tokens(
    parts: Iterable[tuple[Iterable[bytes], float]], vocabulary: Vocabulary, rule: CharacterRule
) -> Tokens:
    """Encode documents; each part comes with its share for validation."""
    encodings, share = [], 0.0
    for documents, part_share in parts:
        encodings.append(encode_documents(documents, vocabulary, rule, part_share))
        share = share or part_share
    counts = sum((encoding.counts for encoding in encodings), TokenCounts())
    check_kept(counts, rule)
    train = np.concatenate([encoding.train for encoding in encodings])
    validation = np.concatenate([encoding.validation for encoding in encodings])
    cut = len(train) - tail_length(len(train), len(validation), share if share < 1 else 0.0)
    validation = np.concatenate([validation, train[cut:]])
    digest = hashlib.sha256(vocabulary.name.encode())
    for stream in (train[:cut], validation):
        digest.update(f" {len(stream)} ".encode() + stream.tobytes())
    return Tokens(train[:cut], validation, vocabulary, counts, digest.hexdigest()[:16])


def check_kept(counts: TokenCounts, rule: str) -> None:
    """Raise if no document is left."""
    if counts.documents_dropped == counts.documents:
        raise EinlinearError(
            what=f"of {counts.documents} documents none is left",
            rule="a document is dropped if it is empty or, under the rule "
            f'"drop", has characters outside the 96 symbols; the rule is "{rule}"',
            fix='use the rule "fold", or other texts',
        )


def _read_all(sources: Sequence[Source]) -> Iterator[bytes]:
    """The documents of all sources, unless they are too large for memory."""
    total = 0
    for source in sources:
        for document in read_documents(source, Reading(str(source))):
            total += len(document)
            if total > UNPACKED:
                raise _too_large(f"of more than {UNPACKED:,} bytes, unpacked,")
            yield document


def _too_large(amount: str) -> EinlinearError:
    return EinlinearError(
        what=f"a text {amount} is given directly",
        rule=f"text files of up to {IN_MEMORY:,} bytes in all are read directly; larger ones are "
        "made into a folder of tokens first",
        fix="run einlinear prepare, or einlinear.prepare in Python, and give its folder",
    )
