"""The command line: words to calls, values to tables. No logic of its own."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from einlinear import __version__
from einlinear.errors import EinlinearError, cannot_write
from einlinear.structures.diagram import draw_structure
from einlinear.structures.plan import Plan, Step, make_plan
from einlinear.structures.taxonomy import taxonomy
from einlinear.structures.text import parse
from einlinear.studies.landscape_runs import LandscapeConfig

try:
    import tyro
    from rich.console import Console
    from rich.table import Table
except ImportError:  # pragma: no cover - checked by hand in an environment without them
    print(
        "einlinear: the command line needs tyro and rich, which are not installed\n"
        "  rule: the command line is an extra of the package\n"
        '  fix:  pip install "einlinear[cli]"',
        file=sys.stderr,
    )
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from einlinear.bench import BenchResult, BenchRow

app = tyro.extras.SubcommandApp()


@app.command
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
    console = _console()
    for table in (_facts(plan), _edge_table(plan), *_step_tables(plan, console.width)):
        console.print(table)
    if svg is not None:
        _write(svg, draw_structure(plan))


@app.command
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

    with _console().status("drawing structures"):
        page = draw_atlas(atlas_rows(samples, seed), width)
    _write(out / "atlas.html", page)


@app.command
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

    from einlinear import bench as benchmark
    from einlinear.blocks import bench_stack, stack_cases

    old = None if compare is None else benchmark.speeds(_read(compare), str(compare))
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "repeats": repeats}
    jobs: list[tuple[str, Callable[[], BenchResult]]] = []
    for case in benchmark.bench_cases(structures, widths, tokens):
        text = f"{case.structure} at width {case.width}, {case.tokens} tokens"
        jobs.append((text, partial(benchmark.bench_case, case, **options)))
    for stack in stack_cases(structures, widths, tokens, blocks):
        text = f"{blocks} blocks at width {stack.width}, {stack.tokens} tokens"
        jobs.append((text, partial(bench_stack, stack, **options)))
    console = _console(150)
    results = []
    with console.status("") as status:
        for number, (text, job) in enumerate(jobs, 1):
            progress = f"case {number} of {len(jobs)}: {text}"
            status.update(progress)
            if not console.is_terminal:  # a log shows no status line
                print(progress, file=sys.stderr)
            results.append(job())
            _save(out / "bench.json", json.dumps(benchmark.as_json(benchmark.merged(results))))
    result = benchmark.merged(results)
    facts = benchmark.machine_facts()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for is_stack in (False, True):
        rows = [row for row in result.rows if row.is_stack == is_stack]
        if rows:
            console.print(_bench_table(rows, old))
    for note in result.notes:
        console.print(note, markup=False)
    _write(out / "bench.json", json.dumps(benchmark.as_json(result), indent=1))
    _write(out / "bench.html", benchmark.bench_page(result))


@app.command
def landscape(
    config: Annotated[LandscapeConfig, tyro.conf.arg(name="")],
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE.npz")] = None,
    processes: int = 2,
) -> None:
    """Find the best learning rate by width and structure, naively and under muP: table, pictures.

    Trains perceptrons of four layers on images. The same command again goes on where it stopped.

    Args:
        config: what to run.
        out: folder for landscape.jsonl, which grows run by run, .json, .svg and .png.
        data: images: train_x, test_x (uint8, NHWC), train_y, test_y; small ones unless given.
        processes: how many runs at once, each on one thread.
    """
    from einlinear.bench import machine_facts  # torch takes a while to load
    from einlinear.models.check_plot import check_matplotlib
    from einlinear.progress import progress_bar
    from einlinear.studies.landscape_sweep import landscape as run_landscape

    check_matplotlib()  # now rather than after all runs
    with progress_bar(_console(), "runs") as show:
        result = run_landscape(config, out=out, data=data, processes=processes, on_progress=show)
    print(result)
    facts = {"machine": machine_facts()} | result.as_json()
    _write(out / "landscape.json", json.dumps(facts, indent=1))
    for ending in ("svg", "png"):
        print(f"wrote {result.plot(out / f'landscape.{ending}')}")


@app.command
def doctor() -> None:
    """Say what this installation runs on: versions, threads, the compiled engine."""
    from einlinear import bench as benchmark  # torch takes a while to load

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in benchmark.machine_facts().items():
        table.add_row(name, str(value))
    _console().print(table)


def _bench_table(rows: Sequence[BenchRow], old: Mapping[tuple[object, ...], float] | None) -> Table:
    from einlinear.bench import interval, row_key

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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends it with exit code 2 and three lines."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"einlinear {__version__}")
        return
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of a table
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _note  # type: ignore[assignment]
            app.cli(prog="einlinear", description=_ABOUT, args=arguments or ["--help"])
        sys.stdout.flush()
    except EinlinearError as error:
        print(f"einlinear: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("einlinear: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        # The reader of the output is gone, or its disk is full: say so, without a second failure.
        sys.stdout = open(os.devnull, "w")
        if not isinstance(error, BrokenPipeError):
            print(f"einlinear: cannot write the output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _note(message: Warning | str, *_: object) -> None:
    print(f"note: {message}", file=sys.stderr)


_ABOUT = f"Linear layers of any structure an einsum can express. Version {__version__}."


def _console(width: int = 132) -> Console:
    # Tables piped into a file or a pager are not cut at 80 columns.
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def _write(path: Path, text: str) -> None:
    _save(path, text)
    print(f"wrote {path}")


def _save(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error


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
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


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
