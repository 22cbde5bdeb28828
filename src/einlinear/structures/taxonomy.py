"""What a structure costs and can express as its width grows: the exponents ω, ψ and ν."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import combinations
from typing import Any, NamedTuple

from einlinear.show.symbols import power, printable
from einlinear.structures.edges import all_cuts, factors_of, touched
from einlinear.structures.structure import Structure, StructureSum, check_structure_or_sum


@dataclass(frozen=True, slots=True)
class Taxonomy:
    """Exponents of a d x d layer with F multiply-adds and N parameters, as d grows.

    omega: F / N = d**omega, how often a parameter is reused; 0 for dense.
    psi:   rank = d**psi; 1 is full rank.
    nu:    F = d**(1 + nu); 1 for dense.
    Departure: the paper's main text has N / F = d**omega and omega = 1 for dense; its appendix is
    right.
    Ref: [P24 §3, App. B].
    """

    omega: Fraction
    psi: Fraction
    nu: Fraction

    @property
    def is_degenerate(self) -> bool:
        """Whether its cost grows as fast as that of a dense layer, or faster."""
        return self.nu >= 1

    def facts(self) -> dict[str, tuple[str, str]]:
        """Each exponent as text, and what it means, by its symbol."""
        reuse = f"grow as {power('d', self.omega)}" if self.omega else "do not grow with width d"
        rank = f"grows as {power('d', self.psi)}" if self.psi else "does not grow"
        cost = f"FLOPs grow as {power('d', 1 + self.nu)}"
        return {
            "ω": (str(self.omega), f"FLOPs per parameter {reuse}"),
            "ψ": (str(self.psi), f"rank {rank}"),
            "ν": (str(self.nu), cost + ": at least as fast as dense" * self.is_degenerate),
        }

    def __str__(self) -> str:
        facts = self.facts()
        width = max(len(value) for value, _ in facts.values())
        lines = [f"{name}  {value:{width}}  {text}" for name, (value, text) in facts.items()]
        return printable("\n".join(lines))


class Growth(NamedTuple):
    """How fast multiply-adds, parameters and rank grow: exponents of the width."""

    macs: Any
    params: Any
    rank: Any


@lru_cache(maxsize=65536)
def taxonomy(structure: Structure | StructureSum) -> Taxonomy:
    """The exact exponents ω, ψ and ν of a structure with any number of factors, or of a sum.

    For two factors, with F = 2 + AB - max(min(XA, YB), min(XB, YA)):

        nu = F - 1     omega = F - (2 + AB - min(XA + YA, XB + YB))
        psi = min(1, 2 + AB - XA - YB, 2 + AB - XB - YA)

    The counts of a sum are those of its terms together, so the term that grows fastest decides.

    Checked by: test_taxonomy.py::test_closed_forms_of_two_factors and
    test_taxonomy.py::test_exponents_are_slopes_of_exact_counts.
    """
    given = check_structure_or_sum(structure)
    terms = given.terms if isinstance(given, StructureSum) else (given,)
    growth = [growth_of(term.growth, Fraction(1)) for term in terms]
    macs, params = max(g.macs for g in growth), max(g.params for g in growth)
    return Taxonomy(omega=macs - params, psi=max(g.rank for g in growth), nu=macs - 1)


def growth_of(
    exponents: Mapping[str, Any],
    one: Any,
    lower: Callable[[Any, Any], Any] = min,
    upper: Callable[[Any, Any], Any] = max,
) -> Growth:
    """The growth of the counts, from the exponent of each edge.

    The exponents may be numbers, or arrays of whole numbers in units of 1/one for many structures
    at once; then `lower` and `upper` are the minimum and maximum of arrays.
    """
    edges = tuple(exponents)
    factors = factors_of(edges)

    def total(group: tuple[str, ...]) -> Any:
        return sum((exponents[edge] for edge in group), start=0 * one)

    # The cheapest way to absorb each set of factors; the dearest step of an order is what grows.
    cheapest: dict[frozenset[str], Any] = {frozenset(): 0 * one}
    for size in range(1, len(factors) + 1):
        for group in map(frozenset, combinations(factors, size)):
            ways = []
            for last in sorted(group):
                step = touched(edges, "".join(sorted(group - {last})), last)
                ways.append(upper(cheapest[group - {last}], total(step)))
            cheapest[group] = reduce(lower, ways)
    params = [total(tuple(edge for edge in edges if factor in edge)) for factor in factors]
    return Growth(
        macs=cheapest[frozenset(factors)],
        params=reduce(upper, params),
        rank=reduce(lower, map(total, all_cuts(edges))),
    )
