"""Thaw: the state that a shorter run has kept, from which a longer one continues.

The state is that of the shorter run right after a step, before anything was logged or evaluated
there: what happens next depends on the number of steps, and is up to the longer run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from einlinear.errors import EinlinearError, quote
from einlinear.files.whole import as_path
from einlinear.runs.config import NOT_IN_ID, RunConfig
from einlinear.runs.directory import RunDirectory
from einlinear.runs.schedule import freeze_step
from einlinear.training.checkpoint import Checkpoint, check_owner, has_checkpoint


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """A run that has kept its state: its config, its directory, and the folder of the state."""

    config: RunConfig
    path: Path
    folder: Path

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse a state that is not that of the run."""
        check_owner(checkpoint, self.config, self.path)


def find_frozen(source: str | Path, config: RunConfig) -> FrozenRun:
    """The run in a directory, whose state a longer run can continue; raises if it cannot."""
    path = as_path(source, "thaw")
    directory = RunDirectory(path)
    held = directory.owner()
    if held is None:
        raise EinlinearError(
            what=f"thaw is {path}, which holds no run",
            rule="a run continues a shorter one, which keeps its config in config.json",
            fix="name the directory of a run that was trained with keep_state=True",
        )
    _check_same(path, held, config)
    step = freeze_step(held)
    if step is None or not 0 < step:
        raise EinlinearError(
            what=f"the run in {path} has the schedule {held.schedule}, the eval_spacing "
            f"{held.eval_spacing}" + f" and the decay_share {held.decay_share:g}" * (step == 0),
            rule="a longer run continues a shorter one if nothing before depends on the steps",
            fix='train both with schedule="constant" or "wsd", a decay_share below 1, and '
            'eval_spacing="fixed"',
        )
    if not has_checkpoint(directory.frozen):
        raise EinlinearError(
            what=f"the run in {path} has no state of step {step} in {directory.frozen}",
            rule="a run keeps its state at that step if keep_state is set, unless it diverges "
            "before",
            fix="train the shorter run with keep_state=True up to that step, or leave thaw out to "
            "start from step 0",
        )
    return FrozenRun(held, path, directory.frozen)


def usable_source(source: Path | None, config: RunConfig) -> Path | None:
    """The source if a run can still continue it: without one, training gives the same numbers."""
    if source is None:
        return None
    try:
        find_frozen(source, config)
    except EinlinearError as error:
        print(f"training from step 0: {error.what}")
        return None
    return source


def _check_same(path: Path, held: RunConfig, config: RunConfig) -> None:
    """Refuse a run that differs in more than its steps, or does not have fewer of them."""
    if held.steps >= config.steps:
        raise EinlinearError(
            what=f"the run in {path} has {held.steps:,} steps, the new one {config.steps:,}",
            rule="a run continues one with fewer steps",
            fix=f"give more than {held.steps:,} steps, or leave thaw out",
        )
    if replace(held, steps=config.steps).id == config.id:
        return
    names = [f.name for f in fields(held) if f.name not in ("steps", *NOT_IN_ID)]
    pairs = [(name, getattr(held, name), getattr(config, name)) for name in names]
    differ = [f"{k} {quote(old)}, not {quote(new)}" for k, old, new in pairs if old != new]
    fix = "give the settings of that run, or leave thaw out"
    if held.warmup != config.warmup:
        fix = f"{fix}; by default warmup follows from the steps: give warmup={held.warmup}"
    raise EinlinearError(
        what=f"the run in {path} has other settings: {', '.join(differ[:4])}",
        rule="a longer run differs from the one that it continues in steps only",
        fix=fix,
    )
