"""run_job: claim a run of a sweep, train it, and keep its output and its errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from einlinear.errors import EinlinearError
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import CONFIG, BusyError, RunDirectory, is_locked, put_aside
from einlinear.sweeps.claims import Claim, Sight, Watch, take
from einlinear.sweeps.job import LOG, Job, Outcome, finished, keep_failure
from einlinear.sweeps.peers import peers_of
from einlinear.training.pace import TrainProgress
from einlinear.training.thaw import usable_source
from einlinear.training.train import train


class _LostClaimError(Exception):
    """Another process has taken the run, because this one seemed dead."""


def load_all() -> None:
    """Load what the first run would load: optimizers import the compiler, which takes seconds."""
    import_module("torch._dynamo")


def run_job(job: Job, *, is_alone: bool = True) -> Outcome:
    """Train the run of a job, unless it has a record or another process has it. Never raises.

    If it is alone in this process, all output goes to the log.
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
                    text = _text(error)
                    keep_failure(directory, "error", text)
                    return Outcome(job.id, "error", text)
            claim.remove()
            return Outcome(job.id, "done")
    except Exception as error:
        return Outcome(job.id, "error", _text(error))


def _train(job: Job, claim: Claim, is_alone: bool) -> None:
    if Path(job.folder).is_dir():  # another machine may lack it, and not need it
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
            place.keep_config(config)  # so that a run that fails before its first step has a name
            source = usable_source(job.source, config)
            with peers_of(job):
                train(config, job.directory, report, threads=job.threads, thaw=source)
        except (_LostClaimError, BusyError):
            raise
        except Exception as error:
            with suppress(OSError), log.open("a", encoding="utf-8") as file:
                file.write(_text(error))
            raise


def _check(place: RunDirectory, config: RunConfig) -> None:
    """Refuse a directory in which another run has finished; rename a damaged config.json.

    The file is not needed: the folder is named by the id of the run, the sweep knows the config,
    and checkpoints hold it.
    """
    try:
        place.check(config)
        return
    except EinlinearError:
        if place.path.name != config.id or _has_another(place, config) or is_locked(place.path):
            raise
    if (place.path / CONFIG).exists():
        put_aside(place.path / CONFIG, "unreadable")


def _has_another(place: RunDirectory, config: RunConfig) -> bool:
    """Whether another run has finished in the directory."""
    try:
        record = place.read_record()
    except EinlinearError:
        return False
    return record is not None and record.id != config.id


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Redirect everything that this process prints, C code included, to a file.

    If the file cannot be written, output goes where it went before: a run does not fail for that.
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
            with suppress(OSError):  # the disk is full
                stream.flush()
        for number, copy in held:
            os.dup2(copy, number)
            os.close(copy)


def _text(error: BaseException) -> str:
    """The three lines of an EinlinearError, or the traceback of any other error."""
    if isinstance(error, EinlinearError):
        return f"{error}\n"
    return "".join(traceback.format_exception(error))
