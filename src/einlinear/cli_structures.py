"""The commands on structures: describe, atlas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from einlinear.structures.diagram import draw_structure
from einlinear.structures.plan import Plan, Step, make_plan
from einlinear.structures.taxonomy import power, taxonomy
from einlinear.structures.text import parse
from einlinear.terminal import columns, console, facts_table, fitted, table_width, write


def describe(
    structure: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STRUCTURE")],
    /,
    *,
    width: Annotated[int, tyro.conf.arg(metavar="D")],
    out_width: Annotated[int | None, tyro.conf.arg(metavar="D2")] = None,
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
) -> None:
    """Say everything about a structure at a width: sizes, steps, cost, rank; draw it with --svg.

    Args:
        structure: such as "btt(rank=2)", "theta(1/2,0,1/2,0,1/2,1/2,0)" or "XA^1 YB^1 AB:64".
        width: width of the input, and of the output unless --out-width is given.
        out_width: width of the output.
        svg: file to draw the diagram to; folders that are missing are made.
    """
    plan = make_plan(parse(structure), width, width if out_width is None else out_width)
    screen = console()
    for table in (_facts(plan, structure), _edge_table(plan), *_step_tables(plan)):
        screen.print(table)
    if svg is not None:
        write(svg, draw_structure(plan))


def atlas(
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    width: int = 1024,
    samples: int = 250,
    seed: int = 0,
) -> None:
    """Draw the taxonomy of all structures, and a table of the named ones, as one HTML page.

    Args:
        out: folder for the page, atlas.html.
        width: width at which the named structures are counted.
        samples: how many random structures to draw in each of four groups.
        seed: the same seed draws the same structures.
    """
    from einlinear.structures.atlas import atlas_rows, draw_atlas  # numpy takes a while to load

    with console().status("drawing structures"):
        page = draw_atlas(atlas_rows(samples, seed), width)
    write(out / "atlas.html", page)


def _facts(plan: Plan, typed: str) -> Table:
    """What the plan says, and the exponents; the structure as it was typed, and its edges."""
    facts = plan.facts()
    rows = {"structure": typed, "as edges": plan.text}
    if typed == plan.text:
        del rows["as edges"]
    shown = ("widths", "equation", "parameters", "FLOPs/token (forward)", "rank", "padding")
    rows |= {name: facts[name] for name in shown}
    kinds = taxonomy(plan.structure).facts()
    return facts_table(rows | {name: f"{value}  ({text})" for name, (value, text) in kinds.items()})


def _edge_table(plan: Plan) -> Table:
    table = Table("edge", "joins", title="edges", title_justify="left")
    for name in ("given", "size"):
        table.add_column(name, justify="right")
    for (edge, value), size in zip(plan.structure.edges, plan.sizes.values(), strict=True):
        given = f"fixed {value}" if isinstance(value, int) else power(value)
        table.add_row(edge, ", ".join(edge), given, f"{size:,}")
    return table


def _step_tables(plan: Plan) -> list[Table]:
    """A column for each step, as many in a table as there is room for."""
    steps = [_step_facts(plan, step) for step in plan.steps]
    for count in range(len(steps), 0, -1):
        tables = [
            _step_table(steps[first : first + count]) for first in range(0, len(steps), count)
        ]
        if all(table_width(table) <= columns() for table in tables):
            break
    return [fitted(table) for table in tables]


def _step_table(steps: Sequence[Mapping[str, str]]) -> Table:
    table = Table("step", title="steps", title_justify="left")
    for step in steps:
        table.add_column(f"meet {step['meets']}", justify="right", overflow="fold")
    for name in list(steps[0])[1:]:
        table.add_row(name, *(step[name] for step in steps))
    return table


def _step_facts(plan: Plan, step: Step) -> dict[str, str]:
    return {
        "meets": step.factor,
        "factor's shape": " x ".join(map(str, plan.factor_shapes[step.factor])),
        "batch": " ".join(step.batch),
        "contracted": " ".join(step.contracted),
        "new": " ".join(step.new),
        "kept": " ".join(step.kept),
        "fan-in": f"{step.fan_in:,}",
        "fan-out": f"{step.fan_out:,}",
        "FLOPs/token": f"{2 * step.macs:,}",
        "share": f"{step.macs / plan.macs:.0%}",
    }
