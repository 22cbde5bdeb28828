"""Draw the figures of a report with matplotlib, for papers and for pages without scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from markupsafe import Markup

from einlinear.reports.analyse import Analysis
from einlinear.reports.figures.panels import (
    SCALE,
    Figure,
    Look,
    Panel,
    Series,
    scale_colour,
)
from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure
from einlinear.show.symbols import power

_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "triangle-down": "v",
    "star": "*",
    "x": "X",
    "circle-open": "o",
}
_LINES: dict[str, dict[str, Any]] = {
    "frontier": {"linestyle": "none"},
    "residual": {"linewidth": 0.9},
    "law": {"linewidth": 1.6},
    "value": {"linewidth": 1.6},
    "beyond": {"linewidth": 1.2, "linestyle": (0, (4, 3))},
    "guess": {"linewidth": 1.2, "linestyle": (0, (4, 3))},
}
_MOST_POINTS = 6000  # with more, draw runs as pixels instead of shapes
_FEW_TIMES = 5.0  # if the ends of an axis are closer, ticks at 1, 2, 5 are too few
_IN_A_ROW = 5  # the most structures in a row of the legend
_LONG_NAME = 30  # longer names beside an axis or in a legend are cut
_AT_A_PLACE = 3  # names beside one place of the taxonomy; more become a count


@dataclass(frozen=True, slots=True)
class Drawing:
    """A file to draw: its name, its panels, and alternative text for screen readers."""

    name: str
    panels: tuple[Panel, ...]
    alt: str


def drawings(figures: tuple[Figure, ...]) -> Iterator[Drawing]:
    """The files to draw: one per panel to choose from, others side by side."""
    for figure in figures:
        if figure.is_choice:
            for panel in figure.panels if figure.name == "frontier" else figure.panels[:1]:
                alt = f"{figure.title}: {panel.y_title} against {panel.x_title}. {figure.about}"
                yield Drawing(f"{figure.name}-{panel.name}", (panel,), alt)
        else:
            yield Drawing(figure.name, figure.panels, f"{figure.title}. {figure.about}")


def run_lines(
    analysis: Analysis, panel: Panel, structure: str, is_open: bool
) -> list[tuple[list[float], list[float]]]:
    """Compute and losses of each run of a structure, with or without a result."""
    lines = []
    for run in analysis.runs:
        if run.structure == structure and run.has_result != is_open:
            points = [
                (spent, point.loss - panel.linf)
                for point, spent in zip(run.curve, run.spent.get(panel.measure, ()), strict=False)
                if spent > 0 and point.loss is not None and point.loss > panel.linf
                if run.counts(point) or not panel.is_counted
            ]
            lines.append(([x for x, _ in points], [y for _, y in points]))
    return lines


def save_drawing(
    drawing: Drawing, analysis: Analysis, looks: Mapping[str, Look], folder: Path
) -> list[Path]:
    """Write a drawing as SVG and PNG."""
    check_matplotlib()
    from matplotlib.figure import Figure as Canvas

    plain = [panel for panel in drawing.panels if panel.colour_by is None]
    names = {series.structure: None for panel in plain for series in panel.series}
    shown = [looks[name] for name in names]
    wide = len(drawing.panels)
    left = _room(drawing)
    width = (7.2 if wide == 1 else 4.6 * wide) + wide * (left - 0.68)
    longest = max((len(_clipped(look.structure)) for look in shown), default=0)
    in_a_row = max(1, min(_IN_A_ROW, int(width / (0.5 + 0.075 * longest))))
    rows = ceil(len(shown) / in_a_row)
    height = 4.0 + 0.22 * rows
    canvas = Canvas(figsize=(width, height))
    # By hand, because matplotlib takes longer to find a layout than to draw.
    canvas.subplots_adjust(
        left=left / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - (0.25 + 0.22 * rows) / height,
        wspace=0.24 + (left - 0.68) / 3.8,
    )
    grid = canvas.subplots(1, wide, squeeze=False)[0]
    for axes, panel in zip(grid, drawing.panels, strict=True):
        _draw_panel(axes, panel, analysis, _coloured(panel, looks))
        if panel.colour_by is not None:
            _draw_scale(canvas, axes, panel)
    style = {"ncols": in_a_row, "frameon": False, "fontsize": 8, "labelcolor": INK}
    canvas.legend(handles=[_handle(look) for look in shown], loc="upper left", **style)
    return [save_figure(canvas, folder / f"{drawing.name}{ending}") for ending in (".svg", ".png")]


def _coloured(panel: Panel, looks: Mapping[str, Look]) -> Mapping[str, Look]:
    """The looks in the colours of the panel."""
    by, ends = panel.colour_by, panel.colour_range
    return {
        name: replace(look, colour=scale_colour(look.exponents[by], ends), symbol="circle")
        if by is not None and look.exponents is not None
        else look
        for name, look in looks.items()
    }


def _draw_scale(canvas: Any, axes: Any, panel: Panel) -> None:
    """What the colours of a panel mean."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    low, high = panel.colour_range
    if high > low:
        colours = ScalarMappable(Normalize(low, high), LinearSegmentedColormap.from_list("", SCALE))
        bar = canvas.colorbar(colours, ax=axes, fraction=0.05, pad=0.03, aspect=32)
        bar.ax.tick_params(labelsize=8, length=0, colors=INK)
        bar.outline.set_visible(False)
        bar.ax.set_title("ωψν"[panel.colour_by or 0], fontsize=9, color=INK)


