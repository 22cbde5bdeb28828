"""short_names: the structures behind the short names of a leaderboard."""

from __future__ import annotations

from collections.abc import Iterable

from einlinear.searches.answer import LeaderboardRow
from einlinear.show.tables import facts_text


def short_names(rows: Iterable[LeaderboardRow]) -> dict[str, str]:
    """Structures by name, of the rows whose label does not spell the structure."""
    found = {
        row.label.split()[0]: row.structure
        for row in rows
        if row.label.strip() and not row.label.startswith(row.structure)
    }
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def short_names_text(rows: Iterable[LeaderboardRow], width: int | None = None) -> str:
    """The names as text, one in a line; empty if all labels spell their structures."""
    found = short_names(rows)
    return facts_text(found, width) if found else ""
