"""The one exception of the package."""

from __future__ import annotations

import reprlib
from pathlib import Path

QUOTED = 200
"""How many characters of input a message quotes at most."""


class EinlinearError(ValueError):
    """Bad input from a user: what was given, the rule it broke, what to type instead.

    All three parts are required, so that no message lacks a remedy.
    """

    def __init__(self, *, what: str, rule: str, fix: str) -> None:
        super().__init__(f"{what}\n  rule: {rule}\n  fix:  {fix}")
        self.what = what
        self.rule = rule
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        """The parts, so that the error survives the way back from a worker process."""
        return _rebuild, (self.what, self.rule, self.fix)


def quote(value: object) -> str:
    """The repr of a value for a message: at most QUOTED characters, whatever the value is.

    Use it wherever a message shows what a user or a file has given. It is quick for values of any
    size and depth, and never raises: ints of thousands of digits have no plain repr.
    """
    try:
        text = _SHORT.repr(value)
    except Exception:  # a repr of somebody else's that fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


def _short_repr() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = QUOTED
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 20
    return short


_SHORT = _short_repr()


def _rebuild(what: str, rule: str, fix: str) -> EinlinearError:
    return EinlinearError(what=what, rule=rule, fix=fix)


def cannot_write(path: Path, error: OSError) -> EinlinearError:
    """What to raise where a file cannot be written."""
    return EinlinearError(
        what=f"cannot write {path}: {error.strerror or error}",
        rule="the output goes to a file in a folder that can be written",
        fix="choose another path, or make room and check its permissions",
    )
