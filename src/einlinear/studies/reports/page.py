"""The page of a report: one HTML file that needs nothing else, with scripts or without."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from hashlib import sha256
from html import escape
from importlib import resources
from typing import Any

from einlinear.pages import fill, plotly_script, script_json
from einlinear.studies.numbers import FLOPS_PER_MAC
from einlinear.studies.reports.analyse import MEASURES, Analysis
from einlinear.studies.reports.cautions import NAMED
from einlinear.studies.reports.figures import measure_name, run_label
from einlinear.studies.reports.html_tables import (
    final_table,
    law_tables,
    linf_table_html,
    multiplier_table,
    run_table,
    swatch,
)
from einlinear.studies.reports.looks import Look
from einlinear.studies.reports.panels import Figure
from einlinear.studies.reports.reproduce import commands
from einlinear.studies.reports.shown import ShownRun
from einlinear.studies.reports.words import Words, facts

MOST_ROUTED = 12  # runs whose routing the page shows
_COUNTING = (
    f"FLOPs are those of training: {FLOPS_PER_MAC} for each multiply-add of a forward pass (2, and "
    "the backward pass has twice as many). "
)


def make_page(
    analysis: Analysis,
    words: Words,
    figures: tuple[Figure, ...],
    looks: dict[str, Look],
    svgs: Mapping[str, str],
) -> str:
    """The whole page; `svgs` are the figures for readers without scripts, by name."""
    folder = resources.files("einlinear.studies.reports")
    style, script, template = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js", "report.html")
    )
    plotly = plotly_script()
    shown = {figure.name: _figure(figure, analysis, svgs) for figure in figures}
    colours = "".join(f".s{k} {{ color: {look.colour} }}" for k, look in enumerate(looks.values()))
    return fill(
        template,
        {
            "POLICY": f"{_hash(plotly)} {_hash(script)}",
            "TITLE": escape(analysis.gathered.title),
            "STYLE": style + colours,
            "FACTS": "".join(
                f"<li>{escape(fact)}</li>" for fact in [*facts(analysis), *_when(analysis)]
            ),
            "HEADLINE": marked(words.headline),
            "FIRST": _first(shown),
            "WORDS": _words(analysis, words),
            "TOGGLES": _toggles(looks),
            "SECTIONS": _sections(analysis, shown, looks, svgs),
            "RUNS": run_table(analysis, looks),
            "REPRODUCE": _reproduce(analysis),
            "COUNTING": "" if analysis.gathered.kind == "table" else _COUNTING,
            "DATA": script_json(page_data(analysis, figures, looks)),
            "PLOTLY": plotly,
            "SCRIPT": script,
        },
    )


def _hash(script: str) -> str:
    """What allows this script, and no other, to run in the page."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def marked(text: str) -> str:
    """A sentence as HTML, names in backquotes as code, and linf as tables write it."""
    names = re.compile(r"`([^`]+)`|\blinf\b")
    return names.sub(lambda m: f"<code>{m[1]}</code>" if m[1] else "L\u221e", escape(text))


def _when(analysis: Analysis) -> list[str]:
    times = [run.written for run in analysis.gathered.runs if run.written is not None]
    if not times:
        return []
    days = [datetime.fromtimestamp(t, timezone.utc).strftime("%Y-%m-%d") for t in sorted(times)]
    return [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"]


def _first(shown: Mapping[str, str]) -> str:
    """The figure that is seen first: losses against compute."""
    if "frontier" not in shown:
        return ""
    head = '<h2 id="h-first" class="unseen">Loss against compute</h2>'
    return f'<section class="first" aria-labelledby="h-first">{head}{shown["frontier"]}</section>'


def _words(analysis: Analysis, words: Words) -> str:
    """What the runs say, and beside it what they cannot say."""
    parts = []
    if words.results:
        items = "".join(f"<li>{marked(text)}</li>" for text in words.results)
        parts.append(f"<div><h2>What these runs say</h2><ul>{items}</ul></div>")
    if words.cautions:
        items = "".join(f"<li>{marked(text)}</li>" for text in words.cautions)
        parts.append(
            f'<div class="cautions"><h2>What these runs cannot say</h2><ul>{items}</ul></div>'
        )
    if len(analysis.gathered.problems) > NAMED:
        items = "".join(
            f"<li><code>{escape(path)}</code>: {escape(why)}</li>"
            for path, why in analysis.gathered.problems
        )
        parts.append(f'<div class="cautions"><h2>What could not be read</h2><ul>{items}</ul></div>')
    return f'<section class="words">{"".join(parts)}</section>' if parts else ""


def _toggles(looks: dict[str, Look]) -> str:
    return "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-s="{k}">'
        f"{swatch(look, k)}{escape(look.structure)}</button>"
        for k, look in enumerate(looks.values())
    )


