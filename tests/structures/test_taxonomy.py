from fractions import Fraction
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from cases import PAPER_THETAS, STRUCTURES, structures
from einlinear import Structure, make_plan, taxonomy
from einlinear.structures.edges import all_edges


@given(structures(max_factors=2))
def test_closed_forms_of_two_factors(s):
    xa, xb, _, ya, yb, _, ab = (s.growth.get(edge, 0) for edge in all_edges(2))
    kinds = taxonomy(s)
    if s.num_factors == 1:
        assert (kinds.omega, kinds.psi, kinds.nu) == (0, 1, 1)
        return
    cheap = max(min(xa, yb), min(xb, ya))
    assert kinds.nu == 1 + ab - cheap
    assert kinds.omega == min(xa + ya, xb + yb) - cheap
    assert kinds.psi == min(1, 2 + ab - xa - yb, 2 + ab - xb - ya)


@given(structures())
def test_ranges(s):
    kinds = taxonomy(s)
    assert kinds.omega >= 0
    assert 0 <= kinds.psi <= 1
    assert kinds.nu >= 0
    assert kinds.is_degenerate == (kinds.nu >= 1)


@given(structures())
def test_names_of_factors_do_not_matter(s):
    assert taxonomy(s.canonical()) == taxonomy(s)


def twelfths(num_factors):
    """Structures whose exponents are multiples of 1/12: sizes at d = 2**12 and 2**24 are exact."""

    @st.composite
    def draw_structure(draw):
        edges = all_edges(num_factors)
        chosen = {}
        for side in "XY":
            at_side = [edge for edge in edges if side in edge]
            cuts = sorted(draw(st.lists(st.integers(0, 12), min_size=3, max_size=3)))
            parts = np.diff([0, *cuts, 12])
            for part in parts:
                edge = draw(st.sampled_from(at_side))
                chosen[edge] = chosen.get(edge, 0) + Fraction(int(part), 12)
        for edge in edges:
            if edge[0] not in "XY" and draw(st.booleans()):
                chosen[edge] = Fraction(draw(st.integers(0, 4)), 12)
        return Structure.from_edges(chosen)

    return draw_structure()


@pytest.mark.no_cover
@settings(max_examples=200)
@given(st.integers(1, 4).flatmap(twelfths))
def test_exponents_are_slopes_of_exact_counts(s):
    small, large = (make_plan(s, 2**n, 2**n) for n in (12, 24))
    assert small.d_in_padded == 2**12
    kinds = taxonomy(s)
    # A count is a sum of at most four powers of d whose exponents differ by 0 or at least 1/12, so
    # between these widths its slope is off by at most log2((1 + 3x) / (1 + 3x**2)) / 12 <= 0.049,
    # x being 2**-12 to the power of the difference; x = 1/3 would be the worst.
    macs = log2(large.macs / small.macs) / 12
    params = log2(large.params / small.params) / 12
    assert macs == pytest.approx(float(1 + kinds.nu), abs=0.049)
    assert params == pytest.approx(float(1 + kinds.nu - kinds.omega), abs=0.049)
    assert log2(large.rank / small.rank) / 12 == pytest.approx(float(kinds.psi))


def random_matrix(plan, rng):
    sizes = plan.sizes
    eye = np.eye(plan.d_in_padded)[: plan.d_in]
    eye = eye.reshape(plan.d_in, *(sizes[edge] for edge in plan.x_edges))
    factors = [rng.standard_normal(shape) for shape in plan.factor_shapes.values()]
    return (
        np.einsum(plan.equation, eye, *factors, optimize=True)
        .reshape(plan.d_in, -1)
        .T[: plan.d_out]
    )


def random_structure(rng, num_factors, unit):
    edges = all_edges(num_factors)
    chosen = {}
    for side in "XY":
        at_side = [edge for edge in edges if side in edge]
        for edge in rng.choice(at_side, unit):
            chosen[edge] = chosen.get(edge, 0) + Fraction(1, unit)
    for edge in edges:
        if edge[0] not in "XY" and rng.random() < 0.5:
            chosen[edge] = Fraction(int(rng.integers(0, 3)), unit)
    return Structure.from_edges(chosen)


