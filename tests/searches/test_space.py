"""The candidates of a search: listed, sampled, each once."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from einlinear.errors import EinlinearError
from einlinear.searches.space import Candidate, SearchSpace, features_of, kernel_of, read_names


def test_dense_comes_first_and_every_candidate_once():
    space = SearchSpace(structures=("btt", "monarch", "dense", "low_rank"), sample=0)
    assert [candidate.label for candidate in space.candidates] == ["dense", "btt", "low_rank"]


def test_a_sample_lies_in_its_region_and_does_not_change():
    space = SearchSpace(structures=(), sample=12, omega=0, psi=1, nu=(0.3, 0.7), factors=(2, 3))
    assert space == SearchSpace(
        structures=(), sample=12, omega=0, psi=1, nu=(0.3, 0.7), factors=(2, 3)
    )
    assert len(space.candidates) == 13
    for candidate in space.candidates[1:]:
        found = el.taxonomy(el.parse(candidate.structure))
        assert (found.omega, found.psi) == (0, 1)
        assert 0.3 <= found.nu <= 0.7
    assert {el.parse(c.structure).num_factors for c in space.candidates[1:]} == {2, 3}


def test_mixtures_and_aligned_heads_multiply_the_structures():
    space = SearchSpace(structures=("btt",), sample=0, num_experts=(0, 8), head_aligned=True)
    labels = [candidate.label for candidate in space.candidates]
    assert space.num_listed == len(labels)
    assert labels == [
        "dense",
        "dense moe 2/8",
        "btt",
        "btt head-aligned",
        "btt moe 2/8",
        "btt moe 2/8 head-aligned",
    ]


def test_structures_that_take_long_to_write_have_short_names():
    long = "XA^2/3 XAB^1/3 YA^53/120 YB^13/120 YAB^9/20 AB^1/30"
    listed = ("monarch", long, "tensor_train(rank_exponent=1/4)")
    space = SearchSpace(structures=listed, sample=2, factors=(2, 3), num_experts=(0, 4))
    names = ["dense", "monarch", "s1", "tensor_train(rank_exponent=1/4)", "s2", "s3"]
    plain = [candidate for candidate in space.candidates if not candidate.num_experts]
    assert [candidate.label for candidate in plain] == names
    assert {f"{name} moe 2/4" for name in names} < {c.label for c in space.candidates}
    assert space.candidates[-1].label == "s3 moe 2/4"
    for candidate in space.candidates:
        nameless = Candidate.of(el.RunConfig(**candidate.settings))
        assert nameless == candidate
        assert hash(nameless) == hash(candidate)
    assert plain[2].structure == long


def test_sampled_structures_keep_their_names_if_more_are_sampled():
    few, more = (SearchSpace(sample=count) for count in (3, 6))
    assert {c.label: c.key for c in few.candidates}.items() <= {
        c.label: c.key for c in more.candidates
    }.items()


def test_names_are_read_from_the_directory_of_a_search(tmp_path):
    space = SearchSpace(sample=2)
    assert read_names(tmp_path) == {}
    for text in ("{", "[]", "{}", '{"space": 3}', '{"space": {"sample": -1}}'):
        (tmp_path / "search.json").write_text(text)
        assert read_names(tmp_path) == {}
    (tmp_path / "search.json").write_text(json.dumps({"space": space.as_dict()}))
    assert read_names(tmp_path) == {c.key: c.label for c in space.candidates}


def test_a_candidate_is_found_in_the_config_of_its_run():
    for candidate in SearchSpace(sample=3, num_experts=(0, 4)).candidates:
        config = el.RunConfig(**candidate.settings)
        assert Candidate.of(config).key == candidate.key


def test_a_space_survives_its_file():
    space = SearchSpace(structures=("btt",), sample=5, omega=0, nu=(0.4, 0.6), num_experts=(0, 8))
    assert SearchSpace.from_dict(space.as_dict()) == space


def test_exponents_are_those_of_the_taxonomy():
    for text in ("btt", "low_rank", "kronecker", "btt(rank_exponent=1/4)"):
        found = el.taxonomy(el.parse(text))
        wanted = (float(found.omega), float(found.psi), float(found.nu))
        # At a finite width constants count too: btt has two factors, so twice d**1.5.
        assert Candidate(text).exponents == pytest.approx(wanted, abs=0.1)


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_the_kernel_is_a_covariance(seed):
    candidates = SearchSpace(structures=("btt",), sample=15, seed=seed).candidates
    kernel = kernel_of(candidates)
    assert np.allclose(np.diag(kernel), 1.0)
    assert np.linalg.eigvalsh(kernel).min() > 0.2
    assert not features_of(candidates)[0].any()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"structures": [], "sample": 0}, ["no candidate except dense", 'structures = ["btt"]']),
        ({"omga": 0}, ["unknown key 'omga'", "omega"]),
        ({"sample": -1}, ["sample is -1"]),
        ({"omega": 0, "psi": 1, "nu": [0.9, 0.1]}, ["nu"]),
        ({"structures": ["bbt"]}, ["bbt"]),
        ({"factors": [9]}, ["factors is 9"]),
        ({"factors": []}, ["factors is ()", "one value or more"]),
        ({"structures": None}, ["structures is None"]),
        ({"head_aligned": "yes"}, ["head_aligned is 'yes'"]),
    ],
)
def test_spaces_that_make_no_sense(space, words):
    with pytest.raises(EinlinearError) as raised:
        SearchSpace.from_dict(space)
    for word in words:
        assert word in str(raised.value)
