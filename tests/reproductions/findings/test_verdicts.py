"""Verdicts: an interval against a claim, and how many runs would resolve it."""

from math import exp, inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from einlinear.reproductions.findings.verdicts import (
    SAME,
    Ratio,
    any_of,
    judge,
    overall,
    runs_in_words,
)


def ratio(value, low, high):
    return Ratio("a", "b", value, low, high)


@pytest.mark.parametrize(
    ("ends", "sense", "bound", "verdict"),
    [
        ((1.2, 1.1, 1.3), "more", None, "reproduced"),
        ((0.8, 0.7, 0.9), "more", None, "contradicted"),
        ((1.1, 0.9, 1.3), "more", None, "not resolved"),
        ((0.8, 0.7, 0.9), "less", None, "reproduced"),
        ((1.2, 1.1, 1.3), "less", None, "contradicted"),
        ((0.9, 0.7, 1.1), "less", None, "not resolved"),
        ((1.2, 1.1, 1.3), "more", 1.4, "contradicted"),
        ((1.0, 0.9, 1.1), "same", None, "reproduced"),
        ((1.6, 1.4, 1.8), "same", None, "contradicted"),
        ((0.5, 0.4, 0.6), "same", None, "contradicted"),
        ((1.1, 0.9, 1.4), "same", None, "not resolved"),
        ((1.1, 1.1, inf), "more", None, "not resolved"),
    ],
)
def test_the_whole_interval_decides(ends, sense, bound, verdict):
    assert judge(ratio(*ends), sense, bound).verdict == verdict


values = st.floats(-1.5, 1.5)
widths = st.floats(0.01, 1.5)


@given(values, widths, st.sampled_from(["more", "less", "same"]))
def test_that_many_runs_resolve_it(value, half, sense):
    """With the interval that so many runs would give, the verdict is no longer open."""
    judged = judge(ratio(exp(value), exp(value - half), exp(value + half)), sense)
    apart = log(SAME) - abs(value) if sense == "same" else value
    if judged.verdict != "not resolved":
        assert judged.more_runs == 1
    elif abs(apart) > 0.01:
        narrow = 0.999 * half / judged.more_runs**0.5
        again = ratio(exp(value), exp(value - narrow), exp(value + narrow))
        assert judge(again, sense).verdict != "not resolved"
        wide = 1.01 * half / judged.more_runs**0.5
        if judged.more_runs > 1.1:
            short_of = ratio(exp(value), exp(value - wide), exp(value + wide))
            assert judge(short_of, sense).verdict == "not resolved"


def test_all_parts_must_agree_and_one_can_contradict():
    good, bad = (judge(ratio(v, 0.9 * v, 1.1 * v), "more") for v in (2.0, 0.5))
    unclear = judge(ratio(1.0, 0.9, 1.1), "more")
    assert overall([good, good]) == "reproduced"
    assert overall([good, unclear]) == "not resolved"
    assert overall([good, unclear, bad]) == "contradicted"


def test_one_reading_of_a_claim_is_enough():
    good, bad = (judge(ratio(v, 0.9 * v, 1.1 * v), "more") for v in (2.0, 0.5))
    unclear = judge(ratio(1.0, 0.9, 1.1), "more")
    assert any_of([bad, good]) == "reproduced"
    assert any_of([bad, unclear]) == "not resolved"
    assert any_of([bad, bad]) == "contradicted"


def test_numbers_of_runs_in_words():
    few, many = (judge(ratio(v, v / 1.3, v * 1.3), "more") for v in (1.15, 1.001))
    assert runs_in_words(few) == "about 4 times the runs would resolve it"
    assert runs_in_words(many) == "too close to the bound for more seeds to resolve"
    assert runs_in_words(judge(ratio(1.1, nan, nan), "more")) == "no interval"
