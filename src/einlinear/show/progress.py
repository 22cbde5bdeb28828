"""Progress of a long piece of work, as the functions that do it report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a piece of work: finished pieces, and their share of the work.

    If the total is unknown, total and share are 0 until the end.
    """

    done: int
    total: int
    share: float


def show_nothing(text: str) -> None:
    """Show no progress: what functions do with texts about it unless you give them a function."""
