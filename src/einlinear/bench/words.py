"""A benchmark for the terminal: tables that fit, and a sentence for each result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from einlinear.bench.rows import (
    LINEAR,
    LINEAR_BIAS,
    MODES,
    WORD_COLUMNS,
    BenchRow,
    bench_tables,
    is_ours,
    row_cells,
)
from einlinear.show.tables import text_table

_IN_HEADING = ("structure", "width", "tokens", "dtype", "pass")
_DISPENSABLE = ("of limit", "peak MB", "from - to", "tokens/s", "limit")
"""Columns to leave out, in this order, if the terminal is narrow; the page has all."""
_LEGEND = {
    "limit": "limit: the speed if both compute equally many FLOPs per second; speeds above it are "
    "possible where nn.Linear computes fewer",
    "from - to": "from - to: the middle four fifths of the rounds",
}
_ALIKE = (0.95, 1.05)
"""Speeds that count as equal to nn.Linear: rounded, they are 1.0."""


@dataclass(frozen=True, slots=True)
class ShownTable:
    """Rows that are seen together: a heading, the names of the columns, the cells of each row.

    flops says what a layer computes; it is empty for other tables.
    """

    heading: str
    flops: str
    names: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    is_bold: tuple[bool, ...]

    def text(self, width: int | None = None, *, has_bold: bool = False) -> str:
        """The table as plain text, in bold what users of the layer get."""
        left = sum(name in (*WORD_COLUMNS, "experts") for name in self.names)
        bold = [k for k, is_bold in enumerate(self.is_bold) if has_bold and is_bold]
        return text_table(self.names, self.lines, left=left, width=width, bold=bold)


def shown_tables(
    rows: Sequence[BenchRow], width: int, old: Mapping[tuple[object, ...], float] | None = None
) -> list[ShownTable]:
    """All rows in tables that fit a width; `old` holds speeds of another run."""
    groups = [group for section in bench_tables(rows) for group in section]
    return [_fitted(part, width, old) for group in groups for part in _parts(group)]


def legend(tables: Sequence[ShownTable]) -> str:
    """What the columns of the tables mean, if their names do not say it; "" if none is left."""
    names = {name for table in tables for name in table.names}
    return ". ".join(text for name, text in _LEGEND.items() if name in names)


def _parts(group: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Split mixtures by their baseline; leave other groups as they are."""
    found: dict[str, list[BenchRow]] = {}
    for row in group:
        found.setdefault(row.baseline if row.section == "experts" else "", []).append(row)
    return list(found.values())


def _fitted(
    rows: Sequence[BenchRow], width: int, old: Mapping[tuple[object, ...], float] | None
) -> ShownTable:
    lines = [row_cells(row, old) for row in rows]
    first = rows[0]
    kept = [name for name in lines[0] if name not in (*_IN_HEADING, "against")]
    if first.section == "blocks":
        kept = ["structure", *(name for name in kept if name != "variant")]
    flops = "".join(flops_text(row) for row in rows if row.kind == "layer")
    bold = tuple(is_ours(row) for row in rows)
    dropped = iter(_DISPENSABLE)
    while True:
        words = tuple(tuple(line[name] for name in kept) for line in lines)
        table = ShownTable(_heading(first), flops, tuple(kept), words, bold)
        spare = next(dropped, None)
        if spare is None or max(map(len, table.text().splitlines())) <= width:
            return table
        kept = [name for name in kept if name != spare]


def _heading(row: BenchRow) -> str:
    """The settings that all rows of a table share."""
    name = "blocks" if row.section == "blocks" else row.structure
    heading = f"{name}, {_setting(row)}, {row.dtype}"
    if row.section == "experts" and row.baseline != LINEAR_BIAS:
        heading += f"; against {row.baseline}"
    return heading


def _setting(row: BenchRow) -> str:
    mode = row.mode.replace("+", " + ")
    return f"width {row.width}, {row.tokens} tokens, {mode}"


def flops_text(row: BenchRow) -> str:
    """The FLOPs per token of a layer and of nn.Linear: 2 for each multiply-add.

    The backward pass takes twice as many as the forward pass.
    """
    dense = 2 * row.width**2 * (1 if row.mode == MODES[0] else 3)
    passes = row.mode.replace("+", " + ")
    return f"FLOPs/token ({passes}): {round(dense / row.limit):,}, {LINEAR} {dense:,}"


def sentences(rows: Sequence[BenchRow]) -> list[str]:
    """Say how many times faster each layer, mixture or stack is than nn.Linear.

    For layers and mixtures, this is forward and backward together.
    """
    found = []
    for row in rows:
        is_layer = row.kind in ("layer", "mixture") and row.baseline == LINEAR_BIAS
        if (is_layer and row.mode == MODES[1]) or row.kind == "stack":
            experts = f", {row.num_active} of {row.num_experts} experts" * bool(row.num_experts)
            found.append(f"{row.structure}{experts}: {_compared(row)}")
    return found


def _compared(row: BenchRow) -> str:
    is_spread = row.rounds > 1
    if (is_spread and row.low < 1 < row.high) or _ALIKE[0] <= row.speed <= _ALIKE[1]:
        speed = f"{row.low:.2f} to {row.high:.2f}" if is_spread else f"{row.speed:.2f}"
        return f"about as fast as {LINEAR} here ({speed} x its speed; {_setting(row)})"
    is_faster = row.speed >= 1
    times = row.speed if is_faster else 1 / row.speed
    amount = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
    return f"{amount} x {'faster' if is_faster else 'slower'} than {LINEAR} here ({_setting(row)})"
