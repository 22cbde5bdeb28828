import time
import warnings
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from cases import PAPER_THETAS, STRUCTURES, structures
from einlinear import EinlinearError, Structure


@given(structures())
def test_parse_is_the_inverse_of_str(s):
    assert el.parse(str(s)) == s


@pytest.mark.parametrize("name", [n for n in STRUCTURES if " " not in n and n != "generic"])
def test_names_with_arguments(name):
    assert el.parse(name) == STRUCTURES[name]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("btt", el.btt()),
        ("BTT()", el.btt()),
        ("  low-rank ( rank = 64 ) ", el.low_rank(rank=64)),
        ("low_rank(rank_exponent=0.5)", el.low_rank()),
        ("low_rank(rank = d / 8)", el.low_rank(rank="d/8")),
        ("XA^1 YB^1 AB:d/8", el.low_rank(rank="d/8")),
        ("theta(1, 0, 0, 0, 1, 0, d/8)", el.low_rank(rank="d/8")),
        ("(1|0|0|0|1|0|d/8)", el.low_rank(rank="d/8")),
        ("theta(1/2,0,1/2,0,1/2,1/2,0)", el.monarch()),
        ("theta(.5, 0, .5, 0, .5, .5, 4)", el.btt(rank=4)),
        ("(0.5|0|0.5|0|0.5|0.5|0)", el.monarch()),
        ("0.5|0|0.5|0|0.5|0.5|0", el.monarch()),
        ("XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:4", el.btt(rank=4)),
        ("AB:1,BAY^1/2, YB^0.5\nXA^1/2\tXBA^1/2", el.btt()),
    ],
)
def test_forms(text, meaning):
    assert el.parse(text) == meaning


@pytest.mark.parametrize("theta", PAPER_THETAS)
def test_original_form_with_two_decimals_is_read_exactly(theta):
    text = "(" + "|".join(f"{float(value):.2f}" for value in theta) + ")"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert el.parse(text).theta == theta
    has_thirds = any(Fraction(value).denominator == 3 for value in theta)
    assert bool(caught) == has_thirds
    if has_thirds:
        assert "1/3" in str(caught[0].message)


def test_thirds_cut_off_instead_of_rounded():
    with pytest.warns(UserWarning, match="0.33 as 1/3, 0.66 as 2/3"):
        s = el.parse("(0.33|0.33|0.33|0.33|0.66|0|0)")
    assert s.theta == (Fraction(1, 3),) * 4 + (Fraction(2, 3), 0, 0)


def test_what_is_no_third_is_left_alone():
    assert el.parse("(0.3|0|0.7|0|0.5|0.5|0)")["XA"] == Fraction(3, 10)
    # 0.33 is near a third, but its side would no longer sum to 1.
    assert el.parse("(0.33|0.25|0.42|0|1|0|0)")["XA"] == Fraction(33, 100)


def test_only_the_original_form_is_snapped():
    with pytest.raises(EinlinearError, match="write a third as 1/3"):
        el.parse("XA^0.33 XB^0.33 XAB^0.33 YA^1")


BAD = [
    "",
    "   ",
    "btt(rank=0)",
    "btt(rank=-1)",
    "btt(rank=two)",
    "btt(2)",
    "btt(rank=2,rank=3)",
    "btt(blocks=2)",
    "dense(rank=2)",
    "butterfly",
    "bttt",
    "XA",
    "XA^1",
    "XA^1 YA^1 XY^1",
    "XA^1 YA^1 AB:0",
    "XA^1 YA^1 AB:2.5",
    "XA^1 YA^1 AB^-1/2",
    "XA^nan YA^1",
    "XA^1/0 YA^1",
    "XA^1e999999999 YA^1",
    "XA^" + "9" * 5000 + " YA^1",
    "theta(1,2,3)",
    "theta",
    "theta(a,b,c,d,e,f,g)",
    "(1|0)",
    "|",
    "(0.5|0|0.4|0|0.5|0.5|0)",
    "(0.33|0|0.67",
    "((1|0|0|1|0|0|0))",
    "XA^1 YA^1 " * 50,
    "XA^\u0661 YA^1",
]


@pytest.mark.parametrize("text", BAD)
def test_malformed_text_is_an_error_with_a_remedy(text):
    with pytest.raises(EinlinearError) as caught:
        el.parse(text)
    assert caught.value.fix
    assert len(str(caught.value)) < 7000


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("bttt", "'btt'"),
        ("monarc", "'monarch'"),
        ("XA", "EDGE\\^exponent"),
        ("low_rank(0.5)", "rank_exponent=1/2"),
        ("btt(rank=1/2)", "rank_exponent=1/2"),
        ("XA^1 YB^1 AB:1/2", "AB\\^1/2"),
    ],
)
def test_the_remedy_is_what_was_meant(text, hint):
    with pytest.raises(EinlinearError, match=hint):
        el.parse(text)


def test_only_text_is_parsed():
    with pytest.raises(EinlinearError, match="NoneType"):
        el.parse(None)


GRAMMAR = st.lists(
    st.sampled_from(
        [*"XYABCDF^:|(),= /.-+0123456789", "btt", "theta", "rank", "low_rank", "1/2", "XA^", "YA^1"]
    ),
    max_size=30,
).map("".join)


@pytest.mark.no_cover
@settings(max_examples=600)
@given(st.one_of(st.text(max_size=60), GRAMMAR))
def test_any_text_is_a_structure_or_an_error(text):
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            s = el.parse(text)
        except EinlinearError:
            pass
        else:
            assert isinstance(s, Structure)
            assert el.parse(str(s)) == s
    assert time.perf_counter() - start < 5, "parsing must not hang on any text"
