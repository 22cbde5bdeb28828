"""The page of a benchmark, bench.html: bars of speed, time against experts, and all numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from itertools import cycle
from statistics import median
from typing import Any

from einlinear.bench_rows import (
    LINEAR,
    LINEAR_BIAS,
    WORDS,
    BenchResult,
    BenchRow,
    cells,
    is_ours,
    tables,
)
from einlinear.machine import machine_facts
from einlinear.pages import fill, plotly_script, script_json

_WHOLE = {
    "layer": "layer, with bias and normalisation",
    "stack": "blocks with the structure in all linear layers",
    "mixture": "MoELinear",
    "active": "as many layers as are active",
    "masked": "all experts, masked",
}
"""One series of bars each, whatever its rows are called."""
_LIMITED = ("layer", "stack", "mixture")
_COLORS = {
    "variant": ("#93a3b8", "#2563a8", "#0d9488", "#0ea5e9", "#84a98c"),
    "layer": ("#7c3aed",),
    "stack": ("#7c3aed",),
    "mixture": ("#7c3aed",),
    "active": ("#64748b",),
    "masked": ("#d97706",),
    "peer": ("#d97706", "#f2b866", "#be185d", "#f472b6"),
}
_SYMBOLS = {"mixture": "circle", "active": "square", "masked": "diamond"}
_GROUP_WIDTH = 0.8
"""Of the points of one structure together."""
_DASHES = {"mixture": "solid", "masked": "dash", "baseline": "dot"}
_LINE_COLORS = ("#7c3aed", "#0d9488", "#d97706", "#2563a8", "#be185d", "#65a30d")
_CAPTIONS = {
    "layers": "Layers",
    "experts": "Mixtures of experts",
    "blocks": "Blocks in training",
}


def bench_page(result: BenchResult) -> str:
    """One page that needs nothing else: bars of speed with their intervals, and the limits."""
    panels: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in result.rows:
        key = (row.section, row.num_active, row.tokens, row.dtype, row.width, row.mode)
        panels.setdefault(key, []).append(row)
    sections, calls = [], []
    for number, rows in enumerate(panels.values()):
        names = [f"figure{number}"]
        calls.append(f"draw('{names[0]}', {script_json(_figure(rows))});")
        if len({row.num_experts for row in rows}) > 1:
            for unit, field in (("ms", "milliseconds"), ("peak MB", "peak_megabytes")):
                names.append(f"{field}{number}")
                calls.append(f"lines('{names[-1]}', '{unit}', {script_json(_lines(rows, field))});")
        sections.append(_section(rows[0], names))
    facts = (f"<b>{escape(name)}</b> {escape(str(v))}" for name, v in machine_facts().items())
    page = {
        "SECTIONS": " ".join(dict.fromkeys(row.section for row in result.rows)),
        "FACTS": " &middot; ".join(facts),
        "NOTES": "".join(f"<li>{escape(note)}</li>" for note in result.notes),
        "FIGURES": "".join(sections),
        "TABLES": "".join(map(_table, tables(result.rows))),
        "CALLS": "\n".join(calls),
        "PLOTLY": plotly_script(),
    }
    template = resources.files("einlinear").joinpath("bench.html").read_text(encoding="utf-8")
    return fill(template, page)


def _section(row: BenchRow, names: Sequence[str]) -> str:
    """A panel: its heading and where its figures go."""
    mode = row.mode.replace("+", " + ")
    title, *further = names
    experts = f", experts with {row.num_active} active" if row.num_active else ""
    pair = "".join(f"<div id='{name}'></div>" for name in further)
    return (
        f"<section><h2>{mode}, width {row.width:,}{experts}</h2>"
        f"<p>{row.tokens:,} tokens, {row.dtype}</p><div id='{title}'></div>"
        + (f"<div class='pair'>{pair}</div>" if pair else "")
        + "</section>"
    )


def _figure(rows: Sequence[BenchRow]) -> dict[str, object]:
    """Groups of bars, one for each structure: variants, then the layer, then peers.

    Points on a logarithmic axis for mixtures, some of which are faster and some far slower.
    """
    is_log = rows[0].section == "experts"
    rows = [row for row in rows if row.kind != "baseline" and row.baseline in (LINEAR, LINEAR_BIAS)]
    places = {name: place for place, name in enumerate(dict.fromkeys(map(_place, rows)))}
    series: dict[tuple[str, str], str] = {}
    for kind, colors in _COLORS.items():
        names = dict.fromkeys(_name(row) for row in rows if row.kind == kind)
        series |= {(kind, name): color for name, color in zip(names, cycle(colors))}
    data = []
    for number, (key, color) in enumerate(series.items()):
        held = [row for row in rows if (row.kind, _name(row)) == key]
        shift = _GROUP_WIDTH * ((number + 0.5) / len(series) - 0.5)
        at = [places[_place(row)] + (shift if is_log else 0) for row in held]
        shown = _points(held, color) if is_log else _bars(held, color)
        data.append({"name": key[1], "x": at} | _speeds(held) | shown)
    limits = {places[_place(row)]: row.limit for row in rows if row.kind in _LIMITED}
    labels = list({_place(row): _label(row) for row in rows}.values())
    return {"data": data + _limits(limits), "labels": labels, "isLog": is_log}


def _name(row: BenchRow) -> str:
    """What the series of the row is called."""
    return _WHOLE.get(row.kind, row.variant)


def _place(row: BenchRow) -> str:
    """The group of bars that the row stands in."""
    return f"{row.structure}, {row.num_experts} experts" if row.num_experts else row.structure


def _speeds(rows: Sequence[BenchRow]) -> dict[str, object]:
    """The values of one series, with their intervals."""
    return {
        "y": [row.speed for row in rows],
        "customdata": [[_place(row), row.low, row.high, row.milliseconds] for row in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.speed for row in rows],
            "arrayminus": [row.speed - row.low for row in rows],
            "color": "#1f2937",
            "thickness": 1.2,
            "width": 3,
        },
    }


def _bars(rows: Sequence[BenchRow], color: str) -> dict[str, object]:
    faint = [row.kind == "variant" and not row.is_chosen for row in rows]
    hatch = "/" if rows[0].kind == "peer" else ""
    return {
        "type": "bar",
        "marker": {
            "color": color,
            "opacity": [0.35 if is_faint else 1.0 for is_faint in faint],
            "pattern": {"shape": hatch, "size": 6, "solidity": 0.25},
        },
    }


def _points(rows: Sequence[BenchRow], color: str) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "markers+text",
        "marker": {"color": color, "size": 11, "symbol": _SYMBOLS[rows[0].kind]},
        "text": [f"{row.speed:.2g}" if row.speed < 10 else f"{row.speed:.0f}" for row in rows],
        "textposition": "middle right",
        "textfont": {"color": color, "size": 12},
        "cliponaxis": False,
    }


def _limits(limits: Mapping[int, float]) -> list[dict[str, object]]:
    """A line above each place, and its value at the right end."""
    color = "#0f9d58"
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "limit: FLOPs saved",
            "x": [x for place in limits for x in (place - 0.44, place + 0.44, None)],
            "y": [y for limit in limits.values() for y in (limit, limit, None)],
            "line": {"color": color, "width": 2.5},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "text",
            "x": [place + 0.44 for place in limits],
            "y": list(limits.values()),
            "text": [f"limit {limit:.3g}" for limit in limits.values()],
            "textposition": "top left",
            "textfont": {"color": color, "size": 12},
            "cliponaxis": False,
            "showlegend": False,
            "hoverinfo": "skip",
        },
    ]


def _lines(rows: Sequence[BenchRow], field: str) -> list[dict[str, object]]:
    """A number of the rows against the number of experts: a line for each way to compute.

    nn.Linear has one line, the median over the structures it was measured beside.
    """
    rows = [row for row in rows if row.baseline == LINEAR_BIAS and row.kind in _DASHES]
    colors = dict(zip(dict.fromkeys(row.structure for row in rows), cycle(_LINE_COLORS)))
    values: dict[tuple[str, str], dict[int, list[float]]] = {}
    for kind in _DASHES:
        for row in sorted(rows, key=lambda row: row.num_experts):
            if row.kind == kind:
                line = values.setdefault((kind, "" if kind == "baseline" else row.structure), {})
                line.setdefault(row.num_experts, []).append(getattr(row, field))
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{structure}, {_WHOLE[kind]}" if structure else LINEAR,
            "x": list(found),
            "y": [median(numbers) for numbers in found.values()],
            "line": {
                "color": colors.get(structure, "#6b7280"),
                "width": 2.5,
                "dash": _DASHES[kind],
            },
            "marker": {"size": 7},
        }
        for (kind, structure), found in values.items()
    ]


def _label(row: BenchRow) -> str:
    """The structure's text in lines of about 20 characters, then the number of experts."""
    lines = [""]
    for word in re.split("(?<=[, ])", row.structure):
        if lines[-1] and len(lines[-1]) + len(word) > 20:
            lines.append("")
        lines[-1] += word
    if row.num_experts:
        lines.append(f"{row.num_experts} experts")
    return "<br>".join(map(escape, lines))


def _table(groups: Sequence[Sequence[BenchRow]]) -> str:
    """All numbers of one section."""
    names = list(cells(groups[0][0]))
    sides = [' class="word"' if name in WORDS else "" for name in names]
    head = "".join(f"<th{side}>{name}" for name, side in zip(names, sides, strict=True))
    body = []
    for group in groups:
        body.append("<tbody>")
        for row in group:
            words = map(escape, cells(row).values())
            line = "".join(f"<td{side}>{word}" for word, side in zip(words, sides, strict=True))
            body.append(f"<tr{' class=ours' * is_ours(row)}>{line}</tr>\n")
        body.append("</tbody>")
    caption = _CAPTIONS[groups[0][0].section]
    return f"<table><caption>{caption}</caption><thead><tr>{head}</thead>{''.join(body)}</table>"
