"""Structure: which nodes each axis of a layer joins, and how its size grows with the width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from math import lcm, prod
from numbers import Integral, Rational, Real

from einlinear.errors import EinlinearError
from einlinear.structures.edges import (
    FACTOR_NAMES,
    all_edges,
    edge_order,
    factors_of,
    normal_edge,
    touched,
)

THETA_EDGES = all_edges(2)

# What a float may differ from a simple fraction, and a side of floats from 1, before we object.
_FLOAT_NOISE = Fraction(1, 10**6)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,9}(?:/[0-9]{1,9})?|[0-9]{0,9}\.[0-9]{1,15})")


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
    elif isinstance(value, Real) and abs(float(value)) < 1e9:
        exact = Fraction(float(value)).limit_denominator(_FLOAT_NOISE.denominator)
    if exact is None or not 0 <= exact <= 1:
        raise EinlinearError(
            what=f"{name} has the exponent {value if isinstance(value, Rational) else repr(value)}",
            rule="an exponent is a number from 0 to 1",
            fix='write 0.5, Fraction(1, 2) or "1/2"; a fixed size is an int of 2 or more, '
            "in text AB:4",
        )
    return exact


def fixed_size(value: object, name: str) -> Fraction | int:
    """The value as a fixed size; a size of 1 is an absent edge, which has exponent 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise EinlinearError(
            what=f"{name} has the size {value!r}",
            rule="a fixed size is a whole number of 1 or more",
            fix="give a positive int, or an exponent of the width such as 1/2",
        )
    return int(value) if int(value) > 1 else Fraction(0)


