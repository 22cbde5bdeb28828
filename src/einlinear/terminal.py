"""What every command needs: a console, a table of facts, files written whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill

from rich.console import Console
from rich.table import Table

from einlinear.errors import cannot_write
from einlinear.files import write_whole

_WIDE = 10_000


def columns() -> int:
    """How wide tables are: as the terminal is, or as COLUMNS says; 80 in a pipe or a file."""
    return get_terminal_size().columns


def console(width: int = _WIDE) -> Console:
    """Where text goes; so wide if it is no terminal, since lines of a log are not broken."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def fitted(table: Table) -> Table:
    """The table, made as narrow as the terminal; 80 columns in a pipe. Cells are folded for it."""
    if table_width(table) > columns():
        table.width = columns()
    return table


def table_width(table: Table) -> int:
    """How many columns the table takes if no cell is folded."""
    return Console(width=_WIDE).measure(table).maximum


def say(text: str, indent: str = "") -> None:
    """Print a paragraph, in a terminal broken between words; further lines are indented."""
    if sys.stdout.isatty():
        text = wrapped(text, indent)
    print(text)


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines that fit, broken between words only."""
    return fill(
        text,
        max(40, columns()),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def facts_table(facts: Mapping[str, object]) -> Table:
    """One line for each fact: its name, and its value, which is folded rather than cut."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, str(value))
    return table


def write(path: Path, text: str) -> None:
    """Save a file and say where."""
    save(path, text)
    print(f"wrote {path}")


def save(path: Path, text: str) -> None:
    """Write a file whole or not at all; links, devices and pipes are written to as they are."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        try:
            path.write_bytes(text.encode())
        except OSError as error:
            raise cannot_write(path, error) from error
    else:
        write_whole(path, text.encode())
