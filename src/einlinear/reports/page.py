"""The page of a report: one self-contained HTML file that works with or without scripts."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from fractions import Fraction
from functools import partial
from hashlib import sha256
from importlib import resources
from math import isfinite
from typing import Any

from markupsafe import Markup, escape

from einlinear.laws.fit import percent_thirds
from einlinear.reports.analyse import MEASURES, Analysis
from einlinear.reports.cautions import MOST_NAMED, level
from einlinear.reports.figures.figures import measure_name, run_label, unit_of
from einlinear.reports.figures.lanes import lane_data, lanes_about
from einlinear.reports.figures.panels import Figure, Look
from einlinear.reports.leaderboard import make_board
from einlinear.reports.reproduce import commands
from einlinear.reports.shown import RUN_COLUMNS, RunColumn, ShownRun
from einlinear.reports.words import Words, facts, verdict
from einlinear.show.numbers import FLOPS_PER_MAC, NONE
from einlinear.show.pages import plotly_script, render

MOST_ROUTED = 12  # runs whose routing the page shows


def make_page(
    analysis: Analysis,
    words: Words,
    figures: tuple[Figure, ...],
    looks: dict[str, Look],
    svgs: Mapping[str, Markup],
) -> str:
    """Render the whole page; `svgs` has the figures for readers without scripts, by name."""
    folder = resources.files("einlinear.reports").joinpath("templates")
    style, script = (
        Markup(folder.joinpath(name).read_text(encoding="utf-8"))
        for name in ("report.css", "report.js")
    )
    plotly = plotly_script()
    return render(
        "einlinear.reports",
        "report.html",
        analysis=analysis,
        gathered=analysis.gathered,
        words=words,
        facts=[*facts(analysis), *_dates(analysis)],
        figures={figure.name: figure for figure in figures},
        svgs=svgs,
        looks=looks,
        numbers={name: k for k, name in enumerate(looks)},
        routed=routed_runs(analysis),
        commands=commands(analysis),
        environment=_environment(analysis),
        most_named=MOST_NAMED,
        flops_per_mac=FLOPS_PER_MAC,
        level=level(analysis),
        style=style,
        script=script,
        plotly=plotly,
        policy=Markup(f"{_hash(plotly)} {_hash(script)}"),
        data=page_data(analysis, figures, looks),
        marked=marked,
        measure_name=partial(measure_name, analysis),
        run_label=run_label,
        percent_thirds=percent_thirds,
        verdict=verdict,
        isfinite=isfinite,
        **_search_values(analysis),
        **_law_values(analysis),
        **_final_values(analysis),
        **_linf_values(analysis),
        **_run_values(analysis, looks),
    )


def _search_values(analysis: Analysis) -> dict[str, Any]:
    """The answer of a search, if the runs are those of one."""
    search = analysis.gathered.search
    if search is None:
        return {"search": None}
    return {"search": search, "board": make_board(search), "lanes_about": lanes_about(search)}


def _hash(script: str) -> str:
    """The source expression that allows this script, and no other, to run in the page."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def marked(text: str) -> Markup:
    """A sentence as HTML, with names in backquotes as code."""
    parts = re.split("`([^`]+)`", text)
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(p) if k % 2 else escape(p) for k, p in enumerate(parts))


