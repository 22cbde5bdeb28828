"""restore: write a record from elsewhere to the directory of its run in a sweep."""

from __future__ import annotations

from pathlib import Path

from einlinear.errors import EinlinearError
from einlinear.runs.directory import RECORD, RunDirectory, is_locked
from einlinear.runs.record import RunRecord


def can_restore(directory: Path, record: RunRecord) -> bool:
    """Whether a directory is free for a record.

    It is not if it has a record, even a damaged one, if a process trains in it, or if its config
    is unreadable or that of another run. The sweep then does what it does without the record.
    """
    if (directory / RECORD).exists() or is_locked(directory):
        return False
    try:
        config = RunDirectory(directory).read_config()
    except EinlinearError:
        return False
    return config is None or config.id == record.id


def restore(directory: Path, record: RunRecord) -> None:
    """Write the config and the record of a run as it would have done, if the directory is free.

    There are no weights and no metrics.
    """
    if can_restore(directory, record):
        place = RunDirectory(directory)
        place.keep_config(record.config)
        place.write_record(record)