def _room(drawing: Drawing) -> float:
    """Inches to the left of the axes, for numbers or names of structures."""
    dots = [s for panel in drawing.panels for s in panel.series if s.role == "dot"]
    return max([0.68, *(0.2 + 0.073 * len(_clipped(s.text[0])) for s in dots)])


def _clipped(name: str) -> str:
    return name if len(name) <= _LONG_NAME else name[: _LONG_NAME - 1] + "\u2026"


def _handle(look: Look) -> Any:
    from matplotlib.lines import Line2D

    style = _marker(look, 5)
    return Line2D(
        [], [], color=look.colour, linewidth=1.6, label=_plain(_clipped(look.structure)), **style
    )


def _plain(text: str) -> str:
    """Escape text for matplotlib: no formulas, and no leading underscore, which hides a label."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def _marker(look: Look, size: float) -> dict[str, Any]:
    face = "none" if look.symbol.endswith("open") else look.colour
    return {"marker": _MARKERS[look.symbol], "markersize": size, "markerfacecolor": face}


def _draw_panel(axes: Any, panel: Panel, analysis: Analysis, looks: Mapping[str, Look]) -> None:
    for is_log, axis in ((panel.is_log_x, axes.set_xscale), (panel.is_log_y, axes.set_yscale)):
        if is_log:
            axis("log")
    line = {"color": INK, "linewidth": 0.8, "linestyle": (0, (1, 2))}
    if panel.line_x is not None:
        axes.axvline(panel.line_x, **line)
    if panel.line_y is not None:
        axes.axhline(panel.line_y, **line)
    _name_places(axes, [series for series in panel.series if series.role == "place"])
    for series in panel.series:
        if series.role in ("runs", "open"):
            _draw_runs(axes, series, panel, analysis, looks[series.structure])
        else:
            _draw_series(axes, series, looks[series.structure])
    if panel.x_range:
        axes.set_xlim(*panel.x_range)
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    if panel.is_reversed:
        axes.invert_xaxis()
    _finish(axes, panel)


def _finish(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if panel.title:
        axes.set_title(panel.title, fontsize=9, color=INK, loc="left")
    axes.set_xlabel(panel.x_title, fontsize=9, color=INK)
    axes.set_ylabel(panel.y_title, fontsize=9, color=INK)
    axes.tick_params(which="both", labelsize=8, colors=INK, length=2)
    axes.grid(color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    if panel.is_log_x:
        axes.xaxis.set_major_formatter(FuncFormatter(_power_of_ten))
        if panel.measure:  # minor ticks over many decades are slow to draw
            axes.xaxis.set_minor_locator(NullLocator())
            low, high = axes.get_xlim()
            if high < 100 * low:
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if panel.is_log_y:  # losses and multipliers are not powers of ten
        _label(axes.yaxis, axes.get_ylim())
    if panel.is_log_x and not panel.measure:
        _label(axes.xaxis, axes.get_xlim())
    dots = [series for series in panel.series if series.role == "dot"]
    if dots:
        axes.set_yticks([s.y[0] for s in dots], [_plain(_clipped(s.text[0])) for s in dots])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _label(axis: Any, ends: tuple[float, float]) -> None:
    """A few round numbers on a logarithmic axis, including 1 if it is in range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    is_short = max(ends) < _FEW_TIMES * min(ends)
    few = MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]) if is_short else LogLocator(subs=(1, 2, 5))
    axis.set_major_locator(few)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _power_of_ten(value: float, _: object) -> str:
    """A power of ten as plain text, which is much faster than a formula."""
    if value <= 0:
        return ""
    exponent = floor(log10(value) + 1e-9)
    times = f"{value / 10**exponent:.2g}"
    return f"{'' if times == '1' else times + '×'}{power('10', exponent)}"


