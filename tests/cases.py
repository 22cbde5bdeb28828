"""The one table of structures and widths that all tests run over, and random structures."""

from fractions import Fraction

from hypothesis import strategies as st

import einlinear as el
from einlinear.structures.edges import all_edges

HALF, THIRD, QUARTER = Fraction(1, 2), Fraction(1, 3), Fraction(1, 4)

# The structures of the paper's experiments, as XA XB XAB YA YB YAB AB.
_H, _T, _TT, _Q, _QQQ = HALF, THIRD, 2 * THIRD, QUARTER, 3 * QUARTER
PAPER_THETAS = [
    (_H, 0, _H, 0, _H, _H, 0),
    (_T, 0, _TT, 0, _TT, _T, 0),
    (_Q, 0, _QQQ, 0, _QQQ, _Q, 0),
    (_TT, 0, _T, 0, _T, _TT, 0),
    (_QQQ, 0, _Q, 0, _Q, _QQQ, 0),
    (_TT, 0, _T, 0, _TT, _T, 0),
    (_T, 0, _TT, 0, _T, _TT, 0),
    (_QQQ, 0, _Q, 0, _QQQ, _Q, 0),
    (_Q, 0, _QQQ, 0, _Q, _QQQ, 0),
    (_H, 0, _H, 0, _H, _H, _Q),
    (_H, 0, _H, 0, _H, _H, _T),
    (_T, 0, _TT, 0, _TT, _T, _Q),
    (_TT, 0, _T, 0, _T, _TT, _Q),
    (_TT, 0, _T, 0, _TT, _T, _Q),
    (_T, 0, _TT, 0, _T, _TT, _Q),
    (_H, _H, 0, _H, _H, 0, 0),
    (_T, _TT, 0, _T, _TT, 0, 0),
    (_H, _H, 0, _H, _H, 0, _Q),
    (_T, _TT, 0, _T, _TT, 0, _Q),
    (1, 0, 0, 0, 1, 0, _QQQ),
    (1, 0, 0, 0, 1, 0, _H),
    (_H, _Q, _Q, _Q, _H, _Q, 0),
    (_H, _Q, _Q, _Q, _H, _Q, _Q),
]

STRUCTURES = {
    "dense": el.dense(),
    "low_rank": el.low_rank(),
    "low_rank(rank=5)": el.low_rank(rank=5),
    "low_rank(rank=d/8)": el.low_rank(rank="d/8"),
    "kronecker": el.kronecker(),
    "kronecker(num_factors=3)": el.kronecker(num_factors=3),
    "tensor_train(rank=3)": el.tensor_train(rank=3),
    "tensor_train(rank=2,num_factors=4)": el.tensor_train(rank=2, num_factors=4),
    "monarch": el.monarch(),
    "btt(rank=2)": el.btt(rank=2),
    "btt(rank_exponent=1/4)": el.btt(rank_exponent=QUARTER),
    "btt(num_factors=3)": el.btt(num_factors=3),
    "btt(rank=2,num_factors=4)": el.btt(rank=2, num_factors=4),
    "generic": el.Structure.from_theta((_H, _Q, _Q, _Q, _H, _Q, Fraction(1, 8))),
    "all 18 edges": el.Structure.from_edges(
        {e: Fraction(1, 7) if e[0] in "XY" else Fraction(1, 20) for e in all_edges(3)}
    ),
}

# Square, wide, tall, prime, tiny.
WIDTHS = [(64, 64), (768, 768), (32, 128), (128, 32), (13, 13), (97, 101), (2, 3), (1, 1)]


@st.composite
def structures(
    draw: st.DrawFn,
    *,
    min_factors: int = 1,
    max_factors: int = 4,
    max_edges_per_side: int = 4,
    fixed: bool = True,
) -> el.Structure:
    """Random structures: some edges at each side with exponents that sum to 1, some ranks."""
    edges = all_edges(draw(st.integers(min_factors, max_factors)))
    chosen: dict[str, object] = {}
    for side in "XY":
        at_side = [edge for edge in edges if side in edge]
        some = draw(
            st.lists(st.sampled_from(at_side), min_size=1, max_size=max_edges_per_side, unique=True)
        )
        weights = draw(st.lists(st.integers(1, 6), min_size=len(some), max_size=len(some)))
        chosen |= {e: Fraction(w, sum(weights)) for e, w in zip(some, weights, strict=True)}
    ranks = [edge for edge in edges if edge[0] not in "XY"]
    if ranks:
        size = st.fractions(0, HALF, max_denominator=8)
        for edge in draw(st.lists(st.sampled_from(ranks), max_size=3, unique=True)):
            others = st.integers(2, 4) | st.sampled_from(["d/2", "d/3", "d/8"])
            chosen[edge] = draw(size | others if fixed else size)
    return el.Structure.from_edges(chosen)
