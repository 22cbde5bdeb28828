"""The studies of the package: read from their files, then changed as the user asks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from einlinear.data.documents import HUB
from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.files.whole import as_path, parse_json
from einlinear.landscapes.config import LandscapeConfig
from einlinear.reproductions.catalogue import Reproduction, Scale
from einlinear.runs.config_file import read_config
from einlinear.show.numbers import listed
from einlinear.sweeps.study import BUDGET, Study, load_study, settings_in, without_settings

_OTHER = {"steps": BUDGET, BUDGET: "steps"}  # each of the two replaces the other


def study_file(name: str, scale: Scale) -> Path:
    """The file of a study in the package; `einlinear sweep` reads it, too."""
    folder = resources.files("einlinear").joinpath("reproductions/studies")
    return Path(str(folder.joinpath(f"{name}.{scale}.toml")))


def shipped_study(
    reproduction: Reproduction,
    scale: Scale,
    *,
    data: str | Path | None = None,
    validation: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Study:
    """The study of a figure that is a sweep.

    Args:
        reproduction: the figure.
        scale: cpu or paper.
        data: a file or folder of data; by default the data of the package.
        validation: texts for validation.
        settings: values that replace those of the study in all its runs; a list gives each run
            once with each value.
    """
    study = load_study(study_file(reproduction.name, scale))
    if study.base["task"] == "regression":
        refuse_data(reproduction, data)
    if study.base["task"] != "text":
        refuse_data(reproduction, validation, "validation")
    given = {"data": data, "validation": validation}
    paths = {name: str(checked_data(path)) for name, path in given.items() if path is not None}
    return with_settings(study, paths | dict(settings or {}))


def shipped_landscape(scale: Scale, settings: Mapping[str, Any] | None = None) -> LandscapeConfig:
    """The settings of the landscape, some of them replaced."""
    given, known = dict(settings or {}), [field.name for field in fields(LandscapeConfig)]
    for key in given:
        if key not in known:
            raise EinlinearError(
                what=f"unknown setting {quote(key)} of a landscape",
                rule=f"its settings are {', '.join(known)}",
                fix=did_you_mean(key, known, "leave it out"),
            )
    values = read_config(study_file("landscape", scale)) | given
    lists = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return replace(LandscapeConfig(), **lists)  # type: ignore[arg-type]


def with_settings(study: Study, settings: Mapping[str, Any]) -> Study:
    """The study with some settings replaced in the base and in all grids.

    Settings that vary together are replaced together; only steps or flops may be replaced alone.
    """
    if not settings:
        return study
    dropped = {*settings, *(_OTHER[name] for name in settings if name in _OTHER)}
    for key in dict.fromkeys(key for grid in study.grids for key in grid):
        _check_replaced(settings_in(key), settings, dropped)
    base = {name: value for name, value in study.base.items() if name not in dropped}
    grids = [without_settings(grid, dropped) for grid in study.grids]
    return Study(study.name, base, tuple(grid | dict(settings) for grid in grids))


def _check_replaced(
    names: Sequence[str], settings: Mapping[str, Any], dropped: Collection[str]
) -> None:
    """Refuse to replace a setting without those that vary together with it: runs would multiply."""
    replaced = [name for name in names if name in settings and name not in _OTHER]
    missing = [name for name in names if name not in dropped]
    if replaced and missing:
        wanted = [f"{n} or {_OTHER[n]}" if n in _OTHER else n for n in missing]
        raise EinlinearError(
            what=f"{listed(replaced)} is replaced without {listed(missing)}, and the study has "
            f'them together, as "{", ".join(names)}"',
            rule="settings that vary together are replaced together; steps or flops may be "
            "replaced alone",
            fix=f"also give {listed(wanted)}",
        )


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings by name out of name=value; a value is a number, a text or a list such as [1,2]."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not (sign and name and text):
            raise EinlinearError(
                what=f"--settings has {quote(pair)}",
                rule="settings of runs are given as name=value",
                fix="try --settings steps=100 seed=0",
            )
        try:
            found[name] = parse_json(text)
        except ValueError:
            found[name] = text
    return found


def checked_data(path: str | Path) -> Path | str:
    """The path of data that exists, or the name of a set on the Hugging Face hub."""
    if str(path).startswith(HUB):
        return str(path)
    if not as_path(path, "the data").exists():
        raise EinlinearError(
            what=f"there is no file or folder {path}",
            rule="data is a file or a folder; without it, the data of the package is used",
            fix="check the path; docs/data.md says how to get and prepare the paper's data",
        )
    return path


def refuse_data(reproduction: Reproduction, data: object, name: str = "data") -> None:
    """Refuse data, or data for validation, that a figure has no use for."""
    if data is not None:
        raise EinlinearError(
            what=f"{name} is {quote(data)}, and {reproduction.name} has no use for it",
            rule="text, pixels and landscapes take data; text also takes texts for validation",
            fix=f"leave {name} out",
        )
