"""How far best learning rates move with the width, from landscapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log, nan
from statistics import fmean

from einlinear.landscapes.cells import LandscapeCell

LEARNED = 0.95 * log(10)
"""A model has learned something if its loss is below this; guessing one of ten has log 10."""


@dataclass(frozen=True, slots=True)
class RateDrift:
    """How far the best rate moves from the narrowest to the widest model, in doublings.

    mean: over structures that learn at both widths, at the mean loss over seeds; nan if none does.
    low, high: the same for single seeds.
    num_learned: cells that learn at some rate.
    most: the largest span of best rates of a structure over all widths, and the structure.
    num_open: cells whose best rate is at an end of the grid, so that the drift may be larger.
    one_rate: mean excess loss, in percent of the loss, if all cells use the best rate of the first
        structure at the smallest width; infinite if a run diverges at it.
    best_loss: mean over cells of the loss at the best rate.
    """

    mean: float
    low: float
    high: float
    most: int
    where: str
    num_learned: int
    num_open: int
    num_cells: int
    one_rate: float
    best_loss: float


def read_cells(landscape: Mapping[str, object]) -> tuple[LandscapeCell, ...]:
    """The cells of a landscape.json."""
    cells = landscape["cells"]
    assert isinstance(cells, list), "the cells of a landscape are a list"
    return tuple(
        LandscapeCell(
            cell["parametrization"],
            cell["structure"],
            cell["width"],
            tuple(cell["rates"]),
            tuple(tuple(inf if v is None else v for v in losses) for losses in cell["losses"]),
            tuple(map(tuple, cell["accuracies"])),
        )
        for cell in cells
    )


def drifts(cells: Sequence[LandscapeCell]) -> dict[str, RateDrift]:
    """The drift of every parametrization."""
    names = dict.fromkeys(cell.parametrization for cell in cells)
    return {name: _drift([c for c in cells if c.parametrization == name]) for name in names}


def _drift(cells: Sequence[LandscapeCell]) -> RateDrift:
    structures = list(dict.fromkeys(cell.structure for cell in cells))
    by = {
        name: sorted((c for c in cells if c.structure == name), key=_width) for name in structures
    }
    seeds = range(len(cells[0].losses[0]))
    ends = [(found[0], found[-1]) for found in by.values()]
    ends = [pair for pair in ends if all(map(has_learned, pair))]
    moved = [abs(_moved([cell.best for cell in pair])) for pair in ends]
    alone = [
        fmean(abs(_moved([cell.best_by_seed[seed] for cell in pair])) for pair in ends)
        for seed in seeds
        if ends
    ] or [nan]
    spans = {
        name: _span(cell.best for cell in found if has_learned(cell)) for name, found in by.items()
    }
    where = max(spans, key=lambda name: spans[name])
    first = by[structures[0]][0]
    excess = [_excess(cell, first.best) for cell in cells]
    return RateDrift(
        fmean(moved) if moved else nan,
        min(alone),
        max(alone),
        spans[where],
        where,
        sum(map(has_learned, cells)),
        sum(cell.is_open for cell in cells),
        len(cells),
        100 * fmean(excess),
        fmean(cell.best_loss for cell in cells),
    )


def has_learned(cell: LandscapeCell) -> bool:
    """Whether the loss at the best rate is better than guessing."""
    return cell.best_loss < LEARNED


def _width(cell: LandscapeCell) -> int:
    return cell.width


def _moved(rates: Sequence[int | None]) -> int:
    first, last = rates
    return 0 if first is None or last is None else last - first


def _span(rates: Iterable[int | None]) -> int:
    known = [rate for rate in rates if rate is not None]
    return max(known) - min(known) if known else 0


def _excess(cell: LandscapeCell, rate: int | None) -> float:
    """How much higher the loss is at one rate than at the best, as a share."""
    if rate not in cell.rates:
        return inf
    return cell.loss_at(rate) / cell.best_loss - 1
