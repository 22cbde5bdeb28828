"""The figures of a report as values, which the page and matplotlib draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, nan

import numpy as np

from einlinear.laws.fit import PowerLaw
from einlinear.laws.multiplier import Multiplier
from einlinear.laws.observations import Observations
from einlinear.reports.analyse import Analysis, Measured, is_wrong
from einlinear.reports.figures.exponents import exponent_panels
from einlinear.reports.figures.panels import Figure, Panel, Series, SeriesRole
from einlinear.reports.shown import ShownRun
from einlinear.show.numbers import short

BEYOND = 10.0  # how far beyond the data laws are drawn
_DRAWN = 1e9  # larger multipliers are off every axis, and matplotlib cannot scale them
MEASURE_NAMES = {
    "flops": "FLOPs",
    "linear_flops": "FLOPs in linear layers",
    "seconds": "seconds",
    "params": "parameters",
    "compute": "compute",
}


def unit_of(analysis: Analysis) -> str:
    """What runs count: token, sample, or similar."""
    units = [run.unit for run in analysis.runs if run.unit != "unit"]
    return units[0] if units else "unit"


def measure_name(analysis: Analysis, measure: str) -> str:
    """The display name of a measure."""
    return f"{unit_of(analysis)}s" if measure == "units" else MEASURE_NAMES[measure]


def make_figures(analysis: Analysis) -> tuple[Figure, ...]:
    """All figures with something to draw, in the order of the page."""
    found = [make(analysis) for make in FIGURES.values()]
    return tuple(figure for figure in found if any(panel.series for panel in figure.panels))


def loss_name(analysis: Analysis) -> str:
    """The name of the loss; which one a table holds is unknown."""
    return "loss" if analysis.gathered.kind == "table" else "validation loss"


def _title(analysis: Analysis, measure: str) -> str:
    name = measure_name(analysis, measure)
    return f"training {name}" if measure == "flops" else name


def _most(analysis: Analysis, is_counted: bool) -> float | None:
    """The top of the loss axis if some losses are far above: one divergent run flattens all."""
    curves = [[p.loss for p in run.curve if p.loss is not None] for run in analysis.runs]
    first = [losses[0] for losses in curves if losses]
    if not first:
        return None
    highest = 0.0 if analysis.main is None else float(analysis.main.front.loss.max())
    usual = 1.25 * highest if is_counted else 1.5 * max(float(np.median(first)), highest)
    return usual if max(map(max, filter(None, curves))) > 3 * usual else None


def _cut(analysis: Analysis, is_counted: bool = False) -> str:
    most = _most(analysis, is_counted)
    return "" if most is None else f" Losses above {short(most)} are cut off."


def _losses(
    analysis: Analysis, measure: str, series: tuple[Series, ...], *, is_counted: bool = False
) -> Panel:
    """Losses against a measure."""
    most = _most(analysis, is_counted)
    drawn = [y for one in series for y in one.y if y > 0]
    drawn += [p.loss for run in analysis.runs for p in run.curve if p.loss]
    return Panel(
        y_range=None if most is None else (min(drawn) / 1.03, most),
        name=measure,
        x_title=_title(analysis, measure),
        y_title=loss_name(analysis),
        measure=measure,
        is_counted=is_counted,
        series=series,
    )


def _exponents(analysis: Analysis) -> Figure:
    """What the runs of a search say about ω, ψ and ν."""
    title = _title(analysis, "flops")
    about, panels = exponent_panels(analysis, title, loss_name(analysis))
    return Figure("exponents", "Loss by ω, ψ and ν", about, panels)


def _frontier(analysis: Analysis) -> Figure:
    panels = [
        _losses(
            analysis,
            measure,
            tuple(
                series
                for name in analysis.structures
                if name in found.data.structures
                for series in _of_structure(analysis, found, name)
            ),
            is_counted=True,
        )
        for measure, found in analysis.measured.items()
    ]
    is_table = analysis.gathered.kind == "table"
    about = (
        f"Faint: every {'point' if is_table else 'evaluation after warm-up'}. Bold: the frontier, "
        "the points that no other point of the structure beats with as much compute or less. "
        f"Lines: the fitted laws, dashed outside the fitted points{_left_out(analysis)}."
    )
    about += _cut(analysis, is_counted=True)
    return Figure("frontier", "Loss against compute", about, tuple(panels), is_choice=True)


def _residuals(analysis: Analysis) -> Figure:
    """How far frontiers are from their laws, if some law does not describe its points."""
    main = analysis.main
    rows = [] if main is None else [main.laws[n] for n in analysis.structures if n in main.laws]
    laws = [row.law for row in rows if row.law is not None]
    panels = []
    if main is not None and any(is_wrong(a) or a.at_bound == "lowest loss" for a in laws):
        series = []
        for law in laws:
            x, loss, _ = _by_compute(main.front.of(law.structure))
            y = tuple(100 * (value / law.loss(at) - 1) for at, value in zip(x, loss, strict=True))
            series.append(Series(law.structure, "residual", tuple(x), y))
        panels.append(
            Panel(
                name=main.measure,
                x_title=_title(analysis, main.measure),
                y_title="loss relative to the law, %",
                series=tuple(series),
                measure=main.measure,
                is_log_y=False,
                line_y=0.0,
            )
        )
    about = (
        "How far the points of each frontier are above its law. Noise goes both ways; a bend, or "
        "points far below, mean that the law does not hold. The smallest and largest runs are "
        "usually above it."
    )
    return Figure("residuals", "Residuals", about, tuple(panels))


def _by_compute(front: Observations) -> tuple[list[float], list[float], list[str]]:
    """Compute, losses and runs of the points of a frontier, by compute."""
    order = np.argsort(front.compute, kind="stable")
    return front.compute[order].tolist(), front.loss[order].tolist(), front.run[order].tolist()


def _left_out(analysis: Analysis) -> str:
    """Say which points of the frontiers are not fitted."""
    laws = [] if analysis.main is None else list(analysis.main.laws.values())
    chosen = {row.points for row in laws if row.law is not None}
    if "inner" not in chosen:
        return ""
    other = ", unless the table below says otherwise" if len(chosen) > 1 else ""
    return f"; the smallest and largest runs are not fitted{other}"


def _of_structure(analysis: Analysis, found: Measured, name: str) -> list[Series]:
    runs = {run.id: run for run in analysis.runs}
    x, y, ids = _by_compute(found.front.of(name))
    text = tuple(run_label(runs[one]) for one in ids)
    series = [Series(name, "runs"), Series(name, "frontier", tuple(x), tuple(y), text)]
    row = found.laws[name]
    if row.law is not None and row.law.a > 0:
        low, high = row.law.compute_range
        first, last = min(x[0], low), BEYOND * x[-1]
        series.append(_line(row.law, "law", ((low, high),)))
        before = ((first, low),) if first < 0.99 * low else ()
        series.append(_line(row.law, "beyond", (*before, (high, last))))
    return series


def _line(law: PowerLaw, role: SeriesRole, parts: tuple[tuple[float, float], ...]) -> Series:
    """A law over one or more ranges, with gaps between them."""
    x = [v for ends in parts for v in (*np.geomspace(*ends, 30).tolist(), nan)][:-1]
    return Series(law.structure, role, tuple(x), tuple(map(law.loss, x)))


def run_label(run: ShownRun) -> str:
    """A run in one line, shown on hover."""
    parts = [f"width {run.width}", f"depth {run.depth}", f"seed {run.seed}"]
    known = [part for part in parts if not part.endswith("None")]
    return f"run {run.id}: {run.structure}, {', '.join(known)}"


def _multipliers(analysis: Analysis) -> Figure:
    reference = analysis.reference
    return Figure(
        "multipliers",
        f"Multipliers against {reference}",
        f"How many times the compute {reference} needs for the same loss: medians over the points "
        "of the frontier, with intervals. To the right of 1 is better.",
        tuple(_dot_panel(analysis, found) for found in _compared(analysis)),
    )


def _multiplier_curves(analysis: Analysis) -> Figure:
    return Figure(
        "multiplier-curves",
        "Multipliers by loss",
        "The multiplier from both laws at each loss, with intervals; the loss falls to the right. "
        "Dashed: losses that one of the two frontiers has not reached.",
        tuple(_curve_panel(analysis, found) for found in _compared(analysis)),
    )


def _compared(analysis: Analysis) -> list[Measured]:
    return [found for found in analysis.measured.values() if found.multipliers]


def _curve_panel(analysis: Analysis, found: Measured) -> Panel:
    series: list[Series] = []
    for name in analysis.structures:
        if name in found.multipliers:
            series += _multiplier_curve(found.multipliers[name])
    drawn = [v for s in series if s.role != "band" for v in s.y]
    for one in found.multipliers.values():
        drawn += np.array([one.low, one.high])[:, ~one.is_extrapolated].ravel().tolist()
    return Panel(
        name=found.measure,
        x_title=loss_name(analysis),
        y_title=f"multiplier by {measure_name(analysis, found.measure)}",
        series=tuple(series),
        is_reversed=True,
        line_y=1.0,
        y_range=_range(drawn),
    )


def _range(values: Sequence[float], most: float = 100.0) -> tuple[float, float]:
    """The range of a logarithmic axis: 1, and all values within a factor of `most`."""
    known = [v for v in values if isfinite(v) and 1 / most <= v <= most]
    low, high = min([*known, 0.8]), max([*known, 1.25])
    room = (high / low) ** 0.06
    return low / room, high * room


def _multiplier_curve(found: Multiplier) -> list[Series]:
    name = found.structure
    has_band = (found.low > 1 / _DRAWN) & (found.high < _DRAWN)
    losses = found.losses[has_band]
    x = (*losses.tolist(), *losses[::-1].tolist())
    y = (*found.high[has_band].tolist(), *found.low[has_band][::-1].tolist())
    series = [Series(name, "band", x, y)] if len(x) else []
    known = (found.values > 1 / _DRAWN) & (found.values < _DRAWN)
    guessed = found.is_extrapolated
    # One more value on each side, so that the parts of the curve meet.
    widened = guessed | np.append(guessed[1:], False) | np.append(False, guessed[:-1])
    for role, here in (("value", ~guessed), ("guess", widened)):
        values = np.where(known & here, found.values, np.nan)
        if np.isfinite(values).any():
            series.append(Series(name, role, tuple(found.losses.tolist()), tuple(values.tolist())))  # type: ignore[arg-type]
    return series


def _dot_panel(analysis: Analysis, found: Measured) -> Panel:
    names = [name for name in analysis.structures if name in found.multipliers]
    series = []
    for place, name in enumerate(names):
        one = found.multipliers[name]
        if isfinite(one.median):
            low, high = (
                end if isfinite(end) and end > 0 else one.median for end in one.median_interval
            )
            y = (float(len(names) - place),)
            series.append(Series(name, "dot", (one.median,), y, (name,), (low,), (high,)))
    ends = [v for s in series for v in (*s.low, *s.high)]
    return Panel(
        name=found.measure,
        x_title=f"multiplier by {measure_name(analysis, found.measure)}",
        y_title="",
        series=tuple(series),
        is_log_y=False,
        line_x=1.0,
        x_range=_range(ends),
        y_range=(0.4, len(names) + 0.6),
    )


def _taxonomy(analysis: Analysis) -> Figure:
    places = {run.structure: run.exponents for run in analysis.runs}
    panels = []
    for axis, title in (("psi", "ψ: rank"), ("omega", "ω: parameter sharing")):
        seen: dict[tuple[float, float], int] = {}
        series = []
        for name in analysis.structures:
            found = places[name]
            if found is not None:
                x, y = float(getattr(found, axis)), float(found.nu)
                before = seen.get((x, y), 0)
                seen[x, y] = before + 1
                series.append(Series(name, "place", (x,), (y,), (name,), (float(before),)))
        panels.append(
            Panel(
                name=axis,
                x_title=title,
                y_title="ν: compute",
                series=tuple(series),
                is_log_x=False,
                is_log_y=False,
                line_x=1.0 if axis == "psi" else 0.0,
                x_range=(-0.05, 1.05),
                y_range=(-0.05, 1.1),
            )
        )
    about = (
        "How a layer grows with its width d: its compute as d to the power of 1 + ν, the uses of "
        "each parameter to the power of ω, and its rank to the power of ψ. The dotted lines mark "
        "full rank and no sharing. Experts are placed by their structure."
    )
    return Figure("taxonomy", "Taxonomy of the structures", about, tuple(panels))


def _curves(analysis: Analysis) -> Figure:
    has_points = {run.structure for run in analysis.runs if run.curve}
    series = tuple(
        Series(name, role)
        for name in analysis.structures
        if name in has_points
        for role in ("runs", "open")
    )
    panels = [
        _losses(analysis, measure, series)
        for measure in ("flops", "units", "seconds", "compute")
        if any(measure in run.spent for run in analysis.runs if run.curve)
    ]
    about = (
        "Every run from its first evaluation to its last, including warm-up, which is not fitted. "
        "Dotted: runs without a result yet."
    )
    if analysis.gathered.kind == "table":
        about = "Every run, from its first point to its last."
    about += _cut(analysis)
    return Figure("curves", "Loss curves", about, tuple(panels), is_choice=True)


FIGURES: dict[str, Callable[[Analysis], Figure]] = {
    "exponents": _exponents,
    "frontier": _frontier,
    "residuals": _residuals,
    "multipliers": _multipliers,
    "multiplier-curves": _multiplier_curves,
    "taxonomy": _taxonomy,
    "curves": _curves,
}
"""All figures by the name that their files begin with, in the order of the page."""
