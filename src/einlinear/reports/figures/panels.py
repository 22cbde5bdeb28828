"""The parts of a figure: panels of series, and the colours and symbols of structures."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

from einlinear.reports.analyse import Analysis

REFERENCE_COLOUR = "#6b7785"
# Distinct for colour-blind readers together with the symbols, on white and on black.
COLOURS = ("#2f7fd1", "#c7691a", "#0f9373", "#b4559f", "#8a6fd6", "#8d7a1f", "#cf4a4a", "#3b8ea5")
SCALE = ("#2f7fd1", "#8a6fd6", "#b4559f", "#c7691a")
"""The colours of an exponent, from its lowest value to its highest."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star", "x")

SeriesRole = Literal[
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
    """Something drawn for one structure; `role` says how. Runs bring their own points.

    low, high: the ends of the interval around x, for dots.
    """

    structure: str
    role: SeriesRole
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()
    text: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.

    measure: what the points of runs are drawn against; empty if the panel has no runs.
    is_counted: whether to draw only points after warm-up, faintly.
    line_x, line_y: where to draw a line between better and worse.
    y_range: None to show everything.
    title: above the panel; "" for none.
    linf: what is subtracted from the losses of runs.
    colour_by: which of ω, ψ and ν the colours mean; None for the structures.
    colour_range: the lowest and the highest value that has a colour.
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
    title: str = ""
    linf: float = 0.0
    colour_by: int | None = None
    colour_range: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels side by side, or one at a time to choose from; `about` is the caption."""

    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    is_choice: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """How every figure draws a structure; exponents are ω, ψ and ν."""

    structure: str
    colour: str
    symbol: str
    exponents: tuple[float, float, float] | None


def make_looks(analysis: Analysis) -> dict[str, Look]:
    """A colour and a symbol for every structure."""
    exponents = {run.structure: run.exponents for run in analysis.runs}
    looks = {}
    number = 0
    for name in analysis.structures:
        place = exponents[name]
        is_reference = name == analysis.reference
        colour = REFERENCE_COLOUR if is_reference else COLOURS[number % len(COLOURS)]
        # Shifted in each round, so that no two structures share both.
        turn = (number + number // len(COLOURS)) % len(SYMBOLS)
        symbol = "circle-open" if is_reference else SYMBOLS[turn]
        number += not is_reference
        values = None if place is None else tuple(map(float, (place.omega, place.psi, place.nu)))
        looks[name] = Look(name, colour, symbol, values)  # type: ignore[arg-type]
    return looks


def scale_colour(value: float, ends: tuple[float, float]) -> str:
    """The colour of an exponent between two ends."""
    low, high = ends
    at = (value - low) / (high - low) * (len(SCALE) - 1) if high > low else 0.0
    first = max(0, min(len(SCALE) - 2, floor(at)))
    pairs = zip(*(_parts(name) for name in SCALE[first : first + 2]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - first)):02x}" for a, b in pairs)


def _parts(name: str) -> tuple[int, ...]:
    return tuple(int(name[k : k + 2], 16) for k in (1, 3, 5))
