"""The picture of a coordinate check: a small panel for every layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError

INK, FAINT, _BAD = "#222222", "#dddddd", "#b3261e"


@dataclass(frozen=True, slots=True)
class Panel:
    """One layer: what changed after each step, first to last, at every width."""

    title: str
    slope: float
    is_fine: bool
    lines: tuple[tuple[float, ...], ...]


def check_matplotlib() -> None:
    """Refuse to go on where pictures cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise EinlinearError(
            what="plots need matplotlib, which is not installed",
            rule="plotting is an extra of the package",
            fix='pip install "einlinear[plot]"',
        ) from error


def draw_panels(panels: list[Panel], widths: tuple[int, ...], title: str, path: Path) -> Path:
    """Write the panels to a file; its ending says the format."""
    check_matplotlib()
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = ceil(len(panels) / columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.1 * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    # All panels span the same ratio, each around its own values: slopes look alike everywhere.
    ranges = [_range(panel) for panel in panels]
    ratio = max(8.0, *(1.3 * high / low for low, high in ranges))
    for i, (axes, panel, (low, high)) in enumerate(zip(grid, panels, ranges, strict=False)):
        _draw(axes, panel, widths)
        middle = sqrt(low * high)
        axes.set_ylim(middle / sqrt(ratio), middle * sqrt(ratio))
        axes.tick_params(labelbottom=i + columns >= len(panels))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
    figure.supxlabel("width", fontsize=9, color=INK)
    figure.supylabel("change of the output (rms)", fontsize=9, color=INK)
    return save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a picture; the same one gives the same file."""
    from matplotlib import rc_context

    if path.suffix.lstrip(".") not in figure.canvas.get_supported_filetypes():
        raise EinlinearError(
            what=f"the plot is to be written to {path}",
            rule="the ending of the file says its format",
            fix=f"call it {path.with_suffix('.svg')} or {path.with_suffix('.png')}",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "einlinear", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _drawn(value: float) -> bool:
    return isfinite(value) and value > 0


def _range(panel: Panel) -> tuple[float, float]:
    values = [value for line in panel.lines for value in line if _drawn(value)]
    return (min(values), max(values)) if values else (1.0, 1.0)


def _draw(axes: Any, panel: Panel, widths: tuple[int, ...]) -> None:
    """Lines from light (first step) to dark (last step) on log axes of base 2."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    for i, line in enumerate(panel.lines):
        shade = (i + 1) / len(panel.lines)
        values = [value if _drawn(value) else None for value in line]
        color = _BAD if not panel.is_fine else "#1f5fa8"
        axes.plot(widths, values, color=color, alpha=0.2 + 0.8 * shade, linewidth=1.4, marker=".")
    color = INK if panel.is_fine else _BAD
    axes.set_title(f"{panel.title}  {panel.slope:+.2f}", fontsize=8, color=color, loc="left")
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.grid(color=FAINT, linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
