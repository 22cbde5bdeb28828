"""Arrays from untrusted .npz files, checked before anything is read or allocated.

An .npz file is a zip archive of arrays. The size that a header claims is compared with the size of
the data. Headers are matched by a pattern, never evaluated, and arrays hold plain numbers only.
Damage raises a ValueError; a file that cannot be opened raises an OSError.
"""

from __future__ import annotations

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from einlinear.errors import EinlinearError, quote, reason

Array = npt.NDArray[Any]

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
_BLOCK = 2**24  # bytes read at once
_FREE = 2**30  # bytes that an array can have however well it is compressed
_MOST_PACKED = 100  # the compression ratio of larger arrays, at most
_ENTRY = re.compile(
    r"\s*'(?:(descr)'\s*:\s*'([<>|=]?[biuf][0-9]{1,2})'"
    r"|(fortran_order)'\s*:\s*(True|False)"
    r"|(shape)'\s*:\s*\(([0-9L,\s]{0,400})\))\s*(?:,|$)"
)
_DAMAGE = (
    ValueError,
    EOFError,
    LookupError,
    RuntimeError,  # an archive with a password, or an unknown compression
    ArithmeticError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
)


@dataclass(frozen=True, slots=True)
class Header:
    """The shape of an array, the type of its numbers, and whether its first axis is innermost."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    @property
    def size(self) -> int:
        """The number of bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Arrays:
    """The arrays of an open .npz file, by name."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self.names = tuple(name.removesuffix(".npy") for name in archive.namelist())

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[Header, IO[bytes]]]:
        """Open an array: its header, and a file of its bytes."""
        entry = self._archive.getinfo(f"{name}.npy")
        with self._archive.open(entry) as file:
            header = _read_header(file)
            left = entry.file_size - file.tell()
            if header.size != left:
                raise ValueError(f"{name} claims {header.size:,} bytes and has {left:,}")
            if header.size > max(_FREE, _MOST_PACKED * entry.compress_size):
                raise ValueError(
                    f"{name} claims {header.size:,} bytes, packed into {entry.compress_size:,}"
                )
            yield header, file

    def read(self, name: str) -> Array:
        """Read a whole array."""
        with self.open(name) as (header, file):
            held = bytearray()
            while len(held) < header.size:
                held += read_exactly(file, min(_BLOCK, header.size - len(held)))
        order: Any = "F" if header.is_fortran else "C"
        array: Array = np.frombuffer(held, header.dtype).reshape(header.shape, order=order)
        return array


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """Open an .npz file; whatever is wrong with it raises a ValueError or an OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield Arrays(archive)
    except EinlinearError:
        raise
    except _DAMAGE as error:
        raise ValueError(reason(error)) from error


def read_exactly(file: IO[bytes], count: int) -> bytes:
    """Read exactly `count` bytes, or raise a ValueError."""
    raw = file.read(count)
    if len(raw) < count:
        raise ValueError("it ends too early")
    return raw


def _read_header(file: IO[bytes]) -> Header:
    start = read_exactly(file, len(_MAGIC) + 2)
    version = start[len(_MAGIC)]
    if not start.startswith(_MAGIC) or version not in (1, 2, 3):
        raise ValueError("it does not hold numpy arrays")
    width = 2 if version == 1 else 4
    length = int.from_bytes(read_exactly(file, width), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"an array has a header of {length:,} bytes")
    return _parse_header(read_exactly(file, length).decode("latin-1"))


def _parse_header(text: str) -> Header:
    """Parse the header of an array of numbers: {'descr': '|u1', 'shape': (9, 3), ...}."""
    inner = text.strip()
    found: dict[str, str] = {}
    place = 1
    while inner.startswith("{") and (entry := _ENTRY.match(inner, place, len(inner) - 1)):
        key, value = (part for part in entry.groups() if part is not None)
        found[key] = value
        place = entry.end()
    rest = inner[place:].strip()
    if rest != "}" or set(found) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"an array does not hold plain numbers: its header is {quote(inner)}")
    try:
        dtype = np.dtype(found["descr"])
    except TypeError:
        raise ValueError(f"{quote(found['descr'])} is not a type of numbers") from None
    parts = [part.strip().removesuffix("L") for part in found["shape"].split(",")]
    shape = tuple(int(part) for part in parts if part)
    return Header(shape, dtype, found["fortran_order"] == "True")
