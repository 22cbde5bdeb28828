"""What every command needs: the terminal's width, paragraphs, facts, and files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import get_terminal_size

from rich.console import Console

from einlinear.files.whole import write_whole
from einlinear.show.tables import facts_text, wrapped


def columns() -> int:
    """The width of tables: that of the terminal, or COLUMNS; 80 in a pipe or a file."""
    return get_terminal_size().columns


def console() -> Console:
    """Where progress is shown."""
    return Console(highlight=False)


def say(text: str, indent: str = "") -> None:
    """Print a paragraph, wrapped."""
    print(wrapped(text, columns(), indent))


def print_facts(facts: Mapping[str, object]) -> None:
    """Print facts, one in a line; lines are wrapped in a terminal only."""
    print(facts_text(facts, columns() if sys.stdout.isatty() else None))


def write(path: Path, text: str) -> None:
    """Write a file and print its path."""
    write_whole(path, text.encode())
    print(f"wrote {path}")
