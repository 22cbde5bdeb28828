"""Numbers that people type, checked and made exact: exponents, sizes, shares, whole numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from numbers import Integral, Rational, Real
from typing import Any, TypeVar

from einlinear.errors import EinlinearError, quote

MAX_SIZE = 10**9
MAX_DENOMINATOR = 10**12
FLOAT_DENOMINATOR = 10**6
"""A float is read as the fraction nearest to it whose denominator is at most this."""
LARGEST = 2**63 - 1
"""The largest whole number that is accepted; larger ones do not fit into arrays and files."""

_Value = TypeVar("_Value")
_SHARE = re.compile(r"d\s*/\s*([0-9]{1,12})")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,13}(?:/[0-9]{1,13})?|[0-9]{0,9}\.[0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class Share:
    """A size that is a share of the width d: d / divisor, rounded up. In text, "d/8"."""

    divisor: int

    def __post_init__(self) -> None:
        fix = 'give a divisor of 2 or more: "d/8"; the whole width is the exponent 1'
        whole_number(self.divisor, "the divisor of a share of the width", 2, MAX_SIZE, fix=fix)

    def __str__(self) -> str:
        return f"d/{self.divisor}"

    def of(self, width: int) -> int:
        """The size at a width."""
        return -(-width // self.divisor)


EdgeSize = Fraction | int | Share
"""The size of an edge: an exponent of the width, a fixed size, or a share of the width."""


def as_share(value: object) -> Share | None:
    """The share that a value is, or that a text such as "d/8" means; None for anything else."""
    if isinstance(value, Share):
        return value
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else Share(int(match[1]))


def is_inexact(value: object) -> bool:
    """Whether the value is a float, which is read as a simple fraction near it."""
    return isinstance(value, Real) and not isinstance(value, Rational)


def exponent(value: object, name: str) -> Fraction:
    """Convert a value to an exact exponent from 0 to 1; `name` identifies it in errors."""
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
    """The first `most` items of an iterable, endless or not; None for texts and other values."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        return None
    try:
        return list(islice(values, most))
    except TypeError:  # a zero-dimensional array has __iter__, but raises
        return None


def size_or_share(value: object, name: str) -> EdgeSize:
    """Convert a value to a share of the width, if it is one, or else to a fixed size."""
    share = as_share(value)
    return fixed_size(value, name) if share is None else share


def fixed_size(value: object, name: str) -> Fraction | int:
    """Convert a value to a fixed size; size 1 is no edge, which has exponent 0."""
    fix = "give an int such as 4; a size that grows with the width is rank_exponent=1/2 or "
    fix += "rank=d/8, in edges AB^1/2 or AB:d/8"
    size = whole_number(value, name, 1, MAX_SIZE, fix=fix)
    return size if size > 1 else Fraction(0)


def true_or_false(value: object, name: str) -> bool:
    """Return True or False; anything else is refused, since a text such as "no" counts as true."""
    if isinstance(value, bool):
        return value
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is true or false",
        fix="give one of the two",
    )


def whole_number(
    value: object, name: str, lowest: int, highest: int | None = None, *, fix: str = ""
) -> int:
    """Convert a value to an int within a range that includes both ends."""
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


def one_of(value: _Value, name: str, choices: Sequence[_Value], *, fix: str = "") -> _Value:
    """Return the value if it is one of the choices; otherwise raise an error that lists them."""
    if isinstance(value, str) and value in choices:
        return value
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is one of {', '.join(map(repr, choices))}",
        fix=fix or f"give {name}={choices[0]!r}",
    )
