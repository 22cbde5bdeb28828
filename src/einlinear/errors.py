"""The one exception of the package."""

from __future__ import annotations

import reprlib
from fractions import Fraction
from pathlib import Path, PurePath

QUOTED = 200
"""How many characters of input a message quotes at most."""
LONGEST = {"what": 2_000, "rule": 2_000, "fix": 10_000}
"""How long the parts of a message are at most, whatever a caller has put into them."""


class EinlinearError(ValueError):
    """Bad input from a user: what was given, the rule it broke, what to type instead.

    All three parts are required, so that no message lacks a remedy.
    """

    def __init__(self, *, what: str, rule: str, fix: str) -> None:
        self.what = shorten(what, LONGEST["what"])
        self.rule = shorten(rule, LONGEST["rule"])
        self.fix = shorten(fix, LONGEST["fix"])
        super().__init__(f"{self.what}\n  rule: {self.rule}\n  fix:  {self.fix}")

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
        text = _nameless(value)
    return shorten(text)


def shorten(text: str, most: int = QUOTED) -> str:
    """The beginning of a text for a message, as it is: at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def reason(error: BaseException) -> str:
    """Why something failed, for a message: what the system or a reader said, at most QUOTED."""
    said = getattr(error, "strerror", None) or error
    try:
        return shorten(str(said)) or type(error).__name__
    except Exception:  # it quotes a number of thousands of digits
        return type(error).__name__


def _nameless(value: object) -> str:
    return f"a value of type {type(value).__name__}"


class _Short(reprlib.Repr):
    """Reprs that are quick for large values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = QUOTED
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20

    def repr_int(self, x: int, level: int) -> str:
        """Plain ints; of very long ones Python refuses to make text."""
        if x.bit_length() > 4 * QUOTED:
            return f"a number of about {int(x.bit_length() * 0.30103):,} digits"
        return repr(x)

    def repr_Fraction(self, x: Fraction, level: int) -> str:  # noqa: N802 - the name of the type
        """As people write fractions."""
        if max(x.numerator.bit_length(), x.denominator.bit_length()) > 4 * QUOTED:
            return "a fraction of very many digits"
        return str(x)

    def repr_instance(self, x: object, level: int) -> str:
        """What the value says of itself, in one line."""
        text = repr(str(x) if isinstance(x, PurePath) else x)
        return " ".join(text.split()) if "\n" in text else text


_SHORT = _Short()


def _rebuild(what: str, rule: str, fix: str) -> EinlinearError:
    return EinlinearError(what=what, rule=rule, fix=fix)


def cannot_write(path: Path, error: OSError) -> EinlinearError:
    """What to raise where a file cannot be written."""
    return EinlinearError(
        what=f"cannot write {path}: {reason(error)}",
        rule="the output goes to a file in a folder that can be written",
        fix="choose another path, or make room and check its permissions",
    )
