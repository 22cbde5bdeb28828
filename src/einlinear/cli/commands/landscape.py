"""The command landscape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from einlinear.cli.arguments import flags_class, in_flags
from einlinear.cli.terminal import columns, console, say, write
from einlinear.errors import EinlinearError
from einlinear.landscapes.config import LandscapeConfig
from einlinear.show.tables import text_table

if TYPE_CHECKING:
    LandscapeFlags = Any
else:
    LandscapeFlags = flags_class(LandscapeConfig)

_FLAGS_OF_RUNS = {"structure": "--structures", "width": "--widths", "batch_size": "--batch"}
"""The flags that decide settings of single runs."""


def landscape(
    flags: Annotated[LandscapeFlags, tyro.conf.arg(name="")],
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE.npz")] = None,
    processes: int = 2,
) -> None:
    """Find the best learning rate by width and structure, without and under µP.

    Trains multilayer perceptrons on images. Interrupt it at any time and rerun it to resume.

    Args:
        flags: Settings of the landscape.
        out: Folder for the runs, landscape.json, landscape.svg and landscape.png.
        data: Images to train on, with train_x, test_x (uint8, NHWC), train_y and test_y; a small
            set of the package by default.
        processes: Number of runs at once, each on one thread.
    """
    config = LandscapeConfig(**asdict(flags))
    try:
        run_landscape(config, out, data, processes)
    except EinlinearError as error:
        raise in_flags(error, _FLAGS_OF_RUNS) from error


def run_landscape(config: LandscapeConfig, out: Path, data: Path | None, processes: int) -> None:
    """Train a landscape with its progress on the screen; print and write its results."""
    from einlinear.cli.progress import progress_bar
    from einlinear.landscapes.landscape import landscape as train_landscape
    from einlinear.layers.machine import machine_facts  # torch takes a while to load
    from einlinear.show.plots import check_matplotlib

    check_matplotlib()  # fail now rather than after all runs
    with progress_bar(console(), "runs") as show:
        result = train_landscape(config, out=out, data=data, processes=processes, on_progress=show)
    print(_table(result.rows()) + "\n")
    for paragraph in result.words:
        say(paragraph)
    facts = {"machine": machine_facts()} | result.as_json()
    write(out / "landscape.json", json.dumps(facts, indent=1))
    for ending in ("svg", "png"):
        print(f"wrote {result.plot(out / f'landscape.{ending}')}")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows as text; names that make the table too wide become titles above their rows."""
    head, *body = rows
    text = text_table(head, body, left=2)
    if max(map(len, text.splitlines())) <= columns():
        return text
    titled: list[Sequence[str] | str] = []
    for before, row in pairwise(rows):
        titled += [", ".join(row[:2])] * (before[:2] != row[:2])
        titled.append((f"  {row[2]}", *row[3:]))
    return text_table((f"  {head[2]}", *head[3:]), titled, left=0)
