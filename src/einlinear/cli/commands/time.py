"""The command time."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from einlinear.cli.progress import progress_bar
from einlinear.cli.terminal import columns, console, say
from einlinear.errors import EinlinearError
from einlinear.files.whole import checked_reading
from einlinear.runs.directory import RECORD, read_record

if TYPE_CHECKING:
    from einlinear.runs.record import RunRecord

_SOURCES = tyro.conf.arg(metavar="DIR [DIR ...]", help_behavior_hint="(required)")


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
        sources: Directories of sweeps, folders of runs, or single runs. Give all that one report
            compares: their models are measured together.
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
    records = [record for source in sources for record in _records_of(source)]
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


def _records_of(source: Path) -> list[RunRecord]:
    """The records in a sweep's directory, in a folder of runs, or of a single run."""
    rule = "models are those of finished runs: of a sweep, a folder of runs, or a single run"
    fix = "give the --out of einlinear sweep or einlinear train"
    with checked_reading(source, rule=rule, fix=fix):
        folder = source / "runs" if (source / "runs").is_dir() else source
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        found = [path for path in (source, *inside) if (path / RECORD).is_file()]
        if not found:
            what = f"there are no finished runs in {source}"
            raise EinlinearError(what=what, rule=rule, fix=fix)
        return [read_record(path) for path in found]
