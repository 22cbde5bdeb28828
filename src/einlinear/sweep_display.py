"""How far a sweep is: a live table in a terminal, lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from einlinear.studies.record import RunRecord
from einlinear.studies.sweeps.progress import Failure, Running, SweepProgress

_SECONDS_BETWEEN_LINES = 15.0
_MOST_ROWS = 20


@contextmanager
def sweep_display(
    console: Console, labels: dict[str, str]
) -> Iterator[Callable[[SweepProgress], None]]:
    """A function that shows progress where the console is; `labels` name runs by id."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def draw(at: SweepProgress) -> None:
                for ended in at.last:
                    live.console.print(_ending(ended, labels), markup=False)
                live.update(picture(at), refresh=True)

            yield draw
        return
    shown = [-_SECONDS_BETWEEN_LINES]

    def write(at: SweepProgress) -> None:
        lines = [_ending(ended, labels) for ended in at.last]
        if lines or monotonic() - shown[0] >= _SECONDS_BETWEEN_LINES:
            shown[0] = monotonic()
            print("\n".join([*lines, _summary(at)]), file=sys.stderr)

    yield write


def picture(at: SweepProgress) -> Group:
    """One line for all, and one for each run under way."""
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_row(ProgressBar(1.0, at.share, width=28), Text(_summary(at), style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    for run in at.running[:_MOST_ROWS]:
        table.add_row(
            ProgressBar(run.total, run.done, width=28),
            escape(run.label),
            Text(f"step {run.done:,} of {run.total:,}"),
            Text("" if run.loss is None else f"loss {run.loss:.4f}"),
            Text("" if run.seconds_left is None else f"{duration(run.seconds_left)} left"),
            Text(_where(run), style="dim"),
        )
    hidden = len(at.running) - _MOST_ROWS
    return Group(head, table, Text(f"and {hidden} more" if hidden > 0 else "", style="dim"))


def duration(seconds: float) -> str:
    """A time for people: 0.8 s, 12 s, 2:05 min, 3:10 h, 2 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}:{minutes:02d} h"
    return f"{hours // 24} d {hours % 24} h"


def _where(run: Running) -> str:
    if run.is_elsewhere:
        return "by another sweep"
    return "" if run.loss is not None else "starting"


def _summary(at: SweepProgress) -> str:
    done = at.finished + at.diverged
    parts = [f"{done} of {at.total} runs done"]
    parts += [f"{at.diverged} diverged"] * bool(at.diverged)
    parts += [f"{at.failed} failed"] * bool(at.failed)
    parts += [f"{len(at.running)} running"] * bool(at.running)
    if done + at.failed < at.total:
        parts.append(f"about {duration(at.seconds_left)} left")
    return ", ".join(parts)


def _ending(ended: RunRecord | Failure, labels: dict[str, str]) -> str:
    name = f"{ended.id} {labels.get(ended.id, '')}".strip()
    if isinstance(ended, Failure):
        return f"failed    {name}: {ended.text.strip().splitlines()[-1]}"
    loss = "" if ended.final_loss is None else f" loss {ended.final_loss:.4f},"
    return f"{ended.status:9} {name}:{loss} {duration(ended.seconds)}"
