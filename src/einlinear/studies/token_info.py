"""tokens.json: what the files of tokens in a folder are, checked field by field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, quote, reason
from einlinear.files import parse_object
from einlinear.structures.values import LARGEST

INFO = "tokens.json"
VERSION = 1
FIX = "delete the folder and prepare the text again"


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of documents: how many there were, and what was dropped."""

    documents: int = 0
    documents_dropped: int = 0
    characters_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(self.parts(), other.parts(), strict=True)
        return Counts(*(mine + others for mine, others in pairs))

    def parts(self) -> tuple[int, int, int]:
        """The three numbers."""
        return self.documents, self.documents_dropped, self.characters_dropped


@dataclass(frozen=True, slots=True)
class Stream:
    """A file of tokens: how many there are, and the crc32 of every block of bytes."""

    tokens: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A text that was read; sha256 is of the file as it is on the disk."""

    name: str
    size: int
    sha256: str
    use: str


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What tokens.json says.

    validation_share is None where texts for validation were given. tail is how many tokens at the
    end of the training text were used for validation, because too few documents were.
    """

    vocabulary: str
    vocab_size: int
    dtype: str
    rule: str
    validation_share: float | None
    tail: int
    counts: Counts
    train: Stream
    validation: Stream
    sources: tuple[SourceFacts, ...]
    version: int = VERSION

    def as_json(self) -> str:
        """The text of tokens.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TokenInfo:
        """The same back; a ValueError if something is missing or wrong."""
        held = parse_object(text)
        version = held.get("version")
        if version != VERSION:
            raise ValueError(f"its version is {quote(version)}, and this is version {VERSION}")
        for part in ("train", "validation"):
            stream = _record(Stream, held.get(part))
            _check_whole(stream["tokens"], *_listed(stream["checksums"]))
            held[part] = Stream(stream["tokens"], tuple(stream["checksums"]))
        held["counts"] = read_counts(held.get("counts"))
        sources = [_record(SourceFacts, source) for source in _listed(held.get("sources"))]
        for source in sources:
            _check_whole(source["size"])
            _check_texts(source["name"], source["sha256"], source["use"])
        held["sources"] = tuple(SourceFacts(**source) for source in sources)
        _record(cls, held)
        _check_whole(held["vocab_size"], held["tail"])
        _check_texts(held["vocabulary"], held["dtype"], held["rule"])
        share = held["validation_share"]
        if share is not None and (type(share) is not float or not 0 < share < 1):
            raise ValueError(f"its validation_share is {quote(share)}")
        return cls(**held)


def read_counts(held: object) -> Counts:
    """Counts as JSON has them; a ValueError if something is missing or wrong."""
    counts = _record(Counts, held)
    _check_whole(*counts.values())
    return Counts(**counts)


def _record(kind: type, held: object) -> dict[str, Any]:
    """The object, if it has the fields of a dataclass and no others."""
    names = {field.name for field in fields(kind)}
    if isinstance(held, dict) and set(held) == names:
        return held
    raise ValueError(f"it lacks one of {', '.join(sorted(names))}, or has more")


def _listed(held: object) -> list[Any]:
    if isinstance(held, list):
        return held
    raise ValueError(f"it has {quote(held)} where a list is due")


def _check_whole(*values: object) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise ValueError(f"it has {quote(value)} where a whole number is due")


def _check_texts(*values: object) -> None:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"it has {quote(value)} where a text is due")


def read_info(folder: Path) -> TokenInfo:
    """What tokens.json says."""
    path = folder / INFO
    try:
        return TokenInfo.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EinlinearError(
            what=f"{folder} holds no whole set of tokens: there is no {INFO}",
            rule=f"{INFO} is written when everything else is",
            fix="prepare the text to the end: the same command again goes on where it stopped",
        ) from error
    except (OSError, ValueError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule=f"{INFO} is as einlinear prepare wrote it",
            fix=FIX,
        ) from error
