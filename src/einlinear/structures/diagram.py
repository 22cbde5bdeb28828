"""The hypergraph of a plan, drawn as SVG: nodes X, A, B, ..., Y and one label per edge."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import cos, hypot, log, sin
from textwrap import wrap

from einlinear.errors import EinlinearError, quote
from einlinear.structures.plan import Plan

COLOURS = {"X": "#2563a8", "Y": "#b45309", "": "#6d28d9"}
"""One colour for the edges at the input, at the output and among factors."""

_INK = "#1f2937"
_NODE_RADIUS = 25.0
_PILL_HEIGHT = 24.0
_FONT = "font-family='ui-sans-serif, system-ui, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the canvas."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Where everything stands: nodes, and the label of each edge between them."""

    width: float
    height: float
    nodes: dict[str, Point]
    labels: dict[str, Point]


def draw_structure(plan: Plan, *, caption: bool = True) -> str:
    """The diagram of a plan as one SVG element, as in the paper's first figure.

    A line is the thicker the more of the width its edge takes; a dashed one has size 1.
    """
    if not isinstance(plan, Plan):
        raise EinlinearError(
            what=f"a drawing was asked of {quote(plan)}",
            rule="a drawing shows a plan: a structure at given widths",
            fix="use el.draw_structure(el.make_plan(structure, 1024, 1024))",
        )
    picture = lay_out(plan)
    foot = 44.0 + 20 * len(_caption_lines(plan, picture)) if caption else 0.0
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {picture.width:.0f} "
        f"{picture.height + foot:.0f}' role='img' {_FONT}>",
        f"<title>{escape(str(plan.structure))}</title>",
        f"<rect width='100%' height='{picture.height + foot:.0f}' fill='#ffffff'/>",
        *(_draw_edge(edge, size, plan, picture) for edge, size in plan.edge_sizes),
        *(_draw_node(node, point) for node, point in picture.nodes.items()),
        *(_draw_label(edge, size, picture.labels[edge]) for edge, size in plan.edge_sizes),
    ]
    if caption:
        parts += _draw_caption(plan, picture)
    return "\n".join([*parts, "</svg>"])


def lay_out(plan: Plan) -> Picture:
    """X at the left, Y at the right, between them the factors in the order of the steps."""
    edges = [edge for edge, _ in plan.edge_sizes]
    order = [step.factor for step in plan.steps]
    crowd = max(0, len(edges) - 7) + 4 * max(0, len(order) - 2)
    width, height = 470.0 + 22 * crowd, 300.0 + 14 * crowd if len(order) > 1 else 110.0
    margin, middle = 44.0, height / 2
    nodes = {"X": Point(margin, middle)}
    for i, factor in enumerate(order):
        # Up and down by turns, so that no three nodes are in line; two factors one above the other.
        along = 0.5 if len(order) <= 2 else 0.18 + 0.64 * i / (len(order) - 1)
        up = 0.0 if len(order) == 1 else (-1) ** i * (middle - margin)
        nodes[factor] = Point(margin + along * (width - 2 * margin), middle - up)
    nodes["Y"] = Point(width - margin, middle)
    anchors = {edge: _centre([nodes[node] for node in edge]) for edge in edges}
    labels = _spread(
        anchors, {e: _pill_width(e, s) for e, s in plan.edge_sizes}, nodes, width, height
    )
    return Picture(width, height, nodes, labels)


def _centre(points: list[Point]) -> Point:
    return Point(sum(p.x for p in points) / len(points), sum(p.y for p in points) / len(points))


def _pill_width(edge: str, size: int) -> float:
    return 22.0 + 7.6 * (len(edge) + len(str(size)) + 1)


def _spread(
    anchors: dict[str, Point],
    widths: dict[str, float],
    nodes: dict[str, Point],
    width: float,
    height: float,
) -> dict[str, Point]:
    """Places near the anchors at which no label covers another or a node."""
    place = {
        # A nudge in a direction of its own parts labels that share an anchor.
        edge: Point(anchor.x + cos(2.4 * i), anchor.y + sin(2.4 * i))
        for i, (edge, anchor) in enumerate(anchors.items())
    }
    for _ in range(400):
        moved = {}
        for edge, here in place.items():
            x = here.x + 0.03 * (anchors[edge].x - here.x)
            y = here.y + 0.03 * (anchors[edge].y - here.y)
            half = widths[edge] / 2
            # How near the middles may come: half of both boxes and a little air.
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
            moved[edge] = Point(
                min(max(x, half + 4), width - half - 4), min(max(y, 16.0), height - 16.0)
            )
        place = moved
    return place


