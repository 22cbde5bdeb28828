"""The command report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from einlinear.cli.terminal import console, say
from einlinear.errors import EinlinearError, quote
from einlinear.runs.config_file import read_config

if TYPE_CHECKING:
    from einlinear.laws.fit import Linf
    from einlinear.reports.analyse import ReportSettings


def report(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    /,
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    reference: str | None = None,
    linf: Annotated[str, tyro.conf.arg(metavar="{shared,fitted,NUMBER}")] = "shared",
    task: str | None = None,
    level: float = 0.9,
    resamples: int = 500,
    seed: int = 0,
    times: Annotated[Path | None, tyro.conf.arg(metavar="STEPS.json")] = None,
    watch: bool = False,
    port: int | None = None,
) -> None:
    """Build an HTML report from runs: frontiers, power laws, multipliers, in words and figures.

    Args:
        source: Directory of a sweep, a folder of runs, one run, a file of einlinear pack, or a CSV
            or JSONL file of observations.
        out: Folder to write to; by default, a folder named report in the directory, or beside the
            file.
        reference: Structure to compare with; by default dense, or the one with the most runs.
        linf: Limit of the laws: shared by all structures, fitted for each, or a number.
        task: Task whose runs are analysed; by default, the one with the most runs.
        level: Confidence level of the intervals.
        resamples: Number of bootstrap samples for the intervals; 0 for no intervals.
        seed: Random seed of the samples.
        times: File of einlinear time: seconds are then steps times the time of a step, whatever
            else the machine did while the runs were trained.
        watch: Serve the page to a browser on this machine and update it until Ctrl-C.
        port: Port to serve on, with --watch; by default, any free port.
    """
    if port is not None and not watch:
        raise EinlinearError(
            what=f"--port is {port}, without --watch",
            rule="--port is where --watch serves the page",
            fix="add --watch, or leave --port out",
        )
    _check_is_no_study(source)
    from einlinear.reports.analyse import ReportSettings  # numpy takes a while to load

    settings = ReportSettings(reference, _linf(linf), task, level, resamples, seed, times)
    if watch:
        _follow(source, out, settings, port or 0)
    else:
        make_report(source, out, settings)


def _check_is_no_study(path: Path) -> None:
    """Refuse a study: a report reads what a sweep has made of it."""
    if path.suffix not in (".toml", ".json") or not path.is_file():
        return
    if {"base", "grid"} & set(read_config(path)):
        raise EinlinearError(
            what=f"{path} is a study, not its results",
            rule="a report reads the runs that einlinear sweep trains from a study",
            fix=f"einlinear sweep {shlex.quote(str(path))} --out DIR, then einlinear report DIR",
        )


def make_report(directory: Path, out: Path | None, settings: ReportSettings) -> None:
    """Write the report and print its conclusions."""
    from einlinear.reports.analyse import analyse
    from einlinear.reports.gather import gather
    from einlinear.reports.write import place_for, write_report

    with console().status("building the report"):
        found = analyse(gather(directory), settings)
        files = write_report(found, place_for(directory, out))
    results = (*files.words.search, *files.words.results)
    lines = [files.words.headline, *(f"- {text}" for text in results)]
    if files.words.cautions:
        lines += ["Limitations:", *(f"- {text}" for text in files.words.cautions)]
    for line in lines:
        say(line.replace("`", ""), indent="  ")
    print(f"wrote {files.page}")
    print(f"wrote {len(files.figures)} figures and {len(files.tables)} tables beside it")


def _follow(directory: Path, out: Path | None, settings: ReportSettings, port: int) -> None:
    """Serve the report and update it while runs train."""
    from einlinear.reports.gather import gather
    from einlinear.reports.live import Live, watch
    from einlinear.reports.write import place_for

    if not directory.exists():
        gather(directory)  # raises an error that names the problem
    live = Live(directory, place_for(directory, out), settings)
    watch(live, port, lambda url: print(f"serving the report at {url} until Ctrl-C", flush=True))


def _linf(text: str) -> Linf:
    if text == "shared":
        return "shared"
    if text == "fitted":
        return "fitted"
    try:
        return float(text)
    except ValueError:
        raise EinlinearError(
            what=f"linf is {quote(text)}",
            rule="linf is shared, fitted or a number",
            fix="give --linf shared, or a number below all losses, such as --linf 1.2",
        ) from None
