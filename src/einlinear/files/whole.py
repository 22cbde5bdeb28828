"""Files written atomically; JSON and TOML in which every kind of damage is a ValueError."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EBUSY
from pathlib import Path, PurePath
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

import tomli_w

from einlinear.errors import EinlinearError, cannot_write, quote, reason

_MOST_DOTS = 500
_SECONDS_TO_WAIT = 60.0  # for another process that writes the same file
_QUOTED_OR_COMMENT = re.compile(r"""\"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*""")
_LONGEST_PATH = 4096


def as_path(value: object, name: str) -> Path:
    """Check a path that a user has given; `name` tells in the error which path it is."""
    text = str(value) if isinstance(value, str | PurePath) else ""
    try:
        if 0 < len(os.fsencode(text)) <= _LONGEST_PATH and "\0" not in text:
            return Path(text)
    except UnicodeEncodeError:
        pass
    raise EinlinearError(
        what=f"{name} is given as {quote(value)}",
        rule=f"a path is a Path, or a text of 1 to {_LONGEST_PATH:,} characters that a file system "
        "can store",
        fix='give the name of a file or folder in quotes, such as "runs/first"',
    )


@contextmanager
def checked_reading(
    path: Path, *, rule: str, fix: str, errors: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    """Turn errors of reading a file into an EinlinearError; one that is raised inside stays."""
    try:
        yield
    except EinlinearError:
        raise
    except errors as error:
        what = f"cannot read {path}: {reason(error)}"
        raise EinlinearError(what=what, rule=rule, fix=fix) from error


def write_whole(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file atomically: all of it or nothing. It is on the disk when this returns.

    The file gets the permissions of any new file of this user (the umask), so that others who share
    the directory can read it. A process that is killed leaves `path` + ".part" behind, which the
    next write of the same file replaces; an error leaves nothing behind. A link stays a link to the
    new file, and devices and pipes are written to.
    """
    chunks = (data,) if isinstance(data, bytes) else data
    part, is_ours = None, False
    try:
        # A pipe is opened by its own name: links such as /dev/stdout lead to names of no file.
        is_stream = path.exists() and not path.is_file() and not path.is_dir()
        target = path.resolve() if path.is_symlink() and not is_stream else path
        if not is_stream:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.part")
        with target.open("wb") if part is None else _open_alone(part) as file:
            is_ours = True
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if part is not None:
                os.fsync(file.fileno())
            if part is not None and fcntl is not None:
                part.replace(target)  # while no other process may write to it
        if part is not None and fcntl is None:  # pragma: no cover
            part.replace(target)  # Windows renames no open file
        if part is not None:
            sync_folder(target.parent)
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        if part is not None and is_ours:
            with suppress(OSError):
                part.unlink(missing_ok=True)  # a full disk needs the room
        raise cannot_write(path, error) from error


def _open_alone(path: Path) -> BinaryIO:
    """Open a file for writing, once no other process writes it.

    A worker may outlive a command that was killed, and write what the next command writes, too.
    """
    deadline = time.monotonic() + _SECONDS_TO_WAIT
    while True:
        file = path.open("ab")
        is_taken = False
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_taken = True
        except OSError:  # a file system without locks
            pass
        if not is_taken and _is_at(path, file):
            file.truncate(0)
            return file
        file.close()
        if time.monotonic() > deadline:
            raise OSError(EBUSY, "another process has been writing it for a minute")
        time.sleep(0.01)


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sync_folder(path: Path) -> None:
    """Flush renames in a folder to the disk; do nothing where folders cannot be opened."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; whatever is wrong with the text raises a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; anything else raises a ValueError."""
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def toml_text(values: Mapping[str, Any]) -> str:
    """Serialize a table of plain values as TOML."""
    return tomli_w.dumps(values)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; whatever is wrong with the text raises a ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pragma: no cover - the same module under its old name
        try:
            import tomli as tomllib
        except ImportError:
            raise EinlinearError(
                what="cannot read TOML: tomli is not installed",
                rule="before Python 3.11 TOML files need the package tomli",
                fix='pip install "einlinear[cli]", or give a .json file',
            ) from None
    # The parser takes quadratic time in the parts of a key, without a limit.
    bare = _QUOTED_OR_COMMENT.sub("", text)
    if any(part.count(".") > _MOST_DOTS for part in re.split(r"[,\n=\[\]{}]", bare)):
        raise ValueError(f"a name or value has more than {_MOST_DOTS} dots")
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
