"""A learning-rate landscape: where each rate is best, how far the best moves, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import get_args

from einlinear.errors import EinlinearError
from einlinear.landscapes.cells import Edge, LandscapeCell
from einlinear.landscapes.config import LandscapeConfig
from einlinear.landscapes.plot import LandscapePanel, Line, draw_landscape
from einlinear.landscapes.transfer import (
    Drift,
    Transfer,
    TransferAnswer,
    find_answer,
    find_drift,
    find_transfer,
)
from einlinear.layers.scaling import Parametrization
from einlinear.runs.record import RunRecord
from einlinear.show.symbols import printable
from einlinear.show.tables import text_table
from einlinear.sweeps.study import Study

_TITLES = {"naive": "naive", "mup": "µP", "unit": "unit"}
_WITHOUT = {"naive": "without", "unit": "with unit weights"}
_OPTIMIZERS = {"adamw": "Adam", "muon": "Muon"}
_DIVERGED = 1.1  # times the loss at the start


@dataclass(frozen=True, slots=True)
class Landscape:
    """The result of `landscape`: a cell for each parametrization, structure and width; print it."""

    config: LandscapeConfig
    cells: tuple[LandscapeCell, ...]
    start_loss: float
    data: str

    def cells_of(self, parametrization: Parametrization) -> tuple[LandscapeCell, ...]:
        """The cells of one parametrization."""
        return tuple(cell for cell in self.cells if cell.parametrization == parametrization)

    def drift_over_widths(self, parametrization: Parametrization) -> Drift | None:
        """How far the best rate of a structure moves with the width, at most.

        None if no structure has a best rate at two widths.
        """
        return find_drift(self.cells_of(parametrization), lambda cell: cell.structure)

    def drift_over_structures(self, parametrization: Parametrization) -> Drift | None:
        """How far apart the best rates of structures are at one width, at most.

        None if there is no width at which two structures have a best rate.
        """
        return find_drift(self.cells_of(parametrization), lambda cell: f"width {cell.width}")

    def transfer(self, parametrization: Parametrization) -> Transfer | None:
        """The cost of one rate for all cells; None if the first cell has no best rate."""
        return find_transfer(self.cells_of(parametrization))

    def answer(self, parametrization: Parametrization) -> TransferAnswer:
        """Whether the rate transfers, if the grid of rates can tell."""
        return find_answer(self.cells_of(parametrization))

    @property
    def verdict(self) -> tuple[str, ...]:
        """The verdict in words: a line for each parametrization, and for µP against each other."""
        own = (_verdict(self, name) for name in self.config.parametrizations)
        return (*own, *(_compared(self, name) for name in self._others))

    @property
    def _others(self) -> tuple[Parametrization, ...]:
        """What µP is compared with; nothing if it was not run."""
        names = self.config.parametrizations
        return tuple(name for name in names if name != "mup") if "mup" in names else ()

    @property
    def caveat(self) -> str:
        """The cells in which µP has the higher loss, each at its best rate; "" if none."""
        found = list(filter(None, (_caveat(self, name) for name in self._others)))
        end = "Compare where the best rates lie, not the rows."
        return " ".join([*found, end]) if found else ""

    @property
    def words(self) -> tuple[str, ...]:
        """The verdict and the caveat, if there is one, as paragraphs."""
        return (*self.verdict, *[self.caveat] * bool(self.caveat))

    def __str__(self) -> str:
        head, *rows = self.rows()
        return "\n".join([text_table(head, rows, left=2), "", *map(printable, self.words)])

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text: a head, then a row for each cell."""
        head = ("", "structure", "width", "best rate", "over seeds", "loss", "test accuracy", "")
        return [head, *(_row(cell) for cell in self.cells)]

    def as_json(self) -> dict[str, object]:
        """The settings, all cells and derived values, as plain JSON values."""
        drifts: dict[str, object] = {
            name: {
                "over_widths": _plain(self.drift_over_widths(name)),
                "over_structures": _plain(self.drift_over_structures(name)),
                "transfer": _plain(self.transfer(name)),
                "answer": self.answer(name),
            }
            for name in self.config.parametrizations
        }
        return {
            "config": asdict(self.config),
            "data": self.data,
            "start_loss": self.start_loss,
            "verdict": list(self.verdict),
            "caveat": self.caveat,
            **drifts,
            "cells": [_cell_json(cell) for cell in self.cells],
        }

    def plot(self, path: str | Path) -> Path:
        """Plot loss against rate, with a column for every structure; .svg, .png or .pdf."""
        panels = []
        for name in self.config.parametrizations:
            cells = self.cells_of(name)
            for structure in self.config.structures:
                lines = tuple(_line(cell) for cell in cells if cell.structure == structure)
                panels.append(LandscapePanel(_TITLES[name], structure, lines, cells[0].best))
        c = self.config
        seeds = f"mean and range of {c.seeds} seeds" if c.seeds > 1 else "one seed"
        small = f"{self.data}, {c.steps} steps of {c.batch}, {_OPTIMIZERS[c.optimizer]}, "
        small += f"{c.activation}, {seeds}. "
        if "mup" in c.parametrizations:
            small += f"Under µP the rate is that of a dense model of width {min(c.widths)}, "
            small += "from which those of all factors follow. "
        if "unit" in c.parametrizations:
            small += "Unit is naive with weights of unit variance in the inner layers. "
        ceiling = 1.06 * self.start_loss
        if any(ceiling < cell.best_loss < inf for cell in self.cells):
            small += "A triangle is a best rate whose loss is above the axis."
        small = small.rstrip()
        open_: dict[str, list[str]] = {}
        for name in c.parametrizations:
            if self.answer(name) == "cannot be told":
                open_.setdefault(_why(self.cells_of(name)), []).append(_TITLES[name])
        for why, names in open_.items():
            small += f"\nWhether rates transfer cannot be told ({' and '.join(names)}): {why}."
        small += f"\n{self.caveat}" if self.caveat else ""
        titles = "Which learning rate is best, by width and structure", small
        return draw_landscape(panels, ceiling=ceiling, titles=titles, path=Path(path))


