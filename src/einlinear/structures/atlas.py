"""The atlas: named and sampled structures in the space of omega, psi and nu, as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from html import escape
from importlib import resources
from string import Template

from einlinear.pages import plotly_script, script_json
from einlinear.structures.diagram import draw_structure
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.sampling import sample_structures
from einlinear.structures.structure import Structure
from einlinear.structures.taxonomy import Taxonomy, taxonomy
from einlinear.structures.text import parse
from einlinear.structures.values import whole_number

NAMED_EXAMPLES = {
    "dense": "dense",
    "low rank": "low_rank",
    "Kronecker": "kronecker",
    "Kronecker, 3 factors": "kronecker(num_factors=3)",
    "TT, rank d^1/4": "tensor_train(rank_exponent=1/4)",
    "Monarch": "monarch",
    "BTT, rank 4": "btt(rank=4)",
    "BTT, rank d^1/4": "btt(rank_exponent=1/4)",
    "BTT, 3 factors": "btt(num_factors=3)",
    "narrow BTT": "theta(3/4,0,1/4,0,3/4,1/4,0)",
    "generic": "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)",
}
"""What the table of the atlas shows: names for people, and texts that `parse` reads."""

_GAP = "\u00a0" * 3

GROUPS = {
    "named": ("Named structures", "#111827"),
    "best": ("No sharing, full rank: omega = 0 and psi = 1", "#0f9d58"),
    "unshared": ("No parameter sharing: omega = 0", "#2563a8"),
    "any": ("Any two-factor structure", "#9ca3af"),
    "three": ("Any three-factor structure", "#d97706"),
}


@dataclass(frozen=True, slots=True)
class AtlasRow:
    """One structure of the atlas."""

    name: str
    text: str
    group: str
    structure: Structure
    taxonomy: Taxonomy


MOST_SAMPLES = 20_000
"""In each group: more make a page that no browser shows."""


def atlas_rows(samples: int, seed: int = 0) -> list[AtlasRow]:
    """The named structures, and `samples` random ones in each of four groups."""
    samples = whole_number(samples, "samples", 0, MOST_SAMPLES)
    drawn = {
        "any": sample_structures(samples, seed=seed),
        "three": sample_structures(samples, num_factors=3, seed=seed),
        "unshared": sample_structures(samples, omega=0, psi=(0, "99/100"), seed=seed),
        "best": sample_structures(samples, omega=0, psi=1, seed=seed),
    }
    rows = [
        AtlasRow("", str(structure), group, structure, taxonomy(structure))
        for group, structures in drawn.items()
        for structure in structures
    ]
    named = [(name, text, parse(text)) for name, text in NAMED_EXAMPLES.items()]
    return rows + [AtlasRow(name, text, "named", s, taxonomy(s)) for name, text, s in named]


def draw_atlas(rows: list[AtlasRow], width: int) -> str:
    """One page that needs nothing else: the space, two views of it, the named structures."""
    figures = {
        "space": _space(rows),
        "rank-cost": _view(rows, "psi"),
        "sharing-cost": _view(rows, "omega"),
    }
    named = [row for row in rows if row.group == "named"]
    calls = "\n".join(
        f"Plotly.newPlot('{name}', {script_json(data)}, {script_json(layout)}, "
        "{responsive: true, displayModeBar: false});"
        for name, (data, layout) in figures.items()
    )
    template = resources.files("einlinear.structures").joinpath("atlas.html")
    return Template(template.read_text(encoding="utf-8")).substitute(
        width=width,
        count=len(rows) - len(named),
        cards="\n".join(_card(row, make_plan(row.structure, width, width)) for row in named),
        table="\n".join(_table_row(row, make_plan(row.structure, width, width)) for row in named),
        plotly=plotly_script(),
        calls=calls,
    )


def _points(rows: list[AtlasRow]) -> list[tuple[str, str, list[AtlasRow]]]:
    """The rows of each group with its title and colour; named ones are drawn last, on top."""
    return [
        (title, colour, [row for row in rows if row.group == group])
        for group, (title, colour) in reversed(GROUPS.items())
    ]


def _hover(row: AtlasRow) -> str:
    t = row.taxonomy
    return f"<b>{escape(row.text)}</b><br>omega {t.omega}, psi {t.psi}, nu {t.nu}"


def _space(rows: list[AtlasRow]) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Traces and layout of the three-dimensional picture."""
    data: list[dict[str, object]] = [
        _plane("omega = 0", "#2563a8", x=[0, 0, 0, 0], y=[0, 1, 1, 0], z=[0, 0, 1, 1]),
        _plane("psi = 1", "#0f9d58", x=[0, 1, 1, 0], y=[1, 1, 1, 1], z=[0, 0, 1, 1]),
    ]
    for title, colour, group in _points(rows):
        is_named = bool(group) and group[0].group == "named"
        data.append(
            {
                "type": "scatter3d",
                "mode": "markers+text" if is_named else "markers",
                "name": title,
                "x": [float(row.taxonomy.omega) for row in group],
                "y": [float(row.taxonomy.psi) for row in group],
                "z": [float(row.taxonomy.nu) for row in group],
                "text": _labels(group, ("omega", "psi", "nu")) if is_named else None,
                "textposition": "middle right",
                "textfont": {"size": 12, "color": colour},
                "hovertext": [_hover(row) for row in group],
                "hoverinfo": "text",
                "marker": {
                    "size": 7 if is_named else 3,
                    "color": colour,
                    "symbol": "diamond" if is_named else "circle",
                    "opacity": 1 if is_named else 0.65,
                },
            }
        )
    axes = {
        "xaxis": {"title": {"text": "omega: parameter sharing"}, "range": [-0.02, 1]},
        "yaxis": {"title": {"text": "psi: rank"}, "range": [0, 1.02]},
        "zaxis": {"title": {"text": "nu: compute"}, "range": [0, 1.02]},
    }
    layout: dict[str, object] = {
        "scene": {
            **axes,
            "camera": {
                "center": {"x": 0.05, "y": 0, "z": -0.1},
                "eye": {"x": 1.25, "y": -1.45, "z": 0.6},
            },
        },
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "height": 620,
        "legend": {"x": 1, "xanchor": "right", "y": 1},
        "font": {"family": "system-ui, sans-serif", "color": "#374151"},
    }
    return data, layout


