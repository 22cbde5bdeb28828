"""The command time."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from einlinear.cli.progress import progress_bar
from einlinear.cli.terminal import columns, console, say
from einlinear.errors import EinlinearError
from einlinear.runs.sources import collect_records

_SOURCES = tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(required)")


def time(
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional, _SOURCES],
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="STEPS.json")],
    repeats: int = 9,
    threads: int = 1,
) -> None:
    """Time a training step of every model of some runs, in turns: prints a table, writes a file.

    Seconds in the records of runs depend on what else the machine did. Run this on a quiet machine,
    then give the file to einlinear report --times.

    Args:
        sources: Sweeps, folders of runs, single runs or files of packed records. Give all that one
            report compares: their models are measured together.
        out: File to write.
        repeats: Number of rounds, in each of which every model has a turn; 5 or more for intervals.
        threads: Threads of each model; as many as the runs had.
    """
    if os.path.isdir(out):
        raise EinlinearError(
            what=f"{out} is a folder",
            rule="--out is the file that holds the times",
            fix=f"--out {shlex.quote(str(out / 'steps.json'))}",
        )
    records = collect_records(sources)
    from einlinear.bench.steps import measure_steps  # torch takes a while to load

    with progress_bar(console(), "turns") as show:
        times = measure_steps(records, repeats=repeats, threads=threads, on_progress=show)
    print(times.table(columns()))
    say(times.origin[:1].upper() + times.origin[1:])
    times.save(out)
    print(f"wrote {out}")
    if len(sources) == 1:
        words = ["einlinear", "report", str(sources[0]), "--times", str(out)]
        print(f"next: {shlex.join(words)}")
