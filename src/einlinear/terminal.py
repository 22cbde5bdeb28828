"""What every command needs: a console, a table of facts, files written whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from einlinear.files import write_whole


def console(width: int = 132) -> Console:
    """Where tables go; so wide if it is no terminal."""
    # Tables piped into a file or a pager are not cut at 80 columns.
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def facts_table(facts: Mapping[str, object]) -> Table:
    """One line for each fact: its name, and its value, which is folded rather than cut."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def write(path: Path, text: str) -> None:
    """Save a file and say where."""
    save(path, text)
    print(f"wrote {path}")


def save(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, text.encode())