def make_landscape(
    config: LandscapeConfig, study: Study, records: Iterable[RunRecord], data: str
) -> Landscape:
    """The landscape of a finished study; `data` is the name of its images."""
    known = {record.id: record for record in records}
    missing = [cell.config for cell in study.cells if cell.config.id not in known]
    if missing:
        raise EinlinearError(
            what=f"{len(missing)} of {len(study.cells)} runs are missing, the first is "
            f"{missing[0].id}",
            rule="a landscape needs the records of all its runs",
            fix="run the same command again to train the missing runs",
        )
    found = (known[cell.config.id] for cell in study.cells)
    cells = []
    for parametrization in config.parametrizations:
        rates = tuple(config.exponents(parametrization))
        for structure, width in product(config.structures, sorted(config.widths)):
            runs = [[next(found) for _ in range(config.seeds)] for _ in rates]
            losses = tuple(tuple(map(_loss, seeds)) for seeds in runs)
            accuracies = tuple(tuple(run.accuracy or 0.0 for run in seeds) for seeds in runs)
            cells.append(
                LandscapeCell(parametrization, structure, width, rates, losses, accuracies)
            )
    # Outputs of a model with unit weights are large, and so is its loss at the start.
    first = min(config.parametrizations, key=["mup", "naive", "unit"].index)
    runs_of_first = [c.config.id for c in study.cells if c.config.parametrization == first]
    start_loss = max(_start_loss(known[run]) for run in runs_of_first)
    return Landscape(config, tuple(cells), start_loss, data)


def _start_loss(record: RunRecord) -> float:
    """The test loss before the first step."""
    return inf if record.curve[0].loss is None else record.curve[0].loss


def _loss(record: RunRecord) -> float:
    """The training loss at the end; infinite if the run diverged, or ended far above its start."""
    loss = record.train_loss
    if record.status == "diverged" or loss is None or loss > _DIVERGED * _start_loss(record):
        return inf
    return loss


def _plain(value: Drift | Transfer | None) -> dict[str, object] | None:
    return None if value is None else asdict(value)


def _verdict(result: Landscape, name: Parametrization) -> str:
    cells, title, transfer = result.cells_of(name), _TITLES[name], result.transfer(name)
    if transfer is None or result.answer(name) == "cannot be told":
        parts = [f"{title}: cannot be told; {_advice(result, name)}."]
    else:
        text = (
            f"{title}: the rate {transfer.word}. One rate for all, 2^{transfer.rate}, costs "
            f"{transfer.mean_loss:.3f} of loss on average, {transfer.worst_loss:.3f} or "
            f"{transfer.worst_share:.1%} at worst ({transfer.worst})"
        )
        text += f", and diverges in {_cells(transfer.diverged)}" * bool(transfer.diverged)
        parts = [f"{text}.", _drifts(result, name)]
    lost = _num_lost(cells)
    parts += [_ends(cells), f"In {_cells(lost)} every rate diverges." * bool(lost)]
    return " ".join(filter(None, parts))


def _drifts(result: Landscape, name: Parametrization) -> str:
    """How far the best rate moves, as far as known."""
    widths, structures = result.drift_over_widths(name), result.drift_over_structures(name)
    parts = []
    if widths:
        parts.append(f"{_seeds(widths)} over widths ({widths.where})")
    if structures:
        parts.append(f"{_seeds(structures)} across structures ({structures.where})")
    if not parts:
        return ""
    bound = "at least" if any(cell.is_open for cell in result.cells_of(name)) else "at most"
    return f"The best rate moves by {bound} {', by '.join(parts)}."


def _advice(result: Landscape, name: Parametrization) -> str:
    """What to change to get an answer."""
    cells, flag = result.cells_of(name), _flag(result, name)
    is_high = any(cell.edge == "highest" for cell in cells)
    if _num_lost(cells) and not is_high:
        return f"start {flag} lower"
    if _num_lost(cells) or any(cell.is_at_edge for cell in cells):
        return f"widen {flag}"
    return "give more --widths or --structures"


