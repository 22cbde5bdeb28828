"""seen_multiplier: the multiplier that the runs themselves show, without any law."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from einlinear.laws.observations import Floats
from einlinear.searches.state import SearchState
from einlinear.show.numbers import FLOPS_PER_MAC


class Seen(NamedTuple):
    """A multiplier, and the FLOPs of the candidate at which it was seen."""

    multiplier: float
    flops: float


def seen_multiplier(state: SearchState, number: int) -> Seen | None:
    """The FLOPs of dense over those of a candidate, for the lowest loss that both reached.

    None if they have no loss in common.
    """
    own, dense = _best_losses(state, number), _best_losses(state, 0)
    loss = max(own[1][-1], dense[1][-1])
    if loss > min(own[1][0], dense[1][0]):
        return None
    flops = _flops_for(own, loss)
    return Seen(_flops_for(dense, loss) / flops, flops)


def _best_losses(state: SearchState, number: int) -> tuple[Floats, Floats]:
    """Growing FLOPs, and the lowest mean loss over seeds up to each."""
    points: dict[float, list[float]] = {}
    for chain, (_, record) in state.tally.longest.items():
        for point in record.curve if chain[0] == number else ():
            if point.step >= state.spec.rungs.steps[0] and point.loss is not None:
                points.setdefault(float(FLOPS_PER_MAC * point.macs), []).append(point.loss)
    flops = np.array(sorted(points))
    losses = np.minimum.accumulate([np.mean(points[at]) for at in sorted(points)])
    is_new = np.append(True, losses[1:] < losses[:-1])
    return flops[is_new], losses[is_new]


def _flops_for(curve: tuple[Floats, Floats], loss: float) -> float:
    """The FLOPs at which a curve of falling losses reaches a loss."""
    flops, losses = curve
    return float(np.exp(np.interp(-loss, -losses, np.log(flops))))
