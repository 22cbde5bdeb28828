"""train: turn a RunConfig into a RunRecord, resuming a run that was stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from einlinear.errors import EinlinearError, quote
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import DamagedError, RunDirectory, read_record
from einlinear.runs.record import RunRecord
from einlinear.structures.values import whole_number
from einlinear.training.checkpoint import has_checkpoint
from einlinear.training.devices.distributed import Place, check_share, from_first, joined, together
from einlinear.training.loop import Mirror, RunLoop
from einlinear.training.needs import MOST_THREADS, check_needs, using_threads
from einlinear.training.pace import OnProgress
from einlinear.training.plan import RunPlan, plan_run
from einlinear.training.thaw import FrozenRun, find_frozen

OnStart = Callable[[RunPlan, int], None]


def train(
    config: RunConfig,
    out: str | Path | None = None,
    progress: OnProgress | None = None,
    *,
    mirrors: Sequence[Mirror] = (),
    on_start: OnStart | None = None,
    threads: int | None = None,
    thaw: str | Path | None = None,
) -> RunRecord:
    """Train the model of a config on its task.

    Everything goes to `out`: config.json, metrics.jsonl and checkpoints during training,
    model.safetensors and record.json at the end. Call this again to resume from the last
    checkpoint, with the same numbers as an uninterrupted run, or to get the record of a finished
    run. If a finished run is damaged or lacks its model, it is trained again.

    Ctrl-C saves a checkpoint before it raises KeyboardInterrupt, and SIGTERM before it ends the
    process; a second signal stops at once. Under torchrun, or in a process group, call this in all
    processes; signals then end them at once.

    With `thaw`, the run continues a shorter run with the same settings and gives the same numbers
    as if it had trained from step 0. The shorter run stays as it is.

    Args:
        config: what to train.
        out: directory of the run; by default nothing is saved.
        progress: called a few times a second.
        mirrors: called with a step and a dict of numbers for every line of metrics.
        on_start: called with the plan of the run and the step from which it resumes.
        threads: of torch during training; by default as many as a step can use, up to torch's
            current number. They change the last bits of results, but not the id of the run.
        thaw: directory of a run that differs only in having fewer steps, trained with
            keep_state=True. Not needed any more once this run has a checkpoint of its own.
    """
    if not isinstance(config, RunConfig):
        raise EinlinearError(
            what=f"the config is {quote(config)}",
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
            with (
                using_threads(config, threads),
                using_tf32(place.device, config.tf32),
                _own_randomness(config, place),
            ):
                with together(place):
                    frozen = _source(config, directory, thaw)
                    plan = _prepared(config, place, directory)
                run = RunLoop(config, place, plan, directory, mirrors)
                with closing(run.state):
                    run.restore(frozen)
                    if on_start is not None and place.is_first:
                        on_start(plan, run.done)
                    record = run.to_the_end(progress)
            _compare(directory, record)
            return record
        finally:
            if directory is not None:
                directory.close()


def _finished(directory: RunDirectory, config: RunConfig, place: Place) -> RunRecord | None:
    """The record of a finished, undamaged run; only the first process reads it."""
    directory.check(config)
    if not place.is_first:
        return None
    try:
        record = directory.read_finished(config)
    except DamagedError as error:
        warnings.warn(f"{error.what}; training the run again", stacklevel=3)
        return None
    if record is not None:
        directory.remove_checkpoints()  # the process was killed right after it wrote the record
        directory.keep_config(config)
    return record


def _compare(directory: RunDirectory | None, record: RunRecord) -> None:
    """Warn if training a run again, because its model was lost, gave other losses."""
    old = None if directory is None else directory.replaced
    if old is not None and [p.loss for p in old.curve] != [p.loss for p in record.curve]:
        warnings.warn(
            f"the losses are not those of the first time, which are in record.json.replaced-*: "
            f"{old.final_loss} then, {record.final_loss} now; another machine, version or number "
            "of threads rounds differently",
            stacklevel=3,
        )


def _source(
    config: RunConfig, directory: RunDirectory | None, thaw: str | Path | None
) -> FrozenRun | None:
    """The shorter run to continue; a run with a checkpoint of its own may do without."""
    if thaw is None:
        return None
    may_lack = directory is not None and has_checkpoint(directory.checkpoints)
    with suppress(EinlinearError) if may_lack else nullcontext():
        return find_frozen(thaw, config)
    return None


def _prepared(config: RunConfig, place: Place, directory: RunDirectory | None) -> RunPlan:
    """Do everything that can go wrong before the first step."""
    check_share(config, place)
    check_needs(config, place)
    is_new = directory is None or not directory.checkpoints.exists()
    plan = plan_run(config, is_checked=is_new and place.is_first)
    if directory is not None and place.is_first:
        directory.open(config)
    return plan


@contextmanager
def using_tf32(device: torch.device, is_allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in products of float32 matrices on a GPU, within the block.

    From 2.9 on, torch has two settings for it. Writing the older one writes both; reading it is an
    error where a caller has written only the newer one.
    """
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    try:
        older = matmul.allow_tf32
    except RuntimeError:  # the two disagree
        older = newer != "tf32"
    matmul.allow_tf32 = is_allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = older
        if newer is not None:
            matmul.fp32_precision = newer


@contextmanager
def _own_randomness(config: RunConfig, place: Place) -> Iterator[None]:
    """Seed torch for the run, and restore the caller's generators afterwards."""
    devices = [place.device] if place.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        yield