def _draw_runs(axes: Any, series: Series, panel: Panel, analysis: Analysis, look: Look) -> None:
    lines = run_lines(analysis, panel, series.structure, series.role == "open")
    x = [value for xs, _ in lines for value in (*xs, float("nan"))]
    y = [value for _, ys in lines for value in (*ys, float("nan"))]
    style = "dotted" if series.role == "open" else "solid"
    alpha = 0.3 if panel.is_counted else 0.7
    drawn = axes.plot(x, y, color=look.colour, alpha=alpha, linewidth=0.7, linestyle=style)
    drawn[0].set_rasterized(sum(len(run.curve) for run in analysis.runs) > _MOST_POINTS)


def _draw_series(axes: Any, series: Series, look: Look) -> None:
    colour = look.colour
    if series.role in _LINES:
        marker = _marker(look, 3.4) if series.role in ("frontier", "residual") else {}
        axes.plot(series.x, series.y, color=colour, **_LINES[series.role], **marker)
    elif series.role == "band":
        axes.fill(series.x, series.y, color=colour, alpha=0.12, linewidth=0)
    elif series.role == "dot":
        (x,), (y,), (low,), (high,) = series.x, series.y, series.low, series.high
        axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
        axes.plot([x], [y], color=colour, **_marker(look, 8))
    elif series.role == "place":
        place, before = (series.x[0], series.y[0]), series.low[0]
        axes.plot(*place, color=colour, **_marker(look, 11 - 3 * min(2, before)))


def _name_places(axes: Any, series: Sequence[Series]) -> None:
    """Write names beside their places; above places in the middle, where names collide."""
    places: dict[tuple[float, float], list[str]] = {}
    for one in series:
        places.setdefault((one.x[0], one.y[0]), []).append(_plain(one.text[0]))
    for (x, y), names in places.items():
        if len(names) > _AT_A_PLACE:
            names = [f"{len(names)} structures"]
        side = "right" if x > 0.75 else "left" if x < 0.25 else "center"
        shift = {"right": (-9, 3), "left": (9, 3), "center": (0, 9)}[side]
        style = {"fontsize": 8, "color": INK, "ha": side, "annotation_clip": False}
        style["va"] = "bottom" if side == "center" else "center" if len(names) == 1 else "top"
        offset = (shift[0], 0 if style["va"] == "center" else shift[1])
        axes.annotate("\n".join(names), (x, y), offset, textcoords="offset points", **style)


def inline_svg(path: Path, name: str, alt: str) -> Markup:
    """An SVG file as markup for the page: in the colours of the text, with unique ids."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    text = re.sub(r"fill: #ffffff", "fill: none", text, flags=re.IGNORECASE)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--line)")
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = Markup(' preserveAspectRatio="xMinYMid" role="img" aria-label="{}">').format(alt)
    return Markup(head) + label + Markup(body)  # matplotlib escapes the texts that it draws
