"""The figures of the findings: ratios with intervals, frontiers with their laws, best rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.landscapes.cells import LandscapeCell
from einlinear.laws.fit import Fit, frontier
from einlinear.laws.observations import Observations
from einlinear.reproductions.findings.rates import has_learned
from einlinear.reproductions.findings.verdicts import Ratio
from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure

GRAY = "#6b7280"
COLORS = {"full": "#7c3aed", "shared": "#d97706", "low": "#0d9488", "experts": "#2563a8"}
"""By kind of layers: full rank without sharing, ω > 0, ψ < 1, mixtures."""

_LIGHT, _DARK = "#e4e7ec", "#1a1d23"
_ON_DARK = {
    "#ffffff": _DARK,
    "#000000": _LIGHT,
    INK: _LIGHT,
    GRAY: "#9aa3b2",
    FAINT: "#3a3f4a",
    COLORS["full"]: "#a78bfa",
    COLORS["experts"]: "#60a5fa",
}
_COLUMNS = 2  # of panels
_LEAST_SHOWN = 0.1  # intervals that reach lower are cut off
_WIDE = 15  # from this range on, there are fewer ticks
_SHADES = (1.0, 0.78, 0.6, 0.45, 0.32)


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One line of a forest: a ratio in FLOPs, perhaps also in seconds and in the paper."""

    text: str
    kind: str
    flops: Ratio
    seconds: Ratio | None = None
    paper: float | None = None


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """Frontiers of some layers and their laws, beside the reference in gray.

    names: what the legend calls each of the layers.
    """

    title: str
    kind: str
    names: Mapping[str, str]
    data: Observations
    laws: Fit


def draw_forest(groups: Mapping[str, Sequence[ForestRow]], axis: str, path: Path) -> Path:
    """Write ratios with intervals, a line for each, in groups with a heading."""
    check_matplotlib()
    from matplotlib.figure import Figure

    count = sum(len(rows) + 1 for rows in groups.values())
    figure = Figure(figsize=(7.6, 0.27 * count + 1.1), layout="constrained", facecolor="white")
    axes = figure.subplots()
    y, ticks, names = 0.0, [], []
    for heading, rows in groups.items():
        axes.text(-0.005, y, heading, transform=axes.get_yaxis_transform(), fontsize=8.5,
                  weight="bold", color=INK, ha="right", va="center")  # fmt: skip
        for row in rows:
            y += 1
            ticks.append(y)
            names.append(row.text)
            shift = 0.13 * (row.seconds is not None)
            _draw_ratio(axes, y - shift, row.flops, COLORS[row.kind])
            if row.flops.before is not None:
                axes.plot(row.flops.before[0], y - shift, marker="|", color=COLORS[row.kind],
                          markersize=7, alpha=0.8, zorder=3)  # fmt: skip
            if row.seconds is not None:
                _draw_ratio(axes, y + 0.2, row.seconds, COLORS[row.kind], is_hollow=True)
            if row.paper is not None:
                axes.plot(row.paper, y, marker="x", color=INK, markersize=6, zorder=4)
        y += 1.3
    axes.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    axes.set_ylim(y - 0.6, -0.7)
    axes.set_yticks(ticks, names)
    _log_axis(axes, [r for rows in groups.values() for r in rows])
    axes.set_xlabel(axis, fontsize=8.5, color=INK)
    _bare(axes)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.7)
    _forest_legend(axes, [r for rows in groups.values() for r in rows])
    return save_figure(figure, path, dark=_ON_DARK)


def _draw_ratio(axes: Any, y: float, ratio: Ratio, color: str, *, is_hollow: bool = False) -> None:
    face = "white" if is_hollow else color
    axes.plot([ratio.low, ratio.high], [y, y], color=color, linewidth=1.1 if is_hollow else 2.0,
              solid_capstyle="butt", zorder=2)  # fmt: skip
    axes.plot(ratio.value, y, marker="o", markersize=4 if is_hollow else 5.5, zorder=3,
              markerfacecolor=face, markeredgecolor=color, markeredgewidth=1.1)  # fmt: skip


def _log_axis(axes: Any, rows: Sequence[ForestRow]) -> None:
    every = [r for row in rows for r in (row.flops, row.seconds) if r is not None]
    early = [row.flops.before[0] for row in rows if row.flops.before is not None]
    low, high = min([*early, *(r.low for r in every)]), max([*early, *(r.high for r in every)])
    high = max([high, *(row.paper for row in rows if row.paper is not None)])
    low = max(low, _LEAST_SHOWN)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.15, high * 1.15)
    is_wide = high / low > _WIDE
    known = [0.1, 0.2, 0.5, 1, 2, 5, 10] if is_wide else [0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6]
    ticks = [tick for tick in known if low / 1.15 <= tick <= high * 1.15]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()


