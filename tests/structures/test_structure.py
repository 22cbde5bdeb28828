import copy
import math
import pickle
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from cases import HALF, PAPER_THETAS, STRUCTURES, structures
from einlinear import EinlinearError, Structure
from einlinear.structures.values import Share


def test_theta_and_edges_say_the_same():
    theta = (HALF, 0, HALF, 0, HALF, HALF, 4)
    same = Structure.from_edges({"XA": "1/2", "XAB": "1/2", "YB": "1/2", "YAB": "1/2", "AB": 4})
    assert Structure.from_theta(theta) == same
    assert same.theta == theta
    assert same.num_factors == 2
    assert same.edges == (
        ("XA", HALF),
        ("XAB", HALF),
        ("YB", HALF),
        ("YAB", HALF),
        ("AB", 4),
    )


@pytest.mark.parametrize("theta", PAPER_THETAS)
def test_theta_round_trip(theta):
    assert Structure.from_theta(theta).theta == theta


@given(structures())
def test_equal_by_meaning_however_it_is_spelled(s):
    spelled = {edge[::-1]: value for edge, value in reversed(s.edges)} | {"FE": 0}
    again = Structure.from_edges(spelled)
    assert again == s
    assert hash(again) == hash(s)


@given(structures())
def test_survives_copy_and_pickle(s):
    assert copy.deepcopy(s) == s
    assert pickle.loads(pickle.dumps(s)) == s


def test_another_exponent_is_another_structure():
    assert el.btt(rank=2) != el.btt(rank=3)
    assert el.btt(rank_exponent=HALF) != el.btt()
    assert el.monarch() == el.btt(rank=1)


def test_item_is_the_exponent_and_zero_for_an_absent_edge():
    s = el.btt(rank=4)
    assert (s["XA"], s["BA"], s["XB"]) == (HALF, 4, 0)
    assert s.growth["AB"] == 0
    with pytest.raises(EinlinearError, match="both X and Y"):
        s["XY"]


@given(
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
)
def test_floats_that_sum_to_one_up_to_rounding_are_accepted(at_x, at_y):
    x, y = np.array(at_x) / sum(at_x), np.array(at_y) / sum(at_y)
    s = Structure.from_theta([*x, *y, 0])
    for edges, given_values in ((("XA", "XB", "XAB"), x), (("YA", "YB", "YAB"), y)):
        assert sum(s[e] for e in edges) == 1
        for edge, value in zip(edges, given_values, strict=True):
            assert abs(float(s[edge]) - value) < 1e-5


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_structures_of_floats_survive_their_text(weights):
    x = [w / sum(weights) for w in weights]
    s = Structure.from_theta([*x, *reversed(x), weights[0]])
    assert el.parse(str(s)) == s
    assert all(value.denominator <= 10**12 for _, value in s.edges)


def test_rounding_is_taken_up_by_the_largest_float():
    x = [0.5773502691896258, 0.19449226482417137, 0.2281574659862028]
    s = Structure.from_theta([*x, 1, 0, 0, 0])
    small = [Fraction(194492, 10**6), Fraction(228157, 10**6)]
    assert (s["XB"], s["XAB"], s["XA"]) == (*small, 1 - sum(small))
    mixed = Structure.from_edges(
        {"XA": Fraction(1, 3), "XB": 0.2222222222, "XC": 0.4444444444, "YA": 1}
    )
    assert mixed["XA"] == Fraction(1, 3)
    assert sum(value for edge, value in mixed.edges if "X" in edge) == 1


@pytest.mark.parametrize(
    "edges",
    [
        {"XA": "1", "XB": "1/1000000", "XAB": 0.0, "YA": 1},
        {"XA": "999999/1000000", "XB": 0.0, "YA": 1},
    ],
)
def test_no_exponent_is_invented_to_mend_a_sum(edges):
    with pytest.raises(EinlinearError, match="add up to"):
        Structure.from_edges(edges)


