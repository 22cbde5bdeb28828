"""The page of a benchmark, bench.html: bars of speed, and all numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from itertools import cycle

from einlinear.bench_rows import BenchResult, BenchRow, interval
from einlinear.machine import machine_facts
from einlinear.structures.atlas import plotly_script

_WHOLE = {
    "layer": "layer, with bias and normalisation",
    "stack": "blocks with the structure in all linear layers",
}
_COLORS = {
    "variant": ("#93a3b8", "#2563a8", "#0d9488", "#0ea5e9", "#84a98c"),
    "layer": ("#7c3aed",),
    "stack": ("#7c3aed",),
    "peer": ("#d97706", "#f2b866", "#be185d", "#f472b6"),
}


def bench_page(result: BenchResult) -> str:
    """One page that needs nothing else: bars of speed with their intervals, and the limits."""
    rows = result.rows
    panels = list(dict.fromkeys((r.tokens, r.dtype, r.width, r.mode) for r in rows))
    calls = []
    for number, panel in enumerate(panels):
        held = [row for row in rows if (row.tokens, row.dtype, row.width, row.mode) == panel]
        calls.append(f"draw('figure{number}', {json.dumps(_figure(held))});")
    figures = [
        f"<section><h2>{mode.replace('+', ' + ')}, width {width:,}</h2>"
        f"<p>{tokens:,} tokens, {dtype}</p><div id='figure{number}'></div></section>"
        for number, (tokens, dtype, width, mode) in enumerate(panels)
    ]
    facts = (f"<b>{escape(name)}</b> {escape(str(v))}" for name, v in machine_facts().items())
    page = {
        "FACTS": " &middot; ".join(facts),
        "NOTES": "".join(f"<li>{escape(note)}</li>" for note in result.notes),
        "FIGURES": "".join(figures),
        "LAYERS": "".join(_table_row(row) for row in rows if not row.is_stack),
        "STACKS": "".join(_table_row(row) for row in rows if row.is_stack),
        "CALLS": "\n".join(calls).replace("</", "<\\/"),
        "PLOTLY": plotly_script(),
    }
    template = resources.files("einlinear").joinpath("bench.html").read_text(encoding="utf-8")
    return re.sub("%([A-Z]+)%", lambda match: page[match[1]], template)


def _figure(rows: Sequence[BenchRow]) -> dict[str, object]:
    """Groups of bars, one for each structure: variants, then the layer, then peers."""
    rows = [row for row in rows if row.kind != "baseline"]
    places = {name: place for place, name in enumerate(dict.fromkeys(r.structure for r in rows))}
    series = []
    for kind, colors in _COLORS.items():
        names = dict.fromkeys(row.variant for row in rows if row.kind == kind)
        series += [(kind, name, color) for name, color in zip(names, cycle(colors))]
    data: list[dict[str, object]] = [
        _bars([row for row in rows if row.variant == name], places, kind, color)
        for kind, name, color in series
    ]
    limits = {places[row.structure]: row.limit for row in rows if row.kind in _WHOLE}
    line = {"color": "#0f9d58", "width": 2.5}
    data.append(
        {
            "type": "scatter",
            "mode": "lines+text",
            "name": "limit: FLOPs saved",
            "x": [x for place in limits for x in (place - 0.44, place, place + 0.44, None)],
            "y": [y for limit in limits.values() for y in (limit, limit, limit, None)],
            "text": [t for v in limits.values() for t in ("", f"limit {v:.3g}", "", "")],
            "textposition": "top center",
            "textfont": {"color": line["color"], "size": 12},
            "line": line,
            "hoverinfo": "skip",
        }
    )
    return {"data": data, "labels": [_label(name) for name in places]}


def _bars(
    rows: Sequence[BenchRow], places: Mapping[str, int], kind: str, color: str
) -> dict[str, object]:
    faint = [kind == "variant" and not row.is_chosen for row in rows]
    return {
        "type": "bar",
        "name": _WHOLE.get(kind, rows[0].variant),
        "x": [places[row.structure] for row in rows],
        "y": [row.speed for row in rows],
        "customdata": [[row.structure, row.low, row.high, row.milliseconds] for row in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.speed for row in rows],
            "arrayminus": [row.speed - row.low for row in rows],
            "color": "#1f2937",
            "thickness": 1.2,
            "width": 3,
        },
        "marker": {
            "color": color,
            "opacity": [0.35 if is_faint else 1.0 for is_faint in faint],
            "pattern": {"shape": "/" if kind == "peer" else "", "size": 6, "solidity": 0.25},
        },
    }


def _label(structure: str) -> str:
    """The structure's text in lines of about 20 characters."""
    lines = [""]
    for word in re.split("(?<=[, ])", structure):
        if lines[-1] and len(lines[-1]) + len(word) > 20:
            lines.append("")
        lines[-1] += word
    return "<br>".join(map(escape, lines))


def _table_row(row: BenchRow) -> str:
    name = f"<b>{escape(row.variant)}</b>" if row.is_chosen else escape(row.variant)
    words = [escape(row.structure), f"{row.width}", f"{row.tokens}", row.dtype, row.mode, name]
    words += [f"{row.limit:.1f}", f"{row.speed:.2f}", interval(row)]
    words += [f"{row.speed / row.limit:.0%}", f"{row.milliseconds:.2f}"]
    words += [f"{row.peak_bytes / 1e6:.1f}"]
    words += [f"{row.tokens_per_second:,.0f}"]
    return "<tr>" + "".join(f"<td>{word}" for word in words) + "</tr>\n"
