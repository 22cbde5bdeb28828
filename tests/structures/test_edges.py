import pytest
from hypothesis import given
from hypothesis import strategies as st

from einlinear import EinlinearError
from einlinear.structures.edges import all_cuts, all_edges, cut, edge_order, normal_edge, touched


@pytest.mark.parametrize(("num_factors", "count"), [(1, 2), (2, 7), (3, 18), (4, 41)])
def test_number_of_edges(num_factors, count):
    edges = all_edges(num_factors)
    assert len(edges) == len(set(edges)) == count
    ranks = 2**num_factors - 1 - num_factors
    assert count == 2 * (2**num_factors - 1) + ranks


def test_edges_of_two_factors_are_in_the_papers_order():
    assert all_edges(2) == ("XA", "XB", "XAB", "YA", "YB", "YAB", "AB")


def test_three_factors_have_the_edge_that_the_paper_forgot():
    assert {"AB", "AC", "BC", "ABC"} <= set(all_edges(3))


@given(st.sampled_from(all_edges(4)), st.randoms(use_true_random=False))
def test_an_edge_has_one_spelling(edge, random):
    nodes = list(edge)
    random.shuffle(nodes)
    assert normal_edge("".join(nodes)) == edge


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("XY", "both X and Y"),
        ("XAY", "both X and Y"),
        ("XAA", "a node twice"),
        ("A", "fewer than two"),
        ("", "fewer than two"),
        ("xa", "unknown node 'a'"),
        ("XQ", "too many factors"),
        (3, "named 3"),
    ],
)
def test_what_is_no_edge(name, problem):
    with pytest.raises(EinlinearError, match=problem):
        normal_edge(name)


def test_sorting_puts_the_input_first():
    mixed = ["AB", "YAB", "XAB", "YA", "XB"]
    assert sorted(mixed, key=edge_order) == ["XB", "XAB", "YA", "YAB", "AB"]


def test_cut_of_the_paper():
    edges = all_edges(2)
    assert cut(edges, "") == ("XA", "XB", "XAB")
    assert cut(edges, "A") == ("XB", "XAB", "YA", "YAB", "AB")
    assert cut(edges, "AB") == ("YA", "YB", "YAB")
    assert len(all_cuts(edges)) == 4


@given(st.integers(1, 4), st.data())
def test_a_step_touches_the_factor_and_the_tensor_and_nothing_else(num_factors, data):
    edges = all_edges(num_factors)
    order = "".join(data.draw(st.permutations("ABCD"[:num_factors])))
    for i, factor in enumerate(order):
        expected = {edge for edge in edges if factor in edge} | set(cut(edges, order[:i]))
        assert set(touched(edges, order[:i], factor)) == expected
