"""How runs ended: whether a frontier is made of ends of runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from einlinear.studies.observations import Floats, Observations

Curve = tuple[str, Floats, Floats]

_NEAR_THE_END = 0.9  # runs of a size that spent at least this share of the longest are its ends


@dataclass(frozen=True, slots=True)
class Ends:
    """How runs of a structure ended.

    sizes: sizes of models on the frontier but the one that went furthest.
    early: those that ended while they were the best for their compute: nothing had overtaken them.
    """

    structure: str
    early: int
    sizes: int

    @property
    def are_early(self) -> bool:
        """Whether that is half of them or more, so that the frontier is mostly ends of runs."""
        return self.sizes > 0 and 2 * self.early >= self.sizes


def find_ends(data: Observations, front: Observations, structure: str) -> Ends:
    """How many sizes of a structure ended before a larger one had overtaken them."""
    if structure not in front.structures:
        return Ends(structure, 0, 0)
    data, front = data.of(structure), front.of(structure)
    furthest = data.size[int(np.argmax(data.compute))]
    on_front = set(zip(front.run.tolist(), front.compute.tolist(), strict=True))
    sizes = {size for size in front.size.tolist() if size != furthest}
    curves = _curves(data)
    last: dict[str, float] = {}
    for size, compute, _ in curves.values():
        last[size] = max(last.get(size, 0.0), compute[-1])
    early = set()
    for run, (size, compute, loss) in curves.items():
        is_end = size in sizes and compute[-1] >= _NEAR_THE_END * last[size]
        others = [curve for curve in curves.values() if curve[0] != size]
        if is_end and (run, compute[-1]) in on_front:
            if not any(_overtakes(curve, compute[-1], loss[-1]) for curve in others):
                early.add(size)
    return Ends(structure, len(early), len(sizes))


def _curves(data: Observations) -> dict[str, Curve]:
    """Of every run its size, and its compute and losses in order."""
    order = np.argsort(data.compute, kind="stable")
    places: dict[str, list[int]] = {}
    for place in order.tolist():
        places.setdefault(data.run[place], []).append(place)
    return {run: (data.size[at[0]], data.compute[at], data.loss[at]) for run, at in places.items()}


def _overtakes(curve: Curve, compute: float, loss: float) -> bool:
    """Whether a run is at a loss or below where it has spent this much, between its points."""
    _, spent, losses = curve
    if not spent[0] <= compute <= spent[-1]:
        return False
    return bool(np.interp(np.log(compute), np.log(spent), np.log(losses)) <= np.log(loss))
