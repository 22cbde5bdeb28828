"""The command describe."""

from __future__ import annotations

import shlex
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import tyro

from einlinear.cli.terminal import columns, print_facts, write
from einlinear.errors import EinlinearError, quote
from einlinear.show.symbols import power
from einlinear.show.tables import text_table
from einlinear.structures.plan import Plan, Step, make_plan
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse_structure


def describe(
    structure: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STRUCTURE")],
    /,
    *,
    width: Annotated[int, tyro.conf.arg(metavar="D")],
    out_width: Annotated[int | None, tyro.conf.arg(metavar="D2")] = None,
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE.svg")] = None,
) -> None:
    """Describe a structure at a width: sizes, steps, cost and rank; draw it with --svg.

    Args:
        structure: The structure, such as "btt(rank=2)", "theta(1/2,0,1/2,0,1/2,1/2,0)" or
            "XA^1 YB^1 AB:64".
        width: The width of the input, and of the output unless you give --out-width.
        out_width: The width of the output.
        svg: Draw the diagram to this .svg file; missing folders are created.
    """
    if svg is not None:
        _check_svg(svg)
    plan = make_plan(parse_structure(structure), width, width if out_width is None else out_width)
    print_facts(_facts(plan, structure))
    print(f"\nedges\n{_edge_table(plan)}")
    for table in _step_tables(plan):
        print(f"\nsteps\n{table}")
    if svg is not None:
        from einlinear.structures.diagram import draw_structure  # Jinja takes a while to load

        write(svg, draw_structure(plan))


def _check_svg(path: Path) -> None:
    """Refuse a name of another kind of file; devices and pipes have no kind."""
    is_device = path.exists() and not path.is_file()
    if not is_device and path.resolve().suffix.lower() != ".svg":
        raise EinlinearError(
            what=f"--svg is {quote(path)}",
            rule="a diagram is an SVG file, whose name ends in .svg",
            fix=f"give --svg {shlex.quote(str(path.with_suffix('.svg')))}",
        )


def _facts(plan: Plan, typed: str) -> dict[str, str]:
    """The plan and the exponents; the structure as it was typed, and its edges."""
    facts = plan.facts()
    rows = {"structure": typed} | ({} if typed == plan.text else {"as edges": plan.text})
    shown = ("widths", "equation", "parameters", "FLOPs/token (forward)", "rank", "padding")
    rows |= {name: facts[name] for name in shown}
    kinds = taxonomy(plan.structure).facts()
    return rows | {name: f"{value}  ({text})" for name, (value, text) in kinds.items()}


def _edge_table(plan: Plan) -> str:
    rows = []
    for (edge, value), size in zip(plan.structure.edges, plan.sizes.values(), strict=True):
        given = f"fixed {value}" if isinstance(value, int) else str(value)
        given = power("d", value) if isinstance(value, Fraction) else given
        rows.append((edge, ", ".join(edge), given, f"{size:,}"))
    return text_table(("edge", "joins", "given", "size"), rows, left=2)


def _step_tables(plan: Plan) -> list[str]:
    """A column for each step, as many in a table as fit."""
    steps = [_step_facts(plan, step) for step in plan.steps]
    for count in range(len(steps), 0, -1):
        groups = [steps[first : first + count] for first in range(0, len(steps), count)]
        tables = [
            text_table(
                ("step", *(f"meet {step['meets']}" for step in group)),
                [(name, *(step[name] for step in group)) for name in list(steps[0])[1:]],
                width=columns() if count == 1 else None,
            )
            for group in groups
        ]
        if all(len(line) <= columns() for table in tables for line in table.splitlines()):
            break
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
        "FLOPs/token": f"{2 * step.macs:,}",
        "share": f"{step.macs / plan.macs:.0%}",
    }
