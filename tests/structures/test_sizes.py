import os
import subprocess
import sys
from fractions import Fraction
from itertools import product
from math import log, prod, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from cases import PAPER_THETAS, STRUCTURES, WIDTHS, structures
from einlinear import EinlinearError, Structure
from einlinear.structures.sizes import TOLERANCE, choose_sizes, rank_bound, share_width


def paddings(sizes, d_in, d_out):
    for side, width in (("X", d_in), ("Y", d_out)):
        yield prod(size for edge, size in sizes.items() if side in edge) / width - 1


def deviations(exponents, sizes, d_in, d_out):
    logs = {"X": log(d_in), "Y": log(d_out)}
    least = min(logs.values())
    for edge, size in sizes.items():
        yield abs(log(size) / logs.get(edge[0], least) - exponents[edge])


# The worst found over all thetas; docs/sizes.md quotes them.
WORST_PADDING, WORST_SMALL_PADDING = 0.0237, 0.0910


@pytest.mark.no_cover
@pytest.mark.parametrize("theta", PAPER_THETAS, ids=lambda theta: "|".join(map(str, theta)))
def test_every_width_has_close_sizes_and_little_padding(theta):
    s = Structure.from_theta(theta)
    exponents = {edge: float(exponent) for edge, exponent in s.edges}
    for d in range(16, 4097):
        for d_in, d_out in ((d, d), (d, 4 * d), (4 * d, d)):
            sizes = choose_sizes(s, d_in, d_out)
            padding = list(paddings(sizes, d_in, d_out))
            assert min(padding) >= 0, "nothing is cut off"
            if d >= 128:
                assert max(padding) <= WORST_PADDING <= 0.03
                assert max(deviations(exponents, sizes, d_in, d_out)) <= 0.15
            else:
                assert max(padding) <= WORST_SMALL_PADDING <= 0.10


def exhaustive(width, exponents):
    """All sizes with the smallest product that comes close, by trying everything."""
    for total in range(width, 2 * width + 1):
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        close = []
        for sizes in product(divisors, repeat=len(exponents)):
            if prod(sizes) == total:
                off = [log(n) / log(width) - e for n, e in zip(sizes, exponents, strict=True)]
                if max(map(abs, off)) < TOLERANCE:
                    close.append((sum(o * o for o in off), sizes))
        if close:
            return total, min(close)[0]
    return None


SIDES = [
    (0.5, 0.5),
    (1 / 3, 2 / 3),
    (0.25, 0.75),
    (0.5, 0.25, 0.25),
    (1 / 3, 1 / 3, 1 / 3),
    (0.1, 0.2, 0.7),
    (0.05, 0.95),
    (0.2, 0.2, 0.2, 0.4),
]


@pytest.mark.parametrize("exponents", SIDES)
def test_sizes_are_those_of_exhaustive_search(exponents):
    for width in range(16, 161):
        found = exhaustive(width, exponents)
        [(cost, sizes)] = share_width(width, exponents)
        if found is not None and found[0] <= width * 11 // 10:
            assert prod(sizes) == found[0]
            assert cost / 1e12 == pytest.approx(found[1], abs=1e-9)
        else:
            score = sqrt(cost / 1e12) + prod(sizes) / width
            assert score == pytest.approx(least_score(width, exponents), abs=1e-6)


