"""Draw the load of every expert over training."""

from __future__ import annotations

from math import ceil, log2
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.runs.record import RunRecord
from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure

_MOST = 2.0  # doublings above or below the even share at the ends of the colour map


def draw_routing(record: RunRecord, path: str | Path) -> Path:
    """Plot the load of every expert over training; the file extension sets the format.

    One panel per layer of experts, one row per expert, one column per evaluation. White is the even
    share; colours are doublings above and below it.
    """
    points = [point for point in record.curve if point.routing]
    if not points:
        raise EinlinearError(
            what=f"run {record.id} has no layers of experts",
            rule="the plot shows how many tokens each expert got",
            fix="train with num_experts, such as einlinear train --num-experts 8",
        )
    check_matplotlib()
    from matplotlib.figure import Figure

    layers = [routing.layer for routing in points[-1].routing]
    columns = min(6, len(layers))
    rows = ceil(len(layers) / columns)
    size = (2.1 * columns + 1.2, 1.7 * rows + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    image: Any = None
    for i, (axes, layer) in enumerate(zip(grid.flatten(), layers, strict=False)):
        last = points[-1].routing[i]
        loads_ep = zip(*(point.routing[i].load for point in points), strict=True)
        image = _draw(axes, [[_doublings(x, len(last.load)) for x in row] for row in loads_ep])
        axes.set_title(f"{_short(layer)}  {last.entropy:.2f}", fontsize=8, color=INK, loc="left")
    marks = sorted({0, (len(points) - 1) // 2, len(points) - 1})
    grid[0, 0].set_xticks(marks, [f"{points[i].step:,}" for i in marks])
    for axes in grid.flatten()[len(layers) :]:
        axes.set_visible(False)
    title = "Load of each expert over training, and the entropy at the end (1 is even)"
    figure.suptitle(title, fontsize=10, color=INK, x=0.02, ha="left")
    figure.supxlabel("step", fontsize=9, color=INK)
    figure.supylabel("expert", fontsize=9, color=INK)
    bar = figure.colorbar(image, ax=grid, shrink=0.8, aspect=30, pad=0.02)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["¼", "½", "even", "2 x", "4 x"])
    bar.ax.tick_params(labelsize=7, length=0, colors=INK)
    bar.outline.set_visible(False)
    return save_figure(figure, Path(path))


def _draw(axes: Any, doublings: list[list[float]]) -> Any:
    image = axes.imshow(
        doublings, cmap="RdBu_r", vmin=-_MOST, vmax=_MOST, aspect="auto", interpolation="nearest"
    )
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.yaxis.get_major_locator().set_params(integer=True)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    return image


def _doublings(load: float, num_experts: int) -> float:
    return max(-_MOST, min(_MOST, log2(load * num_experts))) if load > 0 else -_MOST


def _short(layer: str) -> str:
    """The name of a layer without the parts that all share."""
    return layer.removeprefix("blocks.").replace("attention.", "").replace("mlp.", "")
