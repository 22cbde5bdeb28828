"""How structures are drawn, in every figure of a report."""

from __future__ import annotations

from dataclasses import dataclass

from einlinear.studies.reports.analyse import Analysis

REFERENCE_COLOUR = "#6b7785"
# Told apart by colour-blind readers together with the symbols, and on white as on black.
COLOURS = ("#2f7fd1", "#c7691a", "#0f9373", "#b4559f", "#8a6fd6", "#8d7a1f", "#cf4a4a", "#3b8ea5")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star", "x")


@dataclass(frozen=True, slots=True)
class Look:
    """How a structure is drawn, in every figure; exponents are omega, psi and nu."""

    structure: str
    colour: str
    symbol: str
    exponents: tuple[float, float, float] | None


def make_looks(analysis: Analysis) -> dict[str, Look]:
    """Colour and symbol of every structure."""
    exponents = {run.structure: run.exponents for run in analysis.runs}
    looks = {}
    number = 0
    for name in analysis.structures:
        place = exponents[name]
        is_reference = name == analysis.reference
        colour = REFERENCE_COLOUR if is_reference else COLOURS[number % len(COLOURS)]
        # Shifted in each round, so that no two structures have both in common.
        turn = (number + number // len(COLOURS)) % len(SYMBOLS)
        symbol = "circle-open" if is_reference else SYMBOLS[turn]
        number += not is_reference
        values = None if place is None else tuple(map(float, (place.omega, place.psi, place.nu)))
        looks[name] = Look(name, colour, symbol, values)  # type: ignore[arg-type]
    return looks