def test_reads_like_a_mapping():
    s = el.btt(rank=2)
    assert "BXA" in s
    assert "XB" not in s
    assert list(s) == ["XA", "XAB", "YB", "YAB", "AB"]
    assert Structure({"XA": 1, "YA": 1}) == el.dense()


@pytest.mark.parametrize("edges", ["btt", 5, None, ["XA"], [("XA", 1, 2)]])
def test_a_structure_of_nonsense(edges):
    with pytest.raises(EinlinearError, match="edges are given as"):
        Structure(edges)


@pytest.mark.parametrize("use", [el.taxonomy, lambda s: el.make_plan(s, 8, 8)])
@pytest.mark.parametrize("thing", ["btt", None, 3])
def test_what_needs_a_structure_says_so(use, thing):
    with pytest.raises(EinlinearError, match="structure is given as"):
        use(thing)


def test_numbers_beyond_all_bounds():
    for make in (
        lambda: el.low_rank(rank=10**10),
        lambda: el.low_rank(rank=10**5000),
        lambda: el.low_rank(rank_exponent=Fraction(1, 10**20)),
        lambda: el.make_plan(el.dense(), 10**5000, 2),
    ):
        with pytest.raises(EinlinearError):
            make()
    assert el.parse(str(el.low_rank(rank=10**9))) == el.low_rank(rank=10**9)


def test_a_float_third_is_a_third():
    assert Structure.from_theta((1 / 3, 0, 2 / 3, 0, 1, 0, 0))["XA"] == Fraction(1, 3)
    assert Structure.from_theta(np.float32([0.5, 0, 0.5, 0, 1, 0, 0]))["XA"] == HALF
    assert el.low_rank(rank=np.int64(8))["AB"] == 8


# --- canonical ---


def relabelled(s, order):
    names = dict(zip(s.factors, order, strict=True))
    edges = {"".join(names.get(n, n) for n in edge): value for edge, value in s.edges}
    return Structure.from_edges(edges)


@given(structures(), st.data())
def test_canonical_is_one_for_all_names_of_the_factors(s, data):
    order = data.draw(st.permutations("ABCDEF"))[: s.num_factors]
    other = relabelled(s, order)
    assert other.canonical() == s.canonical()
    assert s.canonical().canonical() == s.canonical()
    assert s.canonical().factors == tuple("ABCDEF"[: s.num_factors])


@given(structures())
def test_canonical_is_a_relabelling(s):
    names = "ABCDEF"[: s.num_factors]
    assert s.canonical() in {relabelled(s, order) for order in permutations(names)}


@given(structures(min_factors=2, max_factors=2))
def test_canonical_meets_the_papers_condition(s):
    c = s.canonical().growth
    xa, xb, ya, yb = (c.get(edge, 0) for edge in ("XA", "XB", "YA", "YB"))
    assert min(xa, yb) >= min(ya, xb)


def test_of_equals_the_one_with_the_largest_first_edges_is_taken():
    s = el.parse("XA^1/3 XB^2/3 YA^1/3 YB^2/3")
    assert s.canonical() == el.parse("XA^2/3 XB^1/3 YA^2/3 YB^1/3")


def test_constants_of_equal_powers_add_up():
    # Two steps of the same power, with and without the factor 2, against one with 2 alone.
    s = el.parse("XAC^1 YC:2 YAB^1 AB^1/6").canonical()
    assert [step.factor for step in el.make_plan(s, 2**16, 2**16).steps] == ["A", "B", "C"]


@pytest.mark.parametrize("name", STRUCTURES)
def test_named_structures_are_their_own_representatives(name):
    assert STRUCTURES[name].canonical() == STRUCTURES[name]


# --- bad input ---


