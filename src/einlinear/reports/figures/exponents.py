"""Loss against compute in the colours of ω, ψ and ν, as in the paper's main figure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from einlinear.laws.observations import Observations
from einlinear.reports.analyse import Analysis
from einlinear.reports.figures.panels import Panel, Series
from einlinear.structures.taxonomy import Taxonomy

_PANELS: tuple[tuple[str, str, Callable[[Taxonomy], bool]], ...] = (
    ("omega", "all structures, by ω", lambda place: True),
    ("psi", "ω = 0, by ψ", lambda place: place.omega == 0),
    ("nu", "ω = 0 and ψ = 1, by ν", lambda place: place.omega == 0 and place.psi == 1),
)
"""Which structures each panel has, in the colours of which exponent."""


def exponent_panels(
    analysis: Analysis, x_title: str, y_title: str
) -> tuple[str, tuple[Panel, ...]]:
    """The caption and the panels; none if the runs are not those of a search.

    Ref: [P24 §4].
    """
    search, main = analysis.gathered.search, analysis.measured.get("flops")
    if search is None or main is None:
        return "", ()
    linf = max(0.0, search.answer.linf)
    places = {run.structure: run.exponents for run in analysis.runs}
    panels, empty = [], []
    for number, (axis, title, is_in) in enumerate(_PANELS):
        known = {n: place for n in analysis.structures if (place := places[n]) is not None}
        names = [n for n, place in known.items() if is_in(place) and n in main.front.structures]
        values = [float(getattr(known[name], axis)) for name in names]
        if not names:
            empty.append(title.split(",")[0])
            continue
        series = [Series(name, "runs") for name in names]
        series += [_frontier(main.front.of(name), name, linf) for name in names]
        panels.append(
            Panel(
                name=axis,
                title=title,
                x_title=x_title,
                y_title=f"{y_title} \u2212 L∞" if linf else y_title,
                series=tuple(series),
                measure="flops",
                is_counted=True,
                linf=linf,
                colour_by=number,
                colour_range=(min(values), max(values)),
            )
        )
    return _about(linf, main.data, empty), tuple(panels)


def _about(linf: float, data: Observations, empty: list[str]) -> str:
    text = (
        "Lines: every run, with runs that go on from shorter ones drawn once. Dots: the frontier "
        "of each structure."
    )
    if linf:
        text += f" The axis is the loss minus L∞ = {linf:.3g}, as the search estimates it."
        below = int((data.loss <= linf).sum())
        text += f" {below:,} points are at L∞ or below and cannot be shown." if below else ""
    for name in empty:
        text += f" There is no panel for {name}: no such structure was trained."
    return text


def _frontier(front: Observations, name: str, linf: float) -> Series:
    order = np.argsort(front.compute, kind="stable")
    order = order[front.loss[order] > linf]
    x, y = front.compute[order].tolist(), (front.loss[order] - linf).tolist()
    text = tuple(f"{name}, run {run}" for run in front.run[order].tolist())
    return Series(name, "frontier", tuple(x), tuple(y), text)
