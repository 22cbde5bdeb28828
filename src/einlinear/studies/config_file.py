"""A RunConfig from a file: TOML or JSON."""

from __future__ import annotations

import shlex
from pathlib import Path

from einlinear.errors import EinlinearError, reason
from einlinear.files import as_path, parse_json, parse_toml
from einlinear.studies.config import RunConfig


def load_config(path: str | Path, **changes: object) -> RunConfig:
    """The config in a .toml or .json file, some fields changed."""
    return RunConfig.from_dict({**read_run(path), **changes}, str(path))


def read_run(path: str | Path) -> dict[str, object]:
    """The fields of one run that stand in a file, unchecked; raises if it is a study."""
    values = read_config(path)
    if tables := [name for name in ("base", "grid") if name in values]:
        raise EinlinearError(
            what=f"{path} is a study: it has {' and '.join(f'[{name}]' for name in tables)}",
            rule="a config holds the settings of one run, a study those of many",
            fix=f"einlinear sweep {shlex.quote(str(path))} --out DIR",
        )
    return values


def read_config(path: str | Path) -> dict[str, object]:
    """The fields that stand in a .toml or .json file, unchecked."""
    path = as_path(path, "the config")
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_json(text) if path.suffix == ".json" else parse_toml(text)
        if not isinstance(values, dict):
            raise ValueError("it is no table of names and values")
    except (OSError, ValueError) as error:
        if isinstance(error, EinlinearError):
            raise
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule="a config is a TOML file, or JSON if its name ends in .json",
            fix="check its path"
            if isinstance(error, OSError)
            else 'write lines such as: structure = "btt(rank=2)"',
        ) from error
    return values
