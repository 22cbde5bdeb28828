"""Sizes of edges: from exponents and widths to whole numbers.

The sizes at a side of a layer multiply to its width, or to slightly more: then the input is padded
with zeros and the output is sliced. Nothing is ever truncated. The sizes at both sides and the
ranks are chosen together: every choice has a penalty, and the smallest wins. Departure: the paper's
code rounds each size on its own, and truncates or pads up to an eighth of the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import merge, nsmallest
from itertools import combinations
from math import ceil, floor, inf, isqrt, log, prod
from typing import NamedTuple

from einlinear.errors import EinlinearError, shorten
from einlinear.structures.edges import all_cuts, factors_of, touched
from einlinear.structures.structure import Structure
from einlinear.structures.values import Share

TOLERANCE = 0.15 + 1e-9
"""The largest distance of log(size) / log(width) from its exponent in a close factorisation."""

SIZES_RULE = 2
"""The number of the rule, part of the id of every run with a structure.

Raise it with every change after which a structure has other sizes at some widths, in
`choose_sizes` or in `heads`: then no run resumes with the sizes of another rule.
Rule 1 was that of development versions, which chose the sizes of each side on its own.
"""

# The penalty of a choice is log(macs / ideal macs)**2 plus these. docs/sizes.md explains them.
_FAR = 0.1  # if macs / ideal macs is outside of _LIMITS
_LIMITS = (0.85, 1.2)
_RANK_LOST = 0.1  # plus log(full rank / rank), if the exponents give full rank but the sizes do not
_SHAPE = 0.04  # times the mean of log(size / ideal size)**2 at X, at Y and among factors
_PADDED = 0.01  # for every side with padding
_PADDED_MUCH = 0.06  # instead, if the padding is above _LITTLE
_LITTLE = 0.01
_PADDING = 1.0  # times the padding of every side, as a fraction of its width
_ODD = 0.004  # for every size above 8 that is not a multiple of 8

_MOST_PADDING = 64  # how many numbers above a width are tried
_WAYS = 24  # how many factorisations of each, divided by the number of edges
_RANKS = 4  # how many choices of ranks

_UNIT = 10**12  # squared deviations are summed as whole numbers of 1/_UNIT, so that ties are exact
_DIGITS = 9  # penalties are rounded, for the same reason
_SLACK = 1e-9

_Way = tuple[int, tuple[int, ...]]  # a factorisation behind its squared deviation


class _Option(NamedTuple):
    """Sizes for the edges at X, at Y or among factors, behind their share of the penalty."""

    penalty: float
    sizes: tuple[int, ...]


class _Part(NamedTuple):
    """The same, with what the sizes contribute to the product of every step and every cut."""

    penalty: float
    sizes: dict[str, int]
    products: list[int]


class _Meeting(NamedTuple):
    """A step of some orders: the factors before and after it, the factor it meets, its edges."""

    before: frozenset[str]
    after: frozenset[str]
    factor: str
    edges: tuple[str, ...]


class _Target(NamedTuple):
    """What a structure asks for at given widths.

    `ideal` are the sizes as real numbers and `macs` their multiply-adds. `full` is the rank to
    keep: the smaller width, or 0 if the exponents do not give full rank. `exponents` are those of
    the edges without a fixed size, at "X", at "Y" and among factors (""); `widths` is what the
    fixed sizes leave for them at X and Y.
    """

    ideal: dict[str, float]
    macs: float
    full: int
    fixed: dict[str, int]
    exponents: dict[str, dict[str, float]]
    widths: dict[str, int]

    @property
    def steps(self) -> tuple[_Meeting, ...]:
        return _all_steps(tuple(self.ideal))

    def part(self, side: str, option: _Option) -> _Part:
        """An option with its products. The fixed sizes go with the ranks."""
        sizes = dict(zip(self.exponents[side], option.sizes, strict=True))
        sizes |= {} if side else self.fixed
        groups = _steps_and_cuts(tuple(self.ideal), tuple(sizes))
        products = [prod([sizes[edge] for edge in group]) for group in groups]
        return _Part(option.penalty, sizes, products)


class _Choice(NamedTuple):
    """Sizes for all edges. Choices compare as they are preferred: the best is the smallest."""

    penalty: float
    macs: float
    negative: tuple[int, ...]

    @property
    def limit(self) -> float:
        """No part of a better choice has a larger penalty."""
        return self.penalty + _SLACK


def choose_sizes(structure: Structure, d_in: int, d_out: int) -> dict[str, int]:
    """The size of every edge of the structure in a layer of these widths.

    The products at X and at Y are at least d_in and d_out; fixed sizes are kept exactly. Of all
    choices within TOLERANCE of the exponents (of all, if there are none), the one with the smallest
    penalty wins; among equals, the one with the fewest multiply-adds, then the one whose first
    sizes are larger. So a layer and its mirror image cost the same.
    Checked by: test_sizes.py::test_sizes_are_those_of_exhaustive_search.
    """
    smaller = min(d_in, d_out)
    fixed = {
        edge: value.of(smaller) if isinstance(value, Share) else value
        for edge, value in structure.edges
        if not isinstance(value, Fraction)
    }
    widths = {"X": _rest(fixed, "X", d_in), "Y": _rest(fixed, "Y", d_out)}
    ideal: dict[str, float] = {}
    exponents: dict[str, dict[str, float]] = {"X": {}, "Y": {}, "": {}}
    for edge, value in structure.edges:
        if not isinstance(value, Fraction):
            ideal[edge] = fixed[edge]
        else:
            side = edge[0] if edge[0] in widths else ""
            exponents[side][edge] = float(value)
            ideal[edge] = widths.get(side, smaller) ** float(value)
    full = smaller if rank_bound(ideal) > smaller * (1 - _SLACK) else 0
    target = _Target(ideal, fewest_macs(ideal)[0], full, fixed, exponents, widths)
    best = _best_choice(target, TOLERANCE) or _best_choice(target, inf)
    assert best is not None, "every width has a factorisation"
    return {edge: -size for edge, size in zip(ideal, best.negative, strict=True)}


def _best_choice(target: _Target, tolerance: float) -> _Choice | None:
    """The choice of smallest penalty, or None if no factorisation is within the tolerance.

    Pads either side more and more, until the padding alone has a larger penalty than the best
    choice so far. New parts at one side meet all parts found before at the other.
    """
    ideal_ranks = tuple(target.ideal[edge] for edge in target.exponents[""])
    ranks = [target.part("", option) for option in _rank_options(ideal_ranks)]
    found: dict[str, list[_Part]] = {"X": [], "Y": []}
    best = _Choice(inf, inf, ())
    totals = [_totals(side, target.widths[side], len(target.exponents[side])) for side in found]
    for padding, side, total in merge(*totals):
        others = found["Y" if side == "X" else "X"]
        least = min(padding, others[0].penalty) if others else padding
        if padding + least > best.limit:
            break
        exponents = tuple(target.exponents[side].values())
        for option in _side_options(total, target.widths[side], exponents, tolerance):
            if option.penalty + least > best.limit:
                break
            part = target.part(side, option)
            for other in others:
                if part.penalty + other.penalty > best.limit:
                    break
                best = min(best, _with_best_rank(target, part, other, ranks, best.limit))
            found[side].append(part)
        found[side].sort(key=lambda part: part.penalty)
    return best if best.negative else None


def _with_best_rank(
    target: _Target, part: _Part, other: _Part, ranks: list[_Part], limit: float
) -> _Choice:
    """The best choice with these parts at the two sides, if it is within the limit."""
    best = _Choice(inf, inf, ())
    steps = target.steps
    for rank in ranks:
        penalty = part.penalty + other.penalty + rank.penalty
        if penalty > min(limit, best.limit):
            break
        factors = zip(part.products, other.products, rank.products, strict=True)
        products = [a * b * c for a, b, c in factors]
        macs, _ = _cheapest(steps, products)
        penalty += _macs_penalty(macs / target.macs)
        penalty += _rank_penalty(min(products[len(steps) :]), target.full)
        if penalty <= min(limit, best.limit):
            sizes = part.sizes | other.sizes | rank.sizes
            negative = tuple(-sizes[edge] for edge in target.ideal)
            best = min(best, _Choice(round(penalty, _DIGITS), macs, negative))
    return best


def _macs_penalty(ratio: float) -> float:
    """The penalty of this many times the ideal multiply-adds."""
    return log(ratio) ** 2 + _FAR * (not _LIMITS[0] <= ratio <= _LIMITS[1])


def _rank_penalty(rank: int, full: int) -> float:
    """The penalty of a rank that should be full."""
    return 0.0 if rank >= full else _RANK_LOST + log(full / rank)


def _padding_penalty(total: int, width: int) -> float:
    """The penalty of padding a width to this total."""
    if total == width:
        return 0.0
    padding = total / width - 1
    return _PADDING * padding + (_PADDED if padding <= _LITTLE else _PADDED_MUCH)


def _odd_penalty(sizes: tuple[int, ...]) -> float:
    """The penalty of sizes that do not fill vectors of eight numbers."""
    return _ODD * sum(n > 8 and n % 8 > 0 for n in sizes)


def _totals(side: str, width: int, num_edges: int) -> Iterator[tuple[float, str, int]]:
    """The totals to which a side may be padded, each behind its penalty.

    At most a tenth is added, and at most _MOST_PADDING; below width 16, at most the width itself.
    A single edge is as wide as the width: with all other sizes fixed, a plan is exactly as named.
    """
    most = min(_MOST_PADDING, width // 10 if width >= 16 else width)
    most = most if num_edges > 1 else 0
    return ((_padding_penalty(n, width), side, n) for n in range(width, width + most + 1))


@lru_cache(maxsize=65536)
def _side_options(
    total: int, width: int, exponents: tuple[float, ...], tolerance: float
) -> tuple[_Option, ...]:
    """The options for a side of this width, padded to this total, best first."""
    count = max(2, _WAYS // len(exponents))
    padding = _padding_penalty(total, width)
    shape = _SHAPE * log(width) ** 2 / len(exponents) / _UNIT
    ways = closest_factors(total, width, exponents, tolerance, count)
    options = (_Option(padding + shape * cost + _odd_penalty(n), n) for cost, n in ways)
    return tuple(sorted(options))


@lru_cache(maxsize=65536)
def _rank_options(ideal: tuple[float, ...]) -> tuple[_Option, ...]:
    """The options for the ranks, best first: each rounded down or up, also to a multiple of 8."""
    options = [_Option(0.0, ())]
    for size in ideal:
        near = {floor(size), ceil(size), floor(size / 8) * 8, ceil(size / 8) * 8} - {0}
        shape = {n: _SHAPE * log(n / size) ** 2 / len(ideal) + _odd_penalty((n,)) for n in near}
        longer = (_Option(o.penalty + shape[n], (*o.sizes, n)) for o in options for n in near)
        options = nsmallest(_RANKS, longer)
    return tuple(options)


def fewest_macs(sizes: Mapping[str, float]) -> tuple[float, str]:
    """The fewest multiply-adds per token of all orders of the factors, and that order.

    The tensor left after some factors does not depend on their order, so the best order of every
    set follows from those of its subsets; this finds the same as trying all orders. Of equals, the
    alphabetically first. Checked by: test_plan.py::test_order_is_the_cheapest_of_all_orders.
    """
    steps = _all_steps(tuple(sizes))
    return _cheapest(steps, [prod([sizes[edge] for edge in step.edges]) for step in steps])


@lru_cache(maxsize=4096)
def _all_steps(edges: tuple[str, ...]) -> tuple[_Meeting, ...]:
    """The steps of all orders of the factors, those after fewer factors first."""
    factors = factors_of(edges)
    groups = ("".join(group) for n in range(len(factors)) for group in combinations(factors, n))
    return tuple(
        _Meeting(frozenset(group), frozenset(group + factor), factor, touched(edges, group, factor))
        for group in groups
        for factor in factors
        if factor not in group
    )


@lru_cache(maxsize=4096)
def _steps_and_cuts(edges: tuple[str, ...], some: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Which of some edges are in each step and in each cut."""
    groups = [*(step.edges for step in _all_steps(edges)), *all_cuts(edges)]
    return [tuple(edge for edge in group if edge in some) for group in groups]


