"""The command pack."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from einlinear.runs.packed import absolute_paths, check_replaceable, write_packed
from einlinear.runs.sources import collect_records, without_record
from einlinear.show.numbers import counted

_SOURCES = tyro.conf.arg(metavar="SOURCE [SOURCE ...]", help_behavior_hint="(required)")


def pack(
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional, _SOURCES],
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.jsonl")],
) -> None:
    """Pack the records of many runs into one small file, to commit, share and report on.

    Packs all runs that have finished or diverged, each once: their settings, counts, losses and
    machines, without weights and without the routing of experts. A run takes about 1.3 KB.
    einlinear report reads the file, and einlinear sweep --records continues from it.

    Args:
        sources: Directories of sweeps, folders of runs, single runs, or packed files.
        out: File to write. A packed file there is replaced if none of its runs would be lost.
    """
    records = collect_records(sources)
    check_replaceable(out, records)
    size = write_packed(records, out)
    left_out = len(without_record(sources, records))
    if left_out:
        verbs = "has no record and is" if left_out == 1 else "have no record and are"
        print(f"note: {counted(left_out, 'run')} {verbs} left out", file=sys.stderr)
    for path in absolute_paths(records):
        print(f"note: the settings hold an absolute path: {path}", file=sys.stderr)
    print(f"packed {counted(len(records), 'run')} in {size:,} bytes")
    print(f"wrote {out}")
