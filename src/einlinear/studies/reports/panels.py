"""What a figure is made of: panels of series, each with a role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "runs",
    "open",
    "frontier",
    "law",
    "beyond",
    "residual",
    "band",
    "value",
    "guess",
    "dot",
    "place",
]


@dataclass(frozen=True, slots=True)
class Series:
    """Something drawn of one structure; `role` says how. Runs bring their own points.

    low, high: ends of an interval around x, of dots.
    """

    structure: str
    role: Role
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()
    text: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.

    measure: what the points of runs are drawn against; none if there are none.
    is_counted: whether only those are drawn that count in fits, and faintly.
    line_x, line_y: where a line is drawn that divides good from bad.
    y_range: None for all that there is.
    """

    name: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    measure: str = ""
    is_counted: bool = False
    is_log_x: bool = True
    is_log_y: bool = True
    is_reversed: bool = False
    line_x: float | None = None
    line_y: float | None = None
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels side by side, or one at a time to choose from; `about` says what is seen."""

    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    is_choice: bool = False
