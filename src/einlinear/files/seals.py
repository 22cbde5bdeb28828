"""Seals: checksums that show whether a file has changed since a run wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from einlinear.files.whole import parse_object

SEAL = "seal"
"""The field of a sealed JSON object that holds the checksum of all other fields."""

_CHUNK = 1 << 20


def sealed(values: Mapping[str, Any]) -> bytes:
    """Serialize an object as JSON, with its seal."""
    return json.dumps({**values, SEAL: seal_of(values)}, indent=1).encode()


def unsealed(text: str | bytes) -> dict[str, Any]:
    """Parse a sealed JSON text; raise a ValueError if it has changed since it was sealed."""
    values = parse_object(text)
    unseal_(values)
    return values


def unseal_(values: dict[str, Any]) -> None:
    """Check and remove the seal of an object; raise a ValueError if the object has changed."""
    seal = values.pop(SEAL, None)
    if seal is None:
        raise ValueError("it has no seal")
    if seal != seal_of(values):
        raise ValueError("its checksum is wrong: it has changed since it was written")


def seal_of(values: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, which does not depend on its layout as text."""
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
    """Raise a ValueError if a file has changed, an OSError if it cannot be read."""
    if file_seal(path) != seal:
        raise ValueError(
            f"the checksum of {path.name} is wrong: it has changed since it was written"
        )
