"""Symbols in plain text: powers, Greek letters, and their ASCII spelling for old terminals."""

from __future__ import annotations

import codecs
import re
import sys

ASCII_ERRORS = "einlinear.ascii"
"""The name of an error handler for encodings: spells symbols out that an encoding lacks."""

_PLAIN, _RAISED = "0123456789+-/", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᐟ"
_RAISE, _LOWER = str.maketrans(_PLAIN, _RAISED), str.maketrans(_RAISED, _PLAIN)
_SPELLED = {
    **{
        "ω": "omega",
        "ψ": "psi",
        "ν": "nu",
        "∞": "inf",
        "θ": "theta",
        "\u00b5": "mu",
        "\u03bc": "mu",
    },
    **{"×": "x", "→": "->", "–": "-", "—": "-", "·": "*", "≤": "<=", "≥": ">=", "…": "..."},
    **{"√": "sqrt ", "≈": "about ", "±": "+-", "│": "|", "─": "-", "━": "-"},
    **dict.fromkeys("╭╮╰╯", "+"),
}


def power(base: str, exponent: object) -> str:
    """Typeset a power: d for 1, d² for 2, d³ᐟ² for 3/2."""
    return base if exponent == 1 else base + str(exponent).translate(_RAISE)


def printable(text: str) -> str:
    """Spell out what the standard output cannot print: omega for ω, d^2 for d²."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, ASCII_ERRORS).decode(encoding)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    if text != _RAISED[-1]:  # alone where an encoding has all digits
        text = re.sub(f"[{_RAISED}]+", _caret, text)
    text = "".join(_SPELLED.get(letter, letter) for letter in text.translate(_LOWER))
    return "".join(letter if letter.isascii() else "?" for letter in text), error.end


def _caret(raised: re.Match[str]) -> str:
    exponent = raised[0].translate(_LOWER)
    return f"^{exponent}" if exponent.isdigit() else f"^({exponent})"


codecs.register_error(ASCII_ERRORS, _spell)