def _plane(name: str, colour: str, **corners: list[int]) -> dict[str, object]:
    shape = {"i": [0, 0], "j": [1, 2], "k": [2, 3], "color": colour, "opacity": 0.1}
    return {
        "type": "mesh3d",
        "name": name,
        "showlegend": True,
        "hoverinfo": "name",
        **shape,
        **corners,
    }


def _labels(group: list[AtlasRow], axes: tuple[str, ...]) -> list[str]:
    """One label for every place: structures that coincide on these axes share it."""
    places = [tuple(getattr(row.taxonomy, axis) for axis in axes) for row in group]
    texts: dict[tuple[Fraction, ...], list[str]] = {}
    for place, row in zip(places, group, strict=True):
        texts.setdefault(place, []).append(row.name)
    labels = {place: f"{_GAP}<br>{_GAP}".join(names) for place, names in texts.items()}
    # Set off from the marker by hard spaces; a place that has its label gets no second one.
    return [_GAP + label + _GAP if (label := labels.pop(place, "")) else "" for place in places]


def _view(rows: list[AtlasRow], axis: str) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Traces and layout of the compute exponent against one of the others."""
    titles = {"psi": "psi: rank exponent", "omega": "omega: parameter sharing"}
    data: list[dict[str, object]] = []
    for title, colour, group in _points(rows):
        is_named = bool(group) and group[0].group == "named"
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text" if is_named else "markers",
                "text": _labels(group, (axis, "nu")) if is_named else None,
                "textposition": "middle left" if axis == "psi" else "middle right",
                "textfont": {"size": 11, "color": colour},
                "name": title,
                "x": [float(getattr(row.taxonomy, axis)) for row in group],
                "y": [float(row.taxonomy.nu) for row in group],
                "hovertext": [_hover(row) for row in group],
                "hoverinfo": "text",
                "showlegend": False,
                "marker": {
                    "size": 11 if is_named else 5,
                    "color": colour,
                    "symbol": "diamond" if is_named else "circle",
                    "opacity": 1 if is_named else 0.55,
                },
            }
        )
    edge = 1 if axis == "psi" else 0
    mark = GROUPS["best"][1] if axis == "psi" else GROUPS["unshared"][1]
    line = {
        "type": "line",
        "x0": edge,
        "x1": edge,
        "y0": 0,
        "y1": 1,
        "line": {"color": mark, "width": 1.5},
    }
    grid = {"gridcolor": "#e5e7eb", "zeroline": False}
    layout: dict[str, object] = {
        "xaxis": {"title": {"text": titles[axis]}, "range": [-0.03, 1.03], **grid},
        "yaxis": {"title": {"text": "nu: compute exponent"}, "range": [0, 1.03], **grid},
        "shapes": [line],
        "margin": {"l": 60, "r": 16, "t": 12, "b": 52},
        "height": 380,
        "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "color": "#374151"},
    }
    return data, layout


def _card(row: AtlasRow, plan: Plan) -> str:
    picture = draw_structure(plan, caption=False)
    caption = f"{escape(row.name)}<code>{escape(row.text)}</code>"
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _table_row(row: AtlasRow, plan: Plan) -> str:
    t = row.taxonomy
    cells = [
        f"<td>{escape(row.name)}</td>",
        f"<td><code>{escape(row.text)}</code></td>",
        f"<td><code class='edges'>{escape(str(row.structure))}</code></td>",
        *(f"<td class='n'>{value}</td>" for value in (t.omega, t.psi, t.nu)),
        f"<td class='n'>{plan.params:,}</td>",
        f"<td class='n'>{2 * plan.macs:,}</td>",
        f"<td class='n'>{plan.macs / plan.dense_macs:.1%}</td>",
        f"<td class='n'>{plan.rank:,}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"
