"""The picture of a recommendation: time against FLOPs, relative to nn.Linear, with the limit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from einlinear.bench.recommend import MeasuredLayer, Recommendation
from einlinear.bench.rows import LINEAR
from einlinear.show.numbers import counted
from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure

_GRAY = "#6b7280"
_BLUE, _ORANGE, _GREEN, _VIOLET = "#2f6fb7", "#c2571a", "#2c7d59", "#7a4fa3"
_LOOKS = {
    "btt": (_BLUE, "o"),
    "monarch": (_BLUE, "o"),
    "low_rank": (_ORANGE, "^"),
    "tensor_train": (_GREEN, "D"),
    "kronecker": (_GREEN, "D"),
}
"""Colour and marker of the named structures; others are violet pentagons."""
_OTHER = (_VIOLET, "p")
_BEYOND = "#f4f5f7"
_LIGHT = "#e4e7ec"
_ON_DARK = {"#ffffff": "#1a1d23", "#000000": _LIGHT, INK: _LIGHT, FAINT: "#3a3f4a"}
_ON_DARK |= {_GRAY: "#9aa3b2", _BEYOND: "#23272f", _BLUE: "#6aa5e8", _ORANGE: "#f0975c"}
_ON_DARK |= {_GREEN: "#62c196", _VIOLET: "#b994e0"}
_TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50]
_Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.7}
_MOST_COLUMNS = 3
_SIZE = (5.6, 4.4)  # inches of a panel
_FONT = 8


def draw_tradeoff(recommendations: Sequence[Recommendation], path: Path) -> Path:
    """Write a panel per shape: a dot for each structure, nn.Linear, and the line time = FLOPs.

    Below the line, a layer computes more FLOPs per second than nn.Linear.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_MOST_COLUMNS, len(recommendations))
    lines = -(-len(recommendations) // columns)
    figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * lines + 0.4), facecolor="white")
    canvas: Any = FigureCanvasAgg(figure)  # measures texts
    figure.set_layout_engine("constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, recommendation in zip(panels, recommendations, strict=False):
        _draw_panel(axes, recommendation)
    for axes in panels[len(recommendations) :]:
        axes.set_visible(False)
    first = recommendations[0]
    setting = f"forward + backward, {counted(first.tokens, 'token')}, {first.dtype}, CPU"
    bars = "; bars: the middle four fifths of the rounds" * (first.dense.rounds > 1)
    title = f"Time and FLOPs relative to {LINEAR}\n{setting}{bars}"
    figure.suptitle(title, fontsize=9.5, color=INK, x=0.01, ha="left")
    canvas.draw()
    figure.set_layout_engine("none")
    for axes, recommendation in zip(panels, recommendations, strict=False):
        _label(axes, recommendation, canvas.get_renderer())
    return save_figure(figure, path, dark=_ON_DARK)


def _draw_panel(axes: Any, recommendation: Recommendation) -> None:
    rows = recommendation.rows
    axes.set_xscale("log")
    axes.set_yscale("log")
    shares = [row.flops_share for row in rows] + [1.0]
    times = [1 / speed for row in rows for speed in (row.low, row.speed, row.high)] + [1.0]
    x_ends = 0.6 * min(shares), 1.9 * max(shares)
    y_ends = 0.7 * min(*shares, *times), 1.6 * max(times)
    line = (min(x_ends[0], y_ends[0]), max(x_ends[1], y_ends[1]))
    axes.fill_between(line, line, line[0], color=_BEYOND, linewidth=0, zorder=0)
    axes.plot(line, line, color=_GRAY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.axhline(1, color=FAINT, linewidth=1, zorder=0.5)
    for row in rows:
        colour, marker = _look(row)
        if row.rounds > 1:
            spread = 1 / row.high, 1 / row.low
            axes.plot([row.flops_share] * 2, spread, color=colour, linewidth=1.2, alpha=0.5)
        face = colour if row is recommendation.best else "white"
        style: Any = {"markerfacecolor": face, "markeredgecolor": colour, "markeredgewidth": 1.5}
        axes.plot(row.flops_share, 1 / row.speed, marker=marker, markersize=6.5, **style)
    axes.plot(1, 1, marker="s", markersize=7, color=INK, markeredgecolor="white")
    axes.set_xlim(*x_ends)
    axes.set_ylim(*y_ends)
    for axis, ends in ((axes.xaxis, x_ends), (axes.yaxis, y_ends)):
        ticks = [tick for tick in _TICKS if ends[0] <= tick <= ends[1]]
        axis.set_ticks(ticks, [f"{100 * tick:g}%" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("FLOPs", fontsize=9, color=INK)
    axes.set_ylabel("time (lower is faster)", fontsize=9, color=INK)
    axes.tick_params(labelsize=_FONT, colors=_GRAY, length=2)
    shape = f"{recommendation.d_in:,} → {recommendation.d_out:,}"
    axes.set_title(f"{shape}: {_verdict(recommendation)}", fontsize=9.5, color=INK, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _verdict(recommendation: Recommendation) -> str:
    best = recommendation.best
    return "stay dense" if best is None else f"use {best.structure}, {best.speed:.3g} x faster"


def _label(axes: Any, recommendation: Recommendation, renderer: Any) -> None:
    """Write each structure's name beside its dot, at the nearest free place."""
    rows, best = recommendation.rows, recommendation.best
    named = [(row.structure, (row.flops_share, 1 / row.speed), _look(row)[0]) for row in rows]
    named.append((LINEAR, (1.0, 1.0), INK))
    points = [tuple(axes.transData.transform(dot)) for _, dot, _ in named]
    unit = axes.figure.dpi / 72  # pixels of a point
    taken = [(x - 5 * unit, y - 5 * unit, x + 5 * unit, y + 5 * unit) for x, y in points]
    taken.append(_label_limit(axes, renderer))
    frame = axes.get_window_extent(renderer).extents
    for (name, dot, colour), (x, y) in zip(named, points, strict=True):
        text = axes.annotate(
            name,
            dot,
            (0, 0),
            textcoords="offset points",
            fontsize=_FONT,
            color=colour,
            fontweight="bold" if best is not None and name == best.structure else "normal",
            va="bottom",
            bbox=_BEHIND,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 4},
        )
        extent = text.get_window_extent(renderer)
        shift = _free_place((x, y), (extent.width, extent.height), taken, frame, unit)
        text.set_position((shift[0] / unit, shift[1] / unit))
        is_near = abs(shift[1] + extent.height / 2) <= 14 * unit
        text.arrow_patch.set_visible(not is_near)
        left, bottom = x + shift[0], y + shift[1]
        taken.append((left, bottom, left + extent.width, bottom + extent.height))


def _label_limit(axes: Any, renderer: Any) -> _Box:
    """Name the line where it leaves the panel at the left; return the place that the name takes."""
    low = 1.06 * max(axes.get_xlim()[0], axes.get_ylim()[0])
    text = axes.annotate(
        "limit: time = FLOPs",
        (low, low),
        (12, 0),
        textcoords="offset points",
        fontsize=_FONT,
        color=_GRAY,
        va="bottom",
    )
    left, bottom, right, top = text.get_window_extent(renderer).extents
    return left, bottom, right, top


def _free_place(
    point: tuple[float, float],
    size: tuple[float, float],
    taken: Sequence[_Box],
    frame: Sequence[float],
    unit: float,
) -> tuple[float, float]:
    """Where a text begins relative to its dot: the nearest place that covers nothing else."""
    (x, y), (width, height) = point, size
    gap, middle = 7 * unit, -height / 2
    shifts = []
    for step in range(24):
        for up in (middle + step * height * 0.55, middle - step * height * 0.55):
            shifts += [(gap + step * unit, up), (-gap - step * unit - width, up)]
    for right, up in shifts:
        box = x + right, y + up, x + right + width, y + up + height
        is_inside = frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] + 40 * unit
        if is_inside and not any(_overlap(box, other) for other in taken):
            return right, up
    return shifts[0]


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _look(row: MeasuredLayer) -> tuple[str, str]:
    name = re.match(r"\w*", row.structure)
    return _LOOKS.get(name[0] if name else "", _OTHER)
