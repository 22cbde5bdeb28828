"""The one exception of the package."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path, PurePath

QUOTED = 200
"""The most characters of input that a message quotes."""
LONGEST = {"what": 2_000, "rule": 2_000, "fix": 10_000}
"""The most characters in each part of a message."""


class EinlinearError(ValueError):
    """Bad input from a user: what was given, the rule it broke, and how to fix it.

    All three parts are required, so every message offers a fix.
    """

    def __init__(self, *, what: str, rule: str, fix: str) -> None:
        self.what = shorten(what, LONGEST["what"])
        self.rule = shorten(rule, LONGEST["rule"])
        self.fix = shorten(fix, LONGEST["fix"])
        super().__init__(f"{self.what}\n  rule: {self.rule}\n  fix:  {self.fix}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the parts, so that the error can return from a worker process."""
        return _rebuild, (self.what, self.rule, self.fix)


def did_you_mean(
    word: object, known: Iterable[str], otherwise: str, least: float = 0.6, *, prefix: str = ""
) -> str:
    """Return a fix that names the nearest known word, or `otherwise` if none is near."""
    text = word if isinstance(word, str) else quote(word)
    close = get_close_matches(text[:40], list(known), 1, least)
    return f"did you mean {prefix + close[0]!r}?" if close else otherwise


def quote(value: object) -> str:
    """The repr of a value for a message, in at most QUOTED characters.

    Use it wherever a message shows what a user or a file gave. It is fast for values of any size
    and depth and never raises; a plain repr does for ints of thousands of digits.
    """
    try:
        text = _SHORT.repr(value)
    except Exception:  # a broken __repr__
        text = _nameless(value)
    return shorten(text)


def shorten(text: str, most: int = QUOTED) -> str:
    """The beginning of a text, in at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def reason(error: BaseException) -> str:
    """Why something failed, in at most QUOTED characters: the message of an exception."""
    said = getattr(error, "strerror", None) or error
    try:
        return shorten(str(said)) or type(error).__name__
    except Exception:  # its text quotes a number of thousands of digits
        return type(error).__name__


def _nameless(value: object) -> str:
    return f"a value of type {type(value).__name__}"


class _Short(reprlib.Repr):
    """Reprs that are fast for large values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = QUOTED
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20

    def repr_int(self, x: int, level: int) -> str:
        """Ints; Python refuses to convert very long ones to text."""
        if x.bit_length() > 4 * QUOTED:
            return f"a number of about {int(x.bit_length() * 0.30103):,} digits"
        return repr(x)

    def repr_Fraction(self, x: Fraction, level: int) -> str:  # noqa: N802 - the name of the type
        """Fractions as people write them: 1/2."""
        if max(x.numerator.bit_length(), x.denominator.bit_length()) > 4 * QUOTED:
            return "a fraction of very many digits"
        return str(x)

    def repr_instance(self, x: object, level: int) -> str:
        """The value's own repr, in one line."""
        text = repr(str(x) if isinstance(x, PurePath) else x)
        return " ".join(text.split()) if "\n" in text else text


_SHORT = _Short()


def _rebuild(what: str, rule: str, fix: str) -> EinlinearError:
    return EinlinearError(what=what, rule=rule, fix=fix)


def cannot_write(path: Path, error: Exception) -> EinlinearError:
    """The error for a file that cannot be written."""
    return EinlinearError(
        what=f"cannot write {path}: {reason(error)}",
        rule="the output goes to a file in a folder that can be written",
        fix="choose another path, or make room and check its permissions",
    )
