"""Values of JSON by the types of dataclasses. Records are tested in test_record.py."""

from dataclasses import dataclass
from math import inf, nan
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from einlinear.files.fields import typed


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    rate: float
    loss: float | None
    inner: tuple[Inner, ...]
    more: dict[str, Any]


RIGHT = {
    "kind": "a",
    "rate": 1,
    "loss": None,
    "inner": [{"name": "x", "sizes": [0, 10**300]}],
    "more": {"k": [None]},
}


def test_the_right_value():
    made = typed(Outer, RIGHT, "it")
    assert made == Outer("a", 1.0, None, (Inner("x", (0, 10**300)),), {"k": [None]})
    assert type(made.rate) is float


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "c"}, "it.kind is 'c', not 'a' or 'b'"),
        ({"kind": ["a"]}, "it.kind is ['a'], not 'a' or 'b'"),
        ({"rate": True}, "it.rate is True, not a finite number"),
        ({"rate": "1"}, "it.rate is '1', not a finite number"),
        ({"rate": None}, "it.rate is None, not a finite number"),
        ({"loss": nan}, "it.loss is nan, not a finite number"),
        ({"loss": -inf}, "it.loss is -inf, not a finite number"),
        ({"inner": {}}, "it.inner is {}, not a list"),
        ({"inner": [3]}, "it.inner[0] is 3, not an object"),
        ({"inner": [{"name": "x"}]}, "it.inner[0] lacks sizes"),
        ({"inner": [{"name": "x", "sizes": [1, -1]}]}, "it.inner[0].sizes[1] is -1, not a whole"),
        ({"inner": [{"name": "x", "sizes": [1, 2, 1.0]}]}, "it.inner[0].sizes[2] is 1.0, not a"),
        ({"more": []}, "it.more is [], not an object"),
        ({"colour": 1}, "it has a field 'colour'"),
    ],
)
def test_wrong_values(change, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        typed(Outer, RIGHT | change, "it")
    assert str(caught.value).startswith(words)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(list(RIGHT)), inner)
    ),
)


@given(st.sampled_from(list(RIGHT)), ANY)
def test_any_value_is_right_or_a_short_error(name, value):
    said = ""
    try:
        typed(Outer, RIGHT | {name: value}, "it")
    except ValueError as error:
        said = str(error)
    assert len(said) < 300
