"""read_records: the records of runs, from any place that holds some."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from einlinear.errors import EinlinearError
from einlinear.files.whole import as_path, checked_reading
from einlinear.runs.directory import CONFIG, RECORD, RunDirectory, read_record
from einlinear.runs.packed import read_packed, rounded_losses
from einlinear.runs.record import RunRecord
from einlinear.show.numbers import counted

FolderKind = Literal["sweep", "runs", "run"]


def read_records(source: str | Path) -> tuple[RunRecord, ...]:
    """The records of all runs that have finished or diverged.

    Runs without a record are left out; a record that cannot be read is an error.

    Args:
        source: the directory of a sweep or a search, a folder of runs, a single run, or a file of
            packed records, which `einlinear pack` writes.
    """
    path = as_path(source, "the source of records")
    with checked_reading(path, rule=_RULE, fix=_FIX):  # names that are too long, say
        is_file, is_folder = path.is_file(), path.is_dir()
        folders = run_folders(path)[1] if is_folder else []
    if is_file:
        return (read_record(path),) if path.name == RECORD else read_packed(path)
    if not is_folder:
        raise EinlinearError(what=f"there is no {path}", rule=_RULE, fix=_FIX)
    records = tuple(read_record(folder) for folder in folders if (folder / RECORD).exists())
    if not records:
        raise EinlinearError(
            what=f"there are no records in {path}, and {counted(len(folders), 'run')} without one",
            rule=_RULE,
            fix=_FIX,
        )
    return records


def collect_records(sources: str | Path | Iterable[str | Path]) -> tuple[RunRecord, ...]:
    """The records of one source or several, each run once.

    If a run is found twice, the first record is kept, or the finished one if the other diverged; a
    warning says so if their losses differ.
    """
    places = (sources,) if isinstance(sources, str | Path) else tuple(sources)
    kept: dict[str, tuple[RunRecord, str | Path]] = {}
    differ: dict[str, list[str]] = {"finished": [], "first": []}  # by which record is kept
    for place in places:
        for record in read_records(place):
            held, where = kept.setdefault(record.id, (record, place))
            if record.status != held.status:
                differ["finished"].append(f"run {record.id} in {where} and in {place}")
                if record.status == "finished":
                    kept[record.id] = record, place
            elif rounded_losses(held) != rounded_losses(record):
                differ["first"].append(f"run {record.id} in {where} and in {place}")
    for which, runs in differ.items():
        if runs:
            one = ", and one of them diverged" if which == "finished" else ""
            warnings.warn(
                f"{counted(len(runs), 'run')} found twice with different losses{one}, of which the "
                f"{which} record is kept: {runs[0]}{'' if len(runs) == 1 else ', and others'}",
                stacklevel=2,
            )
    return tuple(record for record, _ in kept.values())


def without_record(sources: Iterable[str | Path], records: Iterable[RunRecord]) -> tuple[Path, ...]:
    """The folders of runs in some sources that are not among the records, each run once."""
    known = {record.id for record in records}
    found: dict[str, Path] = {}
    for source in map(Path, sources):
        for folder in run_folders(source)[1] if source.is_dir() else ():
            try:
                config = RunDirectory(folder).read_config()
            except EinlinearError:  # it is unreadable
                config = None
            name = str(folder) if config is None else config.id
            if name not in known and not (folder / RECORD).exists():
                found.setdefault(name, folder)
    return tuple(found.values())


def run_folders(source: Path) -> tuple[FolderKind, list[Path]]:
    """What a directory is, and the directories of its runs."""
    if _is_run(source):
        return "run", [source]
    is_sweep = (source / "runs").is_dir()
    inside = sorted((source / "runs" if is_sweep else source).iterdir())
    return "sweep" if is_sweep else "runs", [path for path in inside if _is_run(path)]


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (CONFIG, RECORD))


_RULE = "records are read from a sweep, a folder of runs, a single run, or a file of packed records"
_FIX = "give the --out of einlinear sweep, train or pack"
