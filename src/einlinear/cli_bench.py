"""The commands on the machine: bench, doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from einlinear.errors import EinlinearError
from einlinear.structures.values import whole_number
from einlinear.terminal import columns, console, facts_table, fitted, save, wrapped, write

if TYPE_CHECKING:
    from rich.status import Status

    from einlinear.bench import Case
    from einlinear.bench_rows import BenchResult
    from einlinear.bench_words import ShownTable
    from einlinear.blocks import StackCase

    _Jobs = list[tuple[str, Callable[..., BenchResult]]]

_SECONDS_BETWEEN_LINES = 15.0
_COLUMNS = (
    "limit: the speed if both compute equally many FLOPs per second, above it if nn.Linear "
    "computes fewer; from - to: four fifths of the rounds"
)
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
    """Time layers against nn.Linear of the same width, in turns: a table, a page and JSON.

    Args:
        out: folder for bench.json, which grows case by case, and bench.html.
        structures: the structures to time.
        widths: widths of input and output.
        tokens: how many rows the input has.
        dtype: type of weights and inputs.
        repeats: how many rounds to time; more are steadier and take longer.
        blocks: also time training steps of so many transformer blocks, with each structure in all
            linear layers, against nn.Linear: tokens per second. Widths are multiples of 64 then,
            tokens rounded down to sequences of 128. 0 is none.
        experts: time mixtures of so many experts (MoELinear) instead of single layers: against
            nn.Linear, as many layers as are active, and all experts computed and masked, which is
            slow and gets three rounds. Several numbers show how time grows with them.
        active: how many experts each token uses, with --experts; 2 unless given.
        compare: bench.json of another run; a column shows the speed as a multiple of its speed.
    """
    whole_number(repeats, "repeats", 1, _MOST_REPEATS)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # what measures memory is talkative
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch  # torch and the layers take a while to load

    from einlinear.bench import bench_cases
    from einlinear.bench_page import bench_page
    from einlinear.bench_rows import as_json, merged, speeds
    from einlinear.bench_words import sentences, shown_tables
    from einlinear.blocks import stack_cases
    from einlinear.machine import machine_facts

    old = None if compare is None else speeds(_read(compare), str(compare))
    layers = bench_cases(structures, widths, tokens)
    stacks = stack_cases(structures, widths, tokens, blocks)
    jobs = [*_layer_jobs(layers, experts, active), *_stack_jobs(stacks)]
    screen = console()
    results = []
    with screen.status("") as status:
        for number, (text, job) in enumerate(jobs, 1):
            show = _progress(f"case {number} of {len(jobs)}: {text}", status)
            results.append(job(getattr(torch, dtype), repeats=repeats, on_progress=show))
            save(out / "bench.json", json.dumps(as_json(merged(results))))
    result = merged(results)
    print(wrapped(", ".join(f"{name} {value}" for name, value in machine_facts().items())))
    for table in shown_tables(result.rows, columns(), old):
        print(f"\n{wrapped(table.heading)}")
        print(wrapped(table.flops), end="\n" * bool(table.flops))
        screen.print(_bench_table(table))
    for note in result.notes:
        print(wrapped(note))
    print(wrapped(_COLUMNS) + "\n")
    print("\n".join(map(wrapped, sentences(result.rows))))
    write(out / "bench.json", json.dumps(as_json(result), indent=1))
    write(out / "bench.html", bench_page(result))


def _layer_jobs(cases: Sequence[Case], experts: Sequence[int] | None, active: int | None) -> _Jobs:
    from einlinear.bench import bench_case
    from einlinear.bench_experts import bench_experts, experts_cases

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
    from einlinear.blocks import bench_stack

    return [
        (
            f"{case.num_blocks} blocks at width {case.width}, {case.tokens} tokens",
            partial(bench_stack, case),
        )
        for case in cases
    ]


def _progress(case: str, status: Status) -> Callable[[str], None]:
    """Shows the case, and what it is told from within: in a log now and then."""
    status.update(case)
    if status.console.is_terminal:
        return lambda text: status.update(f"{case}: {text}")
    print(case, file=sys.stderr)
    shown = [monotonic()]

    def write_line(text: str) -> None:
        if monotonic() - shown[0] > _SECONDS_BETWEEN_LINES:
            shown[0] = monotonic()
            print(f"  {text}", file=sys.stderr)

    return write_line


def doctor() -> None:
    """Say what this installation runs on: versions, threads, the compiled engine."""
    from einlinear.machine import machine_facts  # torch takes a while to load

    console().print(facts_table(machine_facts()))


def _bench_table(shown: ShownTable) -> Table:
    side: Literal["left", "right"]
    from einlinear.bench_rows import WORDS

    table = Table(padding=(0, 0, 0, 1))
    for name in shown.names:
        side = "left" if name in WORDS else "right"
        table.add_column(name, justify=side, no_wrap=name != "structure", overflow="fold")
    for words, is_bold in zip(shown.lines, shown.is_bold, strict=True):
        table.add_row(*map(escape, words), style="bold" if is_bold else None)
    return fitted(table)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error
