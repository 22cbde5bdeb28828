"""Edges of the hypergraph behind a layer: sets of the nodes X, Y and the factors A, B, C, ...

An edge is written as a word of its nodes, X or Y first, then the factors in order: "XA", "YAB",
"AB". Contraction steps, costs and ranks all follow from one notion, the cut: the edges that join
X and some factors with Y and the other factors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import combinations

from einlinear.errors import EinlinearError, quote

FACTOR_NAMES = "ABCDEF"

_RULE = "an edge joins two or more of X, Y, A, B, C, ..., each named once, and never both X and Y"


def normal_edge(name: object) -> str:
    """Normalise the spelling of an edge: X or Y first, then the factors ("BXA" -> "XAB")."""
    if not isinstance(name, str):
        raise EinlinearError(
            what=f"an edge is named {quote(name)}",
            rule=_RULE,
            fix='use a word such as "XA" or "YAB"',
        )
    nodes = set(name)
    problem = None
    if unknown := sorted(nodes - set("XY" + FACTOR_NAMES)):
        problem = f"the unknown node {unknown[0]!r}"
        if unknown[0].isascii() and unknown[0].isupper():
            problem += f" (too many factors: there are at most {len(FACTOR_NAMES)})"
    elif len(nodes) < len(name):
        problem = "a node twice"
    elif nodes >= {"X", "Y"}:
        problem = "both X and Y"
    elif len(nodes) < 2:
        problem = "fewer than two nodes"
    if problem:
        raise EinlinearError(
            what=f"the edge {quote(name)} has {problem}",
            rule=_RULE,
            fix=f"use X, Y and the factors {', '.join(FACTOR_NAMES)} in capitals: XA, YAB, AB",
        )
    return "".join(sorted(nodes, key=lambda node: (node not in "XY", node)))


def edge_order(edge: str) -> tuple[int, int, str]:
    """The key that sorts edges as the paper lists them: XA XB XAB, YA YB YAB, AB."""
    side = {"X": 0, "Y": 1}.get(edge[0], 2)
    return side, len(edge), edge


def factors_of(edges: Iterable[str]) -> tuple[str, ...]:
    """The factors that the edges touch, in order."""
    return tuple(sorted({node for edge in edges for node in edge} - {"X", "Y"}))


@lru_cache
def all_edges(num_factors: int) -> tuple[str, ...]:
    """Every edge over X, Y and the first factors: 2, 7, 18, 41 of them for 1 to 4 factors.

    Ref: [P24 §2, App. E], with the edge BC that the paper's list of three factors lacks.
    """
    names = FACTOR_NAMES[:num_factors]
    groups = [
        "".join(group) for size in range(1, num_factors + 1) for group in combinations(names, size)
    ]
    ranks = [group for group in groups if len(group) > 1]
    return tuple(
        sorted(["X" + g for g in groups] + ["Y" + g for g in groups] + ranks, key=edge_order)
    )


@lru_cache(maxsize=4096)
def _bits(nodes: str) -> int:
    """The nodes as a set of bits."""
    return sum(1 << ("XY" + FACTOR_NAMES).index(node) for node in nodes)


def cut(edges: Iterable[str], absorbed: str) -> tuple[str, ...]:
    """The edges between {X and the absorbed factors} and {Y and the other factors}.

    After the input has met the absorbed factors these are exactly the axes of the intermediate.
    """
    inside = _bits("X" + absorbed)
    return tuple(edge for edge in edges if 0 < _bits(edge) & inside < _bits(edge))


@lru_cache(maxsize=4096)
def all_cuts(edges: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The cut for every set of factors on X's side: the rank is at most the smallest of them."""
    factors = factors_of(edges)
    sets = (group for size in range(len(factors) + 1) for group in combinations(factors, size))
    return tuple(cut(edges, "".join(group)) for group in sets)


def touched(edges: Iterable[str], absorbed: str, factor: str) -> tuple[str, ...]:
    """The edges of the step in which the input, after the absorbed factors, meets another one.

    The product of their sizes is the number of multiply-adds of the step.
    """
    before, after = _bits("X" + absorbed), _bits("X" + absorbed + factor)
    return tuple(
        edge
        for edge in edges
        if 0 < _bits(edge) & before < _bits(edge) or 0 < _bits(edge) & after < _bits(edge)
    )
