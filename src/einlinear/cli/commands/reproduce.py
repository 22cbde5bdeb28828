"""The command reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from einlinear.cli.commands.sweep import run_study, slurm_settings
from einlinear.cli.terminal import columns, say
from einlinear.errors import EinlinearError
from einlinear.reproductions.catalogue import (
    REPRODUCTIONS,
    SCALES,
    Reproduction,
    Scale,
    find_reproduction,
)
from einlinear.reproductions.costs import stored_costs
from einlinear.reproductions.shipped import (
    checked_data,
    parse_settings,
    refuse_data,
    shipped_landscape,
    shipped_study,
)
from einlinear.show.numbers import NONE
from einlinear.show.tables import text_table
from einlinear.sweeps.placing import ExecutorName, Placing


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None,
    /,
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    scale: Scale = "cpu",
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    validation: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    settings: tuple[str, ...] = (),
    executor: ExecutorName = "local",
    processes: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    slurm: tuple[str, ...] = (),
    devices: int | None = None,
    dry_run: bool = False,
) -> None:
    """Reproduce a figure of the paper: trains its study and builds the report.

    Without a name, lists all figures with their runs and FLOPs. The studies are files of the
    package: small models for a CPU, or the models of the paper. Interrupt it at any time and rerun
    it to resume.

    Args:
        name: Name of the figure.
        out: Directory of the runs; the report goes to DIR/report.
        scale: cpu trains small models on data of the package, paper those of the paper.
        data: File or folder to train on; by default, the data of the package.
        validation: Text file for validation; by default, a part of the data.
        settings: Settings that replace those of the study, such as steps=100 seed=[0,1].
        executor: Train in local processes, in this process (inline), on a Ray cluster, or on Slurm.
        processes: Number of runs at once; by default, as many as there are cores, or room on Ray.
        threads: Threads of each run; by default, as many as its steps can use and cores allow.
        address: Address of a Ray cluster; by default, one is started on this machine.
        slurm: Settings of Slurm jobs, such as partition=cpu time=120 mem=8G.
        devices: GPUs of each run, all on one machine; without GPUs, its processes; by default, 1.
        dry_run: Print the plan and stop; nothing is written. At the paper's scale, without times.
    """
    if name is None:
        _print_list()
        return
    found, changes = find_reproduction(name), parse_settings(settings)
    placing = Placing(executor, processes, threads, address, slurm_settings(slurm), devices)
    if out is None:
        raise EinlinearError(
            what="--out is missing",
            rule="einlinear reproduce NAME writes its runs and its page to a directory",
            fix=f"einlinear reproduce {name} --out {name}",
        )
    if found.kind == "atlas":
        _draw(found, out, data or validation, changes, dry_run=dry_run)
        return
    if found.kind == "landscape":
        refuse_data(found, validation, "validation")
        _train_landscape(scale, out, data, changes, placing, dry_run=dry_run)
        return
    study = shipped_study(found, scale, data=data, validation=validation, settings=changes)
    result = run_study(study, out, placing, dry_run=dry_run, is_timed=scale == "cpu")
    if result is None:
        return
    if result.records:
        _report(found, out)
    if result.failures:
        raise SystemExit(1)


def _report(found: Reproduction, out: Path) -> None:
    from einlinear.cli.commands.report import make_report  # numpy takes a while to load
    from einlinear.reports.analyse import ReportSettings

    make_report(out, None, ReportSettings(reference=found.reference))


def _draw(
    found: Reproduction, out: Path, data: str | None, changes: Mapping[str, Any], *, dry_run: bool
) -> None:
    """Draw the atlas: there is nothing to train."""
    from einlinear.cli.commands.atlas import atlas

    refuse_data(found, data)
    if changes:
        raise EinlinearError(
            what=f"--settings are given, and {found.name} trains nothing",
            rule="settings are those of runs",
            fix="leave --settings out; einlinear atlas has options of its own",
        )
    if dry_run:
        print(f"trains nothing\nwrites {out / 'atlas.html'}")
    else:
        atlas(out=out)


def _train_landscape(
    scale: Scale,
    out: Path,
    data: str | None,
    changes: Mapping[str, Any],
    placing: Placing,
    *,
    dry_run: bool,
) -> None:
    """Train all runs as a sweep, wherever that is; the landscape then finds them finished."""
    from einlinear.cli.commands.landscape import run_landscape
    from einlinear.landscapes.config import make_study
    from einlinear.show.plots import check_matplotlib

    config = shipped_landscape(scale, changes)
    images = None if data is None else Path(checked_data(data))
    check_matplotlib()  # fail now rather than after all runs
    placing = replace(placing, threads=placing.threads or 1)  # as einlinear landscape does
    result = run_study(
        make_study(config, images), out, placing, dry_run=dry_run, is_timed=scale == "cpu"
    )
    if result is None:
        return
    if result.failures:
        raise SystemExit(1)
    run_landscape(config, out, images, 1)


def _print_list() -> None:
    costs = stored_costs()
    rows: list[list[str] | str] = []
    for name, found in REPRODUCTIONS.items():
        cells = [name, found.figure]
        for scale in SCALES:
            cost = costs.get((name, scale))
            cells += ["0", NONE] if cost is None else [str(cost.runs), f"{cost.flops:.1e}"]
        rows += [cells, f"  {found.about}"]
    heads = [f"{scale} {noun}" for scale in SCALES for noun in ("runs", "FLOPs")]
    print(text_table(("name", "figure", *heads), rows, left=2, width=columns()) + "\n")
    say("Figures of [P24], arXiv 2410.02117, with the training FLOPs of all runs at two scales.")
    print("next: einlinear reproduce NAME --out DIR --dry-run")
