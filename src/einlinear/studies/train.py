"""train: a RunConfig becomes a RunRecord; a run that was stopped goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from einlinear.errors import EinlinearError
from einlinear.studies.checkpoint import remove_checkpoints
from einlinear.studies.config import RunConfig
from einlinear.studies.directory import RunDirectory
from einlinear.studies.distributed import Place, check_share, joined, together
from einlinear.studies.loop import Mirror, OnProgress, Run
from einlinear.studies.plan_run import RunPlan, plan_run
from einlinear.studies.record import RunRecord

OnStart = Callable[[RunPlan, int], None]


def train(
    config: RunConfig,
    out: str | Path | None = None,
    progress: OnProgress | None = None,
    *,
    mirrors: Sequence[Mirror] = (),
    on_start: OnStart | None = None,
) -> RunRecord:
    """Train the model of a config on its task.

    With `out` everything is kept there: config.json, metrics.jsonl, checkpoints while it trains,
    model.safetensors and record.json at the end. The same call again goes on from the last
    checkpoint, with the same numbers as if it had not been stopped, or gives the record of a run
    that has finished. Under torchrun, or in a process group, all processes call this.

    Args:
        config: what to train.
        out: directory of the run; nothing is kept unless given.
        progress: called a few times a second.
        mirrors: called with a step and numbers by name whenever a line of metrics is written.
        on_start: called with what the run will be, and the step from which it goes on.
    """
    if not isinstance(config, RunConfig):
        raise EinlinearError(
            what=f"the config is given as {config!r:.80}",
            rule="a run is decided by a RunConfig",
            fix='train(RunConfig(task="text", structure="btt"))',
        )
    directory = None if out is None else RunDirectory(out)
    with joined(config) as place:
        with together(place):
            record = None if directory is None else _finished(directory, config, place)
        if record is not None:
            return record
        try:
            with _own_randomness(config, place):
                with together(place):
                    plan = _prepared(config, place, directory)
                run = Run(config, place, plan, directory, mirrors)
                run.restore()
                if on_start is not None and place.is_first:
                    on_start(plan, run.done)
                return run.to_the_end(progress)
        finally:
            if directory is not None:
                directory.close()


def _finished(directory: RunDirectory, config: RunConfig, place: Place) -> RunRecord | None:
    directory.check(config)
    record = directory.read_record()
    if record is not None and place.is_first:
        remove_checkpoints(directory.checkpoints)  # it was killed right after it had ended
    return record


def _prepared(config: RunConfig, place: Place, directory: RunDirectory | None) -> RunPlan:
    """Everything that can go wrong before the first step."""
    check_share(config, place)
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
