"""Shell commands that reproduce the runs and the report."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

from einlinear.reports.analyse import Analysis, ReportSettings
from einlinear.runs.config import RunConfig


def commands(analysis: Analysis) -> list[tuple[str, str]]:
    """What each command does, and the command."""
    gathered = analysis.gathered
    found = []
    for study in gathered.studies:
        file = gathered.source / "studies" / study.file
        # Elsewhere: the directory of the sweep has all runs, so nothing would be trained there.
        again = f"{gathered.source.resolve().name}-again"
        command = ["einlinear", "sweep", str(file), "--out", again]
        name = f" of {study.name}" if study.name else ""
        found.append((f"All runs{name}", shlex.join(command)))
    ended = [run for run in analysis.runs if run.config is not None and run.loss is not None]
    best = min(ended, key=lambda run: run.loss or 0.0, default=None)
    if best is not None and best.config is not None:
        title = f"The run with the lowest loss, {best.structure}"
        found.append((title, train_command(best.config, "run")))
    found.append(("This report", report_command(gathered.source, analysis.settings)))
    return found


def train_command(config: RunConfig, out: str) -> str:
    """The command that trains a run, with every setting that task and preset do not imply."""
    words = ["einlinear", "train"]
    for name, value in own_settings(config).items():
        flag = f"--{name.replace('_', '-')}"
        values = list(map(str, value if isinstance(value, tuple) else (value,)))
        # A value that looks like a flag would be read as one.
        words += [f"{flag}={values[0]}"] if values[0].startswith("-") else [flag, *values]
    return shlex.join([*words, "--out", out])


def own_settings(config: RunConfig) -> dict[str, object]:
    """The task and the fewest other settings that give the same config."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    plain = RunConfig(task=config.task, preset=config.preset)
    kept = {name: value for name, value in values.items() if value != getattr(plain, name)}
    kept = {"task": config.task, "preset": config.preset} | kept
    for name in list(kept):
        fewer = {key: value for key, value in kept.items() if key != name}
        if name != "task" and _is_same(fewer, config):
            kept = fewer
    return kept


def _is_same(settings: dict[str, object], config: RunConfig) -> bool:
    try:
        return RunConfig.from_dict(settings) == config
    except ValueError:  # not even a valid config
        return False


def report_command(source: Path, settings: ReportSettings) -> str:
    """The command that makes the report, with options that differ from the defaults."""
    words = ["einlinear", "report", str(source)]
    for field in fields(ReportSettings):
        value = getattr(settings, field.name)
        if value != field.default:
            words += [f"--{field.name}", str(value)]
    return shlex.join(words)