def _entry(edge: str, value: object) -> Fraction | int:
    """What stands at an edge: an int of 2 or more is a fixed size, all else an exponent."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 2:
        return fixed_size(value, edge)
    return exponent(value, edge)


@dataclass(frozen=True, slots=True)
class Structure:
    """Which nodes each axis of a layer joins, and how its size grows with the width.

    An edge such as "XAB" joins the input X with the factors A and B. Its size is d_in**exponent at
    the input, d_out**exponent at the output and min(d_in, d_out)**exponent among factors only; a
    fixed size (an int) stays the same at every width, and the exponents then share out the rest.
    Edges that are absent, have exponent 0 or size 1 are one and the same and are not kept.
    Ref: [P24 §2, App. E].
    """

    edges: tuple[tuple[str, Fraction | int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", _normal_edges(self.edges))
        for side in ("X", "Y"):
            at_side = {edge: value for edge, value in self.edges if side in edge}
            total = sum(value for value in at_side.values() if isinstance(value, Fraction))
            if total != 1:
                raise EinlinearError(
                    what=f"the exponents at {side} add up to {total} in {str(self) or 'no edges'}",
                    rule="each side of the layer must use its whole width: the sum is 1",
                    fix=_sum_fix(side, at_side, 1 - Fraction(total)),
                )

    @classmethod
    def from_edges(cls, edges: Mapping[str, object]) -> Structure:
        """A structure from {edge: exponent or fixed size}, for any number of factors.

        A float, Fraction or "p/q" string is an exponent of the width; an int of 2 or more is a
        fixed size (0 and 1 are exponents).
        """
        if not isinstance(edges, Mapping):
            raise EinlinearError(
                what=f"the edges are given as {type(edges).__name__}",
                rule="edges are a mapping from the name of an edge to its exponent or fixed size",
                fix='write {"XA": "1/2", "XAB": "1/2", "YB": "1/2", "YAB": "1/2", "AB": 4}',
            )
        return cls(tuple(edges.items()))  # type: ignore[arg-type]

    @classmethod
    def from_theta(cls, theta: Sequence[object]) -> Structure:
        """A structure of two factors from the paper's numbers: XA XB XAB YA YB YAB AB."""
        values = (
            tuple(theta) if isinstance(theta, Iterable) and not isinstance(theta, str) else None
        )
        if values is None or len(values) != len(THETA_EDGES):
            given = f"{len(values)} numbers" if values is not None else repr(theta)
            raise EinlinearError(
                what=f"theta is given as {given}",
                rule=f"theta has {len(THETA_EDGES)} numbers, for {' '.join(THETA_EDGES)}",
                fix="write absent edges as 0: (1/2, 0, 1/2, 0, 1/2, 1/2, 0); "
                "for more factors use from_edges",
            )
        return cls(tuple(zip(THETA_EDGES, values, strict=True)))  # type: ignore[arg-type]

    @property
    def theta(self) -> tuple[Fraction | int, ...]:
        """The paper's seven numbers, for structures of at most two factors."""
        if not set(self.factors) <= {"A", "B"}:
            raise EinlinearError(
                what=f"theta was asked of a structure with the factors {', '.join(self.factors)}",
                rule="the paper's seven numbers describe the factors A and B only",
                fix="use s.edges, or s.canonical() if there are two factors of other names",
            )
        return tuple(self[edge] for edge in THETA_EDGES)

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the factors, in order."""
        return factors_of(edge for edge, _ in self.edges)

    @property
    def num_factors(self) -> int:
        """How many factors there are."""
        return len(self.factors)

    @property
    def growth(self) -> dict[str, Fraction]:
        """The exponent of each edge as the width grows; a fixed size does not grow."""
        return {
            edge: value if isinstance(value, Fraction) else Fraction(0)
            for edge, value in self.edges
        }

    def __getitem__(self, edge: str) -> Fraction | int:
        """The exponent or fixed size of an edge; 0 if it is absent."""
        return dict(self.edges).get(normal_edge(edge), Fraction(0))

    def __str__(self) -> str:
        return " ".join(
            f"{edge}^{value}" if isinstance(value, Fraction) else f"{edge}:{value}"
            for edge, value in self.edges
        )

    def __repr__(self) -> str:
        return f"<Structure {self}>"

    def canonical(self) -> Structure:
        """The representative of all structures that differ only in the names of the factors.

        It is cheapest, as the width grows, when the input meets A first, then B, and so on; among
        equals the one whose first edges are largest is taken.
        Ref: [P24 App. B, exchange redundancy].
        """
        return _canonical(self)


def _normal_edges(
    pairs: Iterable[tuple[str, object]],
) -> tuple[tuple[str, Fraction | int], ...]:
    """The edges in their one spelling and order, exact, without those of size 1."""
    given: dict[str, object] = {}
    for name, value in pairs:
        edge = normal_edge(name)
        if edge in given:
            raise EinlinearError(
                what=f"the edge {edge} is given twice: as {given[edge]} and as {value}",
                rule="each edge has one exponent or one fixed size",
                fix="give it once, with the sum of the exponents or the product of the sizes",
            )
        given[edge] = value
    values = {edge: _entry(edge, value) for edge, value in given.items()}
    floats = [e for e, v in given.items() if isinstance(v, Real) and not isinstance(v, Rational)]
    for side in ("X", "Y"):
        _absorb_float_noise_(values, [edge for edge in floats if side in edge])
    kept = {edge: value for edge, value in values.items() if value != 0}
    return tuple(sorted(kept.items(), key=lambda item: edge_order(item[0])))


def _absorb_float_noise_(values: dict[str, Fraction | int], floats: list[str]) -> None:
    """Make a side of floats sum to exactly 1 by its largest one, if only rounding is missing."""
    if not floats:
        return
    side = floats[0][0]
    exponents = (v for e, v in values.items() if side in e and isinstance(v, Fraction))
    missing = 1 - sum(exponents, Fraction(0))
    if missing and abs(missing) <= len(floats) * _FLOAT_NOISE:
        values[max(floats, key=lambda edge: values[edge])] += missing


def _sum_fix(side: str, at_side: dict[str, Fraction | int], missing: Fraction) -> str:
    """What to type when a side does not add up to 1."""
    growing = [edge for edge, value in at_side.items() if isinstance(value, Fraction)]
    if not growing:
        return f"give one edge at {side} the exponent 1, so that it takes what is left: {side}A^1"
    change = f"add {missing} to" if missing > 0 else f"take {-missing} from"
    return f"{change} one of {', '.join(growing)}; write a third as 1/3, not 0.33"


@lru_cache(maxsize=65536)
def _canonical(structure: Structure) -> Structure:
    orders = ["".join(order) for order in permutations(structure.factors)]
    costs = {order: _step_costs(structure, order) for order in orders}
    cheapest = min(costs.values())
    candidates = [_relabel(structure, order) for order in orders if costs[order] == cheapest]
    return Structure(
        tuple(min(candidates, key=lambda edges: [(edge_order(edge), -v) for edge, v in edges]))
    )


def _step_costs(structure: Structure, order: str) -> list[tuple[int, int]]:
    """How the cost of each step grows, as (exponent, constant), the dearest step first.

    Exponents are counted in units of their common denominator.
    """
    edges = dict(structure.edges)
    unit = lcm(*(value.denominator for value in edges.values()))
    costs = []
    for i, factor in enumerate(order):
        values = [edges[edge] for edge in touched(edges, order[:i], factor)]
        fixed = prod(value for value in values if isinstance(value, int))
        grown = sum(int(value * unit) for value in values if not isinstance(value, int))
        costs.append((grown, fixed))
    return sorted(costs, reverse=True)


def _relabel(structure: Structure, order: str) -> list[tuple[str, Fraction | int]]:
    """The edges, sorted, with the first factor of the order called A, the second B, and so on."""
    names = str.maketrans(order, FACTOR_NAMES[: len(order)])
    edges = [(normal_edge(edge.translate(names)), value) for edge, value in structure.edges]
    return sorted(edges, key=lambda item: edge_order(item[0]))
