"""Progress of long work: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from rich.status import Status

    from einlinear.show.progress import Progress
    from einlinear.training.pace import TrainProgress

_SECONDS_BETWEEN_LINES = 15.0


class LineClock:
    """Limits the lines of a log: one is due at first, then 15 seconds after the last."""

    def __init__(self) -> None:
        self._last: float | None = None

    def is_due(self, *, always: bool = False) -> bool:
        """Whether to write a line now, which then counts as written."""
        now = monotonic()
        is_due = always or self._last is None or now - self._last >= _SECONDS_BETWEEN_LINES
        if is_due:
            self._last = now
        return is_due


@contextmanager
def progress_bar(console: Console, noun: str) -> Iterator[Callable[[Progress], None]]:
    """A function that shows progress, with the time left by share of work."""
    if console.is_terminal:
        columns = (
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=console, speed_estimate_period=600) as bar:
            task = bar.add_task("starting", total=1.0)

            def draw(at: Progress) -> None:
                bar.update(task, completed=at.share, description=_amount(at, noun))

            yield draw
    else:
        yield _log(noun)


@contextmanager
def training_bar(console: Console) -> Iterator[Callable[[TrainProgress], None]]:
    """A function that shows the progress of a run: its loss, its speed, the time left."""
    if console.is_terminal:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=console) as bar:
            task = bar.add_task("starting", total=1.0)

            def draw(at: TrainProgress) -> None:
                bar.update(task, completed=at.done / at.total, description=_training_text(at))

            yield draw
        return
    clock = LineClock()

    def write(at: TrainProgress) -> None:
        if clock.is_due(always=at.done == at.total):
            print(_training_text(at), file=sys.stderr)

    yield write


def case_progress(case: str, status: Status) -> Callable[[str], None]:
    """A function that shows the case and where it is: at once in a terminal, rarely in a log."""
    status.update(case)
    if status.console.is_terminal:
        return lambda text: status.update(f"{case}: {text}")
    print(case, file=sys.stderr)
    clock = LineClock()
    clock.is_due()

    def write_line(text: str) -> None:
        if clock.is_due():
            print(f"  {text}", file=sys.stderr)

    return write_line


def _training_text(at: TrainProgress) -> str:
    minutes, seconds = divmod(round(at.seconds_left), 60)
    return (
        f"step {at.done} of {at.total}, training loss {at.loss:.4f}, "
        f"{at.units_per_second:,.0f} {at.unit}s/s, {minutes}:{seconds:02d} left"
    )


def _log(noun: str) -> Callable[[Progress], None]:
    begin = monotonic()
    first: list[float] = []
    clock = LineClock()

    def write(at: Progress) -> None:
        first.extend([] if first else [at.share])
        if not at.total and not at.done:
            return  # nothing is known yet
        if not clock.is_due(always=0 < at.total <= at.done):
            return
        seconds = monotonic() - begin
        line = f"{_amount(at, noun)}, {seconds:.0f} s"
        if first[0] < at.share < 1:
            left = seconds * (1 - at.share) / (at.share - first[0])
            line += f", about {left:.0f} s left"
        print(line, file=sys.stderr)

    return write


def _amount(at: Progress, noun: str) -> str:
    if at.total:
        return f"{at.done} of {at.total} {noun}"
    return f"{at.done} {noun}" if at.done else "starting"
