"""The parts of a folder of tokens: each encoded by itself, in the end joined.

A part is a file that appears whole or not at all. It carries a hash of the documents and settings
that it was made of, so that it is used again exactly where it is right.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError
from einlinear.files import parse_object, write_whole
from einlinear.structures.values import whole_number
from einlinear.studies.token_info import (
    INFO,
    Counts,
    SourceFacts,
    Stream,
    TokenInfo,
    read_counts,
)
from einlinear.studies.tokens import (
    BLOCK,
    check_kept,
    encode_documents,
    stored_dtype,
    tail_length,
)
from einlinear.studies.vocabulary import Rule, open_vocabulary

PARTS = "parts"


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the tokens, beside the texts."""

    vocabulary: str
    rule: Rule
    share: float | None

    def share_of(self, use: str) -> float:
        """Which share of the texts of this use is for validation."""
        if use == "validation":
            return 1.0
        return 0.0 if self.share is None else self.share


@dataclass(frozen=True, slots=True)
class Chunk:
    """Documents that are encoded together, and how many bytes had been read after them."""

    index: int
    use: str
    documents: tuple[bytes, ...]
    bytes_read: int

    def digest(self, settings: Settings) -> str:
        """A hash of all that decides the part."""
        digest = hashlib.blake2b(repr((settings, self.use)).encode(), digest_size=16)
        for document in self.documents:
            digest.update(len(document).to_bytes(8, "big"))
            digest.update(document)
        return digest.hexdigest()


def part_path(out: Path, index: int) -> Path:
    """The file of a part."""
    return out / PARTS / f"{index:08d}"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a part holds."""

    train: bytes
    validation: bytes
    counts: Counts


def write_part(path: Path, digest: str, chunk: Chunk, settings: Settings) -> None:
    """Encode a chunk into a file that appears whole or not at all."""
    vocabulary = open_vocabulary(settings.vocabulary)
    encoding = encode_documents(
        chunk.documents, vocabulary, settings.rule, settings.share_of(chunk.use)
    )
    kind = stored_dtype(vocabulary)
    train, validation = (
        stream.astype(kind, copy=False).tobytes()
        for stream in (encoding.train, encoding.validation)
    )
    body = train + validation
    header = {
        "digest": digest,
        "train_bytes": len(train),
        "bytes": len(body),
        "counts": asdict(encoding.counts),
    }
    sealed = header | {"checksum": _checksum(header, body)}
    write_whole(path, json.dumps(sealed).encode() + b"\n" + body)


def _checksum(header: Mapping[str, Any], body: bytes) -> int:
    """Of all that a part holds: a changed number of its header would cut it elsewhere."""
    return zlib.crc32(body, zlib.crc32(json.dumps(header, sort_keys=True).encode()))


def read_part(path: Path, digest: str | None = None) -> Part | None:
    """A part, or None if it is missing, damaged, or was made of something else."""
    try:
        line, _, body = path.read_bytes().partition(b"\n")
        header = parse_object(line)
        checksum = header.pop("checksum")
        is_whole = len(body) == header["bytes"] and _checksum(header, body) == checksum
        if not is_whole or digest not in (None, header["digest"]):
            return None
        cut = whole_number(header["train_bytes"], "train_bytes", 0, len(body))
        return Part(body[:cut], body[cut:], read_counts(header["counts"]))
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def _parts(out: Path, count: int) -> Iterator[Part]:
    for index in range(count):
        part = read_part(part_path(out, index))
        if part is None:
            raise EinlinearError(
                what=f"{part_path(out, index)} was whole and is so no more",
                rule="nothing else writes to the folder while a text is prepared",
                fix="give the same command again; the part is made anew",
            )
        yield part


def join_parts(
    out: Path,
    count: int,
    settings: Settings,
    sources: Sequence[SourceFacts],
) -> TokenInfo:
    """Join the parts, then write tokens.json, then remove the parts."""
    vocabulary = open_vocabulary(settings.vocabulary)
    width = np.dtype(vocabulary.dtype).itemsize
    counts, train, held_out = Counts(), 0, 0
    for part in _parts(out, count):
        counts += part.counts
        train, held_out = train + len(part.train), held_out + len(part.validation)
    check_kept(counts, settings.rule)
    tail = tail_length(train // width, held_out // width, settings.share or 0.0)
    cut = train - tail * width
    names = ("train.bin", "validation.bin")
    contents = (_train(out, count, 0, cut), _validation(out, count, cut, train))
    streams = [
        _write_stream(out / name, content, width)
        for name, content in zip(names, contents, strict=True)
    ]
    info = TokenInfo(
        vocabulary=vocabulary.name,
        vocab_size=vocabulary.size,
        dtype=np.dtype(vocabulary.dtype).name,
        rule=settings.rule,
        validation_share=settings.share,
        tail=tail,
        counts=counts,
        train=streams[0],
        validation=streams[1],
        sources=tuple(sources),
    )
    write_whole(out / INFO, info.as_json().encode())
    shutil.rmtree(out / PARTS)
    return info


def _train(out: Path, count: int, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of the training tokens of all parts from begin to end."""
    position = 0
    for part in _parts(out, count):
        yield part.train[max(0, begin - position) : max(0, end - position)]
        position += len(part.train)


def _validation(out: Path, count: int, cut: int, train: int) -> Iterator[bytes]:
    """The bytes of the tokens for validation, and of the tail that was cut off from training."""
    for part in _parts(out, count):
        yield part.validation
    if cut < train:
        yield from _train(out, count, cut, train)


def _write_stream(path: Path, content: Iterable[bytes], width: int) -> Stream:
    """Write a file of tokens and say what is in it."""
    checksums: list[int] = []
    size = 0

    def counted() -> Iterator[bytes]:
        nonlocal size
        for piece in content:
            rest = memoryview(piece)
            while rest:
                if size % BLOCK == 0:
                    checksums.append(0)
                step = rest[: BLOCK - size % BLOCK]
                checksums[-1] = zlib.crc32(step, checksums[-1])
                size, rest = size + len(step), rest[len(step) :]
            yield piece

    write_whole(path, counted())
    return Stream(size // width, tuple(checksums))
