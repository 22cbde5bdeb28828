"""Numbers and names as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isfinite, log10

NONE = "\u2013"
FLOPS_PER_MAC = 6
"""Training FLOPs for each multiply-add of a forward pass: 2, and twice as many backward."""
_PREFIXES = ("", " k", " M", " G", " T", " P", " E")


def short(value: float | None, digits: int = 3) -> str:
    """A number with some significant digits, without an exponent where that reads well."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    size = floor(log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 <= size < 6:
        return f"{value:,.{max(0, digits - 1 - size)}f}"
    return f"{value:.{digits - 1}e}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")


def between(ends: tuple[float, float], digits: int = 3) -> str:
    """An interval as text; empty if it is not finite."""
    low, high = ends
    if not (isfinite(low) and isfinite(high)):
        return ""
    return f"{short(low, digits)} to {short(high, digits)}"


def amount(value: float | None, digits: int = 3) -> str:
    """A large number with a prefix: 1.21 M."""
    if value is None or not isfinite(value):
        return NONE
    step = 0
    while abs(value) >= 999.5 and step < len(_PREFIXES) - 1:
        value, step = value / 1000, step + 1
    return f"{short(value, digits)}{_PREFIXES[step]}" if step else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A time in seconds, minutes, hours or days."""
    if seconds is None or not isfinite(seconds):
        return NONE
    for unit, length in (("days", 172800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{short(seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit])} {unit}"
    return f"{short(seconds)} s"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things: 1 run, 2 runs."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int | None = None) -> str:
    """Join names as in a sentence: "a, b and c". With `most` of 2: "a, b and 7 more"."""
    names = list(names)
    if most is not None and len(names) > most:
        names[most:] = [f"{len(names) - most:,} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
