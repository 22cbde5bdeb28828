"""Structures sampled at random or on a grid, anywhere in the taxonomy.

Exponents are whole multiples of 1/unit, so that sums, comparisons and subspaces are exact. The
exponents at X are a point of a simplex (they sum to 1), those at Y of another, and those among
factors of a third (they sum to at most 1); "uniform" is uniform over the points of all three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, cycle, islice
from math import ceil, comb, floor, lcm, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from einlinear.errors import EinlinearError, quote
from einlinear.structures.edges import FACTOR_NAMES, all_edges, cut
from einlinear.structures.structure import Structure
from einlinear.structures.taxonomy import growth_of
from einlinear.structures.values import FLOAT_DENOMINATOR, exponent, is_inexact, whole_number

Range = float | Fraction | str | tuple[float | Fraction | str, float | Fraction | str] | None
"""A value, a pair (lowest, highest) that includes both ends, or None for no limit."""

_UNIT = 120  # halves, thirds, quarters, fifths, sixths, eighths and tenths are exact
_MAX_UNIT = 10_000
_BATCH = 20_000
_MAX_DRAWS = 1_000_000  # to find the first ten; a region with fewer is too thin
_MAX_GRID = 2_000_000
_MAX_COUNT = 1_000_000
_MAX_DISTINCT = 10_000
_MAX_REPEATS = 1_000  # draws without a new structure; a region that has more is too small

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """The non-degenerate structures whose omega, psi and nu lie in given ranges."""

    omega: tuple[Fraction, Fraction]
    psi: tuple[Fraction, Fraction]
    nu: tuple[Fraction, Fraction]

    def __str__(self) -> str:
        parts = {"omega": self.omega, "psi": self.psi, "nu": self.nu}
        bounds = [
            f"{name} = {lo}" if lo == hi else f"{_text(lo)} <= {name} <= {_text(hi)}"
            for name, (lo, hi) in parts.items()
            if lo > 0 or hi < 1
        ]
        return " and ".join(["nu < 1", *bounds])

    def contains(self, exponents: _Ints, edges: tuple[str, ...], unit: int) -> NDArray[np.bool_]:
        """Which rows of exponents, in units of 1/unit, lie in the region."""
        columns = dict(zip(edges, exponents.T, strict=True))
        macs, params, rank = growth_of(columns, unit, np.minimum, np.maximum)
        inside = macs < 2 * unit
        for values, (lo, hi) in (
            (macs - params, self.omega),
            (rank, self.psi),
            (macs - unit, self.nu),
        ):
            inside &= (values >= ceil(lo * unit)) & (values <= floor(hi * unit))
        return np.asarray(inside, dtype=np.bool_)


def sample_structures(
    count: int,
    *,
    num_factors: int = 2,
    omega: Range = None,
    psi: Range = None,
    nu: Range = None,
    seed: int = 0,
) -> list[Structure]:
    """Sample structures: canonical, cheaper than dense, with ω, ψ and ν in the given ranges.

    A range is None (no limit), a value (exactly that: omega=0, psi=1) or a pair that includes its
    ends. A float is taken at its exact value: 0.7 is slightly below 7/10; write "7/10" to include
    it. Samples are independent and uniform, and the same for the same seed. A region that is empty
    or very thin raises an EinlinearError after a bounded number of draws.
    """
    count = whole_number(count, "count", 0, _MAX_COUNT)
    return list(islice(_draws(_region(omega, psi, nu), num_factors, seed), count))


def distinct_structures(
    count: int,
    *,
    num_factors: int | Sequence[int] = 2,
    omega: Range = None,
    psi: Range = None,
    nu: Range = None,
    seed: int = 0,
) -> list[Structure]:
    """Sample different structures, as `sample_structures` does.

    If several numbers of factors are given, the structures take turns: [2, 3] gives one of two
    factors, one of three, one of two, ... More structures with the same seed begin with the same
    ones.
    """
    count = whole_number(count, "count", 1, _MAX_DISTINCT)
    numbers: list[Any] = [num_factors]
    if isinstance(num_factors, list | tuple):
        numbers = list(num_factors)
    if not numbers or len(set(map(str, numbers))) < len(numbers):
        raise EinlinearError(
            what=f"num_factors is {quote(num_factors)}",
            rule="num_factors is a whole number from 1 to 4, or a list of different ones",
            fix="give 2, or [2, 3]",
        )
    region = _region(omega, psi, nu)
    streams = [(number, _draws(region, number, seed)) for number in numbers]
    found: dict[Structure, None] = {}
    for number, stream in cycle(streams):
        new = next((s for s in islice(stream, _MAX_REPEATS) if s not in found), None)
        if new is None:
            raise EinlinearError(
                what=f"only {len(found)} different structures were found where {region}, with "
                f"num_factors={quote(num_factors)}; count is {count}",
                rule=f"{_MAX_REPEATS:,} draws find a structure of {number} factors that is new",
                fix=f"give a count of {max(1, len(found))} or less, or widen the ranges",
            )
        found[new] = None
        if len(found) == count:
            break
    return list(found)


def _draws(region: Region, num_factors: int, seed: int) -> Iterator[Structure]:
    """Independent, uniform structures of a region; raises if it is empty or very thin."""
    edges, seed = _edges(num_factors), whole_number(seed, "seed", 0)
    exact = [lo.denominator for lo, hi in (region.omega, region.psi, region.nu) if lo == hi]
    unit = lcm(_UNIT, *exact)
    if unit > _MAX_UNIT:
        raise EinlinearError(
            what=f"the exact values of {region} have the common denominator {unit}",
            rule=f"exponents are drawn as multiples of 1/120, refined to at most 1/{_MAX_UNIT}",
            fix="give a range such as nu=(0.61, 0.62) instead of the value",
        )
    draw = _draw_without_sharing if region.omega[1] == 0 else _draw_anywhere
    random = np.random.default_rng(seed)
    found = drawn = 0
    while drawn < _MAX_DRAWS * (1 + found / 10):
        rows = draw(random, edges, unit)
        drawn += len(rows)
        for row in rows[region.contains(rows, edges, unit)]:
            found += 1
            yield _structure(row, edges, unit).canonical()
    raise _empty(region, num_factors, found, f"{drawn:,} random structures")


def grid_structures(
    denominator: int,
    *,
    num_factors: int = 2,
    omega: Range = None,
    psi: Range = None,
    nu: Range = None,
) -> list[Structure]:
    """All structures whose exponents are multiples of 1/denominator, in the given ranges.

    They are canonical, cheaper than dense, each once, in a fixed order. Structures with fewer
    factors are included.
    """
    region = _region(omega, psi, nu)
    edges = _edges(num_factors)
    denominator = whole_number(denominator, "denominator", 1, FLOAT_DENOMINATOR)
    simplices = [len(columns) + slack for columns, slack in _simplices(edges)]
    points = prod(comb(denominator + parts - 1, parts - 1) for parts in simplices)
    if points > _MAX_GRID:
        raise EinlinearError(
            what=f"a grid of 1/{denominator} for {num_factors} factors has "
            f"{_amount(points)} points",
            rule=f"a grid has at most {_MAX_GRID:,} points",
            fix="use a smaller denominator or fewer factors, or draw with sample_structures",
        )
    found: dict[Structure, None] = {}
    for rows in _grid_rows(edges, denominator):
        for row in rows[region.contains(rows, edges, denominator)]:
            found[_structure(row, edges, denominator).canonical()] = None
    if not found:
        raise _empty(region, num_factors, 0, f"the {points:,} points of the grid 1/{denominator}")
    return list(found)


def _empty(region: Region, num_factors: int, found: int, searched: str) -> EinlinearError:
    fix = "widen the ranges"
    if num_factors == 1:
        fix = "use num_factors=2 or more: one factor is a dense layer, and dense layers have nu = 1"
    elif num_factors == 2 and region.psi[0] == 1:
        fix = "widen the ranges: two factors of full rank, psi = 1, have nu >= 1/2"
    return EinlinearError(
        what=f"{found or 'none'} of {searched} with num_factors={num_factors} lie where {region}",
        rule="a region must not be empty, nor so thin that random structures miss it",
        fix=fix,
    )


def _amount(points: int) -> str:
    return f"{points:,}" if points < 10**15 else "more than 10^15"


def _text(bound: Fraction) -> str:
    return str(bound) if bound.denominator < _MAX_UNIT else str(float(bound))


def _region(omega: Range, psi: Range, nu: Range) -> Region:
    return Region(_bounds(omega, "omega"), _bounds(psi, "psi"), _bounds(nu, "nu"))


def _bounds(value: Range, name: str) -> tuple[Fraction, Fraction]:
    if value is None:
        return Fraction(0), Fraction(1)
    ends = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(ends) != 2 or (low := exponent(ends[0], name)) > (high := exponent(ends[1], name)):
        raise EinlinearError(
            what=f"{name} is {quote(value)}",
            rule="a range is a value, or a pair (lowest, highest)",
            fix=f"write {name}=(0.25, 0.5), or {name}=0 for exactly 0",
        )
    if low < high:
        # The ends are what floats are exactly, so that low <= nu <= high holds in Python.
        low, high = (
            Fraction(float(end)) if is_inexact(end) else exact
            for end, exact in zip(ends, (low, high), strict=True)
        )
    return low, high


def _edges(num_factors: int) -> tuple[str, ...]:
    return all_edges(whole_number(num_factors, "num_factors", 1, 4))


def _simplices(edges: tuple[str, ...]) -> list[tuple[list[int], int]]:
    """The columns at X, at Y and among factors; the last can sum to less than 1."""
    sides = [edge[0] if edge[0] in "XY" else "" for edge in edges]
    columns = {side: [i for i, s in enumerate(sides) if s == side] for side in ("X", "Y", "")}
    return [(columns["X"], 0), (columns["Y"], 0), (columns[""], 1)]


def _structure(row: _Ints, edges: tuple[str, ...], unit: int) -> Structure:
    return Structure(tuple((e, Fraction(int(n), unit)) for e, n in zip(edges, row, strict=True)))


def _draw_anywhere(random: np.random.Generator, edges: tuple[str, ...], unit: int) -> _Ints:
    """A batch of uniform points of the three simplices."""
    return _draw_face(random, edges, unit, frozenset(), _BATCH)


def _draw_without_sharing(random: np.random.Generator, edges: tuple[str, ...], unit: int) -> _Ints:
    """A batch of uniform points among those that can have ω = 0.

    ω is 0 exactly if, in the cheapest order, one of the most expensive steps meets a factor that
    has all the edges of the tensor. For each factor and each set of factors before it, other edges
    must then be absent: a face of the simplices. Faces are chosen in proportion to their number of
    points, and points on several faces are thinned, so that all points of the union are equally
    likely.
    """
    faces = list(_faces_without_sharing(edges))
    weights = np.array([_face_points(edges, unit, face) for face in faces], dtype=float)
    counts = random.multinomial(_BATCH, weights / weights.sum())
    rows = np.concatenate(
        [_draw_face(random, edges, unit, face, n) for face, n in zip(faces, counts, strict=True)]
    )
    rows = random.permutation(rows)
    columns = {edge: i for i, edge in enumerate(edges)}
    on_faces = sum((rows[:, [columns[e] for e in face]] == 0).all(axis=1) for face in faces)
    thinned: _Ints = rows[random.random(len(rows)) * on_faces < 1]
    return thinned


def _faces_without_sharing(edges: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """The edges that must be absent if a factor, after some others, shares no parameters."""
    factors = [name for name in FACTOR_NAMES if "X" + name in edges]
    seen = set()
    for factor in factors:
        others = [name for name in factors if name != factor]
        for size in range(len(factors)):
            for absorbed in combinations(others, size):
                face = frozenset(
                    edge for edge in cut(edges, "".join(absorbed)) if factor not in edge
                )
                if face not in seen:
                    seen.add(face)
                    yield face


def _face_points(edges: tuple[str, ...], unit: int, absent: frozenset[str]) -> int:
    """How many points the face has on which some edges are absent."""
    parts = [
        sum(edges[i] not in absent for i in columns) + slack for columns, slack in _simplices(edges)
    ]
    return prod(comb(unit + n - 1, n - 1) for n in parts)


def _draw_face(
    random: np.random.Generator,
    edges: tuple[str, ...],
    unit: int,
    absent: frozenset[str],
    count: int,
) -> _Ints:
    """Uniform points of the face on which some edges are absent."""
    rows = np.zeros((count, len(edges)), dtype=np.int64)
    for columns, slack in _simplices(edges):
        present = [i for i in columns if edges[i] not in absent]
        rows[:, present] = _compositions(random, count, len(present) + slack, unit)[
            :, : len(present)
        ]
    return rows


def _compositions(random: np.random.Generator, count: int, parts: int, unit: int) -> _Ints:
    """Uniform ways to write `unit` as an ordered sum of `parts` whole numbers (stars and bars)."""
    slots = unit + parts - 1
    bars = np.zeros((0, parts - 1), dtype=np.int64)
    while len(bars) < count:
        # Draws with a repeated bar are dropped, so that all sets of bars are equally likely.
        more = np.sort(random.integers(0, slots, (2 * count, parts - 1)), axis=1)
        bars = np.concatenate([bars, more[(np.diff(more, axis=1) > 0).all(axis=1)]])
    ends = np.ones((count, 1), dtype=np.int64)
    return np.diff(np.concatenate([-ends, bars[:count], slots * ends], axis=1), axis=1) - 1


def _grid_rows(edges: tuple[str, ...], unit: int) -> Iterator[_Ints]:
    """All points of the three simplices, in blocks of one point of the first."""
    tables = []
    for columns, slack in _simplices(edges):
        parts = len(columns) + slack
        bars = combinations(range(unit + parts - 1), parts - 1)
        table = [np.diff([-1, *chosen, unit + parts - 1]) - 1 for chosen in bars]
        tables.append(np.array(table)[:, : len(columns)])
    at_x, at_y, ranks = tables
    for row in at_x:
        block = np.zeros((len(at_y) * len(ranks), len(edges)), dtype=np.int64)
        for (columns, _), values in zip(
            _simplices(edges),
            (row[None], np.repeat(at_y, len(ranks), axis=0), np.tile(ranks, (len(at_y), 1))),
            strict=True,
        ):
            block[:, columns] = values
        yield block
