"""The hypergraph of a plan, drawn as SVG: nodes X, A, B, ..., Y and one label per edge."""

from __future__ import annotations

from math import cos, hypot, log, sin
from textwrap import wrap
from typing import NamedTuple

from einlinear.errors import EinlinearError, quote
from einlinear.show.pages import render
from einlinear.structures.plan import Plan

SIDE_COLOURS = {"X": "#2563a8", "Y": "#b45309"}
"""The colours of the input and the output, and of the edges there."""
RANK_COLOUR = "#6d28d9"
"""The colour of edges among factors only."""

_NODE_RADIUS = 25.0
_PILL_HEIGHT = 24.0


class Position(NamedTuple):
    """A place on the canvas."""

    x: float
    y: float


class DiagramLayout(NamedTuple):
    """Where the nodes are, and the label of each edge."""

    width: float
    height: float
    nodes: dict[str, Position]
    labels: dict[str, Position]


def draw_structure(plan: Plan, *, caption: bool = True) -> str:
    """Draw a plan as one SVG element, as in the paper's first figure.

    The thicker a line, the more of the width its edge takes; an edge of size 1 is dashed.
    """
    if not isinstance(plan, Plan):
        raise EinlinearError(
            what=f"draw_structure was called with {quote(plan)}",
            rule="a drawing shows a plan: a structure at given widths",
            fix="use el.draw_structure(el.make_plan(structure, 1024, 1024))",
        )
    layout = lay_out(plan)
    captions, counts = _caption(plan, layout) if caption else ([], [])
    return render(
        "einlinear.structures",
        "diagram.svg",
        plan=plan,
        layout=layout,
        height=layout.height + (44 + 20 * len(captions) if caption else 0),
        radius=_NODE_RADIUS,
        side_colours=SIDE_COLOURS,
        edges=[_drawn(edge, size, plan, layout) for edge, size in plan.edge_sizes],
        captions=captions,
        counts=counts,
    )


def lay_out(plan: Plan) -> DiagramLayout:
    """Place X at the left, Y at the right, and the factors between, in the order of the steps."""
    edges = [edge for edge, _ in plan.edge_sizes]
    order = [step.factor for step in plan.steps]
    crowd = max(0, len(edges) - 7) + 4 * max(0, len(order) - 2)
    width, height = 470.0 + 22 * crowd, 300.0 + 14 * crowd if len(order) > 1 else 110.0
    margin, middle = 44.0, height / 2
    nodes = {"X": Position(margin, middle)}
    for i, factor in enumerate(order):
        # Alternate up and down, so that no three nodes are in line.
        along = 0.5 if len(order) <= 2 else 0.18 + 0.64 * i / (len(order) - 1)
        up = 0.0 if len(order) == 1 else (-1) ** i * (middle - margin)
        nodes[factor] = Position(margin + along * (width - 2 * margin), middle - up)
    nodes["Y"] = Position(width - margin, middle)
    anchors = {edge: _centre([nodes[node] for node in edge]) for edge in edges}
    labels = _spread(
        anchors, {e: _pill_width(e, s) for e, s in plan.edge_sizes}, nodes, width, height
    )
    return DiagramLayout(width, height, nodes, labels)


def _centre(points: list[Position]) -> Position:
    return Position(sum(p.x for p in points) / len(points), sum(p.y for p in points) / len(points))


def _pill_width(edge: str, size: int) -> float:
    return 22.0 + 7.6 * (len(edge) + len(str(size)) + 1)


def _spread(
    anchors: dict[str, Position],
    widths: dict[str, float],
    nodes: dict[str, Position],
    width: float,
    height: float,
) -> dict[str, Position]:
    """Move labels away from their anchors until none covers another label or a node."""
    place = {
        # Nudge each in another direction: labels that share an anchor must separate.
        edge: Position(anchor.x + cos(2.4 * i), anchor.y + sin(2.4 * i))
        for i, (edge, anchor) in enumerate(anchors.items())
    }
    for _ in range(400):
        moved = {}
        for edge, here in place.items():
            x = here.x + 0.03 * (anchors[edge].x - here.x)
            y = here.y + 0.03 * (anchors[edge].y - here.y)
            half = widths[edge] / 2
            # The least distance of the centres: half of both boxes and a small gap.
            boxes = [
                (p, half + widths[o] / 2 + 8, _PILL_HEIGHT + 10)
                for o, p in place.items()
                if o != edge
            ]
            reach = _NODE_RADIUS + 6
            boxes += [(p, half + reach, _PILL_HEIGHT / 2 + reach) for p in nodes.values()]
            for other, near_x, near_y in boxes:
                push = _push(here, other, near_x, near_y)
                x, y = x + push.x, y + push.y
            moved[edge] = Position(
                min(max(x, half + 4), width - half - 4), min(max(y, 16.0), height - 16.0)
            )
        place = moved
    return place


def _push(here: Position, other: Position, near_x: float, near_y: float) -> Position:
    """How far a label steps aside from a box that it overlaps."""
    dx, dy = here.x - other.x, here.y - other.y
    overlap = min(near_x - abs(dx), near_y - abs(dy))
    if overlap <= 0:
        return Position(0.0, 0.0)
    length = hypot(dx / near_x, dy / near_y) or 1.0
    return Position(0.3 * overlap * dx / near_x / length, 0.6 * overlap * dy / near_y / length)


def _drawn(edge: str, size: int, plan: Plan, layout: DiagramLayout) -> dict[str, object]:
    """What the template needs to draw an edge and its label."""
    label = layout.labels[edge]
    ends = [layout.nodes[node] for node in edge]
    if len(ends) == 2:
        # The curve from node to node that passes through the label.
        (a, b), middle = ends, _centre(ends)
        bend = Position(2 * label.x - middle.x, 2 * label.y - middle.y)
        path = f"M{a.x:.1f} {a.y:.1f}Q{bend.x:.1f} {bend.y:.1f} {b.x:.1f} {b.y:.1f}"
    else:
        path = "".join(f"M{label.x:.1f} {label.y:.1f}L{end.x:.1f} {end.y:.1f}" for end in ends)
    return {
        "name": edge,
        "size": size,
        "colour": SIDE_COLOURS.get(edge[0], RANK_COLOUR),
        "thickness": 1.6 + 5 * log(size) / log(max(plan.d_in, plan.d_out, 2)),
        "path": path,
        "label": label,
        "pill": _pill_width(edge, size),
    }


def _caption(plan: Plan, layout: DiagramLayout) -> tuple[list[str], list[str]]:
    """The structure, in lines that fit into the picture, and its counts."""
    lines = wrap(str(plan.structure), width=int(layout.width / 10.5), break_long_words=False)
    return lines, [
        f"{plan.d_in:,} \u2192 {plan.d_out:,} \u00b7 {plan.params:,} parameters "
        f"\u00b7 rank {plan.rank:,}",
        f"{2 * plan.macs:,} FLOPs per token, {plan.macs / plan.dense_macs:.1%} of dense",
    ]
