"""The structures that recommend measures for a shape: a few of each kind that are cheap enough."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from numbers import Real
from typing import Any

from einlinear.errors import EinlinearError, quote
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.text import parse_structure

_RANKED = ("btt(rank={})", "tensor_train(rank={})")
_FIXED = (
    "btt",
    "btt(rank=2)",
    "btt(rank=4)",
    "btt(rank_exponent=1/4)",
    "monarch(num_factors=3)",
    "low_rank",
    "kronecker",
    "tensor_train(rank=2)",
    "tensor_train(rank=4)",
)


def check_flops_share(share: Any) -> float:
    """Return the share of dense's FLOPs that a structure may have, from above 0 to 1."""
    is_number = isinstance(share, Real) and not isinstance(share, bool)
    if is_number and 0 < share <= 1:
        return float(share)
    raise EinlinearError(
        what=f"share is {quote(share)}",
        rule="share is a number above 0 and at most 1: the part of the dense layer's FLOPs that a "
        "structure may have",
        fix="give share=0.25 for a quarter",
    )


def cheap_structures(d_in: int, d_out: int, share: float) -> tuple[str, ...]:
    """The texts of structures with at most a share of the dense layer's FLOPs and parameters.

    Low rank, tensor trains and block tensor trains with a few ranks, and with the largest that
    fits: a power of two, or the width divided by one. Of structures that are the same layer at
    these widths, only the first is kept.
    """
    found: dict[tuple[tuple[str, int], ...], str] = {}
    for text in _texts(d_in, d_out, share):
        plan = make_plan(parse_structure(text), d_in, d_out)
        if _fits(plan, share):
            found.setdefault(tuple(pair for pair in plan.edge_sizes if pair[1] > 1), text)
    return tuple(found.values())


def _texts(d_in: int, d_out: int, share: float) -> Iterator[str]:
    yield from _FIXED
    powers = [2**k for k in range(1, min(d_in, d_out).bit_length())]

    def cheap(text: str) -> bool:
        return _fits(make_plan(parse_structure(text), d_in, d_out), share)

    for text in _RANKED:
        texts = [text.format(rank) for rank in powers]
        yield from list(takewhile(cheap, texts))[-1:]
    low_ranks = filter(cheap, [f"low_rank(rank=d/{divisor})" for divisor in powers])
    yield from islice(low_ranks, 2)  # the largest, and half of it


def _fits(plan: Plan, share: float) -> bool:
    return max(plan.macs, plan.params) <= share * plan.dense_macs
