"""The page and the figure about the compressed sentence encoder, from its record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_page(record: Mapping[str, Any], out: Path) -> None:
    """Write compress-encoder.md and compress-encoder.svg."""
    raise NotImplementedError
