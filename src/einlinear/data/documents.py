"""Read documents, one after the other, from text files of any size or the Hugging Face hub."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from einlinear.errors import EinlinearError, reason, shorten
from einlinear.files.whole import as_path, checked_reading, parse_object
from einlinear.structures.values import taken

if TYPE_CHECKING:
    from hashlib import _Hash

Source = str | Path
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
HUB = "hub:"
MAX_DOCUMENT = 16 * 2**20
"""A longer document is cut into pieces of about this many bytes, which count as documents."""

_BLOCK = 2**20
_MOST_SOURCES = 1_000_000
_LONGEST_LINE = 16 * MAX_DOCUMENT
_SEPARATOR = b"\n\n\n"  # further newlines are stripped from the documents
_RULE = (
    "a text is a .txt, .txt.gz, .jsonl or .jsonl.gz file, a folder of such files, or a data set of "
    "the Hugging Face hub, written hub:owner/name"
)


@dataclass(slots=True)
class Reading:
    """Progress of reading a source.

    bytes_read counts bytes of the file on disk, or of the text for hub sources.
    """

    source: str
    bytes_read: int = 0
    digest: _Hash = field(default_factory=hashlib.sha256)


def find_sources(sources: Source | Sequence[Source]) -> tuple[Source, ...]:
    """Return all files in files and folders; those of a folder are sorted by name."""
    several = taken(sources, _MOST_SOURCES)
    given: list[Any] = [sources] if several is None else several
    found = tuple(file for source in given for file in _files(source))
    if not found:
        raise EinlinearError(what="no text is given", rule=_RULE, fix="name a file or a folder")
    return found


def _files(source: Source) -> list[Source]:
    if isinstance(source, str) and source.startswith(HUB):
        return [source]
    path = as_path(source, "a text")
    files = [path]
    if os.path.isdir(path):
        inside = path.rglob("*")
        files = sorted(file for file in inside if file.name.endswith(SUFFIXES) and file.is_file())
        if not files:
            raise EinlinearError(
                what=f"the folder {path} holds no text", rule=_RULE, fix="name another folder"
            )
    for file in files:
        what = ""
        if not os.path.exists(file):
            what = f"there is no file {file}"
        elif not file.name.endswith(SUFFIXES):
            what = f"{file} does not have the name of a text"
        elif file.stat().st_size == 0:
            what = f"{file} is empty"
        if what:
            raise EinlinearError(what=what, rule=_RULE, fix="check the name; leave out empty files")
    return list(files)


def size_of(source: Source) -> int | None:
    """The size of a source, as `Reading.bytes_read` counts it; None for a hub source."""
    return None if str(source).startswith(HUB) else Path(source).stat().st_size


def read_documents(source: Source, reading: Reading) -> Iterator[bytes]:
    """Yield the documents of a source, in UTF-8, stripped of newlines, none of them empty.

    In a .txt file, three or more newlines separate documents. In a .jsonl file, every line holds
    one, as "text". Uses bounded memory for any size of the source.
    """
    if str(source).startswith(HUB):
        documents = _from_hub(str(source).removeprefix(HUB), reading)
    else:
        documents = _from_file(Path(source), reading)
    for document in documents:
        yield from _pieces(document.strip(b"\n"))


def _from_file(path: Path, reading: Reading) -> Iterator[bytes]:
    fix, errors = "check that the file is complete and readable", (OSError, EOFError, zlib.error)
    with checked_reading(path, rule=_RULE, fix=fix, errors=errors), path.open("rb") as file:
        watched = _Watched(file, reading)
        is_packed = path.name.endswith(".gz")
        opened = gzip.open(watched) if is_packed else io.BufferedReader(watched, _BLOCK)
        with cast("IO[bytes]", opened) as content:
            if path.name.endswith((".jsonl", ".jsonl.gz")):
                yield from _lines(content, path)
            else:
                yield from split_documents(iter(partial(content.read, _BLOCK), b""))


class _Watched(io.RawIOBase):
    """A file that keeps a Reading up to date."""

    def __init__(self, file: IO[bytes], reading: Reading) -> None:
        self.file, self.reading = file, reading

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count: int = self.file.readinto(buffer)  # type: ignore[attr-defined]
        self.reading.bytes_read += count
        self.reading.digest.update(buffer[:count])
        return count


def split_documents(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split a text at three or more newlines, wherever the blocks are cut.

    A document that grows too long is cut at a newline, at a space, or else between characters.
    """
    rest, held = b"", b""
    for block in blocks:
        block = held + block
        held = b"\r" if block.endswith(b"\r") else b""  # maybe half of a newline
        block = block.removesuffix(b"\r").replace(b"\r\n", b"\n")
        rest += block
        if (
            len(rest) > MAX_DOCUMENT
            or rest.find(_SEPARATOR, max(0, len(rest) - len(block) - 2)) >= 0
        ):
            *whole, rest = rest.split(_SEPARATOR)
            yield from whole
            while len(rest) > MAX_DOCUMENT:
                cut = _cut(rest)
                yield rest[:cut]
                rest = rest[cut:].lstrip(b"\n")
        rest = rest.lstrip(b"\n")
    yield rest + held


def _pieces(document: bytes) -> Iterator[bytes]:
    while len(document) > MAX_DOCUMENT:
        cut = _cut(document)
        yield document[:cut].rstrip(b"\n")
        document = document[cut:].lstrip(b"\n")
    if document:
        yield document


def _cut(document: bytes) -> int:
    """Where to cut a document that is too long."""
    for mark in (b"\n", b" "):
        found = document.rfind(mark, MAX_DOCUMENT // 2, MAX_DOCUMENT)
        if found >= 0:
            return found + 1
    cut = MAX_DOCUMENT
    while document[cut] & 0xC0 == 0x80 and cut > MAX_DOCUMENT - 4:  # inside a character of UTF-8
        cut -= 1
    return cut


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
        if not line.strip():
            continue
        try:
            text = parse_object(line)["text"]
            if not isinstance(text, str):
                raise ValueError('its "text" is not a string')
        except (ValueError, KeyError) as error:
            raise EinlinearError(
                what=f"line {number} of {path} holds no text: {type(error).__name__}: "
                f"{reason(error)}",
                rule='every line is a JSON object with a string "text"',
                fix="repair or delete that line",
            ) from error
        yield text.replace("\r\n", "\n").encode("utf-8", errors="replace")


def _from_hub(name: str, reading: Reading) -> Iterator[bytes]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise EinlinearError(
            what=f"{HUB}{shorten(name)} needs the package datasets, which is not installed",
            rule="datasets is an optional package",
            fix='pip install "einlinear[hub]"',
        ) from error
    try:
        rows = load_dataset(name, split="train", streaming=True)
        for row in rows:
            document = row["text"].replace("\r\n", "\n").encode("utf-8", errors="replace")
            reading.bytes_read += len(document)
            reading.digest.update(document + b"\0")
            yield document
    except Exception as error:  # network errors have no common base class
        raise EinlinearError(
            what=f"cannot read {HUB}{shorten(name)}: {type(error).__name__}: {reason(error)}",
            rule='the data set has a split "train" whose rows have a "text"',
            fix="check the name and the network; run the same command again to resume",
        ) from error