@pytest.mark.no_cover
@pytest.mark.parametrize("num_factors", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_rank_of_random_matrices_is_d_to_the_psi(num_factors):
    # Exponents are multiples of 1/6, so at d = 64 sizes are exact and the rank should be 64**psi.
    rng = np.random.default_rng(num_factors)
    hits = 0
    for _ in range(300):
        s = random_structure(rng, num_factors, unit=6)
        plan = make_plan(s, 64, 64)
        expected = round(64 ** float(taxonomy(s).psi))
        assert plan.rank == expected
        rank = np.linalg.matrix_rank(random_matrix(plan, rng))
        assert expected - 2 <= rank <= expected
        hits += rank == expected
    assert hits >= 290, "the bound is almost always reached"


@pytest.mark.no_cover
@pytest.mark.parametrize("num_factors", [2, 3])
def test_rank_of_random_matrices_is_the_smallest_cut(num_factors):
    # Any widths, so sizes are odd, padded and far from their exponents.
    rng = np.random.default_rng(10 + num_factors)
    hits = 0
    for _ in range(300):
        s = random_structure(rng, num_factors, unit=int(rng.integers(2, 6)))
        plan = make_plan(s, int(rng.integers(2, 40)), int(rng.integers(2, 40)))
        rank = np.linalg.matrix_rank(random_matrix(plan, rng))
        assert plan.rank - 2 <= rank <= plan.rank
        hits += rank == plan.rank
    assert hits >= 290


def test_named_structures():
    kinds = {name: taxonomy(s) for name, s in STRUCTURES.items()}
    half, third = Fraction(1, 2), Fraction(1, 3)
    expected = {
        "dense": (0, 1, 1),
        "low_rank": (0, half, half),
        "low_rank(rank=5)": (0, 0, 0),
        "low_rank(rank=d/8)": (0, 1, 1),
        "kronecker": (half, 1, half),
        "kronecker(num_factors=3)": (2 * third, 1, third),
        "monarch": (0, 1, half),
        "btt(rank=2)": (0, 1, half),
        "btt(rank_exponent=1/4)": (0, 1, Fraction(3, 4)),
        "btt(num_factors=3)": (0, 1, third),
    }
    for name, values in expected.items():
        assert (kinds[name].omega, kinds[name].psi, kinds[name].nu) == values
    degenerate = [name for name, kind in kinds.items() if kind.is_degenerate]
    assert degenerate == ["dense", "low_rank(rank=d/8)"]


def test_sharing_vanishes_beyond_the_papers_subspace():
    # XB and YA need not both be absent for omega = 0.
    assert taxonomy(el.parse("XA^1/4 XB^1/4 XAB^1/2 YB^1/2 YAB^1/2")).omega == 0


def test_thetas_that_the_paper_calls_low_rank_but_are_not():
    for index in (6, 8):
        assert taxonomy(Structure.from_theta(PAPER_THETAS[index])).psi == 1


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (
            el.monarch(),
            "ω  0    FLOPs per parameter do not grow with width d\n"
            "ψ  1    rank grows as d\n"
            "ν  1/2  FLOPs grow as d³ᐟ²",
        ),
        (
            el.dense(),
            "ω  0  FLOPs per parameter do not grow with width d\n"
            "ψ  1  rank grows as d\n"
            "ν  1  FLOPs grow as d²: at least as fast as dense",
        ),
        (
            el.low_rank(rank=3),
            "ω  0  FLOPs per parameter do not grow with width d\n"
            "ψ  0  rank does not grow\n"
            "ν  0  FLOPs grow as d",
        ),
        (
            el.kronecker(),
            "ω  1/2  FLOPs per parameter grow as d¹ᐟ²\n"
            "ψ  1    rank grows as d\n"
            "ν  1/2  FLOPs grow as d³ᐟ²",
        ),
    ],
)
def test_a_taxonomy_as_text(structure, text):
    kinds = taxonomy(structure)
    assert str(kinds) == text
    assert repr(kinds).startswith("Taxonomy(omega=Fraction(")
