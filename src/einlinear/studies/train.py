"""train: a RunConfig becomes a RunRecord; a run that was stopped goes on where it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from einlinear.errors import EinlinearError, quote
from einlinear.structures.values import whole_number
from einlinear.studies.config import RunConfig
from einlinear.studies.directory import DamagedError, RunDirectory, read_record
from einlinear.studies.distributed import Place, check_share, from_first, joined, together
from einlinear.studies.loop import Mirror, OnProgress, Run
from einlinear.studies.needs import check_needs
from einlinear.studies.plan_run import RunPlan, plan_run
from einlinear.studies.record import RunRecord
from einlinear.studies.threads import MOST_THREADS, using_threads

OnStart = Callable[[RunPlan, int], None]


def train(
    config: RunConfig,
    out: str | Path | None = None,
    progress: OnProgress | None = None,
    *,
    mirrors: Sequence[Mirror] = (),
    on_start: OnStart | None = None,
    threads: int | None = None,
) -> RunRecord:
    """Train the model of a config on its task.

    With `out` everything is kept there: config.json, metrics.jsonl, checkpoints while it trains,
    model.safetensors and record.json at the end. The same call again goes on from the last
    checkpoint, with the same numbers as if it had not been stopped, or gives the record of a run
    that has finished. If that is damaged, or its model is missing, the run is trained again.

    Ctrl-C saves a checkpoint before it raises KeyboardInterrupt, and SIGTERM before it ends the
    process; a second one stops at once. Under torchrun, or in a process group, all processes call
    this; signals then end them at once.

    Args:
        config: what to train.
        out: directory of the run; nothing is kept unless given.
        progress: called a few times a second.
        mirrors: called with a step and numbers by name whenever a line of metrics is written.
        on_start: called with what the run will be, and the step from which it goes on.
        threads: of torch, while it trains; by the size of a step unless given, and at most as many
            as torch has now. They change the last bits of results, and no run's id.
    """
    if not isinstance(config, RunConfig):
        raise EinlinearError(
            what=f"the config is given as {quote(config)}",
            rule="a run is decided by a RunConfig",
            fix='train(RunConfig(task="text", structure="btt"))',
        )
    if threads is not None:
        threads = whole_number(threads, "threads", 1, MOST_THREADS)
    directory = None if out is None else RunDirectory(out)
    with joined(config) as place:
        with together(place):
            record = None if directory is None else _finished(directory, config, place)
        if directory is not None and from_first(place, record is not None):
            with together(place):
                return record or read_record(directory.path)
        try:
            with using_threads(config, threads), _own_randomness(config, place):
                with together(place):
                    plan = _prepared(config, place, directory)
                run = Run(config, place, plan, directory, mirrors)
                run.restore()
                if on_start is not None and place.is_first:
                    on_start(plan, run.done)
                record = run.to_the_end(progress)
            _compare(directory, record)
            return record
        finally:
            if directory is not None:
                directory.close()


def _finished(directory: RunDirectory, config: RunConfig, place: Place) -> RunRecord | None:
    """The record of a run that has finished and is whole, for the first process."""
    directory.check(config)
    if not place.is_first:
        return None
    try:
        record = directory.read_finished(config)
    except DamagedError as error:
        warnings.warn(f"{error.what}; training the run again", stacklevel=3)
        return None
    if record is not None:
        directory.remove_checkpoints()  # it was killed right after it had ended
        directory.keep_config(config)
    return record


def _compare(directory: RunDirectory | None, record: RunRecord) -> None:
    """Say if a run that was trained again, because its model was lost, is not what it was."""
    old = None if directory is None else directory.replaced
    if old is not None and [p.loss for p in old.curve] != [p.loss for p in record.curve]:
        warnings.warn(
            f"the losses are not those of the first time, which are in record.json.replaced-*: "
            f"{old.final_loss} then, {record.final_loss} now; another machine, version or number "
            "of threads rounds otherwise",
            stacklevel=3,
        )


def _prepared(config: RunConfig, place: Place, directory: RunDirectory | None) -> RunPlan:
    """Everything that can go wrong before the first step."""
    check_share(config, place)
    check_needs(config, place)
    is_new = directory is None or not directory.checkpoints.exists()
    plan = plan_run(config, is_checked=is_new and place.is_first)
    if directory is not None and place.is_first:
        directory.open(config)
    return plan


@contextmanager
def _own_randomness(config: RunConfig, place: Place) -> Iterator[None]:
    """A run draws from its seed, and leaves the generators of the caller as they were."""
    devices = [place.device] if place.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        yield
