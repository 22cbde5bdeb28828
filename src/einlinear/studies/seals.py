"""Seals: checksums by which files that a run has written are known to be as they were written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from einlinear.files import parse_object

SEAL = "seal"
"""The field of a sealed JSON object that holds the checksum of all other fields."""

_CHUNK = 1 << 20


class Digest(Protocol):
    """A checksum under way, as hashlib makes them."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Count more data in."""


def sealed(values: Mapping[str, Any]) -> bytes:
    """A JSON text of an object with its seal."""
    return json.dumps({**values, SEAL: seal_of(values)}, indent=1).encode()


def unsealed(text: str | bytes) -> dict[str, Any]:
    """The object of a sealed JSON text, without the seal; a ValueError if it has changed."""
    values = parse_object(text)
    unseal_(values)
    return values


def unseal_(values: dict[str, Any]) -> None:
    """Take the seal off an object; a ValueError if the object has changed since it was sealed."""
    seal = values.pop(SEAL, None)
    if seal is None:
        raise ValueError("it has no seal")
    if seal != seal_of(values):
        raise ValueError("its checksum is wrong: it has changed since it was written")


def seal_of(values: Mapping[str, Any]) -> str:
    """The checksum of a JSON object: the same however the object is laid out as text."""
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    return sha256(text.encode()).hexdigest()


def file_seal(path: Path) -> str:
    """The checksum of a file."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_file(path: Path, seal: str) -> None:
    """Raise a ValueError if a file is not what was sealed, an OSError if it cannot be read."""
    if file_seal(path) != seal:
        raise ValueError(
            f"the checksum of {path.name} is wrong: it has changed since it was written"
        )


def counted_in(
    digest: Digest, chunks: Iterable[bytes | memoryview]
) -> Iterator[bytes | memoryview]:
    """The chunks, each counted into a checksum on its way."""
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
