"""The figure of a landscape: loss against rate, with a column for every structure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import Any

from einlinear.show.plots import check_matplotlib, save_figure

_INK, _GRAY, _FAINT = "#1c2430", "#6b7280", "#e7e9ee"
_DRIFT = "#f3c98b"


@dataclass(frozen=True, slots=True)
class Line:
    """One width: mean, lowest and highest loss over seeds at every rate, and the best rate."""

    width: int
    rates: tuple[int, ...]
    means: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    best: int | None


@dataclass(frozen=True, slots=True)
class LandscapePanel:
    """One structure with one parametrization; reference is the transferred rate."""

    row: str
    column: str
    lines: tuple[Line, ...]
    reference: int | None


def draw_landscape(
    panels: Sequence[LandscapePanel], *, ceiling: float, titles: tuple[str, str], path: Path
) -> Path:
    """Draw the panels to a file, in the format of its suffix; the loss axis ends at `ceiling`.

    titles: the headline, and smaller lines below it.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    rows, columns = (list(dict.fromkeys(names)) for names in _names(panels))
    legend = 6.0 + 0.6 * len(panels[0].lines)
    width = max(2.15 * len(columns) + 1.2, legend)
    small = "\n".join(fill(line, int(14 * width)) for line in titles[1].splitlines())
    above = 1.05 + 0.155 * small.count("\n")  # inches for the titles and names of columns
    size = width, 2.2 * len(rows) + 0.85 + above
    figure = Figure(figsize=size, facecolor="white")
    grid = figure.subplots(len(rows), len(columns), sharex="row", sharey=True, squeeze=False)
    left, right, top, bottom = _margins(figure, above)
    figure.subplots_adjust(left, bottom, right, top, wspace=0.09, hspace=0.2)
    limits = _limits(panels, ceiling)
    for panel in panels:
        place = rows.index(panel.row), columns.index(panel.column)
        axes = grid[place]
        _draw(axes, panel, limits)
        if place[0] == 0:
            axes.set_title(_wrapped(panel.column), fontsize=9, color=_INK, pad=6)
        if place[1] == 0:
            _name_row(axes, panel.row)
    _write_titles(figure, (titles[0], small), left)
    _legend(figure, panels, (left + right) / 2)
    save_figure(figure, path)
    return path


def _names(panels: Sequence[LandscapePanel]) -> tuple[list[str], list[str]]:
    return [panel.row for panel in panels], [panel.column for panel in panels]


def _margins(figure: Any, above: float) -> tuple[float, float, float, float]:
    """The margins of the panels: left, right, top, bottom; constant in inches."""
    width, height = figure.get_size_inches()
    return 0.95 / width, 1 - 0.2 / width, 1 - above / height, 0.85 / height


def _limits(panels: Sequence[LandscapePanel], ceiling: float) -> tuple[float, float]:
    values = [v for panel in panels for line in panel.lines for v in line.lows if isfinite(v)]
    low = min([*values, 0.95 * ceiling])
    return low - 0.06 * (ceiling - low), ceiling


def _draw(axes: Any, panel: LandscapePanel, limits: tuple[float, float]) -> None:
    low, high = limits
    best = [line.best for line in panel.lines if line.best is not None]
    if best:
        axes.axvspan(min(best) - 0.16, max(best) + 0.16, color=_DRIFT, alpha=0.28, linewidth=0)
    if panel.reference is not None:
        axes.axvline(panel.reference, color=_GRAY, linewidth=0.9, linestyle=(0, (2, 2)))
    above = high + (high - low)  # where losses that are not finite are drawn: out of sight

    def shown(values: tuple[float, ...]) -> list[float]:
        return [min(value, above) for value in values]

    for line, color in zip(panel.lines, _colors(len(panel.lines)), strict=True):
        bounds = shown(line.lows), shown(line.highs)
        axes.fill_between(line.rates, *bounds, color=color, alpha=0.16, linewidth=0)
        axes.plot(line.rates, shown(line.means), color=color, linewidth=1.5, zorder=3)
    for line, color in zip(panel.lines, _colors(len(panel.lines)), strict=True):
        if line.best is not None:
            loss = line.means[line.rates.index(line.best)]
            is_above = loss > high
            point = line.best, high - 0.035 * (high - low) if is_above else loss
            style: Any = {"markerfacecolor": color, "markeredgecolor": "white", "markersize": 6.5}
            axes.plot(
                *point, marker="^" if is_above else "o", markeredgewidth=0.9, zorder=4, **style
            )
    axes.set_ylim(low, high)
    rates = panel.lines[0].rates
    axes.set_xlim(rates[0] - 0.35, rates[-1] + 0.35)
    ticks = rates[:: 2 if len(rates) > 5 else 1]
    axes.set_xticks(ticks, [f"$2^{{{rate}}}$" for rate in ticks])
    axes.tick_params(labelsize=7.5, colors=_GRAY, length=0, pad=3)
    axes.grid(color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9cdd6")


def _colors(count: int) -> list[Any]:
    """From light to dark, narrow to wide."""
    from matplotlib import colormaps

    scale = colormaps["viridis_r"]
    return [scale(0.12 + 0.83 * i / max(1, count - 1)) for i in range(count)]


def _name_row(axes: Any, name: str) -> None:
    axes.set_ylabel("training loss", fontsize=8.5, color=_GRAY)
    style: Any = {"fontsize": 11, "weight": "bold", "color": _INK, "rotation": 90}
    place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(name, (0, 0.5), (-50, 0), **place, **style, ha="center", va="center")


def _write_titles(figure: Any, titles: tuple[str, str], left: float) -> None:
    height = figure.get_size_inches()[1]
    figure.text(left, 1 - 0.32 / height, titles[0], fontsize=13, color=_INK, weight="bold")
    figure.text(left, 1 - 0.45 / height, titles[1], fontsize=8.5, color=_GRAY, va="top")


def _legend(figure: Any, panels: Sequence[LandscapePanel], middle: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    height = figure.get_size_inches()[1]
    style: Any = {"fontsize": 8.5, "color": _GRAY, "ha": "center"}
    figure.text(middle, 0.46 / height, "learning rate", **style)
    widths = [line.width for line in panels[0].lines]
    handles: list[Any] = [
        Line2D([], [], color=color, linewidth=2, label=str(width))
        for width, color in zip(widths, _colors(len(widths)), strict=True)
    ]
    handles[0].set_label(f"width {widths[0]}")
    dot: Any = {"marker": "o", "linestyle": "", "color": _GRAY, "markeredgecolor": "white"}
    handles.append(Line2D([], [], label="best rate", markersize=6.5, **dot))
    handles.append(Patch(color=_DRIFT, alpha=0.4, linewidth=0, label="from best to best"))
    if any(panel.reference is not None for panel in panels):
        dashes: Any = {"color": _GRAY, "linewidth": 1, "linestyle": (0, (2, 2))}
        name = f"best for {panels[0].column} at {widths[0]}"
        handles.append(Line2D([], [], label=name, **dashes))
    figure.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(middle, 0.06 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=_INK,
        handlelength=1.6,
        columnspacing=1.5,
    )


def _wrapped(text: str) -> str:
    """The text in lines of about 20 characters."""
    lines = [""]
    for word in re.split("(?<=[,( ])", text):
        if lines[-1] and len(lines[-1]) + len(word) > 20:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.strip() for line in lines)
