from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from einlinear import EinlinearError, Structure, taxonomy
from einlinear.structures.edges import all_edges
from einlinear.structures.sampling import (
    Region,
    _compositions,
    _draw_anywhere,
    _draw_face,
    _draw_without_sharing,
    _faces_without_sharing,
    distinct_structures,
)

RANGE = (Fraction(1, 4), Fraction(7, 10))


@pytest.mark.no_cover
@pytest.mark.parametrize("num_factors", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "region",
    [{}, {"omega": 0}, {"psi": 1}, {"omega": 0, "psi": 1}, {"omega": RANGE, "nu": (0.3, 0.95)}],
    ids=str,
)
def test_samples_lie_in_their_region(num_factors, region):
    for s in el.sample_structures(40, num_factors=num_factors, seed=3, **region):
        kinds = taxonomy(s)
        assert s == s.canonical()
        assert not kinds.is_degenerate
        for name, wanted in region.items():
            low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
            assert low <= getattr(kinds, name) <= high


def test_the_first_draws_are_as_good_as_the_last():
    # With omega = 0 either XB or YA is absent, about equally often, also among single draws.
    singles = [el.sample_structures(1, omega=0, seed=seed)[0] for seed in range(120)]
    without_xb = sum("XB" not in s for s in singles)
    assert 30 <= without_xb <= 90, "120 fair draws stay within five standard deviations of 60"


@pytest.mark.no_cover
@pytest.mark.slow
def test_ends_of_ranges():
    exact = {taxonomy(s).nu for s in el.grid_structures(10, nu=("3/10", "7/10"))}
    assert {min(exact), max(exact)} == {Fraction(3, 10), Fraction(7, 10)}
    # 0.3 is a hair below 3/10 and 0.7 below 7/10, as Python compares them.
    floats = {taxonomy(s).nu for s in el.grid_structures(10, nu=(0.3, 0.7))}
    assert floats == {nu for nu in exact if 0.3 <= nu <= 0.7} == exact - {Fraction(7, 10)}


@pytest.mark.no_cover
@pytest.mark.slow
def test_many_draws_are_not_too_many(monkeypatch):
    monkeypatch.setattr("einlinear.structures.sampling._MAX_DRAWS", 1000)
    assert len(el.sample_structures(9000)) == 9000


def test_exact_values_anywhere():
    assert {taxonomy(s).nu for s in el.sample_structures(20, nu="4/7")} == {Fraction(4, 7)}
    assert {taxonomy(s).psi for s in el.sample_structures(20, psi=0.8)} == {Fraction(4, 5)}


def test_the_same_seed_draws_the_same():
    first = el.sample_structures(30, seed=1)
    assert first == el.sample_structures(30, seed=1)
    assert first[:10] == el.sample_structures(10, seed=1)
    assert first != el.sample_structures(30, seed=2)
    assert len(set(first)) == 30


def test_different_structures_take_turns():
    found = distinct_structures(12, num_factors=[2, 3], omega=0, psi=1, seed=4)
    assert [s.num_factors for s in found] == [2, 3] * 6
    assert found == distinct_structures(20, num_factors=(2, 3), omega=0, psi=1, seed=4)[:12]
    assert found[::2] == el.sample_structures(6, omega=0, psi=1, seed=4)
    assert all((taxonomy(s).omega, taxonomy(s).psi) == (0, 1) for s in found)


def test_structures_that_are_drawn_twice_count_once(monkeypatch):
    """On a grid of 1/3, two factors of rank 1 or less have few structures, all of which come."""
    monkeypatch.setattr("einlinear.structures.sampling._UNIT", 3)
    everything = el.grid_structures(3, psi=1)
    drawn = el.sample_structures(40, psi=1)
    assert len(set(drawn)) < 40
    found = distinct_structures(len(everything), psi=1)
    assert set(found) == set(everything)
    assert found == list(dict.fromkeys(el.sample_structures(1000, psi=1)))
    with pytest.raises(
        EinlinearError, match=f"only {len(everything)} different structures"
    ) as told:
        distinct_structures(len(everything) + 1, psi=1)
    assert f"a count of {len(everything)} or less" in told.value.fix


def test_no_structure_is_a_fine_number_of_structures():
    assert el.sample_structures(0) == []


@settings(max_examples=30)
@given(st.integers(1, 7), st.integers(1, 200), st.integers(0, 2**32))
def test_compositions_sum_to_the_unit(parts, unit, seed):
    rows = _compositions(np.random.default_rng(seed), 50, parts, unit)
    assert rows.shape == (50, parts)
    assert (rows >= 0).all()
    assert (rows.sum(axis=1) == unit).all()


def assert_uniform(counts, cells):
    """Every cell is hit about equally often: within five standard deviations of chi-square."""
    assert len(counts) == cells, "every point can be drawn"
    mean = sum(counts.values()) / cells
    chi2 = sum((n - mean) ** 2 / mean for n in counts.values())
    assert abs(chi2 - (cells - 1)) < 5 * sqrt(2 * (cells - 1))


