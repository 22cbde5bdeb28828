"""The pace of a run: a stopwatch, timed steps, and progress, reported a few times a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from einlinear.training.loop import RunLoop

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Progress of a run: steps, mean loss of the last steps, speed, seconds left."""

    done: int
    total: int
    loss: float
    unit: str
    units_per_second: float
    seconds_left: float


OnProgress = Callable[[TrainProgress], None]


class Stopwatch:
    """Adds up the time between `go` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device
        self._since: float | None = None

    def go(self) -> None:
        """Start, unless it is running."""
        if self._since is None:
            self._since = perf_counter()

    def stop(self) -> None:
        """Stop, once the device has finished its work."""
        if self._since is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds += perf_counter() - self._since
            self._since = None

    def now(self) -> float:
        """The time so far, running or not."""
        return self.seconds + (0.0 if self._since is None else perf_counter() - self._since)


def take_steps(
    run: RunLoop, *, most: int, seconds: float, least: int = 1, begin: int = 0
) -> list[float]:
    """Train without evaluations and files, to time the steps; returns the seconds of each.

    Takes at least `least` and at most `most` steps, as many as begin within `seconds`. The first is
    step `begin` of the run.
    """
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        before = run.watch.seconds
        run.watch.go()
        run.state.step(begin + len(times))
        run.watch.stop()
        times.append(run.watch.seconds - before)
    return times


class Reporter:
    """Reports progress a few times a second, and at the end."""

    def __init__(self, run: RunLoop, progress: OnProgress | None) -> None:
        self._run, self._progress = run, progress
        self._start = (run.done, run.watch.seconds)
        self._next = 0.0

    def __call__(self) -> None:
        """Report, if it is time."""
        run = self._run
        is_end = run.done == run.config.steps
        if self._progress is None or (monotonic() < self._next and not is_end):
            return
        self._next = monotonic() + _SECONDS_BETWEEN_REPORTS
        steps = run.done - self._start[0]
        seconds = max(1e-9, run.watch.now() - self._start[1]) / steps
        self._progress(
            TrainProgress(
                done=run.done,
                total=run.config.steps,
                loss=run.last_loss(),
                unit=run.plan.unit,
                units_per_second=run.plan.units_per_step / seconds,
                seconds_left=(run.config.steps - run.done) * seconds,
            )
        )
