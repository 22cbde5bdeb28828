"""How runs ended: too early to trust a frontier, and with which final loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from einlinear.laws.observations import Floats, Observations
from einlinear.reports.shown import ShownRun

Curve = tuple[str, Floats, Floats]

_NEAR_THE_END = 0.9  # runs that spent this share of their size's longest are its ends


@dataclass(frozen=True, slots=True)
class Ends:
    """How the runs of a structure ended.

    sizes: model sizes on the frontier, except the one that went furthest.
    early: how many of them ended while still the best for their compute, before being overtaken.
    """

    structure: str
    early: int
    sizes: int

    @property
    def are_early(self) -> bool:
        """Whether at least half did, so that the frontier consists mostly of ends of runs."""
        return self.sizes > 0 and 2 * self.early >= self.sizes


def find_ends(data: Observations, front: Observations, structure: str) -> Ends:
    """Count the sizes of a structure that ended before another size overtook them."""
    if structure not in front.structures:
        return Ends(structure, 0, 0)
    data, front = data.of(structure), front.of(structure)
    furthest = data.size[int(np.argmax(data.compute))]
    on_front = set(zip(front.run.tolist(), front.compute.tolist(), strict=True))
    sizes = {size for size in front.size.tolist() if size != furthest}
    curves = _curves(data)
    early = set()
    for run, (size, compute, loss) in curves.items():
        longest = max(curve[1][-1] for curve in curves.values() if curve[0] == size)
        is_end = size in sizes and compute[-1] >= _NEAR_THE_END * longest
        others = [curve for curve in curves.values() if curve[0] != size]
        if is_end and (run, compute[-1]) in on_front:
            if not any(_overtakes(curve, compute[-1], loss[-1]) for curve in others):
                early.add(size)
    return Ends(structure, len(early), len(sizes))


def _curves(data: Observations) -> dict[str, Curve]:
    """The size, sorted compute and losses of every run."""
    order = np.argsort(data.compute, kind="stable")
    places: dict[str, list[int]] = {}
    for place in order.tolist():
        places.setdefault(data.run[place], []).append(place)
    return {run: (data.size[at[0]], data.compute[at], data.loss[at]) for run, at in places.items()}


def _overtakes(curve: Curve, compute: float, loss: float) -> bool:
    """Whether a run, interpolated between its points, is at or below a loss at a compute."""
    _, spent, losses = curve
    if not spent[0] <= compute <= spent[-1]:
        return False
    return bool(np.interp(np.log(compute), np.log(spent), np.log(losses)) <= np.log(loss))


@dataclass(frozen=True, slots=True)
class Final:
    """The seeds of one structure at one width, in the setting with the lowest mean loss.

    loss, seconds, flops: means over the seeds; low and high are the extremes of the loss.
    num_settings: how many settings the structure has at this width: depths, learning rates, steps.
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


def find_finals(runs: Sequence[ShownRun], structures: Sequence[str]) -> tuple[Final, ...]:
    """One for each structure and width with a finished run, in this order, narrow to wide."""
    found: dict[tuple[str, int], dict[str, list[ShownRun]]] = {}
    for run in runs:
        if run.loss is not None and run.width is not None:
            found.setdefault((run.structure, run.width), {}).setdefault(run.group, []).append(run)
    order = {name: k for k, name in enumerate(structures)}
    keys = sorted(found, key=lambda key: (order[key[0]], key[1]))
    return tuple(_final(structure, width, found[structure, width]) for structure, width in keys)


def _final(structure: str, width: int, settings: dict[str, list[ShownRun]]) -> Final:
    runs = min(settings.values(), key=lambda some: fmean(_losses(some)))
    losses = _losses(runs)
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Final(
        structure=structure,
        width=width,
        loss=fmean(losses),
        low=min(losses),
        high=max(losses),
        seconds=fmean(seconds) if seconds else None,
        flops=fmean(run.total("flops") for run in runs) or None,
        params=runs[0].params,
        num_runs=len(runs),
        num_settings=len(settings),
    )


def _losses(runs: Sequence[ShownRun]) -> list[float]:
    return [run.loss for run in runs if run.loss is not None]
