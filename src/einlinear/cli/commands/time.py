"""The command time."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from einlinear.cli.progress import progress_bar
from einlinear.cli.terminal import columns, console, say
from einlinear.errors import EinlinearError
from einlinear.runs.sources import collect_records
from einlinear.runs.step_times import trained_threads
from einlinear.show.numbers import counted, listed

_SOURCES = tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(required)")


def time(
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional, _SOURCES],
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="STEPS.json")],
    repeats: int = 9,
    threads: int | None = None,
) -> None:
    """Time a training step of every model of some runs, in turns: prints a table, writes a file.

    Seconds in the records of runs depend on what else the machine did. Run this on a quiet machine,
    then give the file to einlinear report --times.

    Args:
        sources: Sweeps, folders of runs, single runs or files of packed records. Give all that one
            report compares: their models are measured together.
        out: File to write.
        repeats: Number of rounds, in each of which every model has a turn; 5 or more for intervals.
        threads: Threads of each model; by default, as many as the runs had, or 1 if they differ.
    """
    if os.path.isdir(out):
        raise EinlinearError(
            what=f"{out} is a folder",
            rule="--out is the file that holds the times",
            fix=f"--out {shlex.quote(str(out / 'steps.json'))}",
        )
    records = collect_records(sources)
    if threads is None or threads > 0:
        threads = _threads(trained_threads(records), threads)
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


def _threads(trained: tuple[int, ...], given: int | None) -> int:
    """The threads to measure with; prints a note if runs were trained with another number."""
    threads = given or (trained[0] if len(trained) == 1 else 1)
    if any(number != threads for number in trained):
        had = listed([str(number) for number in trained])
        noun = "thread" if trained == (1,) else "threads"
        print(
            f"note: the runs were trained with {had} {noun}, and steps are timed with "
            f"{counted(threads, 'thread')}; see --threads",
            file=sys.stderr,
        )
    return threads
