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
        return self.size >= LARGE.size and self.ways >= LARGE.ways


SMALL, LARGE = CacheShape(32 * 1024, 8), CacheShape(48 * 1024, 12)
"""The shapes that programs are made for; the small one is assumed where the system does not say."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@lru_cache(maxsize=1)
def first_level(caches: Path = _CACHES) -> CacheShape:
    """The first-level data cache of this machine, as Linux describes it."""
    for folder in sorted(caches.glob("index*")):
        with suppress(OSError, ValueError):
            level, kind, size, ways = (
                (folder / name).read_text(encoding="ascii").strip()
                for name in ("level", "type", "size", "ways_of_associativity")
            )
            if level == "1" and kind in ("Data", "Unified"):
                return CacheShape(int(size.removesuffix("K")) * 1024, int(ways))
    return SMALL
