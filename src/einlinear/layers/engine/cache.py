"""The first-level cache of this processor, which decides how programs are cut into blocks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size in bytes, and how many lines with the same lower address bits fit at once."""

    size: int
    ways: int

    @property
    def is_large(self) -> bool:
        """Whether it holds columns of distant rows, and the terms of a sum in lines of their own.

        With 48 KB and 12 ways it is faster to read such numbers where they are; with 32 KB and
        8 ways, to copy them first.
        """
        return self.size >= 48 * 1024 and self.ways >= 12


SMALL = CacheShape(32 * 1024, 8)
"""What to assume where the system does not say."""


@lru_cache(maxsize=1)
def first_level() -> CacheShape:
    """The first-level data cache of this machine."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError, ValueError):
            level, kind, size, ways = (
                (folder / name).read_text(encoding="ascii").strip()
                for name in ("level", "type", "size", "ways_of_associativity")
            )
            if level == "1" and kind in ("Data", "Unified"):
                return CacheShape(int(size.removesuffix("K")) * 1024, int(ways))
    return SMALL