def _forest_legend(axes: Any, rows: Sequence[ForestRow]) -> None:
    from matplotlib.lines import Line2D

    dot: Any = {"linestyle": "", "marker": "o", "color": GRAY}
    handles = [Line2D([], [], label="in FLOPs", markersize=5.5, **dot)]
    if any(row.flops.before is not None for row in rows):
        bar: Any = {"linestyle": "", "marker": "|", "color": GRAY, "markersize": 7}
        handles.append(Line2D([], [], label="at a tenth of the compute", **bar))
    if any(row.seconds is not None for row in rows):
        hollow: Any = dot | {"markerfacecolor": "white"}
        handles.append(Line2D([], [], label="in seconds", markersize=4, **hollow))
    if any(row.paper is not None for row in rows):
        cross: Any = {"linestyle": "", "marker": "x", "color": INK, "markersize": 6}
        handles.append(Line2D([], [], label="in the paper", **cross))
    if len(handles) > 1:
        axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles),
                           frameon=False, fontsize=8, labelcolor=INK)  # fmt: skip


def draw_curves(panels: Sequence[CurvePanel], reference: str, path: Path) -> Path:
    """Write a panel for each kind of layers: frontiers as points, laws as lines."""
    check_matplotlib()
    from matplotlib.figure import Figure

    rows = -(-len(panels) // _COLUMNS)
    size = 3.9 * _COLUMNS + 0.4, 3.2 * rows + 0.2
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        data, laws = panel.data, panel.laws
        _draw_law(axes, data, laws, reference, "dense", GRAY)
        shown = {name: text for name, text in panel.names.items() if name in data.structures}
        for (name, text), shade in zip(shown.items(), _SHADES, strict=False):
            color = _shaded(COLORS[panel.kind], shade)
            _draw_law(axes, data, laws, name, text, color)
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = float(data.loss.min()), 2.6
        ticks = [t for t in (1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.2, 2.4, 2.6) if low < t <= high]
        axes.set_ylim(low * 0.985, high)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(panel.title, fontsize=9.5, color=INK, loc="left")
        _bare(axes)
        axes.grid(color=FAINT, linewidth=0.6)
        place: Any = {"loc": "lower left", "frameon": False, "labelcolor": INK}
        axes.legend(fontsize=7.5, handlelength=1.4, **place)
    for axes in grid[-1]:
        axes.set_xlabel("training FLOPs", fontsize=8.5, color=INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("validation loss, nats per symbol", fontsize=8.5, color=INK)
    return save_figure(figure, path, dark=_ON_DARK)


def _draw_law(axes: Any, data: Observations, laws: Fit, name: str, text: str, color: str) -> None:
    front = frontier(data.of(name))
    law = laws[name]
    axes.plot(front.compute, front.loss, linestyle="", marker="o", markersize=2.6, color=color,
              markeredgewidth=0, alpha=0.75)  # fmt: skip
    x = np.geomspace(*law.compute_range, 60)
    axes.plot(x, [law.loss(c) for c in x.tolist()], color=color, linewidth=1.5, label=text)


def _shaded(color: str, share: float) -> str:
    """A colour mixed with white."""
    parts = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def draw_rates(
    cells: Sequence[LandscapeCell], titles: Mapping[str, str], names: Mapping[str, str], path: Path
) -> Path:
    """Write a panel for each parametrization: the best rates of structures that learn, by width."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(titles) + 1.9, 3.1), layout="constrained", facecolor="white")
    grid = figure.subplots(1, len(titles), squeeze=False, sharex=True)[0]
    palette = [INK, *COLORS.values(), "#be185d", GRAY]
    structures = list(dict.fromkeys(cell.structure for cell in cells))
    for axes, (key, title) in zip(grid, titles.items(), strict=True):
        for place, (structure, color) in enumerate(zip(structures, palette, strict=False)):
            own = sorted(
                (c.width, c.best + 0.07 * (place - len(structures) / 2))
                for c in cells
                if (c.parametrization, c.structure) == (key, structure)
                and c.best is not None
                and has_learned(c)
            )
            label = names.get(structure, structure)
            widths, best = [width for width, _ in own], [rate for _, rate in own]
            axes.plot(widths, best, color=color, marker="o", markersize=3.5, linewidth=1.3,
                      label=label)  # fmt: skip
        rates = sorted({rate for c in cells if c.parametrization == key for rate in c.rates})
        axes.set_ylim(rates[0] - 0.6, rates[-1] + 0.6)
        shown = rates[:: 2 if len(rates) > 6 else 1]
        axes.set_yticks(shown, [f"$2^{{{rate}}}$" for rate in shown])
        widths = sorted({cell.width for cell in cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.minorticks_off()
        axes.set_title(title, fontsize=9.5, color=INK, loc="left")
        axes.set_xlabel("width", fontsize=8.5, color=INK)
        _bare(axes)
        axes.grid(color=FAINT, linewidth=0.6)
    grid[0].set_ylabel("best learning rate", fontsize=8.5, color=INK)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8,
                  labelcolor=INK)  # fmt: skip
    return save_figure(figure, path, dark=_ON_DARK)


def _bare(axes: Any) -> None:
    axes.tick_params(labelsize=8, colors=INK, length=2)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRAY)
