"""Structures as text: the inverse of str(structure), and the shorter forms people type."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from fractions import Fraction

from einlinear.errors import EinlinearError, did_you_mean, quote, shorten
from einlinear.structures.named import NAMED
from einlinear.structures.structure import (
    THETA_EDGES,
    Structure,
    StructureSum,
    check_structure,
)
from einlinear.structures.values import EdgeSize, Share, as_share, exponent, size_or_share

_RULE = (
    'a structure is a name such as "btt(rank=2)", a theta such as "theta(1/2,0,1/2,0,1/2,1/2,0)", '
    'edges such as "XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:4", or several of these with + between'
)
_CALL = re.compile(r"([A-Za-z][A-Za-z_-]*)\s*(?:\((.*)\))?", re.DOTALL)
_EDGE = re.compile(r"([A-Za-z]+)([\^:])(\S+)")
_BARE_EDGE = re.compile(r"[XYA-F]{2,}")
_LONGEST = 10_000  # characters; all edges of six factors with long exponents have fewer
_THIRDS = (Fraction(1, 3), Fraction(2, 3))
_NEAR = Fraction(1, 100)


def parse(text: str) -> Structure | StructureSum:
    """Parse the text of a structure, or of a sum of structures: the inverse of str.

    Four forms: a name with its arguments, "btt(rank=2)"; the paper's numbers, "theta(1/2,0,...)";
    the same as the original code writes them, "(0.5|0|0.5|0|0.5|0.5|0)"; edges, "XA^1/2 XAB^1/2
    YB^1 AB:4", where ^ gives an exponent and : a fixed size, or d/8, a share of the width.
    Between structures, + makes a sum: "low_rank(rank=8) + btt".
    """
    if not isinstance(text, str):
        raise EinlinearError(
            what=f"a structure is given as {type(text).__name__}", rule=_RULE, fix="give a string"
        )
    if len(text) > _LONGEST:
        raise EinlinearError(
            what=f"a structure is given as a text of {len(text):,} characters, {quote(text[:40])}",
            rule=f"a structure is a text of at most {_LONGEST:,} characters",
            fix='give a text such as "btt(rank=2)"; name a file only where a file is asked for',
        )
    terms = tuple(map(_parse_one, _summands(text)))
    return terms[0] if len(terms) == 1 else StructureSum(terms)


def parse_structure(text: str) -> Structure:
    """Parse the text of a single structure; a sum is an error."""
    return check_structure(parse(text))


def _summands(text: str) -> list[str]:
    """The parts of a text between its plus signs, without those in brackets and of numbers."""
    parts, depth = [""], 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        is_sign = character == "+" and text[i + 1 : i + 2].isdigit()
        if character == "+" and depth <= 0 and not is_sign:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _parse_one(text: str) -> Structure:
    stripped = text.strip()
    if "|" in stripped:
        return _parse_bars(stripped)
    call = _CALL.fullmatch(stripped)
    if call and not _BARE_EDGE.fullmatch(stripped):
        name, arguments = call[1].lower().replace("-", "_"), call[2] or ""
        if name == "theta":
            return Structure.from_theta([_number(part) for part in _split(arguments)])
        return _parse_named(name, arguments)
    return _parse_edges(stripped)


def _split(arguments: str) -> list[str]:
    return [part.strip() for part in arguments.split(",")] if arguments.strip() else []


def _number(part: str) -> EdgeSize:
    """A number of a theta: a fixed size if it is a whole number of 2 or more, or an exponent."""
    if (share := as_share(part)) is not None:
        return share
    if re.fullmatch(r"[0-9]{1,12}", part) and int(part) >= 2:
        return int(part)
    return exponent(part, "an edge of theta")


def _parse_named(name: str, arguments: str) -> Structure:
    if name not in NAMED:
        raise EinlinearError(
            what=f"there is no structure named {quote(name)}",
            rule=_RULE,
            fix=did_you_mean(name, [*NAMED, "theta"], f"the names are {', '.join(NAMED)}"),
        )
    make: Callable[..., Structure] = NAMED[name]
    known = list(inspect.signature(make).parameters)
    values: dict[str, object] = {}
    for part in _split(arguments):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known or key in values:
            raise EinlinearError(
                what=f"{name} has the argument {quote(part)}",
                rule=f"{name} takes {', '.join(known) or 'no arguments'}, each once, as key=value",
                fix=f"write {' or '.join(f'{name}({e})' for e in _examples(known))}",
            )
        values[key] = int(value) if re.fullmatch(r"[+-]?[0-9]{1,12}", value) else value
    return make(**values)


def _examples(known: list[str]) -> list[str]:
    """Example arguments."""
    shown = {"rank": "rank=2", "rank_exponent": "rank_exponent=1/2", "num_factors": "num_factors=3"}
    return [shown[key] for key in known] or [""]


def _parse_edges(text: str) -> Structure:
    pairs: list[tuple[str, EdgeSize]] = []
    for token in text.replace(",", " ").split():
        match = _EDGE.fullmatch(token)
        if match is None:
            raise EinlinearError(
                what=f"cannot read {quote(token[:40])} in {quote(text[:80])}",
                rule=_RULE,
                fix="write every edge as EDGE^exponent or EDGE:size, with spaces between",
            )
        edge, kind, number = match.groups()
        if kind == "^":
            pairs.append((edge, exponent(number, edge)))
        else:
            whole = int(number) if re.fullmatch(r"[0-9]{1,12}", number) else number
            pairs.append((edge, size_or_share(whole, edge)))
    if not pairs:
        raise EinlinearError(what=f"the text {quote(text)} is empty", rule=_RULE, fix='try "btt"')
    return Structure(tuple(pairs))


def _parse_bars(text: str) -> Structure:
    """Parse the form of the original code, which writes a third with two decimals."""
    parts = [part.strip() for part in text.removeprefix("(").removesuffix(")").split("|")]
    values = [_number(part) for part in parts]
    if len(values) != len(THETA_EDGES):
        return Structure.from_theta(values)
    snapped = [*_snap(values[:3]), *_snap(values[3:6]), _third(values[6])]
    if snapped != values:
        changes = {
            f"{part} as {new}"
            for part, old, new in zip(parts, values, snapped, strict=True)
            if old != new
        }
        warnings.warn(
            f"read {shorten(', '.join(sorted(changes)))} in {quote(text)}, taking near-thirds "
            "for thirds; write 1/3 and 2/3 to silence this",
            stacklevel=4,
        )
    return Structure.from_theta(snapped)


def _third(value: EdgeSize) -> EdgeSize:
    """The third that is near the value, or the value itself."""
    if isinstance(value, Share):
        return value
    near = [third for third in _THIRDS if abs(value - third) <= _NEAR]
    return near[0] if near else value


def _snap(side: list[EdgeSize]) -> list[EdgeSize]:
    """The side with near-thirds made exact, where that makes it sum to 1."""
    snapped = [_third(value) for value in side]
    total, exact = (
        sum((v for v in s if isinstance(v, Fraction)), Fraction(0)) for s in (side, snapped)
    )
    return snapped if abs(1 - total) <= _NEAR and exact == 1 else side