def least_score(width, exponents):
    """The best sum of deviation and size of the padded width, by trying everything."""
    scores = []
    for total in range(width, width * 11 // 10 + 1):
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        for sizes in product(divisors, repeat=len(exponents)):
            if prod(sizes) == total:
                off = [log(n) / log(width) - e for n, e in zip(sizes, exponents, strict=True)]
                scores.append(sqrt(sum(o * o for o in off)) + total / width)
    return min(scores)


@given(st.integers(1, 5000), structures())
def test_sizes_multiply_to_at_least_the_width_and_fixed_ones_stay(width, s):
    sizes = choose_sizes(s, width, width)
    assert all(0 <= padding <= 1 for padding in paddings(sizes, width, width))
    for edge, value in s.edges:
        if isinstance(value, int):
            assert sizes[edge] == value


@given(st.integers(1, 400), st.sampled_from(SIDES))
def test_alternatives_come_best_first(width, exponents):
    ways = share_width(width, exponents, 8)
    assert [cost for cost, _ in ways] == sorted(cost for cost, _ in ways)
    assert ways[0] == share_width(width, exponents, 1)[0]
    assert len({prod(sizes) for _, sizes in ways}) == 1


def test_widths_in_common_use_need_no_padding():
    for s in (s for s in STRUCTURES.values() if s.num_factors <= 2):
        for width in range(64, 8193, 64):
            assert list(paddings(choose_sizes(s, width, width), width, width)) == [0, 0]


@pytest.mark.no_cover
@pytest.mark.parametrize("theta", PAPER_THETAS)
def test_full_rank_stays_full_rank(theta):
    s = Structure.from_theta(theta)
    if el.taxonomy(s).psi < 1:
        return
    for d in range(64, 4097, 64):
        for d_in, d_out in ((d, d), (d, 4 * d), (4 * d, d)):
            sizes = choose_sizes(s, d_in, d_out)
            # Three edges at a side, with a large prime in the width, leave no choice: 64 * 19, ...
            if len(sizes) < 6 or max(sizes.values()) ** 2 <= d:
                assert rank_bound(sizes) >= d
    if len(s.edges) < 6:
        for d in range(16, 2049):
            assert rank_bound(choose_sizes(s, d, d)) >= d


def test_alternatives_are_tried_for_the_rank():
    assert rank_bound(choose_sizes(Structure.from_theta(PAPER_THETAS[21]), 768, 768)) >= 768
    s = Structure.from_theta(PAPER_THETAS[1])
    short = [d for d in range(64, 3000, 5) if rank_bound(choose_sizes(s, d, 4 * d)) < d]
    assert len(short) <= 6, "of 588 widths; 26 with three alternatives, 78 with the best one only"


def test_monarch_at_768_is_of_full_rank():
    sizes = choose_sizes(el.monarch(), 768, 768)
    assert sorted(sizes.values()) == [24, 24, 32, 32]
    assert rank_bound(sizes) == 768


def test_fixed_sizes_leave_the_rest_to_the_exponents():
    s = Structure.from_edges({"XA": 1, "XAB": 12, "YB": "1/2", "YC": "1/2", "YAB": 3, "AB": 7})
    sizes = choose_sizes(s, 768, 768)
    assert sizes == {"XA": 64, "XAB": 12, "YB": 16, "YC": 16, "YAB": 3, "AB": 7}


def test_a_fixed_size_that_does_not_divide():
    with pytest.raises(EinlinearError) as caught:
        choose_sizes(el.parse("XA^1 XAB:7 YB^1"), 1024, 1024)
    assert "1024 at X is not a multiple of XAB:7" in caught.value.what
    assert "4, 8, 16" in caught.value.fix


def test_ranks_grow_with_the_smaller_width():
    assert choose_sizes(el.low_rank(rank_exponent=Fraction(1, 3)), 1000, 4000)["AB"] == 10


def test_sizes_do_not_depend_on_the_process():
    code = (
        "import sys; sys.path.insert(0, 'tests'); from cases import *\n"
        "from einlinear.structures.sizes import choose_sizes\n"
        "print([list(choose_sizes(s, *w).items()) for s in STRUCTURES.values() for w in WIDTHS])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    here = [list(choose_sizes(s, a, b).items()) for s in STRUCTURES.values() for a, b in WIDTHS]
    assert outputs == {f"{here}\n"}


def test_tiny_widths_are_padded_rather_than_left_without_rank():
    assert choose_sizes(el.monarch(), 7, 7) == dict.fromkeys(("XA", "XAB", "YB", "YAB"), 3)
    for d in range(1, 16):
        assert rank_bound(choose_sizes(el.monarch(), d, d)) >= d
