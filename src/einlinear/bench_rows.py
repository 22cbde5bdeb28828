"""What a benchmark measures: rows, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.machine import machine_facts
from einlinear.peers import failure, missing_note

MODES = ("forward", "forward+backward")
LINEAR, LINEAR_BIAS = "nn.Linear", "nn.Linear + bias"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One way to compute one layer: how many times faster than nn.Linear of the same widths.

    kind is "baseline", "variant" (our multiply alone, one of VARIANTS), "peer" (another library's),
    "layer" (EinsumLinear as it is called, with bias and weight normalisation) or "stack" (a step of
    training transformer blocks, see blocks.py); baseline is the row it is compared with, which has
    a bias if this one has. speed is the median over rounds of the baseline's time by this one's,
    low and high the ends of the middle four fifths; peak_bytes is the most memory that torch held
    at once beyond what was there, plus the engine's workspace.
    """

    structure: str
    width: int
    tokens: int
    dtype: str
    mode: str
    variant: str
    kind: str
    baseline: str
    is_chosen: bool
    limit: float
    speed: float
    low: float
    high: float
    rounds: int
    milliseconds: float
    peak_bytes: int

    @property
    def is_stack(self) -> bool:
        """Whether this is a step of training blocks, dense or not, rather than one layer."""
        return self.mode not in MODES

    @property
    def tokens_per_second(self) -> float:
        """By the median of the times."""
        return 1e3 * self.tokens / self.milliseconds


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The rows of one or more cases, and a line for everything that a reader might miss in them."""

    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...]


def compared(dense: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that follow from the seconds of its baseline and its own, by round."""
    ratios = sorted(before / after for before, after in zip(dense, ours, strict=True))
    return {
        "speed": median(ratios),
        "low": _quantile(ratios, 0.1),
        "high": _quantile(ratios, 0.9),
        "rounds": len(ratios),
        "milliseconds": 1e3 * median(ours),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies, between two of them if need be."""
    below = int(share * (len(ordered) - 1))
    above = min(below + 1, len(ordered) - 1)
    part = share * (len(ordered) - 1) - below
    return ordered[below] + part * (ordered[above] - ordered[below])


def interval(row: BenchRow) -> str:
    """The middle four fifths of the rounds; one round has none."""
    return f"{row.low:.2f} - {row.high:.2f}" if row.rounds > 1 else "one round"


def as_json(result: BenchResult) -> dict[str, object]:
    """The facts of the machine, all rows and the notes, as plain data."""
    rows = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in result.rows]
    return {"machine": machine_facts(), "notes": list(result.notes), "rows": rows}


def merged(results: Sequence[BenchResult]) -> BenchResult:
    """All rows; each note once, and how to add the peers that are missing."""
    missing = missing_note()
    notes = [note for result in results for note in result.notes] + ([missing] if missing else [])
    rows = [row for result in results for row in result.rows]
    return BenchResult(tuple(rows), tuple(dict.fromkeys(notes)))


_KEY = ("structure", "width", "tokens", "dtype", "mode", "variant")


def speeds(text: str, name: str) -> dict[tuple[object, ...], float]:
    """The speed of every row of a bench.json, by what identifies the row."""
    try:
        rows = json.loads(text)["rows"]
        return {tuple(row[key] for key in _KEY): float(row["speed"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise EinlinearError(
            what=f"{name} holds no rows of a benchmark: {failure(error)}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error


def row_key(row: BenchRow) -> tuple[object, ...]:
    """What identifies a row in two runs."""
    return tuple(getattr(row, key) for key in _KEY)
