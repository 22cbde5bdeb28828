"""Tables as plain text, for terminals, logs and `print`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from textwrap import fill, wrap

from einlinear.show.symbols import printable

RULE = "---"
"""A row that draws a line across the table."""

_GAP, _NARROW_GAP = "  ", " "  # between columns
_LEAST = 8  # characters that a column of words keeps where the table is too wide


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
    its own above its row. If that is not enough, the head is wrapped, and columns move closer
    together if that keeps all other cells whole; or else the cells of the widest columns are
    wrapped. Numbers and the words of the head stay whole, so a table can be
    wider than a very narrow terminal.

    Symbols that the standard output cannot print are spelled out, see `printable`.

    Args:
        head: the names of the columns.
        rows: the cells of each row. A string is a line of its own: the title of a section, or RULE.
        left: how many columns are aligned to the left; the others are aligned to the right.
        width: the most characters in a line; no limit if None.
        bold: the indices of the rows to print in bold, for terminals.
    """
    rows = [printable(r) if isinstance(r, str) else tuple(map(printable, r)) for r in rows]
    cells = [tuple(map(printable, head)), *(row for row in rows if not isinstance(row, str))]
    columns = [k for k, column in enumerate(zip(*cells, strict=True)) if any(column)]
    widths = [max(len(row[k]) for row in cells) for k in columns]
    gap = _GAP
    if width is not None:
        whole = [cells if k >= left else cells[:1] for k in columns]
        least = [
            max(_LEAST if k < left else 1, *(_longest_word(row[k]) for row in kept))
            for k, kept in zip(columns, whole, strict=True)
        ]
        # As narrow as they get if no cell is wrapped, only the head.
        whole_cells = [least[0], *(_cells_width(cells, k) for k in columns[1:])]
        gaps = {each: width - _total_gap(each, widths) for each in (_GAP, _NARROW_GAP)}
        least_of = [sum(map(min, widths, floor)) for floor in (whole_cells, least)]
        if least_of[1] > gaps[_GAP] or gaps[_GAP] < least_of[0] <= gaps[_NARROW_GAP]:
            gap = _NARROW_GAP
        floor = whole_cells if least_of[0] <= gaps[gap] else least
        widths = _narrowed(widths, floor, gaps[gap])
    rule = "-" * (sum(widths) + _total_gap(gap, widths))

    def lines(row: Sequence[str] | str) -> list[str]:
        if isinstance(row, str):
            return [rule if row == RULE else row if width is None else wrapped(row, width)]
        first, *others = (row[k] for k in columns)
        above = []
        if width is not None and len(first) > widths[0]:
            above, first = [wrapped(first, width)], ""
        parts = [
            [cell] if len(cell) <= room else wrap(cell, room, break_on_hyphens=False)
            for cell, room in zip((first, *others), widths, strict=True)
        ]
        return above + [
            gap.join(
                part.ljust(room) if k < left else part.rjust(room)
                for k, part, room in zip(columns, line, widths, strict=True)
            ).rstrip()
            for line in zip_longest(*parts, fillvalue="")
        ]

    found = [*lines(cells[0]), rule]
    for number, row in enumerate(rows):
        found += [f"\x1b[1m{line}\x1b[0m" if number in bold else line for line in lines(row)]
    return "\n".join(found)


def _cells_width(cells: Sequence[Sequence[str]], k: int) -> int:
    """The width of a column whose cells are whole, below a head that may be wrapped."""
    head, *others = (row[k] for row in cells)
    return max(_longest_word(head), *map(len, others), 1)


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _total_gap(gap: str, widths: Sequence[int]) -> int:
    return len(gap) * (len(widths) - 1)


def _narrowed(widths: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """The widths of columns that add up to `total`: a narrower first one, or else the widest.

    No column becomes narrower than its `least`.
    """
    found = list(widths)
    excess = sum(found) - total
    if excess <= 0:
        return found
    if found[0] - excess >= least[0]:
        return [found[0] - excess, *found[1:]]
    for _ in range(excess):
        wide = [k for k, (now, low) in enumerate(zip(found, least, strict=True)) if now > low]
        if not wide:
            break
        found[max(wide, key=lambda k: found[k])] -= 1
    return found


def facts_text(facts: Mapping[str, object], width: int | None = None) -> str:
    """Format facts, one in a line: its name, then its value, which is wrapped to fit."""
    shown = {printable(name): printable(str(value)) for name, value in facts.items()}
    first = max(map(len, shown)) + len(_GAP)
    lines = []
    for name, value in shown.items():
        room = None if width is None else max(_LEAST, width - first)
        parts = [value] if room is None else wrap(value, room, break_on_hyphens=False)
        heads = [name, *[""] * (len(parts) - 1)]
        lines += [f"{head:{first}}{part}" for head, part in zip(heads, parts, strict=True)]
    return "\n".join(lines)


def wrapped(text: str, width: int, indent: str = "  ") -> str:
    """Wrap a paragraph between words; lines after the first are indented further by `indent`."""
    text = printable(text)
    own = text[: len(text) - len(text.lstrip())]
    return fill(
        text,
        width,
        subsequent_indent=own + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
