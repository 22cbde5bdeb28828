"""The atlas: named and random structures in the space of ω, ψ and ν, as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import NamedTuple

from markupsafe import Markup

from einlinear.show.pages import plotly_script, render
from einlinear.structures.diagram import RANK_COLOUR, SIDE_COLOURS, draw_structure
from einlinear.structures.plan import make_plan
from einlinear.structures.sampling import sample_structures
from einlinear.structures.structure import Structure
from einlinear.structures.taxonomy import Taxonomy, taxonomy
from einlinear.structures.text import parse_structure
from einlinear.structures.values import whole_number

NAMED_EXAMPLES = {
    "dense": "dense",
    "low rank": "low_rank",
    "Kronecker": "kronecker",
    "Kronecker, 3 factors": "kronecker(num_factors=3)",
    "TT, rank d¹ᐟ⁴": "tensor_train(rank_exponent=1/4)",
    "Monarch": "monarch",
    "BTT, rank 4": "btt(rank=4)",
    "BTT, rank d¹ᐟ⁴": "btt(rank_exponent=1/4)",
    "BTT, 3 factors": "btt(num_factors=3)",
    "narrow BTT": "theta(3/4,0,1/4,0,3/4,1/4,0)",
    "generic": "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)",
}
"""The structures in the table of the atlas: names for people, and texts that `parse` reads."""

_GAP = "\u00a0" * 3


class AtlasGroup(NamedTuple):
    """Points of one kind: how the legend names them, and their colour on light and dark pages."""

    title: str
    light: str
    dark: str


GROUPS = {
    "named": AtlasGroup("Named structures", "#111827", "#f3f4f6"),
    "best": AtlasGroup("No sharing, full rank: ω = 0 and ψ = 1", "#0f9d58", "#34c77b"),
    "unshared": AtlasGroup("No parameter sharing: ω = 0", "#2563a8", "#6ea8e6"),
    "any": AtlasGroup("Any two-factor structure", "#9ca3af", "#7d8794"),
    "three": AtlasGroup("Any three-factor structure", "#d97706", "#f0a13c"),
}

_EDGE_COLOURS = {
    SIDE_COLOURS["X"]: "#6ea8e6",
    SIDE_COLOURS["Y"]: "#eb9a55",
    RANK_COLOUR: "#b294f5",
}
"""The colours of the diagrams on a dark page."""


@dataclass(frozen=True, slots=True)
class AtlasRow:
    """One structure of the atlas."""

    name: str
    text: str
    group: str
    structure: Structure
    taxonomy: Taxonomy


MOST_SAMPLES = 20_000
"""The most random structures in each group; browsers cannot show more."""


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
    named = [(name, text, parse_structure(text)) for name, text in NAMED_EXAMPLES.items()]
    return rows + [AtlasRow(name, text, "named", s, taxonomy(s)) for name, text, s in named]


def draw_atlas(rows: list[AtlasRow], width: int) -> str:
    """One self-contained page: the space, two views of it, and the named structures."""
    named = [row for row in rows if row.group == "named"]
    plans = [make_plan(row.structure, width, width) for row in named]
    pictures = [Markup(draw_structure(plan, caption=False)) for plan in plans]
    return render(
        "einlinear.structures",
        "atlas.html",
        width=width,
        count=len(rows) - len(named),
        groups=GROUPS,
        edge_colours=_EDGE_COLOURS,
        named=list(zip(named, plans, pictures, strict=True)),
        figures={
            "space": _space(rows),
            "rank-cost": _view(rows, "psi"),
            "sharing-cost": _view(rows, "omega"),
        },
        plotly=plotly_script(),
    )


def _traces(
    rows: list[AtlasRow], axes: tuple[str, ...], sizes: tuple[int, int], **style: object
) -> list[dict[str, object]]:
    """One trace per group, at the exponents `axes`; named structures are drawn last, on top."""
    found = []
    for name, group in reversed(GROUPS.items()):
        held = [row for row in rows if row.group == name]
        places = zip("xyz", axes, strict=False)
        is_named = name == "named"
        found.append(
            {
                "mode": "markers+text" if is_named else "markers",
                "name": group.title,
                **{k: [float(getattr(row.taxonomy, axis)) for row in held] for k, axis in places},
                "text": _labels(held, axes) if is_named else None,
                "textfont": {"size": 12 if len(axes) > 2 else 11, "color": f"--{name}"},
                "hovertext": [_hover(row) for row in held],
                "hoverinfo": "text",
                "marker": {
                    "size": sizes[is_named],
                    "color": f"--{name}",
                    "symbol": "diamond" if is_named else "circle",
                    "opacity": 1 if is_named else 0.6,
                },
                **style,
            }
        )
    return found


def _hover(row: AtlasRow) -> str:
    t = row.taxonomy
    return f"<b>{escape(row.text)}</b><br>ω {t.omega}, ψ {t.psi}, ν {t.nu}"


def _space(rows: list[AtlasRow]) -> dict[str, object]:
    """The three-dimensional picture."""
    data = [
        _plane("ω = 0", "--unshared", x=[0, 0, 0, 0], y=[0, 1, 1, 0], z=[0, 0, 1, 1]),
        _plane("ψ = 1", "--best", x=[0, 1, 1, 0], y=[1, 1, 1, 1], z=[0, 0, 1, 1]),
    ]
    axes = ("omega", "psi", "nu")
    data += _traces(rows, axes, (3, 7), type="scatter3d", textposition="middle right")
    grid = {"gridcolor": "--line", "zerolinecolor": "--line", "showbackground": False}
    layout = {
        "scene": {
            "xaxis": {"title": {"text": "ω: parameter sharing"}, "range": [-0.02, 1], **grid},
            "yaxis": {"title": {"text": "ψ: rank"}, "range": [0, 1.02], **grid},
            "zaxis": {"title": {"text": "ν: compute"}, "range": [0, 1.02], **grid},
            "camera": {
                "center": {"x": 0.05, "y": 0, "z": -0.1},
                "eye": {"x": 1.25, "y": -1.45, "z": 0.6},
            },
        },
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
        "height": 620,
        "legend": {"x": 1, "xanchor": "right", "y": 1, "bgcolor": "rgba(0,0,0,0)"},
    }
    return {"data": data, "layout": layout}


def _plane(name: str, colour: str, **corners: list[int]) -> dict[str, object]:
    faces = {"i": [0, 0], "j": [1, 2], "k": [2, 3], "color": colour, "opacity": 0.1}
    return (
        {"type": "mesh3d", "name": name, "showlegend": True, "hoverinfo": "name"} | faces | corners
    )


def _labels(group: list[AtlasRow], axes: tuple[str, ...]) -> list[str]:
    """One label for every place: structures that coincide on these axes share one."""
    places = [tuple(getattr(row.taxonomy, axis) for axis in axes) for row in group]
    texts: dict[tuple[Fraction, ...], list[str]] = {}
    for place, row in zip(places, group, strict=True):
        texts.setdefault(place, []).append(row.name)
    labels = {place: f"{_GAP}<br>{_GAP}".join(names) for place, names in texts.items()}
    # Hard spaces keep the label off the marker; a place gets its label only once.
    return [_GAP + label + _GAP if (label := labels.pop(place, "")) else "" for place in places]


def _view(rows: list[AtlasRow], axis: str) -> dict[str, object]:
    """The compute exponent against one of the others."""
    is_rank = axis == "psi"
    side = "middle left" if is_rank else "middle right"
    style = {"type": "scatter", "textposition": side, "showlegend": False}
    mark = {
        "type": "line",
        "x0": int(is_rank),
        "x1": int(is_rank),
        "y0": 0,
        "y1": 1,
        "line": {"color": "--best" if is_rank else "--unshared", "width": 1.5},
    }
    grid = {"gridcolor": "--line", "zeroline": False}
    title = "ψ: rank exponent" if is_rank else "ω: parameter sharing"
    layout = {
        "xaxis": {"title": {"text": title}, "range": [-0.03, 1.03], **grid},
        "yaxis": {"title": {"text": "ν: compute exponent"}, "range": [0, 1.03], **grid},
        "shapes": [mark],
        "margin": {"l": 60, "r": 16, "t": 12, "b": 52},
        "height": 380,
    }
    return {"data": _traces(rows, (axis, "nu"), (5, 11), **style), "layout": layout}