def _cheapest(steps: tuple[_Meeting, ...], macs: Sequence[float]) -> tuple[float, str]:
    """The sum of the multiply-adds of the cheapest order, and the order."""
    best: dict[frozenset[str], tuple[float, str]] = {frozenset(): (0, "")}
    for (before, after, factor, _), cost in zip(steps, macs, strict=False):
        sum_before, order = best[before]
        way = (sum_before + cost, order + factor)
        best[after] = min(best.get(after, way), way)
    return best[steps[-1].after]


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


def closest_factors(
    total: int, width: int, exponents: tuple[float, ...], tolerance: float, count: int
) -> tuple[_Way, ...]:
    """The `count` factorisations of `total` nearest to width**exponents, best first.

    Goes through the edges one by one and keeps, for each divisor of the total, the best ways to
    make it from the edges so far. This is exact, since squared deviations add up.
    """
    divisors = _divisors(total)
    scale = log(width) or 1.0
    exponent_of = {n: log(n) / scale for n in divisors}
    made: dict[int, list[_Way]] = {1: [(0, ())]}
    for i, exponent in enumerate(exponents):
        allowed = {
            n: round((exponent_of[n] - exponent) ** 2 * _UNIT)
            for n in divisors
            if abs(exponent_of[n] - exponent) < tolerance
        }
        longer: dict[int, list[_Way]] = {}
        for part, ways in made.items():
            left = total // part
            for n in allowed if i + 1 < len(exponents) else {left} & allowed.keys():
                if left % n == 0:
                    # Sizes are negative, so that among equals the largest sorts first.
                    more = [(cost + allowed[n], (*sizes, -n)) for cost, sizes in ways]
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
