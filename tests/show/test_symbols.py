"""Powers and Greek letters, and what is printed where an encoding lacks them."""

import io
import sys
from fractions import Fraction

import pytest

from einlinear.show.symbols import ASCII_ERRORS, power, printable


def test_powers_are_typeset():
    shown = [power("d", e) for e in (1, 2, Fraction(3, 2), Fraction(11, 12))]
    assert shown == ["d", "d²", "d³ᐟ²", "d¹¹ᐟ¹²"]


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "ω = 0: d² → d³ᐟ² ☃"),
        ("latin-1", "omega = 0: d² -> d³/² ?"),
        ("ascii", "omega = 0: d^2 -> d^(3/2) ?"),
    ],
)
def test_what_cannot_be_printed_is_spelled_out(encoding, expected, monkeypatch):
    text = "ω = 0: d² → d³ᐟ² ☃"
    assert text.encode(encoding, ASCII_ERRORS).decode(encoding) == expected
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert printable(text) == expected


def test_boxes_are_drawn_in_ascii():
    assert "╭─ options ─╮".encode("ascii", ASCII_ERRORS) == b"+- options -+"


def test_bytes_that_cannot_be_read_are_an_error_as_ever():
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("ascii", ASCII_ERRORS)
