"""The command bench."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from einlinear.cli.progress import case_progress
from einlinear.cli.terminal import columns, console, write
from einlinear.errors import EinlinearError
from einlinear.files.whole import write_whole
from einlinear.layers.engine.memory import keep_memory_if_possible
from einlinear.show.tables import wrapped
from einlinear.structures.values import whole_number

if TYPE_CHECKING:
    from einlinear.bench.blocks import StackCase
    from einlinear.bench.layers import LayerCase
    from einlinear.bench.rows import BenchResult

    _Jobs = list[tuple[str, Callable[..., BenchResult]]]

_MOST_REPEATS = 10_000


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
    experts: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="E [E ...]")] = None,
    active: Annotated[int | None, tyro.conf.arg(metavar="K")] = None,
    compare: Annotated[Path | None, tyro.conf.arg(metavar="OLD.json")] = None,
) -> None:
    """Time layers against nn.Linear of the same width: prints tables, writes a page and JSON.

    Args:
        out: Folder for bench.json, which grows case by case, bench.html and speed.svg.
        structures: Structures to time.
        widths: Widths of input and output.
        tokens: Numbers of rows in the input.
        dtype: Type of weights and inputs.
        repeats: Number of timed rounds; more rounds give steadier results and take longer.
        blocks: Also time training steps of this many transformer blocks, with each structure in all
            linear layers, in tokens per second; widths must then be multiples of 64, and tokens are
            rounded down to sequences of 128.
        experts: Time mixtures of this many experts (MoELinear) instead of single layers, compared
            with nn.Linear, with as many layers as are active, and with all experts computed and
            masked, which is slow and gets three rounds; give several numbers to see how time grows.
        active: Number of experts that each token uses, with --experts; 2 by default.
        compare: A bench.json of another run; a column then shows the speed relative to that run.
    """
    whole_number(repeats, "repeats", 1, _MOST_REPEATS)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that measures memory logs a lot
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    keep_memory_if_possible()
    import torch  # torch and the layers take a while to load

    from einlinear.bench.blocks import stack_cases
    from einlinear.bench.layers import bench_cases
    from einlinear.bench.page import bench_page
    from einlinear.bench.plot import draw_speeds, speed_rows
    from einlinear.bench.rows import bench_json, merge_results, read_speeds
    from einlinear.bench.words import legend, sentences, shown_tables
    from einlinear.layers.machine import machine_facts

    old = None if compare is None else read_speeds(_read(compare), str(compare))
    layers = bench_cases(structures, widths, tokens)
    stacks = stack_cases(structures, widths, tokens, blocks)
    jobs = [*_layer_jobs(layers, experts, active), *_stack_jobs(stacks)]
    screen = console()
    results = []
    with screen.status("") as status:
        for number, (text, job) in enumerate(jobs, 1):
            show = case_progress(f"case {number} of {len(jobs)}: {text}", status)
            results.append(job(getattr(torch, dtype), repeats=repeats, on_progress=show))
            write_whole(out / "bench.json", json.dumps(bench_json(merge_results(results))).encode())
    result = merge_results(results)
    width, has_bold = columns(), screen.is_terminal
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    print(wrapped(facts, width, ""))
    tables = shown_tables(result.rows, width, old)
    for table in tables:
        print()
        for line in filter(None, (table.heading, table.flops)):
            print(wrapped(line, width, ""))
        print(table.text(width, has_bold=has_bold))
    print()
    for line in (*result.notes, legend(tables), "", *sentences(result.rows)):
        print(wrapped(line, width, ""))
    write(out / "bench.json", json.dumps(bench_json(result), indent=1))
    write(out / "bench.html", bench_page(result))
    if speed_rows(result.rows):
        print(f"wrote {draw_speeds(result.rows, out / 'speed.svg')}")


def _layer_jobs(
    cases: Sequence[LayerCase], experts: Sequence[int] | None, active: int | None
) -> _Jobs:
    from einlinear.bench.experts import bench_experts, experts_cases
    from einlinear.bench.layers import bench_case

    if experts is None:
        if active is not None:
            raise EinlinearError(
                what=f"--active {active} without --experts",
                rule="only mixtures have active experts",
                fix=f"--experts 16 --active {active}, or leave --active out",
            )
        return [
            (
                f"{case.structure} at width {case.width}, {case.tokens} tokens",
                partial(bench_case, case),
            )
            for case in cases
        ]
    return [
        (
            f"{case.structure}, {case.num_active} of {case.num_experts} experts, "
            f"at width {case.width}, {case.tokens} tokens",
            partial(bench_experts, case),
        )
        for case in experts_cases(cases, experts, 2 if active is None else active)
    ]


def _stack_jobs(cases: Sequence[StackCase]) -> _Jobs:
    from einlinear.bench.blocks import bench_stack

    return [
        (
            f"{case.num_blocks} blocks at width {case.width}, {case.tokens} tokens",
            partial(bench_stack, case),
        )
        for case in cases
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error
