"""Whether a learning rate transfers: how far best rates move, and what one rate for all costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean
from typing import Literal

from einlinear.landscapes.cells import LandscapeCell

TransferAnswer = Literal["transfers", "nearly transfers", "does not transfer", "cannot be told"]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the best rate moves, in doublings; low and high are its range over single seeds.

    where: the structure or width at which it moves most.
    """

    doublings: int
    low: int
    high: int
    where: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """The cost of using one rate everywhere: the best of the first structure at the base width.

    Losses are excess losses over the best of a cell; worst_share is the largest, as a share of
    that best loss. diverged counts the cells in which this rate diverges and another does not.
    """

    rate: int
    mean_loss: float
    worst_loss: float
    worst_share: float
    worst: str
    diverged: int

    @property
    def word(self) -> TransferAnswer:
        """The verdict: one rate costs at most 2 % of the loss, at most 5 %, or more."""
        if self.diverged or self.worst_share > 0.05:
            return "does not transfer"
        return "transfers" if self.worst_share <= 0.02 else "nearly transfers"


def find_drift(
    cells: Sequence[LandscapeCell], group: Callable[[LandscapeCell], str]
) -> Drift | None:
    """The largest span of best rates within a group, also for each seed alone.

    None if no group has two best rates.
    """
    held: dict[str, list[LandscapeCell]] = {}
    for cell in cells:
        if cell.best is not None:  # then each seed has a best rate, too
            held.setdefault(group(cell), []).append(cell)
    held = {name: found for name, found in held.items() if len(found) > 1}
    if not held:
        return None

    def largest(best: Callable[[LandscapeCell], int | None]) -> tuple[int, str]:
        spans = [(_span(map(best, found)), name) for name, found in held.items()]
        return max(spans, key=lambda pair: pair[0])

    doublings, where = largest(lambda cell: cell.best)
    seeds = range(len(cells[0].best_by_seed))
    alone = [largest(lambda cell, seed=seed: cell.best_by_seed[seed])[0] for seed in seeds]  # type: ignore[misc]
    return Drift(doublings, min(alone), max(alone), where)


def _span(rates: Iterable[int | None]) -> int:
    known = [rate for rate in rates if rate is not None]
    return max(known) - min(known)


def find_transfer(cells: Sequence[LandscapeCell]) -> Transfer | None:
    """The cost of the first cell's best rate in all cells; None if it has no best rate."""
    rate = cells[0].best
    if rate is None:
        return None
    known = [cell for cell in cells if cell.best is not None]
    extra = {cell: cell.loss_at(rate) - cell.best_loss for cell in known}
    kept = {cell: loss for cell, loss in extra.items() if isfinite(loss)}
    worst = max(kept, key=lambda cell: _share(kept[cell], cell.best_loss))
    return Transfer(
        rate=rate,
        mean_loss=fmean(kept.values()),
        worst_loss=kept[worst],
        worst_share=_share(kept[worst], worst.best_loss),
        worst=f"{worst.structure} at width {worst.width}",
        diverged=len(extra) - len(kept),
    )


def find_answer(cells: Sequence[LandscapeCell]) -> TransferAnswer:
    """Whether the best rate of the first cell transfers to the others, if the grid can tell.

    If a best rate is at an end of the grid, the true best may lie beyond, and the cost of one rate
    is a lower bound. If every rate diverges, the cost is unknown. Then only "does not transfer" is
    certain, unless the transferred rate is unknown or at an end itself. With a single cell there is
    nothing to transfer to.
    """
    transfer = find_transfer(cells)
    if transfer is None or cells[0].is_at_edge:
        return "cannot be told"
    is_open = len(cells) < 2 or any(cell.is_open for cell in cells)
    is_certain = not is_open or transfer.word == "does not transfer"
    return transfer.word if is_certain else "cannot be told"


def _share(extra: float, loss: float) -> float:
    """An excess loss as a share of the loss, which may be 0."""
    return extra / loss if loss > 0 else inf if extra > 0 else 0.0
