"""The command report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from einlinear.errors import EinlinearError, quote
from einlinear.terminal import console, say

if TYPE_CHECKING:
    from einlinear.studies.fit import Linf
    from einlinear.studies.reports.analyse import Settings


def report(
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    /,
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    reference: str | None = None,
    linf: Annotated[str, tyro.conf.arg(metavar="{shared,fitted,NUMBER}")] = "shared",
    task: str | None = None,
    level: float = 0.9,
    resamples: int = 500,
    seed: int = 0,
    watch: bool = False,
    port: int = 0,
) -> None:
    """Make a page of what runs say: frontiers, power laws, multipliers, in words and figures.

    Args:
        directory: of a sweep, a folder of runs, one run, or a CSV or JSONL file of observations.
        out: folder to write to; report in the directory unless given.
        reference: structure that others are compared with; dense, or what has the most runs.
        linf: limit of the laws: shared by all, fitted for each structure, or a number.
        task: whose runs are analysed; that with the most runs unless given.
        level: of the intervals.
        resamples: samples of the runs for the intervals; 0 is no intervals.
        seed: of the samples.
        watch: serve the page to a browser on this machine, and follow the runs until Ctrl-C.
        port: of that; any that is free unless given.
    """
    from einlinear.studies.reports.analyse import Settings  # numpy takes a while to load

    settings = Settings(reference, _linf(linf), task, level, resamples, seed)
    if watch:
        _follow(directory, out, settings, port)
    else:
        _make(directory, out, settings)


def _make(directory: Path, out: Path | None, settings: Settings) -> None:
    """Write the report, and print what it says."""
    from einlinear.studies.reports.analyse import analyse
    from einlinear.studies.reports.gather import gather
    from einlinear.studies.reports.write import place_for, write_report

    with console().status("making the report"):
        found = analyse(gather(directory), settings)
        files = write_report(found, place_for(directory, out))
    lines = [files.words.headline, *(f"- {text}" for text in files.words.results)]
    if files.words.cautions:
        lines += ["What these runs cannot say:", *(f"- {text}" for text in files.words.cautions)]
    for line in lines:
        say(line.replace("`", ""), indent="  ")
    print(f"wrote {files.page}")
    print(f"wrote {len(files.figures)} figures and {len(files.tables)} tables beside it")


def _follow(directory: Path, out: Path | None, settings: Settings, port: int) -> None:
    """Serve the report while runs go on."""
    from einlinear.studies.reports.gather import gather
    from einlinear.studies.reports.live import Live, watch
    from einlinear.studies.reports.write import place_for

    if not directory.exists():
        gather(directory)  # says what is wrong
    live = Live(directory, place_for(directory, out), settings)
    watch(live, port, lambda url: print(f"the report is at {url}, until Ctrl-C", flush=True))


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
