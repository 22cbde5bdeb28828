"""Study: many runs as one value: grids of settings over a base, from a file or from code."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from itertools import product
from math import prod
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.files.whole import toml_text
from einlinear.runs.config import RunConfig
from einlinear.runs.config_file import read_config
from einlinear.show.numbers import short
from einlinear.sweeps.sampled import with_samples

BUDGET = "flops"
"""The setting that replaces steps: FLOPs of a run, forward and backward."""

_MOST_RUNS = 100_000
_MOST_FLOPS = 1e30  # more than all computers of the world compute in a century
_MOST_BITS = 4000  # longer numbers cannot be written to JSON and TOML
_KEYS = ("name", "base", "grid")
_USUAL: dict[str, Any] = {"width": 32, "steps": 500, BUDGET: 1e12, "seed": 1}  # for examples
_FIELDS = tuple(field.name for field in fields(RunConfig))
_EXAMPLE = 'give [base] task = "text" and [grid] structure = ["dense", "btt"]'


@dataclass(frozen=True, slots=True)
class StudyCell:
    """One combination of a study: the settings of a run, whose steps may follow from a budget.

    config: the run; it has one step if its steps follow from a budget.
    """

    settings: Mapping[str, Any]
    flops: float | None
    config: RunConfig

    def with_steps(self, steps: int) -> RunConfig:
        """The run with this many steps."""
        return _config({**self.settings, "steps": steps})


@dataclass(frozen=True, slots=True)
class Study:
    """Many runs: grids of settings over a base.

    Args:
        name: the name shown to readers.
        base: settings of all runs: fields of RunConfig, or `flops` instead of steps.
        grids: each is a table of settings. A list stands for each of its values, and all
            combinations are run. A combination that appears in several grids is run once. A name
            such as "width, steps" holds settings that vary together: [[32, 500], [64, 1000]]. A
            table in the place of a structure samples some: {"sample": 20, "omega": 0, "psi": 1}.

    cells: all combinations, each once, in the order of the grids.
    """

    name: str
    base: Mapping[str, Any]
    grids: tuple[Mapping[str, Any], ...] = ({},)
    cells: tuple[StudyCell, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise _wrong("name", self.name, "a study has a name, which is a text", "give a text")
        object.__setattr__(self, "grids", tuple(with_samples(g, "a study") for g in self.grids))
        _check_count(self.grids)
        for name, value in _items(self.base):
            if name in _FIELDS and isinstance(value, Mapping):
                raise _many_in_base(name, value)
        object.__setattr__(self, "base", _plain_table("base", self.base))
        object.__setattr__(self, "grids", tuple(_plain_table("grid", g) for g in self.grids))
        for name, value in self.base.items():
            if isinstance(value, list) and not _is_one(name, value):
                raise _many_in_base(name, value)
        found = {json.dumps(settings, sort_keys=True): settings for settings in self._settings()}
        if not found:
            raise _wrong("grid", list(self.grids), "a study has one run or more")
        # Every error is found before anything runs.
        object.__setattr__(self, "cells", tuple(map(_cell, found.values())))

    def _settings(self) -> Iterator[dict[str, Any]]:
        for grid in self.grids:
            for tables in product(*(_choices(name, value) for name, value in grid.items())):
                chosen = {name: value for table in tables for name, value in table.items()}
                # A budget in the grid replaces steps in the base, and the other way around.
                settings = {k: v for k, v in self.base.items() if not _replaces(chosen, k)} | chosen
                yield settings

    @property
    def id(self) -> str:
        """A hash of everything in the study, however its file is laid out."""
        return sha256(json.dumps(self.as_dict()).encode()).hexdigest()[:12]

    def to_toml(self) -> str:
        """The study as TOML, which `load_study` reads."""
        return toml_text(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The study as a JSON object, which `from_dict` reads."""
        return {"name": self.name, "base": self.base, "grid": list(self.grids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "a study") -> Study:
        """Make a study from a table of name, base, and one grid or a list of grids."""
        if not isinstance(values, Mapping):
            raise _wrong(source, values, "a study is a table of settings")
        for key in values:
            if key not in _KEYS:
                place = "put it under [base] or [grid]" if key in (*_FIELDS, BUDGET) else None
                raise EinlinearError(
                    what=f"unknown key {quote(key)} in {source}",
                    rule=f"a study has {', '.join(_KEYS)}",
                    fix=place or did_you_mean(key, [*_KEYS, *_FIELDS], _EXAMPLE),
                )
        grid = values.get("grid", {})
        grids = tuple(grid) if isinstance(grid, list | tuple) else (grid,)
        grids = tuple(with_samples(table, source) for table in grids)
        return cls(values.get("name", "study"), values.get("base", {}), grids)


def load_study(path: str | Path) -> Study:
    """Read a study from a .toml or .json file. Its name defaults to that of the file."""
    path = Path(path)
    return Study.from_dict({"name": path.stem, **read_config(path)}, str(path))


def as_study(study: Study | Mapping[str, Any] | str | Path) -> Study:
    """Make a study from what users pass: a Study, its settings, or a file."""
    if isinstance(study, Study):
        return study
    if isinstance(study, Mapping):
        return Study.from_dict(study)
    if isinstance(study, str | Path):
        return load_study(study)
    raise _wrong("study", study, "a study is a Study, a table of settings, or a file")


def settings_in(key: str) -> tuple[str, ...]:
    """The settings that a key of a grid names: one, or several that vary together."""
    return tuple(part.strip() for part in key.split(",")) if isinstance(key, str) else (key,)


def without_settings(grid: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """A grid without some settings, also where they vary together with others."""
    kept: dict[str, Any] = {}
    for key, value in grid.items():
        names = settings_in(key)
        places = [place for place, name in enumerate(names) if name not in dropped]
        if len(places) == len(names):
            kept[key] = value
        elif len(places) == 1:
            kept[names[places[0]]] = _each_once(row[places[0]] for row in value)
        elif places:
            rows = _each_once([row[place] for place in places] for row in value)
            kept[", ".join(names[place] for place in places)] = rows
    return kept


def _each_once(values: Iterable[Any]) -> list[Any]:
    """Values, some of them lists, without those that are equal to an earlier one."""
    return list({json.dumps(value): value for value in values}.values())


def _check_key(key: object, name: object) -> None:
    """Refuse a key of a table for the name of a setting in it."""
    if name in _FIELDS or name == BUDGET:
        return
    parts = [part for part in re.split(r"[\s,;]+", key) if part] if isinstance(key, str) else []
    if parts and (name == "" or ";" in str(key)):
        both = ", ".join(parts)
        alone = f"write {both}, or name a second setting: " if len(parts) == 1 else "write "
        raise EinlinearError(
            what=f"a key in a study is {quote(key)}",
            rule="names of settings that vary together have one comma between them",
            fix=f'{alone}"{both if len(parts) > 1 else _with_another(both)}"',
        )
    raise EinlinearError(
        what=f"unknown setting {quote(name)} in a study",
        rule=f"base and grid hold fields of RunConfig, or {BUDGET}",
        fix=did_you_mean(name, [*_FIELDS, BUDGET], f"one of {', '.join(_FIELDS)}"),
    )


def _check_count(grids: Iterable[Mapping[str, Any]]) -> None:
    """Refuse too many runs, before any list is expanded."""
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


def _many_in_base(name: str, value: object) -> EinlinearError:
    rule = "base has one value for each setting, shared by all runs"
    return _wrong(f"{name} in base", value, rule, f"put {name} under [grid]")


def _items(grid: object) -> Iterable[tuple[str, Any]]:
    return grid.items() if isinstance(grid, Mapping) else ()


def _length(name: str, value: object) -> int:
    """How many values a setting of a grid has, at least 1; works for ranges too long for len."""
    if isinstance(value, list | tuple) and _is_one(name, value):
        return 1
    if isinstance(value, range):
        return max(1, -(-(value.stop - value.start) // value.step))
    return max(1, len(value)) if isinstance(value, list | tuple) else 1


def _plain_table(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as plain values."""
    if not isinstance(values, Mapping):
        raise _wrong(place, values, "base and grids are tables of settings")
    named: dict[str, str] = {}
    for key in values:
        names = settings_in(key)
        for name in names:
            _check_key(key, name)
            if name in named:
                rule = "a grid has each setting once, alone or together with others"
                raise EinlinearError(
                    what=f"{name} is in {quote(named[name])} and in {quote(key)}",
                    rule=rule,
                    fix=f"leave {name} out of one of them",
                )
            named[name] = key
        if len(names) > 1:
            _check_together(place, key, names, values[key])
    return {key: _plain_values(key, value) for key, value in values.items()}


def _check_together(place: str, key: str, names: Sequence[str], value: object) -> None:
    """Refuse values of settings that vary together unless each has one value for every setting."""
    rule = (
        f"settings that vary together are in a grid, with rows of {len(names)} values, one for "
        "each setting"
    )
    example = f'"{key}" = {_example_rows(names)}'
    fix = f"give {example}"
    if place != "grid":
        raise _wrong(f"{key} in {place}", value, rule, f"put it under [grid]: {fix}")
    if not isinstance(value, list | tuple) or not value:
        raise _wrong(f"{key} in {place}", value, rule, fix)
    for number, row in enumerate(value, 1):
        where = f"row {number} of {key}"
        if not isinstance(row, list | tuple) or len(row) != len(names):
            raise _wrong(where, row, rule, fix)
        for name, entry in zip(names, row, strict=True):
            if isinstance(entry, list | tuple | range) and not _is_one(name, entry):
                rule = "each entry of a row is one value, not a list"
                fix = f"give each value a row of its own, as in {example}"
                raise _wrong(f"{name} in {where}", entry, rule, fix)


def _example_rows(names: Sequence[str]) -> str:
    """Two rows of values that these settings could have."""
    values = [_USUAL[name] if name in _USUAL else getattr(RunConfig(), name) for name in names]
    twice = [2 * v if type(v) in (int, float) else v for v in values]
    rows = dict.fromkeys(", ".join(map(_example, row)) for row in (values, twice))
    return f"[{', '.join(f'[{row}]' for row in rows)}]"


def _example(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return '"..."' if value is None else json.dumps(value)


def _with_another(name: str) -> str:
    return f"{name}, {'width' if name == 'steps' else 'steps'}"


def _plain_values(key: str, value: Any) -> Any:
    """The values of a key of a table as a file holds them."""
    names = settings_in(key)
    if len(names) == 1:
        return _plain(key, value)
    return [[_plain(n, entry, 1) for n, entry in zip(names, row, strict=True)] for row in value]


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """A value as a file holds it: paths, ranges and numbers of other packages become plain."""
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
            raise _wrong(name, value, "a number in a study is below 1e308") from None
    fix = "leave it out" if value is None else "give one of these, or a list"
    raise _wrong(name, value, "a setting is a text, a number, a flag, or a list of them", fix)


def _is_one(name: str, value: Iterable[Any]) -> bool:
    """Whether a list is a single value: only betas is a pair."""
    return name == "betas" and not any(isinstance(entry, list | tuple) for entry in value)


def _choices(key: str, value: Any) -> Iterator[dict[str, Any]]:
    """The settings that each value of a grid stands for."""
    names = settings_in(key)
    for chosen in _values(key, value):
        yield {key: chosen} if len(names) == 1 else dict(zip(names, chosen, strict=True))


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """The values of a setting of a grid, each once."""
    if not isinstance(value, list) or _is_one(name, value):
        return (value,)
    if not value:
        rule = "a list in a grid has one value or more"
        raise _wrong(name, value, rule, f"give {name} a value, or leave it out")
    seen = set()
    for entry in value:
        key = json.dumps(entry) if isinstance(entry, list) else entry
        if key in seen:
            rule = "a list in a grid has each value once"
            raise _wrong(name, value, rule, f"remove the second {quote(entry)}")
        seen.add(key)
    return tuple(value)


def _replaces(chosen: Mapping[str, Any], key: str) -> bool:
    other = {"steps": BUDGET, BUDGET: "steps"}.get(key)
    return other in chosen


def _cell(settings: Mapping[str, Any]) -> StudyCell:
    rest = {name: value for name, value in settings.items() if name != BUDGET}
    flops = settings.get(BUDGET)
    if flops is None:
        return StudyCell(rest, None, _config(rest))
    is_number = isinstance(flops, int | float) and not isinstance(flops, bool)
    if not is_number or not 0 < flops <= _MOST_FLOPS:
        rule = f"{BUDGET} is a number above 0, of {_MOST_FLOPS:g} or less"
        raise _wrong(BUDGET, flops, rule, f"give a number, for example {BUDGET} = 1e12")
    if "steps" in rest:
        raise EinlinearError(
            what=f"steps are {quote(rest['steps'])} and {BUDGET} {flops:g}",
            rule=f"the steps of a run are given or follow from its {BUDGET}, not both",
            fix=f"leave steps or {BUDGET} out",
        )
    return StudyCell(rest, float(flops), _config(rest | {"steps": 1}))


def _config(settings: Mapping[str, Any]) -> RunConfig:
    return RunConfig.from_dict(settings, "a study")


def _wrong(name: str, value: object, rule: str, fix: str = _EXAMPLE) -> EinlinearError:
    return EinlinearError(what=f"{name} is {quote(value)}", rule=rule, fix=fix)
