"""run_job: one run of a sweep is claimed, trained, its output kept, its failure told."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from einlinear.errors import EinlinearError, cannot_write
from einlinear.studies.config import RunConfig
from einlinear.studies.directory import CONFIG, BusyError, RunDirectory, is_locked
from einlinear.studies.loop import TrainProgress
from einlinear.studies.sweeps.claims import Claim, Sight, Watch, take
from einlinear.studies.sweeps.job import LOG, Job, Outcome, finished, keep_failure
from einlinear.studies.train import train


class _LostClaimError(Exception):
    """Another process has taken the run: this one was taken for dead."""


def load_all() -> None:
    """Load what the first run would load: optimizers need the compiler, which takes seconds."""
    import_module("torch._dynamo")


def run_job(job: Job, *, is_alone: bool = True) -> Outcome:
    """Train the run of a job, unless it has a record or somebody else has it. Never raises.

    Args:
        job: what to run.
        is_alone: whether this process does nothing else: what it prints goes to the log.
    """
    directory = job.directory
    try:
        seen = Watch().free(directory) or (None if job.after is None else Sight(*job.after))
        claim = None if seen is None else take(directory, seen)
        if claim is None:
            return Outcome(job.id, "busy")
        with claim:
            if finished(directory) is None:
                try:
                    _train(job, claim, is_alone)
                except (_LostClaimError, BusyError):
                    return Outcome(job.id, "busy")
                except Exception as error:
                    text = _told(error)
                    keep_failure(directory, "error", text)
                    return Outcome(job.id, "error", text)
            claim.remove()
            return Outcome(job.id, "done")
    except Exception as error:
        return Outcome(job.id, "error", _told(error))


def _train(job: Job, claim: Claim, is_alone: bool) -> None:
    if Path(job.folder).is_dir():  # another machine may lack it, and need no path of the config
        os.chdir(job.folder)
    config = RunConfig.from_dict(job.config)

    def report(at: TrainProgress) -> None:
        if claim.is_lost():
            raise _LostClaimError
        claim.report(asdict(at))

    log = job.directory / LOG
    keeping: AbstractContextManager[None] = _kept(log) if is_alone else nullcontext()
    with keeping:
        try:
            place = RunDirectory(job.directory)
            _check(place, config)
            place.keep_config(config)  # or a run that fails before its first step has no name
            train(config, job.directory, report, threads=job.threads)
        except (_LostClaimError, BusyError):
            raise
        except Exception as error:
            _add(log, _told(error))
            raise


def _check(place: RunDirectory, config: RunConfig) -> None:
    """Refuse a directory in which another run has finished; put a damaged config.json aside.

    The folder has the id of the run for its name, and the sweep knows the config. Checkpoints know
    theirs, too.
    """
    try:
        place.check(config)
        return
    except EinlinearError:
        if place.path.name != config.id or _has_another(place, config) or is_locked(place.path):
            raise
    _put_aside(place.path / CONFIG)


def _has_another(place: RunDirectory, config: RunConfig) -> bool:
    """Whether another run has finished in a directory."""
    try:
        record = place.read_record()
    except EinlinearError:
        return False
    return record is not None and record.id != config.id


def _put_aside(path: Path) -> None:
    """Give what cannot stay another name; nothing is lost."""
    if not path.exists():
        return
    count = len(list(path.parent.glob(f"{path.name}.unreadable-*")))
    aside = path.with_name(f"{path.name}.unreadable-{count + 1}")
    try:
        path.replace(aside)
    except OSError as error:
        raise cannot_write(aside, error) from error


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Everything that this process prints, C code included, goes to a file meanwhile.

    A run does not fail for want of a log: where none can be written, all goes where it would.
    """
    try:
        file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)  # less the umask
    except OSError:
        yield
        return
    held = [(number, os.dup(number)) for number in (1, 2)]
    sys.stdout.flush()
    sys.stderr.flush()
    for number, _ in held:
        os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass  # a full disk
        for number, copy in held:
            os.dup2(copy, number)
            os.close(copy)


def _add(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass  # the outcome still says it


def _told(error: BaseException) -> str:
    """A user's mistake in its three lines, anything else with where it happened."""
    if isinstance(error, EinlinearError):
        return f"{error}\n"
    return "".join(traceback.format_exception(error))
