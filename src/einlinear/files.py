"""Files written whole or not at all; JSON and TOML in which every kind of damage is one error."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from einlinear.errors import EinlinearError, cannot_write, quote

_MOST_DOTS = 500
_QUOTED_OR_COMMENT = re.compile(r"""\"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*""")
_LONGEST_PATH = 4096


def as_path(value: object, name: str) -> Path:
    """The path that a user has given; `name` says in the error what it is the path of."""
    text = str(value) if isinstance(value, str | PurePath) else ""
    try:
        if 0 < len(os.fsencode(text)) <= _LONGEST_PATH and "\0" not in text:
            return Path(text)
    except UnicodeEncodeError:
        pass
    raise EinlinearError(
        what=f"{name} is given as {quote(value)}",
        rule=f"a path is a text of 1 to {_LONGEST_PATH:,} characters that a file system can have, "
        "or a Path",
        fix='give the name of a file or folder in quotes, such as "runs/first"',
    )


def write_whole(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all; it is on the disk when this returns.

    The file gets the permissions of any new file of this user (the umask), so that others who share
    the directory can read it. What a process that is killed leaves behind is `path` + ".part",
    which the next write of the same file replaces. Where writing fails, nothing is left behind.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for chunk in (data,) if isinstance(data, bytes) else data:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # a disk that is full needs the room
        raise cannot_write(path, error) from error


def sync_folder(path: Path) -> None:
    """Put what was renamed in a folder on the disk; does nothing where folders cannot be opened."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Whatever is wrong with the text is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The object of a JSON text. Whatever is wrong, another kind of value too, is a ValueError."""
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Whatever is wrong with the text is a ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pragma: no cover - the same module under its old name
        try:
            import tomli as tomllib
        except ImportError:
            raise EinlinearError(
                what="TOML cannot be read: tomli is not installed",
                rule="before Python 3.11 TOML files need the package tomli",
                fix='pip install "einlinear[cli]", or give a .json file',
            ) from None
    # The parser takes the square of the parts of a key in time, and sets no limit of its own.
    bare = _QUOTED_OR_COMMENT.sub("", text)
    if any(part.count(".") > _MOST_DOTS for part in re.split(r"[,\n=\[\]{}]", bare)):
        raise ValueError(f"a name or value has more than {_MOST_DOTS} dots")
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
