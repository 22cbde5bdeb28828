"""Structure: which nodes each axis of a layer joins, and how its size grows with the width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from math import lcm, prod
from numbers import Integral

from einlinear.errors import EinlinearError, quote, shorten
from einlinear.structures.edges import (
    FACTOR_NAMES,
    all_edges,
    edge_order,
    factors_of,
    normal_edge,
    touched,
)
from einlinear.structures.values import (
    FLOAT_DENOMINATOR,
    MAX_DENOMINATOR,
    EdgeSize,
    Share,
    as_share,
    exponent,
    fixed_size,
    is_inexact,
    taken,
)

THETA_EDGES = all_edges(2)
_MOST = 1000  # edges to read at most; six factors have 183


def _entry(edge: str, value: object) -> EdgeSize:
    """The value of an edge: a fixed size if it is an int of 2 or more, a share, or an exponent."""
    share = as_share(value)
    if share is not None:
        if edge[0] in "XY":
            raise EinlinearError(
                what=f"{edge} has the size {share}",
                rule="only an edge between factors can be a share of the width; the edges at X and "
                "Y divide all of it",
                fix=f"give {edge} an exponent, or a fixed size",
            )
        return share
    is_size = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 2
    return fixed_size(value, edge) if is_size else exponent(value, edge)


@dataclass(frozen=True, slots=True)
class Structure:
    """Which nodes each axis of a layer joins, and how its size grows with the width.

    An edge such as "XAB" joins the input X with the factors A and B. Its size is d_in**exponent at
    the input, d_out**exponent at the output and min(d_in, d_out)**exponent among factors only; a
    fixed size (an int) stays the same at every width, and the exponents then divide the rest. An
    edge among factors may also be a Share, min(d_in, d_out) / divisor, rounded up.
    An edge with exponent 0 or size 1 is the same as no edge, and is not kept.
    Ref: [P24 §2, App. E].
    """

    edges: tuple[tuple[str, EdgeSize], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", _normal_edges(self.edges))
        for side in ("X", "Y"):
            missing = _missing(dict(self.edges), side)
            if missing:
                total = f"{1 - missing} in {shorten(str(self)) or 'no edges'}"
                raise EinlinearError(
                    what=f"the exponents at {side} add up to {total}",
                    rule="each side of the layer must use its whole width: the sum is 1",
                    fix=_sum_fix(self, side, missing),
                )

    @classmethod
    def from_edges(cls, edges: Mapping[str, object]) -> Structure:
        """A structure from {edge: exponent or size}, for any number of factors.

        A float, Fraction or "p/q" string is an exponent of the width; an int of 2 or more is a
        fixed size (0 and 1 are exponents); "d/8" is a share of the width.
        """
        return cls(edges)  # type: ignore[arg-type]

    @classmethod
    def from_theta(cls, theta: Sequence[object]) -> Structure:
        """A structure of two factors from the paper's numbers: XA XB XAB YA YB YAB AB."""
        most = len(THETA_EDGES)
        values = taken(theta, most + 1)
        if values is None or len(values) != most:
            given = quote(theta)
            if values is not None:
                given = f"{len(values)} numbers" if len(values) <= most else f"more than {most}"
            raise EinlinearError(
                what=f"theta is given as {given}",
                rule=f"theta has {len(THETA_EDGES)} numbers, for {' '.join(THETA_EDGES)}",
                fix="write absent edges as 0: (1/2, 0, 1/2, 0, 1/2, 1/2, 0); "
                "for more factors give edges, such as XA^1/2 XBC^1/2 YC^1",
            )
        return cls(tuple(zip(THETA_EDGES, values, strict=True)))

    @property
    def theta(self) -> tuple[EdgeSize, ...]:
        """The paper's seven numbers, for structures of at most two factors."""
        if not set(self.factors) <= {"A", "B"}:
            raise EinlinearError(
                what=f"theta was read from a structure with the factors {', '.join(self.factors)}",
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
        """The exponent of each edge as the width grows: 0 for a fixed size, 1 for a share."""
        return {
            edge: value if isinstance(value, Fraction) else Fraction(isinstance(value, Share))
            for edge, value in self.edges
        }

    def __getitem__(self, edge: str) -> EdgeSize:
        """The exponent, fixed size or share of an edge; 0 if it is absent."""
        return dict(self.edges).get(normal_edge(edge), Fraction(0))

    def __contains__(self, edge: str) -> bool:
        return normal_edge(edge) in dict(self.edges)

    def __iter__(self) -> Iterator[str]:
        return (edge for edge, _ in self.edges)

    def __str__(self) -> str:
        return " ".join(
            f"{edge}^{value}" if isinstance(value, Fraction) else f"{edge}:{value}"
            for edge, value in self.edges
        )

    def __repr__(self) -> str:
        return f"<Structure {self}>"

    def __add__(self, other: object) -> StructureSum:
        if not isinstance(other, Structure | StructureSum):
            return NotImplemented
        return StructureSum(_terms(self) + _terms(other))

    def canonical(self) -> Structure:
        """Rename the factors to A, B, ... in the order that is cheapest as the width grows.

        Structures that differ only in the names of their factors have the same canonical form.
        Among equally cheap orders, the one whose first edges are largest wins.
        Ref: [P24 App. B, exchange redundancy].
        """
        return _canonical(self)


@dataclass(frozen=True, slots=True)
class StructureSum:
    """Two or more structures whose matrices are added: low_rank(rank=8) + btt().

    A sum within a sum is taken apart. The order of the terms counts: `a + b` and `b + a` make the
    same matrices, but they are different values, since layers number their terms.
    """

    terms: tuple[Structure, ...]

    def __post_init__(self) -> None:
        terms = [each for term in taken(self.terms, _MOST) or () for each in _terms(term)]
        if len(terms) < 2:
            raise EinlinearError(
                what=f"a sum is given as {quote(self.terms)}",
                rule="a sum has two or more structures",
                fix='write el.low_rank(rank=8) + el.btt(), or el.parse("low_rank(rank=8) + btt")',
            )
        object.__setattr__(self, "terms", tuple(terms))

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    def __repr__(self) -> str:
        return f"<StructureSum {self}>"

    def __add__(self, other: object) -> StructureSum:
        if not isinstance(other, Structure | StructureSum):
            return NotImplemented
        return StructureSum(_terms(self) + _terms(other))


def _terms(structure: object) -> tuple[Structure, ...]:
    if isinstance(structure, StructureSum):
        return structure.terms
    return (check_structure(structure),)


def check_structure_or_sum(structure: object) -> Structure | StructureSum:
    """Return the structure or the sum, or raise an error if it is something else."""
    return structure if isinstance(structure, StructureSum) else check_structure(structure)


def check_structure(structure: object) -> Structure:
    """Return the structure, or raise an error if it is something else, such as a sum."""
    if isinstance(structure, Structure):
        return structure
    if isinstance(structure, StructureSum):
        raise EinlinearError(
            what=f"a structure is given as the sum {shorten(str(structure))}",
            rule="sums are for el.SumLinear, el.convert_, el.adapt_, el.make_plan and el.taxonomy; "
            "everything else takes a single structure",
            fix=f'give one of its terms: "{shorten(str(structure.terms[0]))}"',
        )
    raise EinlinearError(
        what=f"a structure is given as {quote(structure)}",
        rule="a structure is a Structure value",
        fix='use el.btt(rank=2), el.parse("btt(rank=2)") or el.Structure.from_edges({...})',
    )


def _normal_edges(edges: object) -> tuple[tuple[str, EdgeSize], ...]:
    """The edges in their normal spelling and order, exact, without those of size 1."""
    given: dict[str, object] = {}
    for name, value in _pairs(edges):
        edge = normal_edge(name)
        if edge in given:
            raise EinlinearError(
                what=f"the edge {edge} is given twice: as {quote(given[edge])} "
                f"and as {quote(value)}",
                rule="each edge has one exponent or one fixed size",
                fix="give it once, with the sum of the exponents or the product of the sizes",
            )
        given[edge] = value
    values = {edge: _entry(edge, value) for edge, value in given.items()}
    for side in ("X", "Y"):
        floats = [e for e, v in given.items() if side in e and is_inexact(v) and values[e] != 0]
        _absorb_float_noise_(values, side, floats)
    kept = {edge: value for edge, value in values.items() if value != 0}
    return tuple(sorted(kept.items(), key=lambda item: edge_order(item[0])))


def _pairs(edges: object) -> list[tuple[object, object]]:
    """Names and values of edges given as a mapping or as pairs."""
    if isinstance(edges, Mapping):
        return list(edges.items())
    pairs = taken(edges, _MOST)
    is_all = pairs is not None and len(pairs) < _MOST
    if not is_all or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs or ()):
        raise EinlinearError(
            what=f"the edges are given as {quote(edges)}",
            rule="edges are a mapping from the name of an edge to its exponent or fixed size",
            fix='write {"XA": "1/2", "XAB": "1/2", "YB": "1/2", "YAB": "1/2", "AB": 4}, '
            'or el.parse("btt(rank=4)")',
        )
    return pairs or []


