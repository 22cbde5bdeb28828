"""The leaderboard of a search as the page shows it: bars, formulas, drawings, code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

from markupsafe import Markup

from einlinear.errors import EinlinearError
from einlinear.reports.shown import Lane, ShownSearch
from einlinear.searches.answer import LeaderboardRow
from einlinear.searches.words import paste_code, rate_words, short_names
from einlinear.structures.diagram import draw_structure
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.text import parse_structure

MOST_ROWS = 10
"""The rows that the page shows at once; the others are folded away."""

_MOST_TIMES = 20.0  # multipliers beyond are drawn at the end of the axis
_TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
_CLOSE_TICKS = (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0)  # of a short axis
_WIDTH = 256  # of a layer that is drawn, if no run says how wide it is
_COUNTS = ("no", "one", "two", "three", "four", "five", "six")


class Bar(NamedTuple):
    """An interval on the axis of multipliers: places from 0 to 1, and whether ends are cut off."""

    low: float
    middle: float
    high: float
    is_cut_low: bool
    is_cut_high: bool


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A row of the leaderboard, with all that its details show.

    words: what the layer is, in a sentence. equation: "" if the structure cannot be read.
    """

    rank: int
    lane: Lane
    row: LeaderboardRow
    bar: Bar
    words: Markup
    equation: str
    drawing: Markup
    code: str
    rate: str


@dataclass(frozen=True, slots=True)
class Board:
    """The leaderboard: its first rows, the others, and the places of ticks on the axis of bars.

    unit: the place of 1, which is dense.
    names: the structures behind short names.
    """

    first: tuple[BoardRow, ...]
    others: tuple[BoardRow, ...]
    ticks: tuple[tuple[float, float], ...]
    unit: float
    names: Mapping[str, str]


def make_board(search: ShownSearch) -> Board:
    """The leaderboard of a search, the best row first."""
    rows = [(lane, lane.row) for lane in search.lanes if lane.row is not None]
    ends = _axis([row for _, row in rows])
    found = [
        _board_row(rank, lane, row, ends, is_drawn=rank <= MOST_ROWS)
        for rank, (lane, row) in enumerate(rows, 1)
    ]
    ticks = tuple((tick, _place(tick, ends)) for tick in _ticks(ends))
    first, others = tuple(found[:MOST_ROWS]), tuple(found[MOST_ROWS:])
    return Board(first, others, ticks, _place(1.0, ends), short_names(row for _, row in rows))


def _axis(rows: Sequence[LeaderboardRow]) -> tuple[float, float]:
    """The ends of the axis: around 1 and all intervals, within reason."""
    values = [v for row in rows for v in (row.low, row.multiplier, row.high) if 0 < v < inf]
    low = max(1 / _MOST_TIMES, min([*values, 0.7]))
    high = min(_MOST_TIMES, max([*values, 1.4]))
    return low / 1.05, high * 1.05


def _ticks(ends: tuple[float, float]) -> list[float]:
    """A few round numbers, with 1 among them."""
    low, high = ends
    inside = [tick for tick in _TICKS if low <= tick <= high]
    if len(inside) > 5:
        return [tick for tick in inside if tick in (0.1, 1.0, 10.0)]
    return inside if len(inside) > 3 else [t for t in _CLOSE_TICKS if low <= t <= high]


def _place(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    inside = min(max(value, low), high) if value == value else low
    return round(log(inside / low) / log(high / low), 4)


def _board_row(
    rank: int, lane: Lane, row: LeaderboardRow, ends: tuple[float, float], *, is_drawn: bool
) -> BoardRow:
    low, high = min(row.low, row.high), max(row.low, row.high)
    plan = _plan(lane, row)
    svg = Markup(draw_structure(plan, caption=False)) if plan and is_drawn else Markup("")
    return BoardRow(
        rank=rank,
        lane=lane,
        row=row,
        bar=Bar(
            _place(low, ends),
            _place(row.multiplier, ends),
            _place(high, ends),
            low < ends[0],
            high > ends[1],
        ),
        words=_words(row, plan),
        equation="" if plan is None else plan.equation,
        drawing=svg,
        code=paste_code(row),
        rate=rate_words(row) or "",
    )


def _plan(lane: Lane, row: LeaderboardRow) -> Plan | None:
    """The layer at the largest width that was trained; None if the structure cannot be read."""
    width = max((one.run.width or 0 for one in lane.runs), default=0) or _WIDTH
    try:
        return make_plan(parse_structure(row.structure), width, width)
    except EinlinearError:
        return None


def _words(row: LeaderboardRow, plan: Plan | None) -> Markup:
    """What the layer is: its factors, rank, sharing and cost, as its width d grows."""
    power = Markup("d<sup>{:.2f}</sup>").format
    if row.structure == "dense":
        text = Markup("A plain linear layer of width d, with d² multiply-adds per token")
    else:
        count = 0 if plan is None else len(plan.steps)
        factors = f"{_COUNTS[count]} factors" if 1 < count < len(_COUNTS) else "one factor"
        rank = Markup("full rank") if row.psi >= 0.995 else Markup("rank ") + power(row.psi)
        uses = Markup("no shared parameters")
        if row.omega > 0.005:
            uses = Markup("each parameter used ") + power(row.omega) + Markup(" times")
        cost = power(1 + row.nu) + Markup(" multiply-adds per token, where a dense layer has d²")
        text = Markup("; ").join((factors.capitalize(), rank, uses, cost))
    if row.num_experts:
        text += Markup("; {} experts, of which each token uses {}").format(
            row.num_experts, row.num_active
        )
    return text + Markup(".")