def points(num_factors, unit):
    """All exponents on the three simplices, slowly."""
    edges = all_edges(num_factors)
    tables = []
    for side, slack in (("X", 0), ("Y", 0), ("", 1)):
        parts = sum((e[0] if e[0] in "XY" else "") == side for e in edges) + slack
        bars = combinations(range(unit + parts - 1), parts - 1)
        rows = [np.diff([-1, *b, unit + parts - 1]) - 1 for b in bars]
        tables.append([tuple(row[: parts - slack]) for row in rows])
    return [(*x, *y, *r) for x in tables[0] for y in tables[1] for r in tables[2]]


def structure_at(point, unit):
    edges = all_edges(2) if len(point) == 7 else all_edges(3)
    return Structure.from_edges(
        {e: Fraction(int(n), unit) for e, n in zip(edges, point, strict=True)}
    )


def test_draws_are_uniform_on_the_simplices():
    random = np.random.default_rng(0)
    rows = np.concatenate([_draw_anywhere(random, all_edges(2), 2) for _ in range(3)])
    assert_uniform(Counter(map(tuple, rows.tolist())), len(points(2, 2)))


def test_draws_without_sharing_are_uniform_on_their_subspace():
    unit = 4
    region = Region(
        (Fraction(0), Fraction(0)), (Fraction(0), Fraction(1)), (Fraction(0), Fraction(1))
    )
    edges = all_edges(2)
    random = np.random.default_rng(0)
    rows = np.concatenate([_draw_without_sharing(random, edges, unit) for _ in range(4)])
    rows = rows[region.contains(rows, edges, unit)]
    kinds = {p: taxonomy(structure_at(p, unit)) for p in points(2, unit)}
    wanted = [p for p, k in kinds.items() if k.omega == 0 and not k.is_degenerate]
    assert_uniform(Counter(map(tuple, rows.tolist())), len(wanted))
    # The twin: faces drawn equally often, with points on several not thinned, are not uniform.
    faces = _faces_without_sharing(edges)
    naive = np.concatenate([_draw_face(random, edges, unit, face, 5000) for face in faces])
    naive = naive[region.contains(naive, edges, unit)]
    with pytest.raises(AssertionError):
        assert_uniform(Counter(map(tuple, naive.tolist())), len(wanted))


@cache
def canonical_structures(num_factors, unit):
    return {structure_at(point, unit).canonical() for point in points(num_factors, unit)}


@pytest.mark.no_cover
@pytest.mark.xdist_group("grids")  # they share what canonical_structures has cached
@pytest.mark.parametrize(
    ("num_factors", "unit"),
    [(2, 1), (2, 2), (2, 4), (3, 1), pytest.param(3, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "region",
    [{}, {"omega": 0}, {"psi": 1, "nu": (0.5, 0.75)}, {"nu": ("3/10", "8/10")}],
    ids=str,
)
def test_grid_is_everything_on_it(num_factors, unit, region):
    expected = set()
    for s in canonical_structures(num_factors, unit):
        kinds = taxonomy(s)
        inside = all(
            Fraction(low) <= getattr(kinds, name) <= Fraction(high)
            for name, wanted in region.items()
            for low, high in [wanted if isinstance(wanted, tuple) else (wanted, wanted)]
        )
        if inside and not kinds.is_degenerate:
            expected.add(s)
    if expected:
        grid = el.grid_structures(unit, num_factors=num_factors, **region)
        assert len(grid) == len(set(grid))
        assert set(grid) == expected
    else:
        with pytest.raises(EinlinearError, match="none of"):
            el.grid_structures(unit, num_factors=num_factors, **region)


def test_the_grid_of_halves_holds_the_classics():
    grid = el.grid_structures(2)
    assert {el.monarch(), el.kronecker(), el.low_rank()} <= set(grid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"psi": 1, "nu": (0, 0.4)}, "nu >= 1/2"),
        ({"nu": 1}, "none of 1,000,000"),
        ({"num_factors": 1}, "one factor is a dense layer"),
        ({"omega": 0.9}, "none of"),
    ],
)
def test_an_empty_region_is_an_error_that_says_so(arguments, message):
    with pytest.raises(EinlinearError, match=message):
        el.sample_structures(5, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"omega": (0.5, 0.25)},
        {"omega": (0, 0.5, 1)},
        {"psi": -1},
        {"nu": 2},
        {"nu": "high"},
        {"nu": float("nan")},
        {"nu": 0.1234567},
        {"num_factors": 0},
        {"num_factors": 5},
        {"num_factors": 2.5},
        {"num_factors": 2.0},
        {"num_factors": np.array([2, 3])},
        {"seed": -1},
        {"seed": "now"},
        {"count": -1},
        {"count": 1.5},
    ],
    ids=str,
)
def test_bad_arguments(arguments):
    with pytest.raises(EinlinearError):
        el.sample_structures(**({"count": 1} | arguments))


@pytest.mark.parametrize(
    "arguments", [{"denominator": 0}, {"denominator": 60}, {"denominator": "4"}]
)
def test_bad_grids(arguments):
    with pytest.raises(EinlinearError, match=r"denominator|points"):
        el.grid_structures(**arguments)
