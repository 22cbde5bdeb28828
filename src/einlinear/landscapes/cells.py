"""A cell of a learning-rate landscape: one structure at one width, and its best rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

from einlinear.layers.scaling import Parametrization

Edge = Literal["lowest", "highest"]


@dataclass(frozen=True, slots=True)
class LandscapeCell:
    """One structure at one width with one parametrization: its losses, by rate and seed.

    Rates are powers of two. Losses are training losses; infinite if the run diverged.
    """

    parametrization: Parametrization
    structure: str
    width: int
    rates: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    accuracies: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> tuple[float, ...]:
        """The loss at every rate, averaged over seeds; infinite if any seed diverged."""
        return tuple(map(fmean, self.losses))

    @property
    def best(self) -> int | None:
        """The rate with the lowest mean loss; None if some seed diverges at every rate."""
        return _best(self.rates, self.means)

    @property
    def best_by_seed(self) -> tuple[int | None, ...]:
        """The best rate for each seed alone."""
        return tuple(_best(self.rates, column) for column in zip(*self.losses, strict=True))

    @property
    def interval(self) -> tuple[int, int] | None:
        """The lowest and highest of the best rates for single seeds."""
        known = [rate for rate in self.best_by_seed if rate is not None]
        return (min(known), max(known)) if known else None

    @property
    def edge(self) -> Edge | None:
        """The end of the grid at which the best rate lies: a better one may lie beyond."""
        if self.best == self.rates[-1]:
            return "highest"
        return "lowest" if self.best == self.rates[0] else None

    @property
    def is_at_edge(self) -> bool:
        """Whether the best rate is at an end of the grid."""
        return self.edge is not None

    @property
    def is_open(self) -> bool:
        """Whether the best rate may lie beyond the grid: at an end, or where all rates diverge."""
        return self.best is None or self.is_at_edge

    @property
    def best_loss(self) -> float:
        """The mean loss at the best rate."""
        return min(self.means)

    @property
    def best_accuracy(self) -> float:
        """The mean test accuracy at the rate with the lowest training loss."""
        return 0.0 if self.best is None else fmean(self.accuracies[self.rates.index(self.best)])

    def loss_at(self, rate: int) -> float:
        """The mean loss at a rate of the grid."""
        return self.means[self.rates.index(rate)]


def _best(rates: Sequence[int], losses: Sequence[float]) -> int | None:
    """The rate with the lowest loss; the lower rate if losses are equal."""
    loss, rate = min(zip(losses, rates, strict=True))
    return rate if isfinite(loss) else None
