"""Tables as plain text, for terminals, logs and `print`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from textwrap import fill, wrap

RULE = "---"
"""A row that draws a line across the table."""

_GAP = "  "  # between columns
_LEAST = 8  # characters that a column keeps where the table is too wide


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str] | str],
    *,
    left: int = 1,
    width: int | None = None,
    bold: Collection[int] = (),
) -> str:
    """Format rows of cells in columns under their head; columns without text are left out.

    If the table is wider than `width`, a first cell that is too long for its column gets a line of
    its own above its row. If that is not enough, the cells of the widest columns are wrapped.

    Args:
        head: the names of the columns.
        rows: the cells of each row. A string is a line of its own: the title of a section, or RULE.
        left: how many columns are aligned to the left; the others are aligned to the right.
        width: the most characters in a line; no limit if None.
        bold: the indices of the rows to print in bold, for terminals.
    """
    rows = list(rows)
    cells = [head, *(row for row in rows if not isinstance(row, str))]
    columns = [k for k, column in enumerate(zip(*cells, strict=True)) if any(column)]
    widths = [max(len(row[k]) for row in cells) for k in columns]
    if width is not None:
        widths = _narrowed(widths, width)
    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))

    def lines(row: Sequence[str] | str) -> list[str]:
        if isinstance(row, str):
            return [rule if row == RULE else row if width is None else wrapped(row, width)]
        first, *others = (row[k] for k in columns)
        above = []
        if width is not None and len(first) > widths[0]:
            above, first = [wrapped(first, width)], ""
        parts = [
            [cell] if len(cell) <= room else wrap(cell, room)
            for cell, room in zip((first, *others), widths, strict=True)
        ]
        return above + [
            _GAP.join(
                part.ljust(room) if k < left else part.rjust(room)
                for k, part, room in zip(columns, line, widths, strict=True)
            ).rstrip()
            for line in zip_longest(*parts, fillvalue="")
        ]

    found = [*lines(cells[0]), rule]
    for number, row in enumerate(rows):
        found += [f"\x1b[1m{line}\x1b[0m" if number in bold else line for line in lines(row)]
    return "\n".join(found)


def _narrowed(widths: list[int], width: int) -> list[int]:
    """The widths of columns that fit: a narrower first one, or else narrower widest ones."""
    spare = width - sum(widths) - len(_GAP) * (len(widths) - 1)
    if spare >= 0:
        return widths
    if widths[0] + spare >= _LEAST:
        return [widths[0] + spare, *widths[1:]]
    widths = list(widths)
    while spare < 0 and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
        spare += 1
    return widths


def facts_text(facts: Mapping[str, object], width: int | None = None) -> str:
    """Format facts, one in a line: its name, then its value, which is wrapped to fit."""
    first = max(map(len, facts)) + len(_GAP)
    lines = []
    for name, value in facts.items():
        room = None if width is None else max(_LEAST, width - first)
        parts = [str(value)] if room is None else wrap(str(value), room, break_on_hyphens=False)
        heads = [name, *[""] * (len(parts) - 1)]
        lines += [f"{head:{first}}{part}" for head, part in zip(heads, parts, strict=True)]
    return "\n".join(lines)


def wrapped(text: str, width: int, indent: str = "  ") -> str:
    """Wrap a paragraph between words; lines after the first are indented further by `indent`."""
    own = text[: len(text) - len(text.lstrip())]
    return fill(
        text,
        width,
        subsequent_indent=own + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