def _figure(figure: Figure, analysis: Analysis, svgs: Mapping[str, str]) -> str:
    """A figure: static at first; the script puts the interactive one in its place."""
    panels = figure.panels[:1] if figure.is_choice else figure.panels
    name = f"{figure.name}-{panels[0].name}" if figure.is_choice else figure.name
    buttons = ""
    if figure.is_choice and len(figure.panels) > 1:
        choices = "".join(
            f'<button type="button" aria-pressed="{"true" if k == 0 else "false"}" '
            f'data-panel="{k}">{escape(measure_name(analysis, panel.name))}</button>'
            for k, panel in enumerate(figure.panels)
        )
        buttons = (
            '<div class="choice js" role="group" aria-label="Horizontal axis">'
            f"<span>Loss against</span>{choices}</div>"
        )
    live = "".join(
        f'<div class="live" data-live="{k}" role="group" aria-label="{escape(figure.title)}, '
        f'{escape(panel.y_title)} against {escape(panel.x_title)}"></div>'
        for k, panel in enumerate(panels)
    )
    return (
        f'<figure id="figure-{figure.name}" data-figure="{figure.name}">{buttons}'
        f'<div class="static">{svgs[name]}</div><div class="panels n{len(panels)}">{live}</div>'
        f"<figcaption>{escape(figure.about)}</figcaption></figure>"
    )


def _sections(
    analysis: Analysis, shown: Mapping[str, str], looks: dict[str, Look], svgs: Mapping[str, str]
) -> str:
    main = analysis.main
    seconds = analysis.measured.get("seconds")
    laws = law_tables(analysis, [found for found in (main, seconds) if found], looks)
    residuals = shown.get("residuals", "")
    multipliers = [shown.get("multipliers", ""), shown.get("multiplier-curves", "")]
    if any(found.multipliers for found in analysis.measured.values()):
        multipliers.append(multiplier_table(analysis, looks))
    if analysis.linf_rows:
        multipliers.append(
            "<h3>How much hangs on L\u221e</h3><p>A conclusion that changes within this table is "
            f"not one of the data.</p>{linf_table_html(analysis, looks)}"
        )
    parts = {
        "Final loss and time": final_table(analysis, looks),
        "Power laws": laws + (f"<h3>Residuals</h3>{residuals}" if residuals else ""),
        f"Multipliers against {analysis.reference}": "".join(multipliers),
        "Where the structures stand": shown.get("taxonomy", ""),
        "Loss curves": shown.get("curves", ""),
        "Where experts got their tokens": _routing(analysis, svgs),
    }
    return "".join(
        f'<section aria-labelledby="h{k}"><h2 id="h{k}">{escape(title)}</h2>{content}</section>'
        for k, (title, content) in enumerate(parts.items())
        if content
    )


def routed_runs(analysis: Analysis) -> list[ShownRun]:
    """The best run of each structure and width that has experts, the lowest losses first."""
    runs = [run for run in analysis.runs if run.curve and run.curve[-1].routing]
    best: dict[tuple[str, int | None], ShownRun] = {}
    for run in sorted(runs, key=lambda run: (not run.has_result, run.best_loss or 1e9)):
        best.setdefault((run.structure, run.width), run)
    return list(best.values())[:MOST_ROUTED]


def _routing(analysis: Analysis, svgs: Mapping[str, str]) -> str:
    runs = routed_runs(analysis)
    if not runs:
        return ""
    options = "".join(
        f'<option value="{k}">{escape(run_label(run))}</option>' for k, run in enumerate(runs)
    )
    return (
        '<figure id="figure-routing" data-figure="routing">'
        f'<label class="js">Run <select>{options}</select></label>'
        f'<div class="static">{svgs.get("routing", "")}</div>'
        '<div class="panels n2"><div class="live"></div><div class="live"></div></div>'
        '<figcaption><span class="js">Left: how evenly the tokens are spread over the experts of '
        "each layer while it trains (1 is even), from the first layer, blue, to the last, red. "
        "Right: the load of every expert at the end. </span>Red is more than the even share, blue "
        "less.</figcaption></figure>"
    )


def _reproduce(analysis: Analysis) -> str:
    parts = [
        f"<h3>{escape(title)}</h3><pre><code>{escape(command)}</code></pre>"
        for title, command in commands(analysis)
    ]
    for study in analysis.gathered.studies:
        title = escape(study.name or study.file)
        parts.append(f"<h3>The study: {title}</h3><pre><code>{escape(study.text)}</code></pre>")
    found: dict[str, dict[str, None]] = {}
    for run in analysis.gathered.runs:
        for name, value in run.environment.items():
            found.setdefault(str(name), {})[str(value)] = None
    if found:
        rows = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(', '.join(values))}</dd></div>"
            for name, values in found.items()
        )
        parts.append(f"<h3>Versions and machines</h3><dl>{rows}</dl>")
    return "".join(parts)


def page_data(
    analysis: Analysis, figures: tuple[Figure, ...], looks: dict[str, Look]
) -> dict[str, Any]:
    """What the script draws: structures, runs as columns, figures."""
    number = {name: k for k, name in enumerate(looks)}
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
    }


def _columns(run: ShownRun, number: Mapping[str, int]) -> dict[str, Any]:
    points = [p for p in run.curve if p.loss is not None and any(p.spent.values())]
    columns: dict[str, Any] = {
        "label": run_label(run),
        "structure": number[run.structure],
        "open": not run.has_result,
        "cold": sum(not run.counts(point) for point in points),
        "step": [point.step for point in points],
        "loss": [_rounded(point.loss) for point in points],
    }
    for measure in MEASURES:
        if points and measure in points[0].spent:
            columns[measure] = [_rounded(point.spent.get(measure)) for point in points]
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
