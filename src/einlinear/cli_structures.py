"""The commands on structures: describe, atlas."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from einlinear.structures.diagram import draw_structure
from einlinear.structures.plan import Plan, Step, make_plan
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse
from einlinear.terminal import console, facts_table, write


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
        svg: file to draw the diagram to.
    """
    plan = make_plan(parse(structure), width, width if out_width is None else out_width)
    screen = console()
    for table in (_facts(plan), _edge_table(plan), *_step_tables(plan, screen.width)):
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


def _facts(plan: Plan) -> Table:
    kinds = taxonomy(plan.structure)
    dense = plan.dense_macs
    padded = [
        f"{name} {width} -> {full} ({full / width - 1:.1%})"
        for name, width, full in (
            ("input", plan.d_in, plan.d_in_padded),
            ("output", plan.d_out, plan.d_out_padded),
        )
        if full > width
    ]
    full_rank = min(plan.d_in, plan.d_out)
    rows = {
        "structure": str(plan.structure),
        "widths": f"{plan.d_in} -> {plan.d_out}",
        "equation": plan.equation,
        "parameters": f"{plan.params:,}  ({plan.params / dense:.2%} of dense)",
        "FLOPs per token": f"{2 * plan.macs:,}  ({plan.macs / dense:.2%} of dense, "
        f"{dense / plan.macs:.2f} x fewer)",
        "rank": f"{plan.rank:,} of {full_rank:,}",
        "omega": f"{kinds.omega}  (FLOPs per parameter grow as {_power(kinds.omega)})",
        "psi": f"{kinds.psi}  (rank grows as {_power(kinds.psi)})",
        "nu": f"{kinds.nu}  (FLOPs grow as {_power(1 + kinds.nu)}"
        + (": not below dense)" if kinds.is_degenerate else ")"),
        "padding": ", ".join(padded) or "none",
    }
    return facts_table(rows)


def _power(exponent: Fraction) -> str:
    return f"d^({exponent})" if exponent.denominator > 1 else f"d^{exponent}"


def _edge_table(plan: Plan) -> Table:
    table = Table("edge", "joins", title="edges", title_justify="left")
    for name in ("given", "size"):
        table.add_column(name, justify="right")
    for (edge, value), size in zip(plan.structure.edges, plan.sizes.values(), strict=True):
        given = f"fixed {value}" if isinstance(value, int) else _power(value)
        table.add_row(edge, ", ".join(edge), given, f"{size:,}")
    return table


def _step_tables(plan: Plan, width: int) -> list[Table]:
    """One table of all steps; in a narrow terminal a list of facts for each."""
    facts = [_step_facts(plan, step) for step in plan.steps]
    if width >= 110:
        table = Table(*facts[0], title="steps", title_justify="left")
        for row in facts:
            table.add_row(*row.values())
        return [table]
    tables = []
    for row in facts:
        table = Table(show_header=False, title=f"step: meet {row['meets']}", title_justify="left")
        for name, value in row.items():
            table.add_row(name, value)
        tables.append(table)
    return tables


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
        "multiply-adds": f"{step.macs:,}",
        "share": f"{step.macs / plan.macs:.0%}",
    }
