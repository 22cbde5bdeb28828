"""typed: a value read from JSON, checked against the type that a dataclass declares for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from einlinear.errors import quote

_MOST = sys.float_info.max
_Reader = Callable[[Any], Any]


def typed(hint: Any, value: object, name: str) -> Any:
    """Convert a value to its type, or raise a ValueError that says which field is wrong, and how.

    The value is from `json.loads`, the type from `get_type_hints`. Dataclasses come from objects
    that hold all their fields and no others, tuples from lists. Whole numbers are 0 or more and
    other numbers finite, all within the range of a float; true and false are not numbers.
    """
    try:
        return _reader(hint)(value)
    except _WrongError as error:
        raise ValueError(f"{name}{error}") from None


_hints = cache(get_type_hints)


def field_types(kind: type) -> Mapping[str, Any]:
    """The types of the fields of a dataclass, by name."""
    return _hints(kind)


class _WrongError(Exception):
    """A value of another type. Each level that it passes prepends the name of its field."""


@cache
def _reader(hint: Any) -> _Reader:
    """A function that converts values to a type. Cached, since files hold many values."""
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


def _value_reader(
    is_right: Callable[[Any], bool], noun: str, kind: _Reader = lambda v: v
) -> _Reader:
    def read(value: object) -> object:
        if is_right(value):
            return kind(value)
        raise _WrongError(f" is {quote(value)}, not {noun}")

    return read


def _is_number(value: Any) -> bool:
    kind = type(value)
    return (kind is float and isfinite(value)) or (kind is int and abs(value) <= _MOST)


_PLAIN: dict[Any, _Reader] = {
    Any: lambda value: value,
    str: _value_reader(lambda value: isinstance(value, str), "a text"),
    bool: _value_reader(lambda value: isinstance(value, bool), "true or false"),
    int: _value_reader(
        lambda value: type(value) is int and 0 <= value <= _MOST, "a whole number of 0 or more"
    ),
    float: _value_reader(_is_number, "a finite number", float),
}


def _read_items(items: Iterable[tuple[object, _Reader, Any]], place: str) -> list[Any]:
    """Read values by keys; `place` shows a key in an error: "[{}]" or ".{}"."""
    found: list[Any] = []
    key: object = None
    try:
        for key, read, value in items:  # noqa: B007 - for the error
            found.append(read(value))
    except _WrongError as error:
        raise _WrongError(f"{place.format(key)}{error}") from None
    return found


def _list_reader(read: _Reader) -> _Reader:
    def read_list(values: object) -> tuple[Any, ...]:
        if not isinstance(values, list | tuple):
            raise _WrongError(f" is {quote(values)}, not a list")
        return tuple(_read_items(((k, read, v) for k, v in enumerate(values)), "[{}]"))

    return read_list


def _dict_reader(read: _Reader) -> _Reader:
    def read_dict(values: object) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise _WrongError(f" is {quote(values)}, not an object")
        items = _read_items(((k, read, v) for k, v in values.items()), ".{}")
        return dict(zip(values, items, strict=True))

    return read_dict


def _object_reader(kind: Any) -> _Reader:
    readers = {name: _reader(hint) for name, hint in field_types(kind).items()}

    def read_object(values: object) -> Any:
        if not isinstance(values, Mapping):
            raise _WrongError(f" is {quote(values)}, not an object")
        if values.keys() != readers.keys():
            missing = [name for name in readers if name not in values]
            unknown = [name for name in values if name not in readers]
            text = f"lacks {missing[0]}" if missing else f"has a field {quote(unknown[0])}"
            raise _WrongError(f" {text}")
        items = _read_items(((n, read, values[n]) for n, read in readers.items()), ".{}")
        return kind(**dict(zip(readers, items, strict=True)))

    return read_object
