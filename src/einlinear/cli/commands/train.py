"""The command train."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from einlinear.cli.arguments import flags_class
from einlinear.cli.commands.prepare import kept_text
from einlinear.cli.terminal import columns, console, print_facts, say
from einlinear.errors import EinlinearError
from einlinear.layers.engine.memory import keep_memory_if_possible
from einlinear.runs.config import RunConfig
from einlinear.runs.config_file import read_run
from einlinear.show.numbers import FLOPS_PER_MAC
from einlinear.show.tables import text_table

if TYPE_CHECKING:
    from einlinear.runs.record import RunRecord
    from einlinear.training.plan import RunPlan

    RunFlags = Any
else:
    _BY_TASK = {f.name: "by task and preset" for f in fields(RunConfig) if f.default is None}
    RunFlags = flags_class(RunConfig, _BY_TASK | {"data": "none", "validation": "none"})

_LOSSES = ("validation loss", "training loss")


def train(
    flags: Annotated[RunFlags, tyro.conf.arg(name="")],
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml")] = None,
    mirror: tuple[Literal["tensorboard", "wandb"], ...] = (),
    threads: int | None = None,
    thaw: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
) -> None:
    """Train a model: prints the plan of the run, then its curve.

    Settings that you do not give follow from task and preset. Ctrl-C saves a checkpoint; run the
    same command again to resume.
    On many devices: torchrun --nproc-per-node N -m einlinear train ...

    Args:
        flags: Settings of the run.
        out: Directory of the run.
        config: A TOML or JSON file of settings; flags override it.
        mirror: Also show metrics in TensorBoard or Weights & Biases.
        threads: Number of threads; by default, as many as the size of a step can use.
        thaw: Directory of a shorter run to continue, trained with --keep-state True.
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # torch reads it when it is loaded; idle threads must not spin
    from einlinear.cli.progress import training_bar  # torch takes a while to load
    from einlinear.training.devices.distributed import SharedError, numbers
    from einlinear.training.mirrors import open_mirror
    from einlinear.training.train import train as run_training

    keep_memory_if_possible()
    run = _run_config(flags, config)
    rank, count = numbers()
    screen = console()
    with ExitStack() as stack:
        show = stack.enter_context(training_bar(screen))
        names = mirror if rank == 0 else ()
        mirrors = [stack.enter_context(open_mirror(name, run, out)) for name in names]

        started: list[int] = []

        def announce(plan: RunPlan, step: int) -> None:
            started.append(step)
            print_facts(_plan_facts(run, plan, out, step))

        try:
            record = run_training(
                run, out, show, mirrors=mirrors, on_start=announce, threads=threads, thaw=thaw
            )
        except SharedError:
            if rank:  # the first process reports it
                raise SystemExit(0) from None
            raise
    if rank == 0:
        if not started:
            say(f"run {run.id} in {out} is already finished; give another --out to train it again")
        print(_curve_table(record))
        say(_result(record))
        print(f"{'wrote' if started else 'read'} {out / 'record.json'}")
        if record.curve[-1].routing:
            _draw_routing(record, out / "routing.svg")
    if count > 1:
        # The threads of gloo sometimes hang while the interpreter shuts down.
        sys.stdout.flush()
        os._exit(0)


def _draw_routing(record: RunRecord, path: Path) -> None:
    """Draw the load of the experts over training, if matplotlib is installed."""
    from einlinear.reports.figures.routing import draw_routing

    try:
        print(f"wrote {draw_routing(record, path)}")
    except EinlinearError as error:  # matplotlib is an extra
        print(f"no picture of the routing: {error.what}")


def _run_config(flags: RunFlags, path: Path | None) -> RunConfig:
    """The settings of a file, if there is one, changed by the flags."""
    given = {} if path is None else read_run(path)
    typed = {field.name: getattr(flags, field.name) for field in fields(RunConfig)}
    given |= {name: value for name, value in typed.items() if value is not None}
    return RunConfig.from_dict(given, "the command line" if path is None else str(path))


def _plan_facts(config: RunConfig, plan: RunPlan, out: Path, step: int) -> dict[str, str]:
    from einlinear.data.tasks.text import TextTask  # torch takes a while to load

    counts, unit = plan.counts, plan.unit
    units = config.steps * plan.units_per_step
    kind = "linear layers" if config.experts == "linear" else "feed-forward nets"
    experts = f", experts of {kind}: {config.num_experts}, {config.num_active} active"
    rows = {
        "run": config.id,
        "task": f"{config.task}, {config.data or 'the data in the package'}",
        "model": f"width {config.width}, depth {config.depth}, {config.structure}"
        + experts * bool(config.num_experts),
        "parameters": f"{counts.params:,}",
        f"FLOPs/{unit} (forward)": f"{2 * counts.macs:,}, in linear layers "
        f"{2 * counts.linear_macs:,}",
        "steps": f"{config.steps:,} of {plan.units_per_step:,} {unit}s, {units:,} in all"
        + f"; resumes at step {step:,}" * bool(step),
        "training FLOPs": f"{FLOPS_PER_MAC * units * counts.macs:.3g}, forward and backward",
        "writes to": str(out),
    }
    if isinstance(plan.task, TextTask):
        rows["text"] = kept_text(plan.task.tokens.counts)
    return rows


def _curve_table(record: RunRecord) -> str:
    head = ("step", f"{record.unit}s", "training FLOPs", "seconds", *_LOSSES)
    rows = [
        (
            f"{point.step:,}",
            f"{point.units:,}",
            f"{FLOPS_PER_MAC * point.macs:.3g}",
            f"{point.seconds:.1f}",
            *("-" if loss is None else f"{loss:.4f}" for loss in (point.loss, point.train_loss)),
        )
        for point in record.curve
    ]
    return text_table(head, rows, left=0, width=columns())


def _result(record: RunRecord) -> str:
    loss = record.final_loss
    ends = "diverged" if loss is None else f"finished with a validation loss of {loss:.4f}"
    return (
        f"{ends} after {record.steps_done:,} steps, {record.seconds:.1f} s, "
        f"{record.units_per_second:,.0f} {record.unit}s per second, "
        f"{record.peak_bytes / 1e6:.1f} MB"
    )
