"""Where runs ended: the final loss and the time of each structure at each width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from einlinear.studies.reports.analyse import Analysis
from einlinear.studies.reports.shown import ShownRun


@dataclass(frozen=True, slots=True)
class Final:
    """The seeds of one structure at one width, in the setting of the lowest mean loss.

    loss, seconds: means over the seeds; low and high are the least and the highest loss.
    num_settings: how many settings that structure has at that width: other depths, rates, steps.
    """

    structure: str
    width: int
    loss: float
    low: float
    high: float
    seconds: float | None
    flops: float | None
    params: int | None
    num_runs: int
    num_settings: int


def find_finals(analysis: Analysis) -> tuple[Final, ...]:
    """One for each structure and width with a run that has finished, widths from narrow to wide."""
    found: dict[tuple[str, int], dict[str, list[ShownRun]]] = {}
    for run in analysis.runs:
        if run.loss is not None and run.width is not None:
            found.setdefault((run.structure, run.width), {}).setdefault(run.group, []).append(run)
    order = {name: k for k, name in enumerate(analysis.structures)}
    keys = sorted(found, key=lambda key: (order[key[0]], key[1]))
    return tuple(_final(structure, width, found[structure, width]) for structure, width in keys)


def _final(structure: str, width: int, settings: dict[str, list[ShownRun]]) -> Final:
    runs = min(settings.values(), key=lambda some: fmean(_losses(some)))
    losses = _losses(runs)
    seconds = [run.seconds for run in runs if run.seconds is not None]
    flops = [run.spent("flops") for run in runs]
    return Final(
        structure=structure,
        width=width,
        loss=fmean(losses),
        low=min(losses),
        high=max(losses),
        seconds=fmean(seconds) if seconds else None,
        flops=fmean(flops) or None,
        params=runs[0].params,
        num_runs=len(runs),
        num_settings=len(settings),
    )


def _losses(runs: Sequence[ShownRun]) -> list[float]:
    return [run.loss for run in runs if run.loss is not None]
