"""Sums of structures: text, counts, exponents, and where they are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from cases import structures
from einlinear.structures.text import parse_structure

sums = st.lists(structures(max_factors=3), min_size=2, max_size=4).map(
    lambda terms: el.StructureSum(tuple(terms))
)


@given(sums)
def test_text_is_read_as_it_was_written(s):
    assert el.parse(str(s)) == s
    assert hash(el.parse(str(s))) == hash(s)


@given(sums, st.sampled_from([(16, 16), (12, 30), (7, 5)]))
def test_counts_are_those_of_the_terms(s, widths):
    plan = el.make_plan(s, *widths)
    plans = [el.make_plan(term, *widths) for term in s.terms]
    assert plan.params == sum(each.params for each in plans)
    assert plan.macs == sum(each.macs for each in plans)
    assert plan.rank == min(*widths, sum(each.rank for each in plans))
    assert (plan.d_in, plan.d_out) == widths
    assert plan == el.make_plan(s, *widths)


@given(sums)
def test_the_fastest_growing_term_decides(s):
    found, own = el.taxonomy(s), [el.taxonomy(term) for term in s.terms]
    assert found.nu == max(each.nu for each in own)
    assert found.psi == max(each.psi for each in own)
    params = max(1 + each.nu - each.omega for each in own)
    assert found.omega == 1 + found.nu - params


def test_the_contract():
    s = el.parse("low_rank(rank=32) + btt(rank=2)")
    assert s == el.low_rank(rank=32) + el.btt(rank=2)
    assert s.terms == (el.low_rank(rank=32), el.btt(rank=2))
    assert "low_rank(rank=32) + btt(rank=2)" in str(el.make_plan(s, 64, 64))


@pytest.mark.parametrize(
    "text",
    ["low_rank+btt", " low_rank  +  monarch()", "low_rank(rank=+2) + btt", "XA^1 YA^+1 + dense"],
)
def test_spaces_and_signs(text):
    assert len(el.parse(text).terms) == 2


def test_sums_within_sums_are_taken_apart():
    a, b, c = el.btt(), el.low_rank(rank=2), el.dense()
    assert (a + b) + c == a + (b + c) == el.StructureSum((a, b, c)) == el.StructureSum((a, b + c))
    assert a + b != b + a


@pytest.mark.parametrize("terms", [(), (el.btt(),), None, 3])
def test_too_few_terms(terms):
    with pytest.raises(el.EinlinearError, match=r"two or more structures[\s\S]*fix: "):
        el.StructureSum(terms)


@pytest.mark.parametrize("text", ["btt +", "+ btt", "btt + + btt", "btt + nonsense"])
def test_broken_texts(text):
    with pytest.raises(el.EinlinearError, match=r"rule: [\s\S]*fix: "):
        el.parse(text)


def test_only_structures_are_added():
    with pytest.raises(TypeError):
        el.btt() + 1
    with pytest.raises(TypeError):
        el.btt() + el.btt() + "btt"


@pytest.mark.parametrize(
    "use",
    [
        parse_structure,
        lambda s: el.moe(s, num_experts=4),
        lambda s: el.heads(4, s),
        lambda s: el.MoELinear(8, 8, structure=s, num_experts=4),
        lambda s: el.RunConfig(task="text", structure=s),
        lambda s: el.recommend(64, 64, structures=[s]),
    ],
)
def test_refused_where_a_single_structure_is_needed(use):
    with pytest.raises(el.EinlinearError, match=r"the sum XA[\s\S]*rule: [\s\S]*single"):
        use("low_rank(rank=2) + btt")
