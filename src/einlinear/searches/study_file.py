"""Read the file of a search: settings of its runs, of the search, and of its space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.runs.config_file import read_config

_TABLES = ("name", "base", "search", "space")
_OPTIONS = (
    "minutes", "flops", "target_flops", "widths", "steps", "objective", "seeds", "seed",
)  # fmt: skip


def read_study(path: str | Path) -> dict[str, Any]:
    """The arguments of `search` in a .toml or .json file."""
    values = read_config(Path(path))
    for key in values:
        if key not in _TABLES:
            raise EinlinearError(
                what=f"unknown key {quote(key)} in {path}",
                rule="the file of a search has [base], [search] and [space]",
                fix=did_you_mean(key, _TABLES, "put settings of runs under [base]"),
            )
    found: dict[str, Any] = {}
    for key, value in dict(_table(values, "search", path)).items():
        if key not in _OPTIONS:
            raise EinlinearError(
                what=f"unknown key {quote(key)} in [search] of {path}",
                rule=f"[search] has {', '.join(map(quote, _OPTIONS))}",
                fix=did_you_mean(key, _OPTIONS, "put settings of runs under [base]"),
            )
        found[key] = value
    return found | {
        "settings": _table(values, "base", path),
        "space": _table(values, "space", path),
    }


def _table(values: dict[str, Any], name: str, path: str | Path) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise EinlinearError(
            what=f"[{name}] is {quote(table)} in {path}",
            rule=f"[{name}] is a table",
            fix=f"write [{name}] and one setting per line",
        )
    return table
