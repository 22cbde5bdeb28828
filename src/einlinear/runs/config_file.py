"""Read a RunConfig from a TOML or JSON file."""

from __future__ import annotations

import shlex
from pathlib import Path

from einlinear.errors import EinlinearError
from einlinear.files.whole import as_path, checked_reading, parse_json, parse_toml
from einlinear.runs.config import RunConfig


def load_config(path: str | Path, **changes: object) -> RunConfig:
    """Load the config in a .toml or .json file, with some fields changed."""
    return RunConfig.from_dict({**read_run(path), **changes}, str(path))


def read_run(path: str | Path) -> dict[str, object]:
    """The fields of one run in a file, unchecked; raises if the file is a study."""
    values = read_config(path)
    if tables := [name for name in ("base", "grid") if name in values]:
        raise EinlinearError(
            what=f"{path} is a study: it has {' and '.join(f'[{name}]' for name in tables)}",
            rule="a config holds the settings of one run, a study those of many",
            fix=f"einlinear sweep {shlex.quote(str(path))} --out DIR",
        )
    return values


def read_config(path: str | Path) -> dict[str, object]:
    """The fields in a .toml or .json file, unchecked."""
    path = as_path(path, "the config")
    rule = "a config is a TOML file, or JSON if its name ends in .json"
    with checked_reading(path, rule=rule, fix='write lines like: structure = "btt(rank=2)"'):
        with checked_reading(path, rule=rule, fix="check its path", errors=(OSError,)):
            text = path.read_text(encoding="utf-8")
        values = parse_json(text) if path.suffix == ".json" else parse_toml(text)
        if not isinstance(values, dict):
            raise ValueError("it is not a table of names and values")
        return values
