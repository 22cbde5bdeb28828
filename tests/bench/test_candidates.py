from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.bench.candidates import cheap_structures, check_flops_share
from einlinear.errors import EinlinearError


@given(st.integers(1, 600), st.integers(1, 600), st.sampled_from([0.02, 0.1, 0.25, 0.5, 1.0]))
def test_every_candidate_is_cheap_and_another_layer(d_in, d_out, share):
    texts = cheap_structures(d_in, d_out, share)
    plans = [el.make_plan(el.parse(text), d_in, d_out) for text in texts]
    for plan in plans:
        assert plan.macs <= share * d_in * d_out
        assert plan.params <= share * d_in * d_out
    assert len({(plan.equation, *plan.factor_shapes.values()) for plan in plans}) == len(plans)


def test_the_list_at_a_usual_width():
    texts = set(cheap_structures(1024, 1024, 0.25))
    assert {"btt", "btt(rank=2)", "btt(rank=4)", "monarch(num_factors=3)", "kronecker"} <= texts
    assert {"low_rank", "low_rank(rank=d/8)", "low_rank(rank=d/16)"} <= texts
    assert "btt(rank_exponent=1/4)" not in texts  # 6/16 of dense
    assert "btt(rank_exponent=1/4)" in cheap_structures(1024, 1024, 0.4)


def test_the_largest_rank_that_fits_is_measured_too():
    """At width 16384 rank r costs 2 r / 128 of dense, so a quarter allows 16."""
    texts = cheap_structures(16384, 16384, 0.25)
    assert {"btt(rank=16)", "tensor_train(rank=16)"} <= set(texts)
    assert not {"btt(rank=8)", "btt(rank=32)"} & set(texts)


@pytest.mark.parametrize("share", [1, 0.5, Fraction(1, 3)])
def test_shares(share):
    assert check_flops_share(share) == float(share)


@pytest.mark.parametrize("share", [0, -1, 1.01, float("nan"), float("inf"), True, "a", None])
def test_shares_out_of_range(share):
    with pytest.raises(EinlinearError, match="above 0 and at most 1"):
        check_flops_share(share)
