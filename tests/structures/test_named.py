import pytest
from hypothesis import given

import einlinear as el
from cases import HALF, QUARTER, STRUCTURES, structures
from einlinear import EinlinearError, Structure
from einlinear.structures.named import named_call


def test_the_papers_examples():
    theta = Structure.from_theta
    assert el.low_rank(rank_exponent=HALF) == theta((1, 0, 0, 0, 1, 0, HALF))
    assert el.kronecker() == theta((HALF, HALF, 0, HALF, HALF, 0, 0))
    assert el.tensor_train(rank=3) == theta((HALF, HALF, 0, HALF, HALF, 0, 3))
    assert el.monarch() == theta((HALF, 0, HALF, 0, HALF, HALF, 0))
    assert el.btt(rank_exponent=QUARTER) == theta((HALF, 0, HALF, 0, HALF, HALF, QUARTER))


def test_dense_has_one_factor():
    assert el.dense().num_factors == 1
    assert el.kronecker(num_factors=1) == el.btt(num_factors=1) == el.dense()


@pytest.mark.parametrize("num_factors", [2, 3, 4, 5, 6])
def test_block_tensor_trains_share_no_parameters(num_factors):
    kinds = el.taxonomy(el.btt(num_factors=num_factors))
    assert (kinds.omega, kinds.psi, kinds.nu) == (0, 1, pytest.approx(1 / num_factors))


def test_ranks_join_neighbours():
    assert el.tensor_train(rank=2, num_factors=4)["BC"] == 2
    assert el.tensor_train(rank=2, num_factors=4)["AC"] == 0


def test_rank_one_is_no_edge():
    assert el.low_rank(rank=1) == Structure.from_edges({"XA": 1, "YB": 1})


@pytest.mark.parametrize(
    "make",
    [
        lambda: el.btt(rank=0),
        lambda: el.btt(rank=-1),
        lambda: el.btt(rank=2.5),
        lambda: el.btt(rank="d/1"),
        lambda: el.btt(rank="d/0"),
        lambda: el.btt(rank="8/d"),
        lambda: el.btt(rank="d/8", rank_exponent=0.5),
        lambda: el.btt(rank=True),
        lambda: el.btt(rank=2, rank_exponent=0.5),
        lambda: el.btt(rank_exponent=2),
        lambda: el.btt(rank_exponent=-0.1),
        lambda: el.btt(num_factors=0),
        lambda: el.btt(num_factors=7),
        lambda: el.kronecker(num_factors=2.0),
        lambda: el.low_rank(rank="64"),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(EinlinearError):
        make()


@pytest.mark.parametrize(
    ("structure", "call"),
    [
        (el.dense(), "dense()"),
        (el.low_rank(), "low_rank()"),
        (el.low_rank(3), "low_rank(rank=3)"),
        (el.low_rank("d/8"), "low_rank(rank=d/8)"),
        (el.btt(rank="d/16", num_factors=3), "btt(rank=d/16, num_factors=3)"),
        (el.monarch(), "monarch()"),
        (el.monarch(num_factors=3), "monarch(num_factors=3)"),
        (el.btt(rank_exponent="1/4", num_factors=3), "btt(rank_exponent=1/4, num_factors=3)"),
        (el.kronecker(num_factors=3), "kronecker(num_factors=3)"),
        (el.tensor_train(4), "tensor_train(rank=4)"),
        (Structure.from_edges({"XA": 1, "YB": 1}), "XA^1 YB^1"),
    ],
)
def test_the_call_that_makes_a_structure(structure, call):
    assert named_call(structure) == call


@pytest.mark.parametrize("structure", STRUCTURES.values())
def test_the_call_of_a_named_structure_means_it(structure):
    assert el.parse(named_call(structure)) == structure


@given(structures())
def test_the_call_of_any_structure_means_it(structure):
    assert el.parse(named_call(structure)) == structure
