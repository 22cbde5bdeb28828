"""The paper's structures: all 23, each in the family that its taxonomy says."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from cases import PAPER_THETAS

STRUCTURES, FAMILIES = el.paper_structures(), el.paper_families()
NAMES = st.sampled_from(list(STRUCTURES))


def in_family(name):
    return [el.taxonomy(STRUCTURES[key]) for key, family in FAMILIES.items() if family == name]


def test_they_are_the_23_thetas():
    assert all(isinstance(structure, el.Structure) for structure in STRUCTURES.values())
    assert len(STRUCTURES) == len(PAPER_THETAS) == 23
    assert {structure.theta for structure in STRUCTURES.values()} == set(PAPER_THETAS)


def test_no_two_are_the_same_layer():
    assert len({structure.canonical() for structure in STRUCTURES.values()}) == 23


def test_each_has_a_family():
    assert list(FAMILIES) == list(STRUCTURES)
    assert Counter(FAMILIES.values()) == {
        "full-rank BTT": 7,
        "narrow BTT": 2,
        "BTT with rank": 6,
        "TT": 4,
        "low rank": 2,
        "generic": 2,
    }


@pytest.mark.parametrize(
    ("family", "omega", "psi", "nu"),
    [
        ("full-rank BTT", (0, 0), (1, 1), ("1/2", "3/4")),
        ("narrow BTT", (0, 0), ("1/2", "2/3"), ("1/4", "1/3")),
        ("BTT with rank", (0, 0), ("11/12", 1), ("7/12", "11/12")),
        ("TT", ("1/3", "1/2"), (1, 1), ("1/2", "11/12")),
        ("low rank", (0, 0), ("1/2", "3/4"), ("1/2", "3/4")),
        ("generic", ("1/4", "1/4"), (1, 1), ("1/2", "3/4")),
    ],
)
def test_a_family_lies_in_its_place(family, omega, psi, nu):
    found = in_family(family)
    for name, ends in (("omega", omega), ("psi", psi), ("nu", nu)):
        values = [getattr(taxonomy, name) for taxonomy in found]
        assert (min(values), max(values)) == tuple(map(Fraction, ends)), name
    assert not any(taxonomy.is_degenerate for taxonomy in found)


@given(NAMES)
def test_a_name_says_the_exponents(name):
    edges = STRUCTURES[name]
    numbers = [Fraction(word) for word in name.split() if word[0].isdigit()]
    if name.startswith("low rank"):
        assert numbers == [edges["AB"]]
    elif name.startswith("generic"):
        assert numbers == [edges["AB"]] * bool(edges["AB"])
    else:
        assert numbers == [edges["XA"], edges["YB"], *[edges["AB"]] * ("rank" in name)]
        assert ("rank" in name) == bool(edges["AB"])


@given(NAMES)
def test_each_is_read_back_from_its_text(name):
    assert el.parse(str(STRUCTURES[name])) == STRUCTURES[name]


def test_some_have_another_name():
    assert STRUCTURES["btt 1/2 1/2"] == el.monarch()
    assert STRUCTURES["btt 1/2 1/2 rank 1/4"] == el.btt(rank_exponent="1/4")
    assert STRUCTURES["kronecker 1/2 1/2"] == el.kronecker()
    assert STRUCTURES["tt 1/2 1/2 rank 1/4"] == el.tensor_train(rank_exponent="1/4")
    assert STRUCTURES["low rank 1/2"] == el.low_rank()


def test_what_is_returned_can_be_changed():
    el.paper_structures().clear()
    assert len(el.paper_structures()) == 23