def _absorb_float_noise_(values: dict[str, EdgeSize], side: str, floats: list[str]) -> None:
    """Make a side with floats sum to exactly 1, if only rounding is missing.

    The floats are rounded to a common grid, which avoids large denominators, and the largest takes
    the difference.
    """
    noise = Fraction(len(floats), FLOAT_DENOMINATOR)
    if not floats or not 0 < abs(_missing(values, side)) <= noise:
        return
    exponents = {e: v for e, v in values.items() if e in floats and isinstance(v, Fraction)}
    rounded = {
        edge: Fraction(round(value * FLOAT_DENOMINATOR), FLOAT_DENOMINATOR)
        for edge, value in exponents.items()
    }
    largest = max(floats, key=lambda edge: exponents[edge])
    rounded[largest] += _missing({**values, **rounded}, side)
    if 0 < rounded[largest] <= 1 and rounded[largest].denominator <= MAX_DENOMINATOR:
        values |= rounded


def _missing(values: Mapping[str, EdgeSize], side: str) -> Fraction:
    """The difference of 1 and the sum of the exponents at a side."""
    exponents = (v for e, v in values.items() if side in e and isinstance(v, Fraction))
    return 1 - sum(exponents, Fraction(0))


def _sum_fix(structure: Structure, side: str, missing: Fraction) -> str:
    """The fix for a side that does not add up to 1."""
    growing = [e for e, value in structure.edges if side in e and isinstance(value, Fraction)]
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
        tuple(min(candidates, key=lambda edges: [(edge_order(e), _largest(v)) for e, v in edges]))
    )


