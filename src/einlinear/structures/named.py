"""Structures with names: dense, low rank, Kronecker, tensor train, Monarch, BTT."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from einlinear.errors import EinlinearError, quote
from einlinear.structures.edges import FACTOR_NAMES
from einlinear.structures.structure import Structure, StructureSum
from einlinear.structures.values import Share, exponent, size_or_share, whole_number


def dense() -> Structure:
    """An ordinary linear layer: one factor that sees the whole input and the whole output."""
    return Structure.from_edges({"XA": 1, "YA": 1})


def low_rank(
    rank: int | str | Share | None = None,
    *,
    rank_exponent: float | Fraction | str | None = None,
) -> Structure:
    """B A with A: d_in -> rank and B: rank -> d_out; the rank is √d by default.

    The rank is an int, or "d/8": an eighth of the width min(d_in, d_out), rounded up.
    """
    if rank is None and rank_exponent is None:
        rank_exponent = Fraction(1, 2)
    return Structure.from_edges({"XA": 1, "YB": 1} | _ranks("AB", rank, rank_exponent))


def kronecker(*, num_factors: int = 2) -> Structure:
    """A Kronecker product of equal factors: a tensor train of rank 1."""
    return tensor_train(num_factors=num_factors)


def tensor_train(
    rank: int | str | Share | None = None,
    *,
    rank_exponent: float | Fraction | str | None = None,
    num_factors: int = 2,
) -> Structure:
    """A tensor train: factor i maps axis i of the input to axis i of the output.

    Neighbouring factors share a rank, 1 by default. Ref: [P24 App. A].
    """
    names = _factor_names(num_factors)
    share = Fraction(1, len(names))
    sides = {side + name: share for name in names for side in "XY"}
    return Structure.from_edges(sides | _ranks(names, rank, rank_exponent))


def monarch(*, num_factors: int = 2) -> Structure:
    """Monarch: block-diagonal, permutation, block-diagonal. The same as btt(rank=1)."""
    return btt(num_factors=num_factors)


def btt(
    rank: int | str | Share | None = None,
    *,
    rank_exponent: float | Fraction | str | None = None,
    num_factors: int = 2,
) -> Structure:
    """A block tensor train: a tensor train without parameter sharing; rank 1 by default.

    Factor i replaces axis i of the input by axis i of the output, with separate weights for every
    index of the other axes: input axis i joins the factors up to i, output axis i those from i on.
    For two factors: XA XAB, YAB YB. Ref: [P24 App. A, B].
    """
    names = _factor_names(num_factors)
    share = Fraction(1, len(names))
    sides = {"X" + names[: i + 1]: share for i in range(len(names))}
    sides |= {"Y" + names[i:]: share for i in range(len(names))}
    return Structure.from_edges(sides | _ranks(names, rank, rank_exponent))


NAMED = {
    "dense": dense,
    "low_rank": low_rank,
    "kronecker": kronecker,
    "tensor_train": tensor_train,
    "monarch": monarch,
    "btt": btt,
}


def named_call(structure: Structure | StructureSum) -> str:
    """The call that makes a structure, such as "btt(rank=2)", or its edges if there is none.

    A structure does not know which of its names was typed: btt() gives "monarch()". A sum has the
    calls of its terms, with + between.
    """
    if isinstance(structure, StructureSum):
        return " + ".join(map(named_call, structure.terms))
    sizes = [size for edge, size in structure.edges if edge[0] not in "XY"]
    ranks: dict[str, object] = {}
    if sizes:
        ranks = {"rank_exponent" if isinstance(sizes[0], Fraction) else "rank": sizes[0]}
    many: dict[str, object] = {"num_factors": structure.num_factors}
    many = {} if structure.num_factors == 2 else many
    calls: list[tuple[str, dict[str, object]]] = [("dense", {}), ("low_rank", {})]
    calls += [("low_rank", ranks), ("kronecker", many)]
    calls += [("monarch", many), ("btt", ranks | many), ("tensor_train", ranks | many)]
    for name, options in calls:
        make: Callable[..., Structure] = NAMED[name]
        if make(**options) == structure:
            return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"
    return str(structure)


def _factor_names(num_factors: int) -> str:
    return FACTOR_NAMES[: whole_number(num_factors, "num_factors", 1, len(FACTOR_NAMES))]


def _ranks(
    names: str, rank: int | str | Share | None, rank_exponent: float | Fraction | str | None
) -> dict[str, object]:
    """The edges between neighbouring factors."""
    if rank is not None and rank_exponent is not None:
        raise EinlinearError(
            what=f"rank={quote(rank)} and rank_exponent={quote(rank_exponent)} are both given",
            rule="a rank is either a size or an exponent of the width",
            fix=f"give one of them: rank={quote(rank)}, or rank_exponent={quote(rank_exponent)}",
        )
    size = (
        size_or_share(1 if rank is None else rank, "the rank")
        if rank_exponent is None
        else exponent(rank_exponent, "the rank")
    )
    return {a + b: size for a, b in pairwise(names)}
