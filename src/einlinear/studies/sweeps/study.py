"""Study: many runs as one value, grids of settings over a base, out of a file or code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from hashlib import sha256
from itertools import product
from math import prod
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from einlinear.errors import EinlinearError, quote
from einlinear.studies.config import RunConfig, toml_value
from einlinear.studies.config_file import read_config
from einlinear.studies.numbers import short

BUDGET = "flops"
"""What a grid or base may say instead of steps: FLOPs of a run, forward and backward."""

_MOST_RUNS = 100_000
_MOST_FLOPS = 1e30  # more than all computers of the world do in a century
_MOST_BITS = 4000  # JSON and TOML write no longer numbers
_KEYS = ("name", "base", "grid")
_FIELDS = tuple(field.name for field in fields(RunConfig))
_EXAMPLE = 'give [base] task = "text" and [grid] structure = ["dense", "btt"]'


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of a study: the settings of a run, whose steps a budget may decide.

    config: the run; of one step if a budget decides.
    """

    settings: Mapping[str, Any]
    flops: float | None
    config: RunConfig

    def with_steps(self, steps: int) -> RunConfig:
        """The run, of so many steps."""
        return _config({**self.settings, "steps": steps})


@dataclass(frozen=True, slots=True)
class Study:
    """Runs as grids over a base.

    Args:
        name: what readers call it.
        base: settings of all runs: fields of RunConfig, or `flops` in the place of steps.
        grids: each is a table of settings; one that is a list stands for each of its values, and
            all combinations are run. A combination that several grids have is run once.

    cells: all combinations, each once, in the order of the grids.
    """

    name: str
    base: Mapping[str, Any]
    grids: tuple[Mapping[str, Any], ...] = ({},)
    cells: tuple[Cell, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise _wrong("name", self.name, "a study has a name, which is a text", "give a text")
        _check_count(self.grids)
        object.__setattr__(self, "base", _plain_table("base", self.base))
        object.__setattr__(self, "grids", tuple(_plain_table("grid", g) for g in self.grids))
        for name, value in self.base.items():
            if isinstance(value, list) and not _is_one(name, value):
                rule = "base has one value for each setting, which all runs share"
                raise _wrong(f"{name} in base", value, rule, f"put {name} under [grid]")
        found = {json.dumps(settings, sort_keys=True): settings for settings in self._settings()}
        if not found:
            raise _wrong("grid", list(self.grids), "a study has one run or more")
        # All that is wrong is found before anything runs.
        object.__setattr__(self, "cells", tuple(map(_cell, found.values())))

    def _settings(self) -> Iterator[dict[str, Any]]:
        for grid in self.grids:
            axes = {name: _values(name, value) for name, value in grid.items()}
            for values in product(*axes.values()):
                chosen = dict(zip(axes, values, strict=True))
                # A budget in the grid takes the place of steps in the base, and the other way.
                settings = {k: v for k, v in self.base.items() if not _replaces(chosen, k)} | chosen
                yield settings

    @property
    def id(self) -> str:
        """A short name that follows from everything in the study."""
        return sha256(self.to_toml().encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """The study as a TOML text, which `load_study` reads."""
        lines = [f"name = {toml_value(self.name)}", "", "[base]", *_table(self.base)]
        for grid in self.grids:
            lines += ["", "[[grid]]", *_table(grid)]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """The study as `from_dict` reads it, as JSON has it."""
        return {"name": self.name, "base": self.base, "grid": list(self.grids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "a study") -> Study:
        """A study as its file has it: name, base, and one grid or a list of them."""
        if not isinstance(values, Mapping):
            raise _wrong(source, values, "a study is a table of settings")
        for key in values:
            if key not in _KEYS:
                close = get_close_matches(quote(key)[:40], [*_KEYS, *_FIELDS], 1, 0.5)
                place = "put it under [base] or [grid]" if key in (*_FIELDS, BUDGET) else None
                raise EinlinearError(
                    what=f"unknown key {quote(key)} in {source}",
                    rule=f"a study has {', '.join(_KEYS)}",
                    fix=place or (f"did you mean {close[0]!r}?" if close else _EXAMPLE),
                )
        grid = values.get("grid", {})
        grids = tuple(grid) if isinstance(grid, list | tuple) else (grid,)
        return cls(values.get("name", "study"), values.get("base", {}), grids)


def load_study(path: str | Path) -> Study:
    """The study in a .toml or .json file; its name is that of the file unless it says one."""
    path = Path(path)
    return Study.from_dict({"name": path.stem, **read_config(path)}, str(path))


def as_study(study: Study | Mapping[str, Any] | str | Path) -> Study:
    """A study from what users give: one, its settings, or a file."""
    if isinstance(study, Study):
        return study
    if isinstance(study, Mapping):
        return Study.from_dict(study)
    if isinstance(study, str | Path):
        return load_study(study)
    raise _wrong("study", study, "a study is a Study, a table of settings, or a file")


def _check_key(key: object) -> None:
    if key in _FIELDS or key == BUDGET:
        return
    close = get_close_matches(quote(key)[:40], [*_FIELDS, BUDGET], 1, 0.5)
    raise EinlinearError(
        what=f"unknown setting {quote(key)} in a study",
        rule=f"base and grid hold fields of RunConfig, or {BUDGET}",
        fix=f"did you mean {close[0]!r}?" if close else f"one of {', '.join(_FIELDS)}",
    )


def _check_count(grids: Iterable[Mapping[str, Any]]) -> None:
    """Refuse more runs than a sweep can hold, before any list is written out."""
    total = 0
    for grid in grids:
        sizes = {name: _length(name, value) for name, value in _items(grid)}
        total += prod(sizes.values())
        if total > _MOST_RUNS:
            longest = max(sizes, key=lambda name: sizes[name])
            raise EinlinearError(
                what=f"a study of {short(total)} runs or more: {longest} has "
                f"{short(sizes[longest])} values",
                rule=f"a study has at most {_MOST_RUNS:,} runs",
                fix=f"give {longest} fewer values, or make several studies",
            )


def _items(grid: object) -> Iterable[tuple[str, Any]]:
    return grid.items() if isinstance(grid, Mapping) else ()


def _length(name: str, value: object) -> int:
    """How many values a setting of a grid has, at least 1; also of a range that len cannot say."""
    if isinstance(value, list | tuple) and _is_one(name, value):
        return 1
    if isinstance(value, range):
        return max(1, -(-(value.stop - value.start) // value.step))
    return max(1, len(value)) if isinstance(value, list | tuple) else 1


def _plain_table(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file has them."""
    if not isinstance(values, Mapping):
        raise _wrong(place, values, "base and grids are tables of settings")
    for key in values:
        _check_key(key)
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """A value as a file has it; paths, ranges and numbers of other packages become plain ones."""
    if isinstance(value, list | tuple | range):
        if depth > 1 or _length(name, value) > _MOST_RUNS:
            rule = f"a setting has one value, or a list of at most {_MOST_RUNS:,} values"
            raise _wrong(name, value, rule)
        return [_plain(name, entry, depth + 1) for entry in value]
    if isinstance(value, str | bool):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Integral) and int(value).bit_length() < _MOST_BITS:
        return int(value)
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(name, value, "a number of a study is below 1e308") from None
    fix = "leave it out" if value is None else "give one of these, or a list"
    raise _wrong(name, value, "a setting is a text, a number, a flag, or a list of them", fix)


def _is_one(name: str, value: Sequence[Any]) -> bool:
    """Whether a list is one value, not several: only betas are a pair."""
    return name == "betas" and not any(isinstance(entry, list | tuple) for entry in value)


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """The values that a setting of a grid takes, each once."""
    if not isinstance(value, list) or _is_one(name, value):
        return (value,)
    if not value:
        rule = "a list of a grid has one value or more"
        raise _wrong(name, value, rule, f"give {name} a value, or leave it out")
    seen = set()
    for entry in value:
        key = str(entry) if isinstance(entry, list) else entry
        if key in seen:
            rule = "a list of a grid has each value once"
            raise _wrong(name, value, rule, f"leave the second {quote(entry)} out")
        seen.add(key)
    return tuple(value)


def _replaces(chosen: Mapping[str, Any], key: str) -> bool:
    other = {"steps": BUDGET, BUDGET: "steps"}.get(key)
    return other in chosen


def _cell(settings: Mapping[str, Any]) -> Cell:
    rest = {name: value for name, value in settings.items() if name != BUDGET}
    flops = settings.get(BUDGET)
    if flops is None:
        return Cell(rest, None, _config(rest))
    is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
    if not is_number or not 0 < flops <= _MOST_FLOPS:
        rule = f"{BUDGET} is a number above 0, of {_MOST_FLOPS:g} or less"
        raise _wrong(BUDGET, flops, rule, f"give a number such as {BUDGET} = 1e12")
    if "steps" in rest:
        raise EinlinearError(
            what=f"steps are {quote(rest['steps'])} and {BUDGET} {flops:g}",
            rule=f"the steps of a run are given, or follow from its {BUDGET}",
            fix=f"leave steps or {BUDGET} out",
        )
    return Cell(rest, float(flops), _config(rest | {"steps": 1}))


def _config(settings: Mapping[str, Any]) -> RunConfig:
    return RunConfig.from_dict(settings, "a study")


def _wrong(name: str, value: object, rule: str, fix: str = _EXAMPLE) -> EinlinearError:
    return EinlinearError(what=f"{name} is {quote(value)}", rule=rule, fix=fix)


def _table(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {toml_value(value)}" for name, value in values.items()]
