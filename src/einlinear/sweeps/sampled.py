"""Sampled structures of a study: a table in the place of a list of structures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from einlinear.errors import EinlinearError, did_you_mean, quote

_PLACE, _PLURAL = "structure", "structures"
_COUNT = "sample"
_ARGUMENTS = {_COUNT: "count", "factors": "num_factors"}  # all others have the same name
_KEYS = (_COUNT, "omega", "psi", "nu", "factors", "seed")
_EXAMPLE = "give structure = { sample = 20, omega = 0, psi = 1, nu = [0.5, 0.7], factors = [2, 3] }"


def with_samples(settings: object, source: str) -> Any:
    """Settings of a grid in which the structures that a table samples stand in its place.

    The table may also be one of the values of a list; a structure that is drawn twice is kept once.
    `structures = {...}` means the same as `structure = {...}`.
    """
    if not isinstance(settings, Mapping):
        return settings
    if isinstance(settings.get(_PLURAL), Mapping) and _PLACE not in settings:
        settings = {_PLACE if k == _PLURAL else k: value for k, value in settings.items()}
    if _PLACE not in settings:
        return settings
    value = settings[_PLACE]
    if isinstance(value, Mapping):
        return {**settings, _PLACE: _sampled(value, source)}
    if not isinstance(value, list | tuple) or not any(isinstance(v, Mapping) for v in value):
        return settings
    found: list[Any] = []
    for entry in value:
        if isinstance(entry, Mapping):
            found += [text for text in _sampled(entry, source) if text not in found]
        else:
            found.append(entry)
    return {**settings, _PLACE: found}


def _sampled(table: Mapping[str, Any], source: str) -> list[str]:
    from einlinear.structures.sampling import distinct_structures  # loads numpy

    for key in table:
        if key not in _KEYS:
            raise EinlinearError(
                what=f"unknown key {quote(key)} in {_PLACE} in {source}",
                rule=f"a table that samples structures has {', '.join(_KEYS)}",
                fix=did_you_mean(key, _KEYS, _EXAMPLE),
            )
    if _COUNT not in table:
        raise EinlinearError(
            what=f"{_PLACE} is {quote(dict(table))} in {source}",
            rule=f"a table in the place of a structure has {_COUNT}, the number of structures",
            fix=_EXAMPLE,
        )
    given = {_ARGUMENTS.get(name, name): value for name, value in table.items()}
    try:
        return [str(structure) for structure in distinct_structures(**given)]
    except EinlinearError as error:
        raise EinlinearError(
            what=f"{_in_keys(error.what)}, in {_PLACE} in {source}",
            rule=_in_keys(error.rule),
            fix=_in_keys(error.fix),
        ) from error


def _in_keys(text: str) -> str:
    """A message as a file spells it: sample for count, nu = [0.5, 0.7] for nu=(0.5, 0.7)."""
    for key, name in _ARGUMENTS.items():
        text = re.sub(rf"\b{name}\b", key, text)
    text = re.sub(r"=\((\S+, \S+)\)", r"=[\1]", text)
    return re.sub(rf"\b({'|'.join(_KEYS)})=", r"\1 = ", text)
