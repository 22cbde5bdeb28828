"""The command on learning rates: landscape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from einlinear.cli_words import unchecked
from einlinear.studies.landscape_runs import LandscapeConfig
from einlinear.terminal import columns, console, say, write

if TYPE_CHECKING:
    LandscapeFlags = Any
else:
    LandscapeFlags = unchecked(LandscapeConfig)


def landscape(
    flags: Annotated[LandscapeFlags, tyro.conf.arg(name="")],
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")],
    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE.npz")] = None,
    processes: int = 2,
) -> None:
    """Find the best learning rate by width and structure, naively and under muP: table, pictures.

    Trains perceptrons of four layers on images. The same command again goes on where it stopped.

    Args:
        flags: what to run.
        out: folder for landscape.jsonl, which grows run by run, .json, .svg and .png.
        data: images: train_x, test_x (uint8, NHWC), train_y, test_y; small ones unless given.
        processes: how many runs at once, each on one thread.
    """
    from einlinear.machine import machine_facts  # torch takes a while to load
    from einlinear.models.check_plot import check_matplotlib
    from einlinear.progress import progress_bar
    from einlinear.studies.landscape_sweep import landscape as run_landscape

    config = LandscapeConfig(**asdict(flags))
    check_matplotlib()  # now rather than after all runs
    with progress_bar(console(), "runs") as show:
        result = run_landscape(config, out=out, data=data, processes=processes, on_progress=show)
    print(_table(result.rows()) + "\n")
    for paragraph in result.words:
        say(paragraph)
    facts = {"machine": machine_facts()} | result.as_json()
    write(out / "landscape.json", json.dumps(facts, indent=1))
    for ending in ("svg", "png"):
        print(f"wrote {result.plot(out / f'landscape.{ending}')}")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """The table as text; names that are too long for the terminal stand above their rows."""
    from einlinear.models.groups import aligned  # torch takes a while to load

    text = aligned(rows, left=2)
    if max(map(len, text.splitlines())) <= columns():
        return text
    head, rule, *lines = aligned([row[2:] for row in rows], left=0).splitlines()
    found = [f"  {head}", f"  {rule}"]
    for before, row, line in zip(rows, rows[1:], lines, strict=False):
        found += [", ".join(row[:2])] * (before[:2] != row[:2])
        found.append(f"  {line}")
    return "\n".join(found)
