"""The training loop: steps, evaluations and checkpoints until the run finishes or diverges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from einlinear.errors import EinlinearError
from einlinear.files.tensors import write_tensors
from einlinear.files.whole import parse_object
from einlinear.layers.machine import machine_facts
from einlinear.layers.measure import peak_memory
from einlinear.layers.moe.routing import Routed
from einlinear.runs.config import RunConfig
from einlinear.runs.directory import MODEL, RunDirectory
from einlinear.runs.record import Point, RunRecord, Status
from einlinear.runs.schedule import eval_steps, fixed_interval, freeze_step, log_interval
from einlinear.training.checkpoint import (
    Checkpoint,
    check_owner,
    check_shapes,
    has_checkpoint,
    load_checkpoint,
    read_checkpoint,
    remove_later,
    save_checkpoint,
)
from einlinear.training.devices.distributed import Place, from_first, mean
from einlinear.training.evaluate import Evaluator
from einlinear.training.pace import OnProgress, Reporter, Stopwatch
from einlinear.training.plan import RunPlan
from einlinear.training.signals import Deferred
from einlinear.training.state import TrainState
from einlinear.training.thaw import FrozenRun

_FAR_ABOVE = 2.0  # times the loss at the start
_LINES = 10  # of metrics, over which the mean loss must be this high; the first ten may be
_SETTLED = 100  # with fixed spacing, the first steps, in which it may be
# What mirrors show of a line of metrics: each name has one value per step.
_SHOWN = {"train": ("train_loss", "rate", "seconds"), "point": ("loss", "data_seconds")}


Mirror = Callable[[int, dict[str, float]], None]


class RunLoop:
    """A run in training, after `done` steps."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        plan: RunPlan,
        directory: RunDirectory | None,
        mirrors: Sequence[Mirror],
    ) -> None:
        self.config, self.place, self.plan, self.directory = config, place, plan, directory
        self.writes_to = directory if place.is_first else None
        if place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place.device)  # of earlier runs of this process
        self.state = TrainState(config, plan.task, place, plan.model)
        rows = max(1, config.batch_size // config.accumulation)
        validation = self.state.task.validation(config.eval_size, batch=rows)
        self.evaluator = Evaluator(self.state, validation)
        self.watch = Stopwatch(place.device)
        self.done = 0
        self.curve: list[Point] = []
        self.peak_bytes = 0
        self._window_steps = 0  # steps in state.losses
        self._mean = 0.0  # loss of the last window
        self._since_point = (0.0, 0)  # sum of losses, and steps, up to the last line of metrics
        self._since_check = (0.0, 0)  # the same, since the last check for a high loss
        # First step, sum of losses and steps of each line in the last tenth of all steps.
        self._last: list[tuple[int, float, int]] = []
        self._last_from = config.steps - max(1, config.steps // 10)
        self._point_steps = set(eval_steps(config.steps, config.eval_points, config.eval_spacing))
        self._freezes_at = freeze_step(config) if config.keep_state else None
        self._is_thawed = False  # and nothing has been noted of the last step yet
        self.accuracy: float | None = None  # at the last point
        self._mirrors = mirrors if place.is_first else ()

    def restore(self, frozen: FrozenRun | None = None) -> None:
        """Get ready for the next step: the first, or the one after the last checkpoint.

        Without a checkpoint, continue a shorter run, if one is given.
        """
        self._measure()
        checkpoint = None
        if self.directory is not None:
            source = [] if frozen is None else [f"continuing the run in {frozen.path}"]
            checkpoint = self._last_checkpoint(self.directory.checkpoints, *source)
        if self.writes_to is not None:
            remove_later(self.writes_to.checkpoints, 0 if checkpoint is None else checkpoint.step)
        if checkpoint is None and frozen is not None:
            checkpoint = self._last_checkpoint(frozen.folder)
            self._is_thawed = checkpoint is not None
        if checkpoint is None:
            if self.writes_to is not None:
                self.writes_to.rewind()
            self._evaluate()
            return
        if self._is_thawed and frozen is not None:
            frozen.check(checkpoint)
        elif self.directory is not None:
            check_owner(checkpoint, self.config, self.directory.path)
            weights = checkpoint.weights("model.")
            check_shapes(weights, self.state.names, self.directory.path)
        self._check_data(checkpoint)
        self.state.load_(checkpoint.tensors)
        self.evaluator.load_(checkpoint.tensors)
        values = checkpoint.values
        self.done = checkpoint.step
        self.curve = _points(values["metrics"])
        self.peak_bytes = values["peak_bytes"]
        self.watch.seconds = values["seconds"]
        self.state.data_seconds = values["data_seconds"]
        self._window_steps, self._mean = values["window_steps"], values["mean"]
        self._since_point = tuple(values["since_point"])
        self._since_check = tuple(values["since_check"])
        last = _lines(values.get("last", []))  # earlier versions have neither
        self._last = [line for line in last if not self._is_thawed or line[0] >= self._last_from]
        self.accuracy = values.get("accuracy")
        if self.writes_to is None:
            return
        if not self._is_thawed and self._freezes_at is not None and self.done >= self._freezes_at:
            self._check_frozen(self._freezes_at)
        if not self.writes_to.rewind(values["metrics"]) and not self._is_thawed:
            warnings.warn(
                f"the metrics in {self.writes_to.path} were damaged; restored them from the "
                f"checkpoint of step {checkpoint.step}",
                stacklevel=2,
            )

    def _check_frozen(self, step: int) -> None:
        """Warn if a run that has begun without keep_state is past the step of that state."""
        assert self.directory is not None, "only a run with a directory resumes"
        if not has_checkpoint(self.directory.frozen):
            warnings.warn(
                f"keep_state is set, and the run in {self.directory.path} resumes at step "
                f"{self.done}, after the state of step {step} that it would keep; no longer run "
                "can continue it",
                stacklevel=3,
            )

    def _check_data(self, checkpoint: Checkpoint) -> None:
        if checkpoint.values["data"] != self.plan.task.fingerprint:
            raise EinlinearError(
                what=f"the data has changed since step {checkpoint.step}: "
                f"{self.config.data or 'that of the package'}",
                rule="a run resumes with the data that it started with",
                fix="restore the data, or train in another directory",
            )

    def _last_checkpoint(self, folder: Path, *otherwise: str) -> Checkpoint | None:
        """The last checkpoint that the first process can read; all processes use the same."""
        found = None
        if self.place.is_first:
            found = load_checkpoint(folder, *otherwise)
        step = from_first(self.place, -1 if found is None else found.step)
        return found if self.place.is_first or step < 0 else read_checkpoint(folder, step)

    def _measure(self) -> None:
        """Measure peak memory; this also does what happens only once, such as compilation."""

        def passes() -> None:
            with self.state.spread.exchanging(True):
                self.state.backward(self.state.batch(0, 0))
            self.state.optimizer.zero_grad()

        for _ in range(
            1 if self.place.count == 1 else 2
        ):  # DDP allocates its buffers in the second
            passes()
        if self.place.device.type == "cpu":
            # Keep what the passes replace: freeing it would distort the measurement.
            held = [m.last_routing for m in self.state.model.modules() if isinstance(m, Routed)]
            self.peak_bytes = self.state.held_bytes() + peak_memory(passes)
            del held
        self.state.data_seconds = 0.0

    def to_the_end(self, progress: OnProgress | None) -> RunRecord:
        """Do all remaining steps and return the record."""
        config = self.config
        report = Reporter(self, progress if self.place.is_first else None)
        has_diverged = False
        # Processes that stop at different steps would wait for each other forever.
        with Deferred(self.directory is not None and self.place.count == 1) as signals:
            if self._is_thawed:
                has_diverged = self._end_step()
            while self.done < config.steps and not has_diverged:
                self.watch.go()
                self.state.step(self.done)
                self.done += 1
                self._window_steps += 1
                has_diverged = self._end_step()
                is_left = self.done < config.steps and not has_diverged
                if self._is_saved() or (signals.is_asked and is_left):
                    self.watch.stop()
                    self._save()
                report()
                if signals.is_asked and is_left:
                    self._stop(signals)
            is_result = not has_diverged and self.curve[-1].loss is not None
            record = self._finish("finished" if is_result else "diverged")
            if signals.is_asked and self.directory is not None:
                warnings.warn(f"the run in {self.directory.path} has finished", stacklevel=2)
            return record

    def _end_step(self) -> bool:
        """Freeze, log and evaluate where it is time; returns whether the run has diverged.

        The frozen state comes first: whether to log and evaluate after this step depends on the
        number of steps.
        """
        if self.done == self._freezes_at and self.directory is not None:
            self.watch.stop()
            self._save(self.directory.frozen)
        has_diverged = False
        is_point = self.done in self._point_steps
        if is_point or self.done % self._interval() == 0:
            self.watch.stop()
            has_diverged = self._log()
        if is_point or has_diverged:
            self._evaluate()
        return has_diverged

    def _interval(self) -> int:
        """The number of steps in a line of metrics."""
        if self.config.eval_spacing == "fixed":
            return fixed_interval(self.done)
        return log_interval(self.config.steps)

    def _stop(self, signals: Deferred) -> None:
        """Let a signal end the run, which has just saved a checkpoint."""
        assert self.directory is not None, "signals are deferred only if there is a directory"
        warnings.warn(
            f"saved a checkpoint of step {self.done} of {self.config.steps} in "
            f"{self.directory.path}; run the same command again to continue",
            stacklevel=2,
        )
        signals.deliver()

    def last_loss(self) -> float:
        """The mean loss since the last line of metrics, or of that line."""
        return float(self.state.losses) / self._window_steps if self._window_steps else self._mean

    def _is_saved(self) -> bool:
        every = self.config.checkpoint_every
        return bool(self.directory and every and self.done % every == 0)

    def _log(self) -> bool:
        """Write the mean loss since the last line; returns whether the run has diverged."""
        loss, steps = float(mean(self.place, self.state.losses)), self._window_steps
        self._mean = loss / steps
        self._since_point = _added(self._since_point, loss, steps)
        self._since_check = _added(self._since_check, loss, steps)
        if self.done - steps >= self._last_from:
            self._last.append((self.done - steps, loss, steps))
        self._window_steps = 0
        self.state.losses.zero_()
        rate = self.state.rate(self.done - 1)
        values = {"step": self.done, "train_loss": _finite(self._mean), "rate": rate}
        self._write({"kind": "train", **values, "seconds": self.watch.seconds})
        return not isfinite(self._mean) or self._stays_high()

    def _stays_high(self) -> bool:
        """Whether the loss was far above the start over many lines, other than the first ones."""
        length = _LINES * self._interval()
        if self.done % length:
            return False
        loss, steps = self._since_check
        self._since_check = (0.0, 0)
        start = self.curve[0].loss
        first = _SETTLED if self.config.eval_spacing == "fixed" else length
        return self.done > first and (start is None or loss > _FAR_ABOVE * start * steps)

    def _evaluate(self) -> None:
        """Add a point to the curve."""
        found = self.evaluator()
        self.accuracy = found.accuracy
        units = self.done * self.plan.units_per_step
        total, steps = self._since_point
        mean = total / steps if steps else None
        point = Point(
            step=self.done,
            units=units,
            macs=units * self.plan.counts.macs,
            seconds=self.watch.seconds,
            data_seconds=self.state.data_seconds,
            loss=_finite(found.loss),
            train_loss=_finite(mean),
            rate=self.state.rate(max(0, self.done - 1)),
            routing=found.routing,
        )
        self._since_point = (0.0, 0)
        self.curve.append(point)
        self._write({"kind": "point", **asdict(point)})

    def _write(self, values: dict[str, Any]) -> None:
        if self.writes_to is not None:
            self.writes_to.append(values)
        names = _SHOWN[values["kind"]]
        numbers = {name: values[name] for name in names if values[name] is not None}
        for mirror in self._mirrors:
            mirror(self.done, numbers)

    def _save(self, folder: Path | None = None) -> None:
        """Save a checkpoint; all processes take part, the first one writes."""
        tensors = self.state.tensors() | self.evaluator.tensors()
        if self.writes_to is None:
            return
        values = {
            "config": self.config.id,
            "data": self.plan.task.fingerprint,
            "metrics": self.writes_to.metrics(),
            "seconds": self.watch.seconds,
            "data_seconds": self.state.data_seconds,
            "peak_bytes": self.peak_bytes,
            "window_steps": self._window_steps,
            "mean": self._mean,
            "since_point": self._since_point,
            "since_check": self._since_check,
            "last": self._last,
            "accuracy": self.accuracy,
        }
        folder = folder or self.writes_to.checkpoints
        save_checkpoint(folder, Checkpoint(self.done, tensors, values))

    def _finish(self, status: Status) -> RunRecord:
        """Write the weights and the record."""
        if self.place.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.place.device)
            self.peak_bytes = max(self.peak_bytes, most)
        task = self.plan.task
        last = (0.0, 0)
        for _, loss, steps in self._last:
            last = _added(last, loss, steps)
        facts = {"processes": self.place.count, "device": str(self.place.device)}
        record = RunRecord(
            config=self.config,
            status=status,
            steps_done=self.done,
            curve=tuple(self.curve),
            unit=self.plan.unit,
            counts=self.plan.counts,
            peak_bytes=self.peak_bytes,
            environment=machine_facts() | facts | {"data": task.fingerprint},
            train_loss=_finite(last[0] / last[1]) if last[1] else None,
            accuracy=self.accuracy,
        )
        weights = self.state.weights() if self.config.save_model else None
        if self.writes_to is not None:
            path = self.writes_to.path / MODEL
            seal = None if weights is None else write_tensors(path, weights)
            self.writes_to.write_record(record, seal)
            self.writes_to.remove_checkpoints()
        return record


def _added(window: tuple[float, int], loss: float, steps: int) -> tuple[float, int]:
    """A sum of losses and its number of steps, with more steps."""
    return window[0] + loss, window[1] + steps


def _lines(last: Sequence[Any]) -> list[tuple[int, float, int]]:
    """First step, sum of losses and steps of the last lines; earlier versions kept only the sum."""
    if last and not isinstance(last[0], Sequence):
        last = [(0, *last)] if last[1] else []
    return [(int(first), float(loss), int(steps)) for first, loss, steps in last]


def _points(metrics: str) -> list[Point]:
    """The evaluations in the lines of metrics."""
    lines = [parse_object(line) for line in metrics.splitlines()]
    return [Point.from_dict(line) for line in lines if line.pop("kind") == "point"]


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
