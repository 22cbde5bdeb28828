"""The command on learning rates: landscape."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from einlinear.cli_words import unchecked
from einlinear.studies.landscape_runs import LandscapeConfig
from einlinear.terminal import console, write

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
    print(result)
    facts = {"machine": machine_facts()} | result.as_json()
    write(out / "landscape.json", json.dumps(facts, indent=1))
    for ending in ("svg", "png"):
        print(f"wrote {result.plot(out / f'landscape.{ending}')}")
