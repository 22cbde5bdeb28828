"""Sizes of edges: from exponents and a width to whole numbers.

The edges at one side of a layer divide its width: the product of their sizes is the width, and each
size is close to width**exponent. A width without such a factorisation, such as a prime, is padded
to the next one that has; it is never truncated. If a full-rank structure would lose rank by its
sizes, the best few factorisations of both sides are paired, and the pair with the highest rank is
taken. Departure: the paper's code rounds each size on its own, and truncates or pads up to an
eighth of the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from math import isqrt, log, prod, sqrt

from einlinear.errors import EinlinearError, shorten
from einlinear.structures.edges import all_cuts
from einlinear.structures.structure import Structure
from einlinear.structures.values import Share

TOLERANCE = 0.15 - 1e-9
"""The largest distance of log(size) / log(width) from its exponent in a close factorisation."""

_UNIT = 10**12  # squared deviations are summed as whole numbers of 1/_UNIT, so that ties are exact
_ALTERNATIVES = 8  # how many factorisations of each side are tried to keep the rank

_Way = tuple[int, tuple[int, ...]]  # a factorisation behind its squared deviation


def choose_sizes(structure: Structure, d_in: int, d_out: int) -> dict[str, int]:
    """The size of every edge of the structure in a layer of these widths.

    The products at X and at Y are at least d_in and d_out; fixed sizes are kept exactly.
    """
    fixed = {
        edge: value.of(min(d_in, d_out)) if isinstance(value, Share) else value
        for edge, value in structure.edges
        if not isinstance(value, Fraction)
    }
    base = {"X": _rest(fixed, "X", d_in), "Y": _rest(fixed, "Y", d_out)}
    ideal = {
        edge: base.get(edge[0], min(d_in, d_out)) ** float(value)
        for edge, value in structure.edges
        if isinstance(value, Fraction)
    }
    nearest = {edge: max(1, round(size)) for edge, size in ideal.items()} | fixed

    def candidates(count: int) -> list[dict[str, int]]:
        """Sizes for the pairs of the `count` best factorisations of X and of Y, best first."""
        ways = []
        for side, width in base.items():
            at_side = [(e, v) for e, v in structure.edges if side in e]
            growing = {e: float(v) for e, v in at_side if isinstance(v, Fraction)}
            found = share_width(width, tuple(growing.values()), count)
            ways.append([(cost, dict(zip(growing, sizes, strict=True))) for cost, sizes in found])
        pairs = sorted(product(*ways), key=lambda pair: pair[0][0] + pair[1][0])
        return [nearest | x | y for (_, x), (_, y) in pairs]

    [sizes] = candidates(1)
    full = min(d_in, d_out)
    wanted = ideal | {edge: float(size) for edge, size in fixed.items()}
    if rank_bound(sizes) < full <= rank_bound(wanted) * (1 + 1e-9):
        sizes = max(candidates(_ALTERNATIVES), key=lambda sizes: min(full, rank_bound(sizes)))
    return {edge: sizes[edge] for edge, _ in structure.edges}


def rank_bound(sizes: Mapping[str, float]) -> float:
    """The size of the smallest cut between X and Y: no matrix of these sizes has a higher rank.

        min over sets S of factors of  prod of sizes of edges between {X} + S and {Y} + the others

    Random matrices almost always reach it.
    Departure: the paper's formula holds for two factors met in the order A, B only.
    Checked by: test_taxonomy.py::test_rank_of_random_matrices_is_the_smallest_cut.
    """
    return min(prod(sizes[edge] for edge in cut) for cut in all_cuts(tuple(sizes)))


def _rest(fixed: dict[str, int], side: str, width: int) -> int:
    """The width of a side divided by its fixed sizes."""
    at_side = {edge: size for edge, size in fixed.items() if side in edge}
    size = prod(at_side.values())
    if width % size:
        near = nsmallest(3, _divisors(width), key=lambda n: abs(log(n) - log(size)))
        product_of = " * ".join(f"{edge}:{size}" for edge, size in at_side.items())
        raise EinlinearError(
            what=f"the width {width} at {side} is not a multiple of {shorten(product_of)}",
            rule="fixed sizes are kept exactly, so their product must divide the width",
            fix=f"use sizes that divide {width}, such as {', '.join(map(str, sorted(near)))}, "
            "or an exponent",
        )
    return width // size


@lru_cache(maxsize=65536)
def share_width(width: int, exponents: tuple[float, ...], count: int = 1) -> tuple[_Way, ...]:
    """The best ways to divide a width into sizes, one for each exponent.

    Takes the smallest product that has a factorisation within TOLERANCE of the exponents, and of
    its factorisations the `count` with the smallest sum of squared deviations, best first; among
    equals, larger first sizes come first. If no product up to a tenth above the width (below 16: up
    to twice the width) has one, the smallest sum of deviation and padding wins. Checked by:
    test_sizes.py::test_sizes_are_those_of_exhaustive_search.
    """
    limit = width * 11 // 10 if width >= 16 else 2 * width
    for total in range(width, limit + 1):
        if ways := closest_factors(total, width, exponents, TOLERANCE, count):
            return ways
    return min(
        (
            closest_factors(total, width, exponents, float("inf"), count)
            for total in range(width, limit + 1)
        ),
        key=lambda ways: sqrt(ways[0][0] / _UNIT) + prod(ways[0][1]) / width,
    )


def closest_factors(
    total: int, width: int, exponents: tuple[float, ...], tolerance: float, count: int
) -> tuple[_Way, ...]:
    """The factorisations of `total` nearest to width**exponents, best first.

    Goes through the edges one by one and keeps, for each divisor of the total, the best ways to
    make it from the edges so far. This is exact, since squared deviations add up.
    """
    divisors = _divisors(total)
    exponent_of = {n: log(n) / log(width) if width > 1 else 0.0 for n in divisors}
    made: dict[int, list[_Way]] = {1: [(0, ())]}
    for exponent in exponents:
        allowed = [
            (n, round((exponent_of[n] - exponent) ** 2 * _UNIT))
            for n in divisors
            if abs(exponent_of[n] - exponent) < tolerance
        ]
        longer: dict[int, list[_Way]] = {}
        for part, ways in made.items():
            for n, deviation in allowed:
                if total // part % n == 0:
                    # Sizes are negative, so that among equals the largest sorts first.
                    more = [(cost + deviation, (*sizes, -n)) for cost, sizes in ways]
                    longer.setdefault(part * n, []).extend(more)
        made = {
            part: [min(ways)] if count == 1 else nsmallest(count, ways)
            for part, ways in longer.items()
        }
    return tuple((cost, tuple(-n for n in sizes)) for cost, sizes in made.get(total, []))


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return tuple(small + [n // k for k in reversed(small) if k * k != n])
