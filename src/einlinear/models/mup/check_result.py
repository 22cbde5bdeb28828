"""CoordinateCheck: what a coordinate check measured, as rows, a verdict, a table and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from pathlib import Path
from typing import Any

from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure
from einlinear.show.tables import text_table

_FINE, _BAD = "#1f5fa8", "#b3261e"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One layer after some steps, at every width.

    sizes are the root mean squares of its output, changes those of the difference from its output
    at the start, both averaged over seeds. Slopes are log2 of these against log2 of the width.
    is_trained tells whether the layer has trainable parameters.
    """

    layer: str
    step: int
    sizes: tuple[float, ...]
    changes: tuple[float, ...]
    size_slope: float
    change_slope: float
    is_trained: bool = True

    @property
    def is_stuck(self) -> bool:
        """Whether a trained layer has not changed at any width."""
        return self.is_trained and not any(self.changes)


@dataclass(frozen=True, slots=True)
class CoordinateCheck:
    """The result of `coordinate_check`: a row for every layer and number of steps; print it.

    The check passes if, after the last step, no output and no change grows faster than
    width**bound, no change shrinks faster than width**-shrink_bound, and every trained layer has
    moved at some width. Outputs may shrink: that of the head does at the start.
    """

    rows: tuple[CheckRow, ...]
    widths: tuple[int, ...]
    bound: float
    shrink_bound: float
    title: str

    @property
    def last_rows(self) -> tuple[CheckRow, ...]:
        """The rows after the last step, which decide."""
        last = max(row.step for row in self.rows)
        return tuple(row for row in self.rows if row.step == last)

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """The rows that break a bound."""
        return tuple(row for row in self.last_rows if not self.is_fine(row))

    @property
    def passed(self) -> bool:
        """Whether every layer stays within the bounds."""
        return not self.failures

    def is_fine(self, row: CheckRow) -> bool:
        """Return whether a row stays within the bounds."""
        highest = max(row.size_slope, row.change_slope)
        is_bound = highest <= self.bound and row.change_slope >= -self.shrink_bound
        return is_bound and not row.is_stuck

    def __str__(self) -> str:
        head = ("layer", *(f"change at {w}" for w in self.widths), "slope", "slope of size", "")
        cells = [
            (
                row.layer,
                *(f"{change:.3g}" for change in row.changes),
                f"{row.change_slope:+.2f}",
                f"{row.size_slope:+.2f}",
                "ok" if self.is_fine(row) else "FAIL" + ": never moves" * row.is_stuck,
            )
            for row in self.last_rows
        ]
        verdict = "PASS" if self.passed else f"FAIL: {len(self.failures)} of {len(cells)} layers"
        rule = f"slopes at most {self.bound:+.2f}; of changes, at least {-self.shrink_bound:+.2f}"
        return f"{self.title}\n{text_table(head, cells)}\n{verdict} ({rule})"

    def plot(self, path: str | Path) -> Path:
        """Draw a panel for every layer with a line for every step, as .svg, .png or .pdf."""
        check_matplotlib()
        from matplotlib.figure import Figure

        rows = self.last_rows
        num_columns = min(4, len(rows))
        num_rows = ceil(len(rows) / num_columns)
        size = (2.6 * num_columns + 0.6, 2.1 * num_rows + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(num_rows, num_columns, sharex=True, squeeze=False).flatten()
        lines = [
            [r.changes for r in self.rows if r.layer == row.layer and r.step > 0] for row in rows
        ]
        ranges = [_range(changes) for changes in lines]
        # All panels span the same ratio around their own values, so equal slopes look equal.
        ratio = max(8.0, *(1.3 * high / low for low, high in ranges))
        for i, row in enumerate(rows):
            axes = grid[i]
            color = _FINE if self.is_fine(row) else _BAD
            _draw(axes, self.widths, lines[i], color)
            title = f"{row.layer}{', never moves' * row.is_stuck}  {row.change_slope:+.2f}"
            color = INK if self.is_fine(row) else _BAD
            axes.set_title(title, fontsize=8, color=color, loc="left")
            middle = sqrt(ranges[i][0] * ranges[i][1])
            axes.set_ylim(middle / sqrt(ratio), middle * sqrt(ratio))
            axes.tick_params(labelbottom=i + num_columns >= len(rows))
        for axes in grid[len(rows) :]:
            axes.set_visible(False)
        title = f"{self.title}: {'pass' if self.passed else 'fail'}"
        figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
        figure.supxlabel("width", fontsize=9, color=INK)
        figure.supylabel("change of the output (rms)", fontsize=9, color=INK)
        return save_figure(figure, Path(path))


def _is_drawn(value: float) -> bool:
    return isfinite(value) and value > 0


def _range(lines: list[tuple[float, ...]]) -> tuple[float, float]:
    values = [value for line in lines for value in line if _is_drawn(value)]
    return (min(values), max(values)) if values else (1.0, 1.0)


def _draw(axes: Any, widths: tuple[int, ...], lines: list[tuple[float, ...]], color: str) -> None:
    """Draw lines from light (first step) to dark (last step) on log axes of base 2."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    for i, line in enumerate(lines, start=1):
        values = [value if _is_drawn(value) else None for value in line]
        alpha = 0.2 + 0.8 * i / len(lines)
        axes.plot(widths, values, color=color, alpha=alpha, linewidth=1.4, marker=".")
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.grid(color=FAINT, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
