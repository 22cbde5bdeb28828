"""typed: a value read from JSON, checked against the type that a dataclass declares for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from einlinear.errors import quote

_MOST = sys.float_info.max


def typed(hint: Any, value: object, name: str) -> Any:
    """The value in the form of its type; a ValueError that says which field is wrong, and how.

    Dataclasses come from objects that hold all their fields and no others, tuples from lists. Whole
    numbers are 0 or more and other numbers finite, all within the range of a float; true and false
    are no numbers.

    Args:
        hint: the type, as `get_type_hints` gives it.
        value: what `json.loads` gave.
        name: of the field, for the error.
    """
    try:
        return _reader(hint)(value)
    except _WrongError as error:
        raise ValueError(f"{name}{error}") from None


def field_types(kind: type) -> Mapping[str, Any]:
    """The types of the fields of a dataclass, by name."""
    return _hints(kind)


_hints = cache(get_type_hints)


class _WrongError(Exception):
    """A value of another type. Its text grows by the name of every field on the way out."""


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """A function that gives a value in the form of a type. Made once: there are many values."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _object_reader(hint)
    if origin in (Union, UnionType):
        [kind] = [kind for kind in inner if kind is not NoneType]
        read = _reader(kind)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _list_reader(_reader(inner[0]))
    if origin is dict:
        return _dict_reader(_reader(inner[1]))
    if origin is Literal:
        noun = " or ".join(map(repr, inner))
        return _value_reader(lambda value: isinstance(value, str) and value in inner, noun)
    return _PLAIN[hint]


def _value_reader(is_right: Callable[[Any], bool], noun: str) -> Callable[[Any], Any]:
    def read(value: object) -> object:
        if is_right(value):
            return value
        raise _WrongError(f" is {quote(value)}, not {noun}")

    return read


def _read_float(value: object) -> float:
    kind = type(value)
    if (kind is float and isfinite(value)) or (kind is int and abs(value) <= _MOST):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise _WrongError(f" is {quote(value)}, not a finite number")


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    str: _value_reader(lambda value: isinstance(value, str), "a text"),
    int: _value_reader(
        lambda value: type(value) is int and 0 <= value <= _MOST, "a whole number of 0 or more"
    ),
    float: _read_float,
}


def _list_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(values: object) -> tuple[Any, ...]:
        if not isinstance(values, list | tuple):
            raise _WrongError(f" is {quote(values)}, not a list")
        found: list[Any] = []
        try:
            for value in values:
                found.append(read(value))
        except _WrongError as error:
            raise _WrongError(f"[{len(found)}]{error}") from None
        return tuple(found)

    return read_all


def _dict_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(values: object) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise _WrongError(f" is {quote(values)}, not an object")
        key = ""
        try:
            found = {}
            for key, value in values.items():
                found[key] = read(value)
        except _WrongError as error:
            raise _WrongError(f".{key}{error}") from None
        return found

    return read_all


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    readers = {name: _reader(hint) for name, hint in field_types(kind).items()}

    def read_all(values: object) -> Any:
        if not isinstance(values, Mapping):
            raise _WrongError(f" is {quote(values)}, not an object")
        if values.keys() != readers.keys():
            missing = [name for name in readers if name not in values]
            unknown = [name for name in values if name not in readers]
            text = f"lacks {missing[0]}" if missing else f"has a field {quote(unknown[0])}"
            raise _WrongError(f" {text}")
        name = ""
        try:
            found = {}
            for name, read in readers.items():
                found[name] = read(values[name])
        except _WrongError as error:
            raise _WrongError(f".{name}{error}") from None
        return kind(**found)

    return read_all
