"""The parts of an unfinished folder of tokens: each encoded separately, joined at the end.

A part appears whole or not at all. It holds a hash of its documents and settings, so that it is
reused only if it is still right.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.data.choices import CharacterRule
from einlinear.data.token_folder import BLOCK, INFO, SourceFacts, Stream, TokenInfo, stored_dtype
from einlinear.data.tokens import TokenCounts, check_kept, encode_documents, tail_length
from einlinear.data.vocabulary import open_vocabulary
from einlinear.errors import EinlinearError
from einlinear.files.fields import typed
from einlinear.files.whole import parse_object, write_whole
from einlinear.structures.values import whole_number

PARTS = "parts"


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """What determines the tokens of a text."""

    vocabulary: str
    rule: CharacterRule
    share: float | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Documents that are encoded together, and how many bytes had been read after them."""

    index: int
    use: str
    documents: tuple[bytes, ...]
    bytes_read: int

    def digest(self, settings: TokenSettings) -> str:
        """A hash of everything that determines the part."""
        digest = hashlib.blake2b(repr((settings, self.use)).encode(), digest_size=16)
        for document in self.documents:
            digest.update(len(document).to_bytes(8, "big"))
            digest.update(document)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The contents of a part."""

    train: bytes
    validation: bytes
    counts: TokenCounts


def part_path(out: Path, index: int) -> Path:
    """The file of a part."""
    return out / PARTS / f"{index:08d}"


def write_part(path: Path, digest: str, chunk: Chunk, settings: TokenSettings) -> None:
    """Encode a chunk into a file that appears whole or not at all."""
    vocabulary = open_vocabulary(settings.vocabulary)
    share = 1.0 if chunk.use == "validation" else settings.share or 0.0
    encoding = encode_documents(chunk.documents, vocabulary, settings.rule, share)
    kind = stored_dtype(vocabulary)
    train = encoding.train.astype(kind, copy=False).tobytes()
    body = train + encoding.validation.astype(kind, copy=False).tobytes()
    header = {
        "digest": digest,
        "train_bytes": len(train),
        "bytes": len(body),
        "counts": asdict(encoding.counts),
    }
    sealed = header | {"checksum": _checksum(header, body)}
    write_whole(path, json.dumps(sealed).encode() + b"\n" + body)


def _checksum(header: Mapping[str, Any], body: bytes) -> int:
    """The checksum of a whole part, header included, because the header says where to cut it."""
    return zlib.crc32(body, zlib.crc32(json.dumps(header, sort_keys=True).encode()))


def read_part(path: Path, digest: str | None = None) -> Part | None:
    """Read a part; None if it is missing, damaged, or has another digest."""
    try:
        line, _, body = path.read_bytes().partition(b"\n")
        header = parse_object(line)
        checksum = header.pop("checksum")
        is_whole = len(body) == header["bytes"] and _checksum(header, body) == checksum
        if not is_whole or digest not in (None, header["digest"]):
            return None
        cut = whole_number(header["train_bytes"], "train_bytes", 0, len(body))
        return Part(body[:cut], body[cut:], typed(TokenCounts, header["counts"], "counts"))
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def _parts(out: Path, count: int) -> Iterator[Part]:
    for index in range(count):
        part = read_part(part_path(out, index))
        if part is None:
            raise EinlinearError(
                what=f"{part_path(out, index)} was changed or removed",
                rule="nothing else writes to the folder while a text is prepared",
                fix="run the same command again, which encodes the part again",
            )
        yield part


def join_parts(
    out: Path, count: int, settings: TokenSettings, sources: Sequence[SourceFacts]
) -> TokenInfo:
    """Join the parts, then write tokens.json, then remove the parts."""
    vocabulary = open_vocabulary(settings.vocabulary)
    width = np.dtype(vocabulary.dtype).itemsize
    counts, train, held_out = TokenCounts(), 0, 0
    for part in _parts(out, count):
        counts += part.counts
        train, held_out = train + len(part.train), held_out + len(part.validation)
    check_kept(counts, settings.rule)
    tail = tail_length(train // width, held_out // width, settings.share or 0.0)
    cut = train - tail * width
    rest = _train(out, count, cut, train) if tail else ()
    validation = chain((part.validation for part in _parts(out, count)), rest)
    info = TokenInfo(
        vocabulary=vocabulary.name,
        vocab_size=vocabulary.size,
        dtype=np.dtype(vocabulary.dtype).name,
        rule=settings.rule,
        validation_share=settings.share,
        tail=tail,
        counts=counts,
        train=_write_stream(out / "train.bin", _train(out, count, 0, cut), width),
        validation=_write_stream(out / "validation.bin", validation, width),
        sources=tuple(sources),
    )
    write_whole(out / INFO, info.as_json().encode())
    shutil.rmtree(out / PARTS)
    return info


def _train(out: Path, count: int, begin: int, end: int) -> Iterator[bytes]:
    """The bytes from begin to end of the training tokens of all parts."""
    position = 0
    for part in _parts(out, count):
        yield part.train[max(0, begin - position) : max(0, end - position)]
        position += len(part.train)


def _write_stream(path: Path, content: Iterable[bytes], width: int) -> Stream:
    """Write a file of tokens and return its description."""
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