def test_error_says_what_rule_and_fix():
    with pytest.raises(EinlinearError) as caught:
        el.parse("XA^1/2 XAB^2/5 YB^1")
    assert str(caught.value) == (
        "the exponents at X add up to 9/10 in XA^1/2 XAB^2/5 YB^1\n"
        "  rule: each side of the layer must use its whole width: the sum is 1\n"
        "  fix:  add 1/10 to one of XA, XAB; write a third as 1/3, not 0.33"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_named_fix_mends_it():
    with pytest.raises(EinlinearError, match="take 1/4 from one of YA, YB"):
        Structure.from_edges({"XA": 1, "YA": 0.5, "YB": 0.75})
    assert Structure.from_edges({"XA": 1, "YA": 0.5, "YB": 0.5})


@pytest.mark.parametrize(
    "edges",
    [
        {},
        {"XA": 1},
        {"XY": 1},
        {"XA": -0.5, "YA": 1},
        {"XA": math.nan, "YA": 1},
        {"XA": math.inf, "YA": 1},
        {"XA": Fraction(3, 2), "YA": 1},
        {"XA": "2", "YA": 1},
        {"XA": "1/0", "YA": 1},
        {"XA": "nan", "YA": 1},
        {"XA": "", "YA": 1},
        {"XA": None, "YA": 1},
        {"XA": True, "YA": 1},
        {"XA": 1j, "YA": 1},
        {"XA": [1], "YA": 1},
        {"XA": -2, "YA": 1},
        {"XA": 16, "YA": 1},
        {"XAB": 1, "XBA": 0, "YA": 1},
        {"XA": 0.33, "XB": 0.33, "XAB": 0.33, "YA": 1},
        {"XABCDEFG": 1, "YA": 1},
        {1: 1, "YA": 1},
    ],
)
def test_bad_edges(edges):
    with pytest.raises(EinlinearError) as caught:
        Structure.from_edges(edges)
    assert caught.value.what
    assert caught.value.rule
    assert caught.value.fix


@pytest.mark.parametrize("theta", [(1, 0, 0), "1010101", 7, None, (1,) * 8])
def test_bad_theta(theta):
    with pytest.raises(EinlinearError, match="theta"):
        Structure.from_theta(theta)


def test_theta_of_three_factors():
    with pytest.raises(EinlinearError, match="A, B, C"):
        _ = el.btt(num_factors=3).theta
    assert el.dense().theta == (1, 0, 0, 1, 0, 0, 0)


def test_a_share_of_the_width_grows_with_it():
    share = el.low_rank(rank="d/8")
    assert (share["AB"], str(share)) == (Share(8), "XA^1 YB^1 AB:d/8")
    assert share.growth == {"XA": 1, "YB": 1, "AB": 1}
    assert share != el.low_rank(rank_exponent=1)
    assert share != el.low_rank(rank=8)
    assert el.Structure(share.edges) == el.Structure.from_edges(dict(share.edges)) == share
    # Eight experts of low rank have the parameters of two dense layers, and two active ones cost
    # half of one: multiply-adds of a square layer are 2 d²/8.
    for width, rank in ((64, 8), (1024, 128), (100, 13), (8, 1), (3, 1)):
        plan = el.make_plan(share, width, width)
        assert plan.sizes["AB"] == rank
        assert (plan.macs, plan.params) == (2 * width * rank, 2 * width * rank)
    assert el.make_plan(share, 64, 256).sizes["AB"] == 8
    assert el.taxonomy(share) == el.taxonomy(el.low_rank(rank_exponent=1))


def test_a_share_of_the_width_is_that_of_an_edge_between_factors():
    with pytest.raises(EinlinearError) as caught:
        el.Structure.from_edges({"XA": "d/2", "XB": 1, "YB": 1})
    assert "XA has the size d/2" in str(caught.value)
    assert "between factors" in str(caught.value)


def test_canonical_forms_of_shares_do_not_depend_on_names():
    edges = {"XA": "1/2", "XB": "1/2", "YC": 1, "AC": "d/8", "BC": "d/4"}
    swapped = {"XB": "1/2", "XA": "1/2", "YC": 1, "BC": "d/8", "AC": "d/4"}
    one, other = (el.Structure.from_edges(e).canonical() for e in (edges, swapped))
    assert one == other
    assert {one["AB"], one["AC"], one["BC"]} >= {Share(4), Share(8)}
