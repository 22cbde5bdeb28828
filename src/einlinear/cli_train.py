"""The commands on training: prepare, train, sample."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro
from docstring_parser import parse
from rich.table import Table

from einlinear.cli_arguments import metavar
from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.config_file import read_run
from einlinear.studies.numbers import FLOPS_PER_MAC
from einlinear.terminal import console, facts_table, fitted, say

if TYPE_CHECKING:
    from einlinear.studies.plan_run import RunPlan
    from einlinear.studies.record import RunRecord
    from einlinear.studies.token_info import Counts

    RunFlags = Any
else:

    def _flags() -> list[tuple[str, object, None]]:
        """Every field of a RunConfig as a flag; None is one that was not given."""
        texts = {entry.arg_name: entry.description for entry in parse(RunConfig.__doc__).params}
        hints = get_type_hints(RunConfig)
        found = []
        for field in fields(RunConfig):
            default = "by task and preset" if field.default is None else field.default
            default = "none" if field.name in ("data", "validation") else default
            words = " ".join(texts[field.name].split())
            hint = hints[field.name]
            shown = tyro.conf.arg(
                help=words, help_behavior_hint=f"(default: {default})", metavar=metavar(hint)
            )
            words_only = tyro.conf.FlagConversionOff  # --compile True
            found.append((field.name, Annotated[hint | None, shown, words_only], None))
        return found

    RunFlags = make_dataclass("RunFlags", _flags(), kw_only=True)


_LOSSES = ("validation loss", "training loss")
_TEXTS = tyro.conf.arg(metavar="TEXT [TEXT ...]", help_behavior_hint="(required)")


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, _TEXTS],
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    validation: tuple[str, ...] = (),
    vocabulary: Literal["ascii", "gpt2"] = "ascii",
    rule: Literal["drop", "fold"] = "drop",
    validation_share: float | None = None,
    processes: int | None = None,
) -> None:
    """Make tokens of texts once, for training on texts of any size.

    The same command again goes on where it stopped.

    Args:
        sources: text files (.txt, .jsonl, either with .gz), folders of them, or hub:owner/name.
        out: folder for the tokens, which einlinear train takes as --data.
        validation: texts for validation; some of the documents unless given.
        vocabulary: 96 symbols, or the byte pairs of GPT-2.
        rule: what happens to a document with a character outside of ascii: it is dropped, or the
            character is folded to one inside.
        validation_share: share of the documents for validation.
        processes: how many at once; one for each core unless given.
    """
    from einlinear.progress import progress_bar
    from einlinear.studies.prepare import prepare as run_prepare

    given: Any = {} if validation_share is None else {"validation_share": validation_share}
    with progress_bar(console(), "MB") as show:
        info = run_prepare(
            sources,
            out,
            validation=validation or None,
            vocabulary=vocabulary,
            rule=rule,
            processes=processes,
            on_progress=show,
            **given,
        )
    for name, stream in (("training", info.train), ("validation", info.validation)):
        print(f"{_counted(stream.tokens, 'token')} for {name}")
    print(_kept(info.counts))
    print(f"wrote {out}")


def _kept(counts: Counts) -> str:
    """What became of the documents of a text."""
    return (
        f"{_counted(counts.documents, 'document')}, {counts.documents_dropped:,} dropped; "
        f"{_counted(counts.characters_dropped, 'character')} dropped"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def train(
    flags: Annotated[RunFlags, tyro.conf.arg(name="")],
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml")] = None,
    mirror: tuple[Literal["tensorboard", "wandb"], ...] = (),
    threads: int | None = None,
) -> None:
    """Train a model: prints what the run will be, then its curve.

    What is not given follows from task and preset. Ctrl-C saves a checkpoint; the same command
    again goes on where it stopped.
    On many devices: torchrun --nproc-per-node N -m einlinear train ...

    Args:
        flags: of the run.
        out: directory of the run.
        config: a file of settings, TOML or JSON; flags override it.
        mirror: show metrics in TensorBoard or Weights & Biases, too.
        threads: of this process; by the size of a step unless given.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: no spinning
    from einlinear.progress import training_bar  # torch takes a while to load
    from einlinear.studies.distributed import SharedError, numbers
    from einlinear.studies.mirrors import open_mirror
    from einlinear.studies.train import train as run_training

    run = _run_config(flags, config)
    rank, count = numbers()
    screen = console()
    with ExitStack() as stack:
        show = stack.enter_context(training_bar(screen))
        names = mirror if rank == 0 else ()
        mirrors = [stack.enter_context(open_mirror(name, run, out)) for name in names]

        def announce(plan: RunPlan, step: int) -> None:
            screen.print(_plan_table(run, plan, out, step))

        try:
            record = run_training(
                run, out, show, mirrors=mirrors, on_start=announce, threads=threads
            )
        except SharedError:
            if rank:  # the first process says it
                raise SystemExit(0) from None
            raise
    if rank == 0:
        screen.print(fitted(_curve_table(record)))
        say(_result(record))
        print(f"wrote {out / 'record.json'}")
        if record.curve[-1].routing:
            _draw_routing(record, out / "routing.svg")
    if count > 1:
        # The threads of gloo now and then hang while the interpreter takes them down.
        sys.stdout.flush()
        os._exit(0)