def _push(here: Point, other: Point, near_x: float, near_y: float) -> Point:
    """How far a label steps aside from a box that it overlaps."""
    dx, dy = here.x - other.x, here.y - other.y
    overlap = min(near_x - abs(dx), near_y - abs(dy))
    if overlap <= 0:
        return Point(0.0, 0.0)
    length = hypot(dx / near_x, dy / near_y) or 1.0
    return Point(0.3 * overlap * dx / near_x / length, 0.6 * overlap * dy / near_y / length)


def _colour(edge: str) -> str:
    return COLOURS[edge[0] if edge[0] in "XY" else ""]


def _draw_edge(edge: str, size: int, plan: Plan, picture: Picture) -> str:
    share = log(size) / log(max(plan.d_in, plan.d_out, 2))
    style = (
        f"fill='none' stroke='{_colour(edge)}' stroke-width='{1.6 + 5 * share:.1f}' "
        "stroke-linecap='round'"
    )
    style += (
        " stroke-opacity='0.75'" if size > 1 else " stroke-opacity='0.5' stroke-dasharray='4 4'"
    )
    label = picture.labels[edge]
    ends = [picture.nodes[node] for node in edge]
    if len(ends) == 2:
        # The curve from node to node that passes through the label.
        bend = Point(
            2 * label.x - (ends[0].x + ends[1].x) / 2, 2 * label.y - (ends[0].y + ends[1].y) / 2
        )
        (a, b), turn = ends, f"Q{bend.x:.1f} {bend.y:.1f}"
        return f"<path d='M{a.x:.1f} {a.y:.1f}{turn} {b.x:.1f} {b.y:.1f}' {style}/>"
    spokes = "".join(f"M{label.x:.1f} {label.y:.1f}L{end.x:.1f} {end.y:.1f}" for end in ends)
    return f"<path d='{spokes}' {style}/>"


def _draw_node(node: str, point: Point) -> str:
    if node in "XY":
        shape = (
            f"<rect x='{point.x - 24:.1f}' y='{point.y - 24:.1f}' width='48' height='48' rx='10' "
            f"fill='{COLOURS[node]}'/>"
        )
    else:
        shape = (
            f"<circle cx='{point.x:.1f}' cy='{point.y:.1f}' r='{_NODE_RADIUS:.0f}' fill='#ffffff' "
            f"stroke='{_INK}' stroke-width='2.5'/>"
        )
    ink = "#ffffff" if node in "XY" else _INK
    return shape + _text(node, point.x, point.y + 7, 20, ink, "font-weight='700'")


def _draw_label(edge: str, size: int, point: Point) -> str:
    width = _pill_width(edge, size)
    colour = _colour(edge)
    left, top = point.x - width / 2, point.y - _PILL_HEIGHT / 2
    pill = (
        f"<rect x='{left:.1f}' y='{top:.1f}' width='{width:.1f}' height='{_PILL_HEIGHT:.0f}' "
        f"rx='12' fill='#ffffff' stroke='{colour}' stroke-width='1.4'/>"
    )
    text = f"<tspan font-weight='700'>{edge}</tspan> {size}"
    return pill + _text(text, point.x, point.y + 4.5, 13, colour)


def _caption_lines(plan: Plan, picture: Picture) -> list[str]:
    """The name of the structure, broken so that it stays within the picture."""
    return wrap(str(plan.structure), width=int(picture.width / 10.5), break_long_words=False)


def _draw_caption(plan: Plan, picture: Picture) -> list[str]:
    centre, y = picture.width / 2, picture.height + 10
    lines = _caption_lines(plan, picture)
    counts = [
        f"{plan.d_in:,} \u2192 {plan.d_out:,} \u00b7 {plan.params:,} parameters "
        f"\u00b7 rank {plan.rank:,}",
        f"{2 * plan.macs:,} FLOPs per token, {plan.macs / plan.dense_macs:.1%} of dense",
    ]
    below = y + 20 * len(lines) + 4
    return [
        *(
            _text(escape(line), centre, y + 20 * i, 15, _INK, "font-weight='600'")
            for i, line in enumerate(lines)
        ),
        *(_text(line, centre, below + 18 * i, 12.5, "#6b7280") for i, line in enumerate(counts)),
    ]


def _text(body: str, x: float, y: float, size: float, colour: str, extra: str = "") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:.1f}' fill='{colour}' "
        f"text-anchor='middle' {extra}>{body}</text>"
    )