def _largest(value: EdgeSize) -> tuple[Fraction | int, int]:
    """The key that sorts large sizes first; a share of the width comes after the whole width."""
    return (Fraction(-1), value.divisor) if isinstance(value, Share) else (-value, 0)


def _step_costs(structure: Structure, order: str) -> list[tuple[int, Fraction]]:
    """How the cost of the order grows: (exponent, constant) of each power, the highest first.

    Exponents are counted in units of their common denominator.
    """
    edges, growth = dict(structure.edges), structure.growth
    unit = lcm(*(value.denominator for value in growth.values()))
    costs: dict[int, Fraction] = {}
    for i, factor in enumerate(order):
        step = touched(edges, order[:i], factor)
        grown = sum(int(growth[edge] * unit) for edge in step)
        costs[grown] = costs.get(grown, Fraction(0)) + prod(map(_constant, map(edges.get, step)))
    return sorted(costs.items(), reverse=True)


def _constant(value: EdgeSize | None) -> Fraction:
    """What a size multiplies a power of the width by."""
    if isinstance(value, Share):
        return Fraction(1, value.divisor)
    return Fraction(value) if isinstance(value, int) else Fraction(1)


def _relabel(structure: Structure, order: str) -> list[tuple[str, EdgeSize]]:
    """The edges, sorted, with the first factor of the order called A, the second B, and so on."""
    names = str.maketrans(order, FACTOR_NAMES[: len(order)])
    edges = [(normal_edge(edge.translate(names)), value) for edge, value in structure.edges]
    return sorted(edges, key=lambda item: edge_order(item[0]))