def _draw_routing(record: RunRecord, path: Path) -> None:
    """The load of the experts over training, where pictures can be drawn."""
    from einlinear.studies.routing_plot import draw_routing

    try:
        print(f"wrote {draw_routing(record, path)}")
    except EinlinearError as error:  # pictures are an extra
        print(f"no picture of the routing: {error.what}")


def _run_config(flags: RunFlags, path: Path | None) -> RunConfig:
    """What a file says, if there is one, changed by the flags that were given."""
    given = {} if path is None else read_run(path)
    typed = {field.name: getattr(flags, field.name) for field in fields(RunConfig)}
    given |= {name: value for name, value in typed.items() if value is not None}
    return RunConfig.from_dict(given, "the command line" if path is None else str(path))


def sample(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    /,
    *,
    prompt: str = "",
    tokens: int = 400,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> None:
    """Write text with the model of a run, token by token.

    Args:
        run: directory of a run on text, finished or not.
        prompt: how the text begins.
        tokens: how many are written.
        temperature: 1 is the model as it is, less is likelier, 0 the likeliest.
        top_k: only the likeliest so many tokens are drawn.
        seed: the same seed writes the same text.
    """
    import torch  # takes a while to load

    from einlinear.models.generate import stream
    from einlinear.studies.load import load_writer

    writer = load_writer(run)
    options: Any = {"temperature": temperature, "top_k": top_k}
    generator = torch.Generator().manual_seed(seed)
    start = writer.encode(prompt)
    sys.stdout.write(prompt)
    pending: list[int] = []
    for token in stream(writer.model, start, tokens, generator=generator, **options):
        pending += token.tolist()
        text = writer.vocabulary.decode(pending)
        if not text.endswith("\ufffd") or len(pending) > 3:  # a character may be several tokens
            sys.stdout.write(text)
            sys.stdout.flush()
            pending = []
    sys.stdout.write(writer.vocabulary.decode(pending) + "\n")


def _plan_table(config: RunConfig, plan: RunPlan, out: Path, step: int) -> Table:
    from einlinear.studies.tasks.text import TextTask  # torch takes a while to load

    counts, unit = plan.counts, plan.unit
    units = config.steps * plan.units_per_step
    kind = "linear layers" if config.experts == "linear" else "feed-forward nets"
    experts = f", experts of {kind}: {config.num_experts}, {config.num_active} active"
    rows = {
        "run": config.id,
        "task": f"{config.task}, {config.data or 'the data of the package'}",
        "model": f"width {config.width}, depth {config.depth}, {config.structure}"
        + experts * bool(config.num_experts),
        "parameters": f"{counts.params:,}",
        f"FLOPs/{unit} (forward)": f"{2 * counts.macs:,}, in linear layers "
        f"{2 * counts.linear_macs:,}",
        "steps": f"{config.steps:,} of {plan.units_per_step:,} {unit}s, {units:,} in all"
        + f"; going on from step {step:,}" * bool(step),
        "training FLOPs": f"{FLOPS_PER_MAC * units * counts.macs:.3g}, forward and backward",
        "writes to": str(out),
    }
    if isinstance(plan.task, TextTask):
        rows["text"] = _kept(plan.task.tokens.counts)
    return facts_table(rows)


def _curve_table(record: RunRecord) -> Table:
    table = Table()
    for name in ("step", f"{record.unit}s", "training FLOPs", "seconds", *_LOSSES):
        table.add_column(name, justify="right")
    for point in record.curve:
        table.add_row(
            f"{point.step:,}",
            f"{point.units:,}",
            f"{FLOPS_PER_MAC * point.macs:.3g}",
            f"{point.seconds:.1f}",
            *("-" if loss is None else f"{loss:.4f}" for loss in (point.loss, point.train_loss)),
        )
    return table


def _result(record: RunRecord) -> str:
    loss = record.final_loss
    ends = "diverged" if loss is None else f"finished with a validation loss of {loss:.4f}"
    return (
        f"{ends} after {record.steps_done:,} steps, {record.seconds:.1f} s, "
        f"{record.units_per_second:,.0f} {record.unit}s per second, "
        f"{record.peak_bytes / 1e6:.1f} MB"
    )