def _why(cells: Sequence[LandscapeCell]) -> str:
    """Why the grid cannot tell whether the rate transfers."""
    lost = _num_lost(cells)
    reasons = ["best rates are ends of the grid"] * any(cell.is_at_edge for cell in cells)
    reasons += [f"in {_cells(lost)} every rate diverges"] * bool(lost)
    return ", ".join(reasons) or "there is one structure at one width"


def _num_lost(cells: Sequence[LandscapeCell]) -> int:
    """The number of cells in which every rate diverges."""
    return sum(cell.best is None for cell in cells)


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _flag(result: Landscape, name: Parametrization) -> str:
    """The option that sets the rates of a parametrization."""
    return "--" + result.config.rates_name(name).replace("_", "-")


def _ends(cells: Sequence[LandscapeCell]) -> str:
    """The best rates at ends of the grid, with their widths; "" if there are none."""
    parts = []
    for edge in get_args(Edge):
        here = [cell for cell in cells if cell.edge == edge]
        if here:
            widths = ", ".join(map(str, dict.fromkeys(cell.width for cell in here)))
            parts.append(
                f"{len(here)} of {len(cells)} best rates {'is' if len(here) == 1 else 'are'} the "
                f"{edge} of the grid, "
                f"2^{here[0].best} (width {widths})"
            )
    return f"{', '.join(parts)}: better ones may lie beyond." if parts else ""


def _compared(result: Landscape, name: Parametrization) -> str:
    """Whether the best rate moves less with µP than with another parametrization, if known."""
    without = _WITHOUT[name]
    unknown = f"Whether the best rate moves less under µP than {without} cannot be told."
    pair: tuple[Parametrization, ...] = (name, "mup")
    drifts = [result.drift_over_widths(each) for each in pair]
    known = [drift.doublings for drift in drifts if drift is not None]
    if len(known) < len(drifts):
        return unknown
    other, mup = known
    other_open, mup_open = (any(cell.is_open for cell in result.cells_of(each)) for each in pair)
    if (mup <= other and mup_open) or (mup >= other and other_open):
        return unknown
    word = "less" if mup < other else "as much" if mup == other else "more"
    than = "as" if mup == other else "than"
    compared = f"Over widths the best rate moves {word} under µP {than} {without}"
    ours, theirs = ("at least " * is_open for is_open in (mup_open, other_open))
    return f"{compared}: {ours}{_doublings(mup)}, {theirs}{_doublings(other)}."


def _caveat(result: Landscape, name: Parametrization) -> str:
    """In how many cells µP has a higher loss than another parametrization; "" if in none."""
    other, mup = ([c.best_loss for c in result.cells_of(each)] for each in (name, "mup"))
    gaps = [ours - theirs for ours, theirs in zip(mup, other, strict=True)]
    higher = [gap for gap in gaps if gap > 0]
    if not higher:
        return ""
    most = f"by up to {max(higher):.3f}" if max(higher) < inf else "or diverges at every rate"
    start = "µP is not lower here: each" if 2 * len(higher) > len(gaps) else "Each"
    loss = "the higher loss" if name == "naive" else f"a higher loss than {_TITLES[name]}"
    return f"{start} at its best rate, µP has {loss} in {len(higher)} of {len(gaps)} cells, {most}."


def _doublings(count: int) -> str:
    return f"{count} doubling{'' if count == 1 else 's'}"


def _seeds(drift: Drift) -> str:
    return f"{_doublings(drift.doublings)} ({_range(drift.low, drift.high)} in single seeds)"


def _range(low: int, high: int) -> str:
    """The ends of a range, or its one number."""
    return f"{low}" if low == high else f"{low} to {high}"


def _row(cell: LandscapeCell) -> tuple[str, ...]:
    return (
        _TITLES[cell.parametrization],
        cell.structure,
        str(cell.width),
        "-" if cell.best is None else f"2^{cell.best}",
        "-" if cell.interval is None else _range(*cell.interval),
        "-" if cell.best is None else f"{cell.best_loss:.3f}",
        "-" if cell.best is None else f"{cell.best_accuracy:.1%}",
        "end of grid" if cell.is_at_edge else "all diverge" if cell.best is None else "",
    )


def _line(cell: LandscapeCell) -> Line:
    return Line(
        width=cell.width,
        rates=cell.rates,
        means=cell.means,
        lows=tuple(map(min, cell.losses)),
        highs=tuple(map(max, cell.losses)),
        best=cell.best,
    )


def _cell_json(cell: LandscapeCell) -> dict[str, object]:
    losses = [[loss if loss < inf else None for loss in seeds] for seeds in cell.losses]
    derived = {
        "best": cell.best,
        "interval": cell.interval,
        "is_at_edge": cell.is_at_edge,
        "best_loss": cell.best_loss if cell.best_loss < inf else None,
        "best_accuracy": None if cell.best is None else cell.best_accuracy,
    }
    return asdict(cell) | {"losses": losses} | derived
