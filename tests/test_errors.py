"""Messages: short, whatever they quote."""

from fractions import Fraction
from pathlib import Path

import pytest

from einlinear import EinlinearError
from einlinear.errors import QUOTED, quote, reason, shorten


class Broken:
    def __repr__(self):
        raise RuntimeError("no repr")


def nested(depth):
    value = ()
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (12, "12"),
        (Fraction(1, 3), "1/3"),
        (Path("a/b"), "'a/b'"),
        (10**5000, "a number of about 5,000 digits"),
        (Fraction(1, 10**5000), "a fraction of very many digits"),
        (Broken(), "a value of type Broken"),
    ],
    ids=["text", "int", "fraction", "path", "long int", "long fraction", "broken"],
)
def test_quotes(value, text):
    assert quote(value) == text


def test_quotes_are_short_and_quick():
    for value in ("x" * 10**7, list(range(10**6)), nested(100_000), {"a" * 10**6: "b" * 10**6}):
        assert 5 < len(quote(value)) <= QUOTED
    assert "x...x" in quote("x" * 300)


def test_reasons():
    assert reason(FileNotFoundError(2, "No such file or directory")) == "No such file or directory"
    assert reason(KeyError()) == "KeyError"
    assert len(reason(ValueError("y" * 1000))) == QUOTED


def test_no_message_is_a_flood():
    error = EinlinearError(what="w" * 10**6, rule="r" * 10**6, fix="f" * 10**6)
    assert (len(error.what), len(error.rule), len(error.fix)) == (2000, 2000, 10_000)
    assert len(str(error)) < 15_000
    assert shorten("abcdef", 5) == "ab..."
