"""Whether a learning rate transfers: how far best rates move, and what one rate for all costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean
from typing import Literal

from einlinear.studies.landscape_cells import Cell

Answer = Literal["transfers", "nearly transfers", "does not transfer", "cannot be told"]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the best rate moves, in doublings; low and high are the ends over single seeds.

    where says in which structure, or at which width, it moves most.
    """

    doublings: int
    low: int
    high: int
    where: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """What it costs to use one rate everywhere: the best of the first structure, at the base width.

    Losses are what is added to the best loss of a cell; worst_share is the most that is added, as
    a share of that loss; diverged counts the cells where that rate diverges, though another would
    not.
    """

    rate: int
    mean_loss: float
    worst_loss: float
    worst_share: float
    worst: str
    diverged: int

    @property
    def word(self) -> Answer:
        """Whether one rate is enough: it costs at most 2 % of a loss, at most 5 %, or more."""
        if self.diverged or self.worst_share > 0.05:
            return "does not transfer"
        return "transfers" if self.worst_share <= 0.02 else "nearly transfers"


def find_drift(cells: Sequence[Cell], group: Callable[[Cell], str]) -> Drift | None:
    """The largest span of best rates inside a group, and the same for every seed alone.

    None if no group has two best rates.
    """
    held: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.best is not None:  # then every seed alone has a best rate, too
            held.setdefault(group(cell), []).append(cell)
    held = {name: found for name, found in held.items() if len(found) > 1}
    if not held:
        return None

    def largest(best: Callable[[Cell], int | None]) -> tuple[int, str]:
        spans = [(_span(map(best, found)), name) for name, found in held.items()]
        return max(spans, key=lambda pair: pair[0])

    doublings, where = largest(lambda cell: cell.best)
    seeds = range(len(cells[0].best_by_seed))
    alone = [largest(lambda cell, seed=seed: cell.best_by_seed[seed])[0] for seed in seeds]  # type: ignore[misc]
    return Drift(doublings, min(alone), max(alone), where)


def _span(rates: Iterable[int | None]) -> int:
    known = [rate for rate in rates if rate is not None]
    return max(known) - min(known)


def find_transfer(cells: Sequence[Cell]) -> Transfer | None:
    """What the best rate of the first cell costs in all; None if it has no best rate."""
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


def find_answer(cells: Sequence[Cell]) -> Answer:
    """Whether the best rate of the first cell transfers to the others, as far as can be told.

    A best rate at an end of the grid may lie beyond it, so what one rate costs there is known
    from below only; where every rate diverges, nothing is known of it. "does not transfer"
    still holds then, unless the rate that is transferred is unknown or an end itself; anything
    better cannot be told. Nor can it with one cell, which has nowhere to transfer a rate to.
    """
    transfer = find_transfer(cells)
    if transfer is None or cells[0].is_at_edge:
        return "cannot be told"
    is_open = len(cells) < 2 or any(cell.is_open for cell in cells)
    is_certain = not is_open or transfer.word == "does not transfer"
    return transfer.word if is_certain else "cannot be told"


def _share(extra: float, loss: float) -> float:
    """What is added to a loss, as a share of it; a loss may be 0."""
    return extra / loss if loss > 0 else inf if extra > 0 else 0.0
