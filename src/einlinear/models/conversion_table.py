"""The table of a conversion as text of at most 80 columns: rows, counts, shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from textwrap import wrap

WIDTH = 80
"""How many columns a table takes at most."""

Row = tuple[str, tuple[str, ...]]
"""The name of a layer, and what stands beside it."""


def table(
    header: tuple[str, ...], sections: Mapping[str, Sequence[Row]], totals: Sequence[Row]
) -> list[str]:
    """The rows of each section under its title, then the totals.

    Where a name is too long for its column, all names are split: a layer then has the last part of
    its name, under the name of the module that holds it.
    """
    rows = [*chain.from_iterable(sections.values()), *totals]
    columns = zip(header, *(facts for _, facts in rows), strict=True)
    widths = [max(map(len, column)) for column in columns]
    room = WIDTH - sum(2 + width for width in widths if width)
    is_split = any(len(name) + 2 > room for name, _ in rows)
    body: list[Row] = []
    for title, lines in sections.items():
        body += [(line, ()) for line in wrapped(title)]
        body += _split(lines) if is_split else [(f"  {name}", facts) for name, facts in lines]
    first = max(len(name) for name, facts in [("layer", header), *body, *totals] if facts)
    widths = [min(first, room), *widths]

    def line(row: Row) -> list[str]:
        name, facts = row
        if not facts:
            return wrapped(name)
        own = wrapped(name) if len(name) > widths[0] else []
        cells = zip(("" if own else name, *facts), widths, strict=True)
        return [*own, "  ".join(cell.ljust(width) for cell, width in cells).rstrip()]

    rule = "-" * sum([widths[0], *(2 + width for width in widths[1:] if width)])
    ends = chain.from_iterable(map(line, totals))
    return [*line(("layer", header)), rule, *chain.from_iterable(map(line, body)), rule, *ends]


def _split(rows: Sequence[Row]) -> list[Row]:
    """Rows under the modules that hold the layers; a layer with several names keeps them."""
    split: list[Row] = []
    holder = ""
    for name, facts in rows:
        parent, _, last = name.rpartition(".")
        if " = " in name or not parent:
            parent, last = "", name
        if parent and parent != holder:
            split.append((f"  {parent}", ()))
        split.append((f"    {last}" if parent else f"  {last}", facts))
        holder = parent
    return split


def wrapped(text: str) -> list[str]:
    """Lines of at most WIDTH, all after the first indented; a name is never broken."""
    indent = text[: len(text) - len(text.lstrip())]
    return wrap(
        text,
        WIDTH,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def change(before: int, after: int) -> str:
    """Two counts: "1.05 M -> 132 k"."""
    return f"{_amount(before)} -> {_amount(after)}"


def _amount(number: int) -> str:
    """A count as people read it: 9,872, then 17.9 k, 1.05 M, 7.24 G."""
    if number < 10_000:
        return f"{number:,}"
    size, prefixes, prefix = float(number), iter("kMGTPE"), ""
    while size >= 999.5:
        size, prefix = size / 1000, next(prefixes)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {prefix}"


def ratio(before: int, after: int, noun: str) -> str:
    """How many times fewer or more there are: "3.1 x fewer FLOPs"."""
    if before == after:
        return f"as many {noun}"
    times = max(before, after) / max(1, min(before, after))
    if times < 1.05:
        return f"about as many {noun}"
    size = f"{times:.1f}" if times < 99.95 else f"{times:,.0f}"
    return f"{size} x {'fewer' if after < before else 'more'} {noun}"


def percent(part: int, total: int) -> str:
    """A share: "91 %", "1.2 %"."""
    share = 100 * part / max(1, total)
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %"
