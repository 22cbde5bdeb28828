"""Progress of a sweep: a live table in a terminal, lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from einlinear.cli.progress import LineClock
from einlinear.runs.record import RunRecord
from einlinear.show.numbers import duration
from einlinear.sweeps.driver import Failure, SweepProgress

_MOST_ROWS = 20
_BAR = 20
_LEAST_WITH_BARS = 78  # columns; in fewer, the names of runs need them


@contextmanager
def sweep_display(
    console: Console,
    labels: Mapping[str, str],
    summary: Callable[[SweepProgress], str] | None = None,
) -> Iterator[Callable[[SweepProgress], None]]:
    """A function that shows progress; `labels` name runs by id, `summary` says how far all is."""
    words = summary or _summary
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def draw(at: SweepProgress) -> None:
                for ended in at.last:
                    live.console.print(_ending(ended, labels), markup=False)
                live.update(picture(at, console.width, words(at)), refresh=True)

            yield draw
        return
    clock = LineClock()

    def write(at: SweepProgress) -> None:
        lines = [_ending(ended, labels) for ended in at.last]
        if clock.is_due(always=bool(lines)):
            _say("\n".join([*lines, words(at)]))

    yield write


def _say(text: str) -> None:
    """Write to the log; a full disk must not end the sweep."""
    try:
        print(text, file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError:
        pass


def picture(at: SweepProgress, width: int, words: str) -> Group:
    """One line for all, and one for each active run; with bars if there is room."""
    bars = int(width >= _LEAST_WITH_BARS)
    head = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(1.0, at.share, width=_BAR)
    head.add_row(*[bar] * bars, Text(words, style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in range(bars):
        table.add_column(width=_BAR)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    for run in at.running[:_MOST_ROWS]:
        table.add_row(
            *[ProgressBar(run.total, run.done, width=_BAR)] * bars,
            Text(run.label + " (another sweep)" * run.is_elsewhere),
            Text(f"{run.done:,}/{run.total:,}"),
            Text("starting" if run.loss is None else f"train loss {run.loss:.4f}"),
            Text("" if run.seconds_left is None else f"{duration(run.seconds_left)} left"),
        )
    hidden = len(at.running) - _MOST_ROWS
    return Group(head, table, Text(f"and {hidden} more" if hidden > 0 else "", style="dim"))


def _summary(at: SweepProgress) -> str:
    done = at.finished + at.diverged
    parts = [f"{done} of {at.total} runs done"]
    parts += [f"{at.diverged} diverged"] * bool(at.diverged)
    parts += [f"{at.failed} failed"] * bool(at.failed)
    parts += [f"{len(at.running)} running"] * bool(at.running)
    if done + at.failed < at.total:
        parts.append(f"about {duration(at.seconds_left)} left")
    return ", ".join(parts)


def _ending(ended: RunRecord | Failure, labels: Mapping[str, str]) -> str:
    name = f"{ended.id} {labels.get(ended.id, '')}".strip()
    if isinstance(ended, Failure):
        return f"failed    {name}: {ended.reason}"
    loss = "" if ended.final_loss is None else f" validation loss {ended.final_loss:.4f},"
    return f"{ended.status:9} {name}:{loss} {duration(ended.seconds)}"