def _dates(analysis: Analysis) -> list[str]:
    times = [run.written for run in analysis.gathered.runs if run.written is not None]
    if not times:
        return []
    days = [datetime.fromtimestamp(t, timezone.utc).strftime("%Y-%m-%d") for t in sorted(times)]
    return [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"]


def _environment(analysis: Analysis) -> dict[str, list[str]]:
    """All values of each fact about versions and machines."""
    found: dict[str, dict[str, None]] = {}
    for run in analysis.gathered.runs:
        for name, value in run.environment.items():
            found.setdefault(str(name), {})[str(value)] = None
    return {name: list(values) for name, values in found.items()}


def _law_values(analysis: Analysis) -> dict[str, Any]:
    """What the tables of laws and multipliers show; each note appears once, below all tables."""
    fitted = [found for found in (analysis.main, analysis.measured.get("seconds")) if found]
    rows = [found.laws[n] for found in fitted for n in analysis.structures if n in found.laws]
    compared = [found for found in analysis.measured.values() if found.multipliers]
    return {
        "fitted": fitted,
        "law_notes": list(dict.fromkeys(row.note for row in rows if row.note)),
        "compared": compared,
        "compared_names": {n for found in compared for n in (*found.multipliers, *found.reasons)},
    }


def _final_values(analysis: Analysis) -> dict[str, Any]:
    """Final losses by structure and width, and the lowest at each width that has several."""
    widths = sorted({final.width for final in analysis.finals})
    losses = {w: [f.loss for f in analysis.finals if f.width == w] for w in widths}
    return {
        "finals": {(final.structure, final.width): final for final in analysis.finals},
        "final_names": {final.structure for final in analysis.finals},
        "best": {w: min(some) if len(some) > 1 else None for w, some in losses.items()},
    }


def _linf_values(analysis: Analysis) -> dict[str, Any]:
    """The misfit and the multipliers at several given linf."""
    known = {row.structure for row in analysis.linf_rows} - {analysis.reference}
    names = [name for name in analysis.structures if name in known]
    rows = []
    for linf in dict.fromkeys(row.linf for row in analysis.linf_rows):
        here = {row.structure: row for row in analysis.linf_rows if row.linf == linf}
        rms = (sum(row.rms**2 for row in here.values()) / len(here)) ** 0.5
        rows.append((linf, rms, [here[name].multiplier for name in names]))
    return {"linf_names": names, "linf_rows": rows}


def _run_values(analysis: Analysis, looks: dict[str, Look]) -> dict[str, Any]:
    """All runs, of every task, and the columns with known values besides the first three."""
    unit = unit_of(analysis)
    place = {name: k for k, name in enumerate(looks)}
    runs = sorted(
        analysis.gathered.runs,
        key=lambda run: (place.get(run.structure, 999), run.width or 0, run.seed, run.id),
    )
    shown = [column for column in RUN_COLUMNS if column.title]
    known = [c for c in shown[3:] if any(c.value(run) not in (None, "") for run in runs)]
    return {
        "run_columns": [(c.title.replace("%", unit), c.is_number) for c in [*shown[:3], *known]],
        "run_rows": [(run, [(*_cell(c, run), c.is_number) for c in known]) for run in runs],
    }


def _cell(column: RunColumn, run: ShownRun) -> tuple[object, str]:
    """What a cell is sorted by, and its text."""
    value = column.value(run)
    key = float(value) if isinstance(value, Fraction) else value
    return key, NONE if value is None else column.text(value)


def routed_runs(analysis: Analysis) -> list[ShownRun]:
    """The best run with experts of each structure and width, lowest losses first."""
    runs = [run for run in analysis.runs if run.curve and run.curve[-1].routing]
    best: dict[tuple[str, int | None], ShownRun] = {}
    for run in sorted(runs, key=lambda run: (not run.has_result, run.best_loss or 1e9)):
        best.setdefault((run.structure, run.width), run)
    return list(best.values())[:MOST_ROUTED]


def page_data(
    analysis: Analysis, figures: tuple[Figure, ...], looks: dict[str, Look]
) -> dict[str, Any]:
    """What the script draws: structures, runs as columns, figures."""
    number = {name: k for k, name in enumerate(looks)}
    search = analysis.gathered.search
    drawn = []
    for figure in figures:
        values = asdict(figure)
        for panel in values["panels"]:
            for series in panel["series"]:
                series["structure"] = number[series["structure"]]
                for key in ("x", "y", "low", "high"):
                    series[key] = [_rounded(value) for value in series[key]]
        drawn.append(values)
    return {
        "structures": [asdict(look) for look in looks.values()],
        "runs": [_columns(run, number) for run in analysis.runs],
        "figures": drawn,
        "routing": [_routing_data(run) for run in routed_runs(analysis)],
        "search": None if search is None else lane_data(search),
    }


def _columns(run: ShownRun, number: Mapping[str, int]) -> dict[str, Any]:
    keep = [
        k
        for k, point in enumerate(run.curve)
        if point.loss is not None and any(column[k] for column in run.spent.values())
    ]
    points = [run.curve[k] for k in keep]
    columns: dict[str, Any] = {
        "label": run_label(run),
        "structure": number[run.structure],
        "open": not run.has_result,
        "cold": sum(not run.counts(point) for point in points),
        "step": [run.step(point) for point in points],
        "loss": [_rounded(point.loss) for point in points],
    }
    for measure in MEASURES:
        if points and measure in run.spent:
            columns[measure] = [_rounded(run.spent[measure][k]) for k in keep]
    return columns


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _routing_data(run: ShownRun) -> dict[str, Any]:
    points = [point for point in run.curve if point.routing]
    last = points[-1].routing
    return {
        "structure": run.structure,
        "steps": [point.step for point in points],
        "layers": [layer.layer for layer in last],
        "entropy": [
            [_rounded(point.routing[k].entropy) for point in points] for k in range(len(last))
        ],
        "load": [[_rounded(share) for share in layer.load] for layer in last],
    }
