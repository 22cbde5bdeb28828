"""The picture of a search: every run of every candidate, in the order of the decisions."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

from einlinear.reports.shown import ChosenRun, Lane, ShownSearch
from einlinear.show.numbers import counted, short
from einlinear.show.plots import FAINT, INK, check_matplotlib, save_figure

STATE_COLOURS = {
    "leader": "#0f9373",
    "open": "#2f7fd1",
    "stopped": "#8a949e",
    "diverged": "#cf4a4a",
    "failed": "#cf4a4a",
}
STATE_WORDS = {
    "leader": "leads",
    "open": "may still win",
    "stopped": "stopped",
    "diverged": "diverged",
    "failed": "failed",
}
LANES_ABOUT = (
    "Each row is a candidate, the best at the top; each dot is a run, the larger the more FLOPs it "
    "cost. From left to right is the order in which the search chose its runs. A cross shows when "
    "a candidate was stopped: because it can hardly win any more, or because a run diverged or "
    "failed. Runs after it are of dense, the reference, of the final check of learning rates, or "
    "were all that was left to decide."
)
_MOST_LANES = 60  # more rows are too thin to read
_LEAST_SIZE, _MORE_SIZE = 5.0, 10.0
_LONG_NAME = 32


def shown_lanes(search: ShownSearch) -> tuple[Lane, ...]:
    """The candidates that the picture has room for."""
    return tuple(lane for lane in search.lanes if lane.runs)[:_MOST_LANES]


def lanes_about(search: ShownSearch) -> str:
    """The caption."""
    more = sum(bool(lane.runs) for lane in search.lanes) - len(shown_lanes(search))
    return LANES_ABOUT + (f" {counted(more, 'more candidate')} had few runs." if more else "")


def lane_data(search: ShownSearch) -> dict[str, Any]:
    """What the script of the page draws."""
    lanes = shown_lanes(search)
    return {
        "spent": search.answer.spent,
        "colours": STATE_COLOURS,
        "words": STATE_WORDS,
        "marks": _marks(search),
        "lanes": [
            {
                "name": lane.name,
                "state": lane.state,
                "ending": lane.ending,
                "after": lane.stopped_after,
                "number": [one.number for one in lane.runs],
                "size": [dot_size(one, search) for one in lane.runs],
                "text": [_text(one) for one in lane.runs],
            }
            for lane in lanes
        ],
    }


def dot_size(one: ChosenRun, search: ShownSearch) -> float:
    """The diameter of the dot of a run, by the logarithm of its FLOPs."""
    costs = [run.flops for lane in search.lanes for run in lane.runs if run.flops > 0]
    low, high = min(costs, default=1.0), max(costs, default=1.0)
    if one.flops <= 0 or high <= low:
        return _LEAST_SIZE
    return round(_LEAST_SIZE + _MORE_SIZE * log(one.flops / low) / log(high / low), 1)


def _marks(search: ShownSearch) -> list[tuple[int, str]]:
    """Run numbers for the axis, with the share of all FLOPs that was spent before."""
    runs = sorted((run for lane in search.lanes for run in lane.runs), key=lambda run: run.number)
    total = runs[-1].spent + runs[-1].flops if runs else 0.0
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 10**6) if len(runs) <= 9 * step)
    chosen = [run for run in runs if run.number == 1 or run.number % step == 0]
    return [(run.number, f"{run.spent / total:.0%}" if total else "") for run in chosen]


def _text(one: ChosenRun) -> list[str]:
    """The lines that are shown on hover."""
    run = one.run
    steps = run.config.steps if run.config is not None else run.steps_done or 0
    size = f"run {one.number}: width {run.width}, {steps:,} steps, seed {run.seed}"
    rate = f", {one.rate:g} times the learning rate" if one.rate != 1 else ""
    loss = run.loss if run.loss is not None else run.best_loss
    result = f"loss {short(loss, 4)}" if run.state == "finished" else run.state
    return [size + rate, f"{result}, {short(one.flops)} FLOPs", *([one.why] if one.why else [])]


def draw_lanes(search: ShownSearch, path: str | Path) -> Path:
    """Plot the picture of a search; the file extension sets the format."""
    check_matplotlib()
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

    lanes = shown_lanes(search)
    height = 1.3 + max(0.16, min(0.3, 9 / max(1, len(lanes)))) * len(lanes)
    names = [lane.name if len(lane.name) <= _LONG_NAME else lane.name[:31] + "…" for lane in lanes]
    left = 0.3 + 0.075 * max(map(len, names), default=0)
    canvas = Canvas(figsize=(9.2, height))
    canvas.subplots_adjust(left / 9.2, 0.6 / height, 1 - 0.15 / 9.2, 1 - 0.35 / height)
    axes = canvas.subplots()
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, lane, search)
    marks = _marks(search)
    axes.set_xticks([n for n, _ in marks], [f"{n}\n{share}" for n, share in marks])
    axes.set_yticks(range(len(lanes)), [name.replace("$", r"\$") for name in names])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel("run; below, the share of FLOPs spent before it", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    seen = [state for state in STATE_COLOURS if any(lane.state == state for lane in lanes)]
    handles = [
        Line2D([], [], marker="o", linestyle="none", color=STATE_COLOURS[s], label=STATE_WORDS[s])
        for s in seen
    ]
    style = {"ncols": 5, "frameon": False, "fontsize": 8, "labelcolor": INK}
    canvas.legend(handles=handles, loc="upper left", **style)
    return save_figure(canvas, Path(path))


def _draw_lane(axes: Any, row: int, lane: Lane, search: ShownSearch) -> None:
    colour, numbers = STATE_COLOURS[lane.state], [one.number for one in lane.runs]
    last = max(numbers[-1], lane.stopped_after or 0)
    axes.plot([numbers[0], last], [row, row], color=colour, linewidth=1, alpha=0.45)
    areas = [(0.62 * dot_size(one, search)) ** 2 for one in lane.runs]
    axes.scatter(numbers, [row] * len(numbers), s=areas, color=colour, linewidths=0, zorder=3)
    if lane.stopped_after is not None:
        end = lane.stopped_after + (0.012 * search.num_runs if lane.stopped_after in numbers else 0)
        end += 0.5
        axes.plot([end], [row], marker="x", markersize=5, markeredgewidth=1.6, color=colour)
