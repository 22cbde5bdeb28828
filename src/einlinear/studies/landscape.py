"""A learning-rate landscape: which rate is best where, how far it moves, and what that means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import get_args

from einlinear.errors import EinlinearError
from einlinear.models.groups import aligned
from einlinear.studies.landscape_cells import Cell, Edge
from einlinear.studies.landscape_plot import LandscapePanel, Line, draw_landscape
from einlinear.studies.landscape_runs import (
    PARAMETRIZATIONS,
    LandscapeConfig,
    Parametrization,
    RunResult,
    plan_runs,
)
from einlinear.studies.landscape_transfer import (
    Answer,
    Drift,
    Transfer,
    find_answer,
    find_drift,
    find_transfer,
)

_TITLES = {"naive": "naive", "mup": "muP"}


@dataclass(frozen=True, slots=True)
class Landscape:
    """What `landscape` measured, a cell for every structure and width, naive and muP; print it."""

    config: LandscapeConfig
    cells: tuple[Cell, ...]
    start_loss: float
    data: str

    def cells_of(self, parametrization: Parametrization) -> tuple[Cell, ...]:
        """Those of one parametrization."""
        return tuple(cell for cell in self.cells if cell.parametrization == parametrization)

    def drift_over_widths(self, parametrization: Parametrization) -> Drift | None:
        """How far the best rate of a structure moves as the width grows: the largest such.

        None if no structure has a best rate at two widths.
        """
        return find_drift(self.cells_of(parametrization), lambda cell: cell.structure)

    def drift_over_structures(self, parametrization: Parametrization) -> Drift | None:
        """How far apart the best rates of structures are at one width: the largest such.

        None if there is no width at which two structures have a best rate.
        """
        return find_drift(self.cells_of(parametrization), lambda cell: f"width {cell.width}")

    def transfer(self, parametrization: Parametrization) -> Transfer | None:
        """What one rate for all costs; None if the first cell has no best rate."""
        return find_transfer(self.cells_of(parametrization))

    def answer(self, parametrization: Parametrization) -> Answer:
        """Whether the rate transfers, as far as the grid of rates can tell."""
        return find_answer(self.cells_of(parametrization))

    @property
    def verdict(self) -> tuple[str, ...]:
        """What the numbers say, a line for each parametrization and one that compares them."""
        return (*(_verdict(self, name) for name in PARAMETRIZATIONS), _compared(self))

    @property
    def caveat(self) -> str:
        """In how many cells muP has the higher loss, each at its own best rate; "" if in none."""
        naive, mup = ([c.best_loss for c in self.cells_of(name)] for name in PARAMETRIZATIONS)
        gaps = [ours - theirs for ours, theirs in zip(mup, naive, strict=True)]
        higher = [gap for gap in gaps if gap > 0]
        if not higher:
            return ""
        most = f"by up to {max(higher):.3f}" if max(higher) < inf else "or diverges at every rate"
        start = "muP is not lower here: each" if 2 * len(higher) > len(gaps) else "Each"
        return (
            f"{start} at its best rate, muP has the higher loss in {len(higher)} of {len(gaps)} "
            f"cells, {most}. Compare where the best rates lie, not the rows."
        )

    @property
    def words(self) -> tuple[str, ...]:
        """The verdict, and the caveat if there is one: a paragraph each."""
        return (*self.verdict, *[self.caveat] * bool(self.caveat))

    def __str__(self) -> str:
        return "\n".join([aligned(self.rows(), left=2), "", *self.words])

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text: its head, then a row for each cell."""
        head = ("", "structure", "width", "best rate", "over seeds", "loss", "test accuracy", "")
        return [head, *(_row(cell) for cell in self.cells)]

    def as_json(self) -> dict[str, object]:
        """The settings, all cells and what follows from them, as plain data."""
        drifts: dict[str, object] = {
            name: {
                "over_widths": _plain(self.drift_over_widths(name)),
                "over_structures": _plain(self.drift_over_structures(name)),
                "transfer": _plain(self.transfer(name)),
                "answer": self.answer(name),
            }
            for name in PARAMETRIZATIONS
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
        """Draw loss against rate, a column for every structure; .svg, .png or .pdf."""
        panels = []
        for name in PARAMETRIZATIONS:
            cells = self.cells_of(name)
            for structure in self.config.structures:
                lines = tuple(_line(cell) for cell in cells if cell.structure == structure)
                panels.append(LandscapePanel(_TITLES[name], structure, lines, cells[0].best))
        c = self.config
        seeds = f"mean and range of {c.seeds} seeds" if c.seeds > 1 else "one seed"
        small = f"{self.data}, {c.steps} steps of {c.batch}, Adam, {c.activation}, {seeds}. "
        small += f"Under muP the rate is that of a dense model of width {min(c.widths)}, "
        small += "from which those of all factors follow."
        open_: dict[str, list[str]] = {}
        for name in PARAMETRIZATIONS:
            if self.answer(name) == "cannot be told":
                open_.setdefault(_why(self.cells_of(name)), []).append(_TITLES[name])
        for why, names in open_.items():
            small += f"\nWhether rates transfer cannot be told ({' and '.join(names)}): {why}."
        small += f"\n{self.caveat}" if self.caveat else ""
        titles = "Which learning rate is best, by width and structure", small
        return draw_landscape(
            panels, ceiling=1.06 * self.start_loss, titles=titles, path=Path(path)
        )


def make_landscape(
    config: LandscapeConfig, results: Iterable[RunResult], fingerprint: str, name: str
) -> Landscape:
    """The landscape of a finished set of runs; results of other settings may be among them."""
    known = {result.run: result for result in results}
    runs = plan_runs(config, fingerprint)
    if missing := [run for run in runs if run not in known]:
        raise EinlinearError(
            what=f"{len(missing)} of {len(runs)} runs are missing, the first is {missing[0]}",
            rule="a landscape is made of all its runs",
            fix="run them: the same command again does what is missing",
        )
    groups: dict[tuple[Parametrization, str, int], dict[int, list[RunResult]]] = {}
    for run in runs:
        group = groups.setdefault((run.parametrization, run.structure, run.width), {})
        group.setdefault(run.rate, []).append(known[run])
    cells = tuple(
        Cell(
            *key,
            rates=tuple(by_rate),
            losses=tuple(tuple(r.loss for r in held) for held in by_rate.values()),
            accuracies=tuple(tuple(r.test_accuracy for r in held) for held in by_rate.values()),
        )
        for key, by_rate in groups.items()
    )
    start = max(known[run].start_loss for run in runs if run.parametrization == "mup")
    return Landscape(config, cells, start, name)


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
    """How far the best rate moves, as far as that is known."""
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
    """What to type for an answer, where there is none."""
    cells, flag = result.cells_of(name), _flag(result, name)
    is_high = any(cell.edge == "highest" for cell in cells)
    if _num_lost(cells) and not is_high:
        return f"start {flag} lower"
    if _num_lost(cells) or any(cell.is_at_edge for cell in cells):
        return f"widen {flag}"
    return "give more --widths or --structures"


def _why(cells: Sequence[Cell]) -> str:
    """Why it cannot be told whether the rate transfers."""
    lost = _num_lost(cells)
    reasons = ["best rates are ends of the grid"] * any(cell.is_at_edge for cell in cells)
    reasons += [f"in {_cells(lost)} every rate diverges"] * bool(lost)
    return ", ".join(reasons) or "there is one structure at one width"


def _num_lost(cells: Sequence[Cell]) -> int:
    """In how many cells every rate diverges."""
    return sum(cell.best is None for cell in cells)


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _flag(result: Landscape, name: Parametrization) -> str:
    """The option that sets the rates of a parametrization."""
    is_own = name == "naive" and result.config.naive_rates is not None
    return "--naive-rates" if is_own else "--rates"


def _ends(cells: Sequence[Cell]) -> str:
    """Which best rates are ends of the grid, and at which widths; "" if none is."""
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


def _compared(result: Landscape) -> str:
    """Whether the best rate moves less under muP; one that is not known may move more."""
    unknown = "Whether the best rate moves less under muP than without cannot be told."
    drifts = [result.drift_over_widths(name) for name in PARAMETRIZATIONS]
    known = [drift.doublings for drift in drifts if drift is not None]
    if len(known) < len(drifts):
        return unknown
    naive, mup = known
    naive_open, mup_open = (
        any(cell.is_open for cell in result.cells_of(name)) for name in PARAMETRIZATIONS
    )
    if (mup <= naive and mup_open) or (mup >= naive and naive_open):
        return unknown
    word = "less" if mup < naive else "as much" if mup == naive else "more"
    than = "as" if mup == naive else "than"
    compared = f"Over widths the best rate moves {word} under muP {than} without"
    ours, theirs = ("at least " * is_open for is_open in (mup_open, naive_open))
    return f"{compared}: {ours}{_doublings(mup)}, {theirs}{_doublings(naive)}."


def _doublings(count: int) -> str:
    return f"{count} doubling{'' if count == 1 else 's'}"


def _seeds(drift: Drift) -> str:
    return f"{_doublings(drift.doublings)} ({drift.low} to {drift.high} in single seeds)"


def _row(cell: Cell) -> tuple[str, ...]:
    low, high = cell.interval or ("-", "-")
    return (
        _TITLES[cell.parametrization],
        cell.structure,
        str(cell.width),
        "-" if cell.best is None else f"2^{cell.best}",
        f"{low} to {high}" if cell.interval else "-",
        "-" if cell.best is None else f"{cell.best_loss:.3f}",
        "-" if cell.best is None else f"{cell.best_accuracy:.1%}",
        "end of grid" if cell.is_at_edge else "all diverge" if cell.best is None else "",
    )


def _line(cell: Cell) -> Line:
    return Line(
        width=cell.width,
        rates=cell.rates,
        means=cell.means,
        lows=tuple(map(min, cell.losses)),
        highs=tuple(map(max, cell.losses)),
        best=cell.best,
    )


def _cell_json(cell: Cell) -> dict[str, object]:
    losses = [[loss if loss < inf else None for loss in seeds] for seeds in cell.losses]
    derived = {
        "best": cell.best,
        "interval": cell.interval,
        "is_at_edge": cell.is_at_edge,
        "best_loss": cell.best_loss if cell.best_loss < inf else None,
        "best_accuracy": None if cell.best is None else cell.best_accuracy,
    }
    return asdict(cell) | {"losses": losses} | derived
