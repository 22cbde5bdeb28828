"""The numbers that people type, made exact or refused: exponents, fixed sizes, whole numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import islice
from numbers import Integral, Rational, Real
from typing import Any

from einlinear.errors import EinlinearError, quote

MAX_SIZE = 10**9
MAX_DENOMINATOR = 10**12
FLOAT_DENOMINATOR = 10**6
"""A float is read as the fraction nearest to it whose denominator is at most this."""
LARGEST = 2**63 - 1
"""The largest whole number that anything may be; more would not fit into an array, or a file."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,13}(?:/[0-9]{1,13})?|[0-9]{0,9}\.[0-9]{1,15})")


def is_inexact(value: object) -> bool:
    """Whether the value is a float of some kind, which stands for a simple fraction near it."""
    return isinstance(value, Real) and not isinstance(value, Rational)


def exponent(value: object, name: str) -> Fraction:
    """The value as an exact exponent from 0 to 1; `name` says in the error whose it is."""
    exact: Fraction | None = None
    if isinstance(value, bool):
        exact = None
    elif isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        numerator, _, denominator = value.strip().partition("/")
        if not denominator or int(denominator):
            exact = Fraction(numerator) / int(denominator or 1)
    elif isinstance(value, Rational):
        exact = Fraction(int(value.numerator), int(value.denominator))
    elif isinstance(value, Real) and abs(float(value)) < MAX_SIZE:
        exact = Fraction(float(value)).limit_denominator(FLOAT_DENOMINATOR)
    if exact is None or not 0 <= exact <= 1 or exact.denominator > MAX_DENOMINATOR:
        raise EinlinearError(
            what=f"{name} has the exponent {quote(value)}",
            rule=f"an exponent is a number from 0 to 1, as a fraction with at most "
            f"{len(str(MAX_DENOMINATOR)) - 1} digits",
            fix='write 0.5, Fraction(1, 2) or "1/2"; a fixed size is an int of 2 or more, '
            "in text AB:4",
        )
    return exact


def taken(values: object, most: int) -> list[Any] | None:
    """At most so many of what can be gone through, endless or not; None of all else and texts."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        return None
    try:
        return list(islice(values, most))
    except TypeError:  # an array of no axes says that it can be, and cannot
        return None


def fixed_size(value: object, name: str) -> Fraction | int:
    """The value as a fixed size; a size of 1 is an absent edge, which has exponent 0."""
    fix = "give an int such as 4; a size that grows with the width is rank_exponent=1/2, or AB^1/2"
    size = whole_number(value, name, 1, MAX_SIZE, fix=fix)
    return size if size > 1 else Fraction(0)


def whole_number(
    value: object, name: str, lowest: int, highest: int | None = None, *, fix: str = ""
) -> int:
    """The value as an int of the range, both ends included."""
    given = None
    if isinstance(value, Integral) and not isinstance(value, bool):
        given = int(value)
        if lowest <= given <= (LARGEST if highest is None else highest):
            return given
    if highest is None and given is not None and given > LARGEST:
        highest = LARGEST
    scope = f"of {lowest:,} or more" if highest is None else f"from {lowest:,} to {highest:,}"
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is a whole number {scope}",
        fix=fix or f"give an int {scope}",
    )
