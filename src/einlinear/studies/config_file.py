"""A RunConfig from a file: TOML or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig


def load_config(path: str | Path, **changes: object) -> RunConfig:
    """The config in a .toml or .json file, some fields changed."""
    return RunConfig.from_dict({**read_config(path), **changes}, str(path))


def read_config(path: str | Path) -> dict[str, object]:
    """The fields that stand in a .toml or .json file, unchecked."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else _read_toml(text)
        if not isinstance(values, dict):
            raise ValueError("it is no table of names and values")
    except (OSError, ValueError) as error:
        if isinstance(error, EinlinearError):
            raise
        raise EinlinearError(
            what=f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            rule="a config is a TOML file, or JSON if its name ends in .json",
            fix="check its path"
            if isinstance(error, OSError)
            else 'write lines such as: structure = "btt(rank=2)"',
        ) from error
    return values


def _read_toml(text: str) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pragma: no cover - the same module under its old name
        try:
            import tomli as tomllib
        except ImportError:
            raise EinlinearError(
                what="TOML cannot be read: tomli is not installed",
                rule="before Python 3.11 TOML files need the package tomli",
                fix='pip install "einlinear[cli]", or give a .json file',
            ) from None
    values: dict[str, object] = tomllib.loads(text)
    return values
