"""The page of a benchmark, bench.html: bars of speed, time against experts, and all numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import cycle
from statistics import median
from typing import Any

from einlinear.bench.rows import (
    LINEAR,
    LINEAR_BIAS,
    WORD_COLUMNS,
    BenchResult,
    BenchRow,
    bench_tables,
    is_ours,
    row_cells,
)
from einlinear.layers.machine import machine_facts
from einlinear.show.pages import plotly_script, render

_WHOLE = {
    "layer": "layer, with bias and normalisation",
    "stack": "blocks with the structure in all linear layers",
    "mixture": "MoELinear",
    "active": "as many layers as are active",
    "masked": "all experts, masked",
}
"""Kinds of rows that are one series each, and its name."""
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
_GROUP_WIDTH = 0.8
"""The width that the points of one structure take together."""
_DASHES = {"mixture": "solid", "masked": "dash", "baseline": "dot"}
_LINE_COLORS = ("#7c3aed", "#0d9488", "#d97706", "#2563a8", "#be185d", "#65a30d")


def bench_page(result: BenchResult) -> str:
    """One self-contained page: bars of speed with their intervals, and the limits."""
    groups: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in result.rows:
        key = (row.section, row.num_active, row.tokens, row.dtype, row.width, row.mode)
        groups.setdefault(key, []).append(row)
    panels, figures = [], {}
    for number, rows in enumerate(groups.values()):
        panel: dict[str, Any] = {"row": rows[0], "speeds": f"speeds{number}", "growth": []}
        figures[panel["speeds"]] = _speed_figure(rows)
        if len({row.num_experts for row in rows}) > 1:
            for field, unit in (("milliseconds", "ms"), ("peak_megabytes", "peak MB")):
                panel["growth"].append(f"{field}{number}")
                figures[panel["growth"][-1]] = {"unit": unit, "data": _growth_lines(rows, field)}
        panels.append(panel)
    return render(
        "einlinear.bench",
        "bench.html",
        sections={row.section for row in result.rows},
        facts=machine_facts(),
        notes=result.notes,
        panels=panels,
        tables=bench_tables(result.rows),
        words=WORD_COLUMNS,
        cells=row_cells,
        is_ours=is_ours,
        figures=figures,
        plotly=plotly_script(),
    )


def _speed_figure(rows: Sequence[BenchRow]) -> dict[str, object]:
    """Groups of bars, one for each structure: variants, then the layer, then peers.

    Mixtures are points on a logarithmic axis, since some are much slower than others.
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
        kind, name = key
        held = [row for row in rows if (row.kind, _name(row)) == key]
        shift = _GROUP_WIDTH * ((number + 0.5) / len(series) - 0.5) if is_log else 0
        values = {
            "x": [places[_place(row)] + shift for row in held],
            "y": [row.speed for row in held],
            "low": [row.low for row in held],
            "high": [row.high for row in held],
            "ms": [row.milliseconds for row in held],
            "place": [_place(row) for row in held],
            "isFaint": [kind == "variant" and not row.is_chosen for row in held],
        }
        data.append({"name": name, "kind": kind, "color": color, **values})
    limits = {places[_place(row)]: row.limit for row in rows if row.kind in _LIMITED}
    labels = list({_place(row): _label(row) for row in rows}.values())
    return {"data": data, "limits": list(limits.items()), "labels": labels, "isLog": is_log}


def _name(row: BenchRow) -> str:
    """The name of the series of a row."""
    return _WHOLE.get(row.kind, row.variant)


def _place(row: BenchRow) -> str:
    """The group of bars that a row belongs to."""
    return f"{row.structure}, {row.num_experts} experts" if row.num_experts else row.structure


def _growth_lines(rows: Sequence[BenchRow], field: str) -> list[dict[str, object]]:
    """A field against the number of experts: one line for each way to compute.

    nn.Linear has one line, the median over all structures.
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
            "name": f"{structure}, {_WHOLE[kind]}" if structure else LINEAR,
            "x": list(found),
            "y": [median(numbers) for numbers in found.values()],
            "color": colors.get(structure, "--soft"),
            "dash": _DASHES[kind],
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
