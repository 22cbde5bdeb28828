"""Every reader of files meets every kind of damage, in small form: see tests/fuzz.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import TARGETS
from fuzz import run as run_input
from kit.damage import READERS, check, damage_file


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damage_is_an_error_and_nothing_worse(reader, tmp_path):
    @settings(max_examples=12, derandomize=True)
    @given(st.randoms(use_true_random=False))
    def run(random):
        data, _ = damage_file(reader, random)
        check(reader, data, tmp_path)

    check(reader, reader.files()[reader.damaged], tmp_path)
    assert reader.read(tmp_path) is not None
    run()


@pytest.mark.parametrize("target", TARGETS)
def test_odd_arguments_are_an_error_and_nothing_worse(target, tmp_path):
    for seed in range(12):
        run_input(target, f"test {seed}", tmp_path)
