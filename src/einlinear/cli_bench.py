"""The commands on the machine: bench, doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from einlinear.errors import EinlinearError
from einlinear.terminal import console, save, write

if TYPE_CHECKING:
    from einlinear.bench_rows import BenchResult, BenchRow


def bench(
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    structures: tuple[str, ...] = (
        "btt",
        "btt(rank=4)",
        "kronecker",
        "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)",
        "low_rank",
    ),
    widths: tuple[int, ...] = (1024,),
    tokens: tuple[int, ...] = (2048,),
    dtype: Literal["float32", "bfloat16", "float64"] = "float32",
    repeats: int = 9,
    blocks: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    compare: Annotated[Path | None, tyro.conf.arg(metavar="OLD.json")] = None,
) -> None:
    """Time layers against nn.Linear of the same width, in turns: a table, a page and JSON.

    Args:
        out: folder for bench.json, which grows case by case, and bench.html.
        structures: which.
        widths: of input and output.
        tokens: how many rows at once.
        dtype: of weights and inputs.
        repeats: how many rounds.
        blocks: also time training steps of so many transformer blocks, with each structure in all
            linear layers, against nn.Linear: tokens per second. Widths are multiples of 64 then,
            tokens rounded down to sequences of 128. 0 is none.
        compare: bench.json of another run; a column shows the speed as a multiple of its speed.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # what measures memory is talkative
    import torch  # torch and the layers take a while to load

    from einlinear.bench import bench_case, bench_cases
    from einlinear.bench_page import bench_page
    from einlinear.bench_rows import as_json, merged, speeds
    from einlinear.blocks import bench_stack, stack_cases
    from einlinear.machine import machine_facts

    old = None if compare is None else speeds(_read(compare), str(compare))
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "repeats": repeats}
    jobs: list[tuple[str, Callable[[], BenchResult]]] = []
    for case in bench_cases(structures, widths, tokens):
        text = f"{case.structure} at width {case.width}, {case.tokens} tokens"
        jobs.append((text, partial(bench_case, case, **options)))
    for stack in stack_cases(structures, widths, tokens, blocks):
        text = f"{blocks} blocks at width {stack.width}, {stack.tokens} tokens"
        jobs.append((text, partial(bench_stack, stack, **options)))
    screen = console(150)
    results = []
    with screen.status("") as status:
        for number, (text, job) in enumerate(jobs, 1):
            progress = f"case {number} of {len(jobs)}: {text}"
            status.update(progress)
            if not screen.is_terminal:  # a log shows no status line
                print(progress, file=sys.stderr)
            results.append(job())
            save(out / "bench.json", json.dumps(as_json(merged(results))))
    result = merged(results)
    facts = machine_facts()
    screen.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for is_stack in (False, True):
        rows = [row for row in result.rows if row.is_stack == is_stack]
        if rows:
            screen.print(_bench_table(rows, old))
    for note in result.notes:
        screen.print(note, markup=False)
    write(out / "bench.json", json.dumps(as_json(result), indent=1))
    write(out / "bench.html", bench_page(result))


def doctor() -> None:
    """Say what this installation runs on: versions, threads, the compiled engine."""
    from einlinear.machine import machine_facts  # torch takes a while to load

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in machine_facts().items():
        table.add_row(name, str(value))
    console().print(table)


def _bench_table(rows: Sequence[BenchRow], old: Mapping[tuple[object, ...], float] | None) -> Table:
    from einlinear.bench_rows import interval, row_key

    is_stack = rows[0].is_stack
    table = Table("structure", "width", "tokens", "dtype", "pass", "variant", padding=(0, 0, 0, 1))
    for name in ("limit", "speed", "from - to", "of limit", "ms", "peak MB"):
        table.add_column(name, justify="right")
    if is_stack:
        table.add_column("tokens/s", justify="right")
    if old is not None:
        table.add_column("by old", justify="right")
    for row, following in zip(rows, (*rows[1:], None), strict=True):
        cells = [
            row.structure,
            str(row.width),
            str(row.tokens),
            row.dtype,
            row.mode.replace("forward", "fwd").replace("backward", "bwd"),
            f"{row.variant} *" if row.is_chosen else row.variant,
            f"{row.limit:.1f}",
            f"{row.speed:.2f}",
            interval(row),
            f"{row.speed / row.limit:.0%}",
            f"{row.milliseconds:.2f}",
            f"{row.peak_bytes / 1e6:.1f}",
        ]
        if is_stack:
            cells.append(f"{row.tokens_per_second:,.0f}")
        if old is not None:
            before = old.get(row_key(row))
            cells.append(f"{row.speed / before:.2f}" if before else "-")
        group = slice(1, -1) if is_stack else slice(-1)  # a stack has one baseline for all
        ends = following is None or row_key(following)[group] != row_key(row)[group]
        is_ours = row.is_chosen or row.kind in ("layer", "stack")
        table.add_row(*cells, style="bold" if is_ours else None, end_section=ends)
    return table


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error
