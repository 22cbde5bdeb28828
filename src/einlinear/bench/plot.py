"""The picture of a benchmark: how many times faster than nn.Linear each layer is, and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from einlinear.bench.rows import BenchRow
from einlinear.show.plots import INK, check_matplotlib, save_figure

_BAR, _LIMIT = "#2f6fb7", "#dbe6f4"
_LIGHT, _DARK = "#e4e7ec", "#1a1d23"
_ON_DARK = {"#ffffff": _DARK, "#000000": _LIGHT, INK: _LIGHT, _BAR: "#6aa5e8", _LIMIT: "#2b3a50"}


def speed_rows(rows: Sequence[BenchRow], mode: str = "forward+backward") -> list[BenchRow]:
    """The layers as users call them, in one pass: the rows that the picture shows."""
    return [row for row in rows if row.kind == "layer" and row.mode == mode]


def draw_speeds(rows: Sequence[BenchRow], path: Path) -> Path:
    """Write a bar per layer, one panel per width; a pale bar behind each is its FLOP limit."""
    check_matplotlib()
    from matplotlib.figure import Figure

    shown = speed_rows(rows)
    widths = sorted({row.width for row in shown})
    most = max(sum(row.width == width for row in shown) for width in widths)
    figure = Figure(figsize=(4.6 * len(widths) + 0.6, 0.42 * most + 1.1), layout="constrained")
    figure.patch.set_facecolor("white")
    panels = figure.subplots(1, len(widths), squeeze=False)[0]
    for axes, width in zip(panels, widths, strict=True):
        _draw_panel(axes, [row for row in shown if row.width == width], width)
    tokens = ", ".join(sorted({f"{row.tokens:,}" for row in shown}))
    dtypes = ", ".join(sorted({row.dtype for row in shown}))
    title = (
        f"Times faster than nn.Linear, forward + backward ({tokens} tokens, {dtypes}, CPU). "
        "Pale: the limit set by the FLOPs"
    )
    figure.suptitle(title, fontsize=9.5, color=INK, x=0.01, ha="left")
    return save_figure(figure, path, dark=_ON_DARK)


def _draw_panel(axes: Any, rows: Sequence[BenchRow], width: int) -> None:
    places = list(range(len(rows)))
    axes.barh(places, [row.limit for row in rows], height=0.72, color=_LIMIT)
    axes.barh(places, [row.speed for row in rows], height=0.44, color=_BAR)
    right = max(max(row.limit, row.speed) for row in rows)
    for place, row in zip(places, rows, strict=True):
        text = f"{row.speed:.1f} of {row.limit:.0f}"
        end = max(row.limit, row.speed) + 0.015 * right
        axes.text(end, place, text, va="center", fontsize=8.5, color=INK)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_yticks(places, [_short(row.structure) for row in rows], fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * right)
    axes.set_title(f"width {width:,}", fontsize=9.5, color=INK, loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(axis="x", labelsize=8, colors=INK, length=2)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _short(structure: str) -> str:
    """A name that fits beside a bar."""
    return structure if len(structure) <= 24 else structure.replace("theta", "θ")
