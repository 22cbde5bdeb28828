"""The rows of a benchmark, in groups, as words and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np

from einlinear.bench.peers import missing_note
from einlinear.errors import EinlinearError, reason
from einlinear.files.whole import parse_object
from einlinear.layers.machine import machine_facts, memory_bytes
from einlinear.show.numbers import amount

MODES = ("forward", "forward+backward")
LINEAR, LINEAR_BIAS = "nn.Linear", "nn.Linear + bias"
WORD_COLUMNS = ("structure", "width", "tokens", "dtype", "pass", "variant", "against")
"""The columns that are aligned to the left."""
SECTIONS = ("layers", "experts", "blocks")
"""The tables of a benchmark: single layers, mixtures of experts, blocks in training."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One way to compute one layer: how many times faster than nn.Linear of the same widths.

    kind: "baseline", "variant" (the multiply alone, one of VARIANTS), "peer" (another library),
        "layer" (a whole EinsumLinear, with bias and weight normalisation), "stack" (a training step
        of transformer blocks, see blocks.py), or for mixtures of experts "mixture", "active" or
        "masked" (see experts.py).
    baseline: the row it is compared with, which has a bias if this one has.
    limit: the ratio of the FLOPs, which is the speed if both compute equally many per second. The
        speed can be higher if nn.Linear computes fewer.
    speed: the median over rounds of the baseline's time divided by this one's; low and high are the
        ends of the middle four fifths.
    peak_bytes: the most memory that torch held at once beyond what it held before, plus the
        engine's workspace.
    num_experts, num_active: 0 if there are no experts.
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
    num_experts: int = 0
    num_active: int = 0

    @property
    def section(self) -> str:
        """Which of SECTIONS the row belongs to, also if it is a baseline there."""
        if self.num_experts:
            return "experts"
        return "layers" if self.mode in MODES else "blocks"

    @property
    def peak_megabytes(self) -> float:
        """Peak memory in units of a million bytes."""
        return self.peak_bytes / 1e6

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, by the median time."""
        return 1e3 * self.tokens / self.milliseconds


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The rows of one or more cases, and notes, such as which library is missing."""

    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...]


def timing_fields(dense: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that follow from its baseline's seconds and its own, by round.

    If one of them took part in the first rounds only, those are compared.
    """
    rounds = min(len(dense), len(ours))
    ratios = np.asarray(dense[:rounds]) / np.asarray(ours[:rounds])
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9]).tolist()
    return {
        "speed": middle,
        "low": low,
        "high": high,
        "rounds": rounds,
        "milliseconds": 1e3 * float(np.median(ours)),
    }


def speed_interval(row: BenchRow) -> str:
    """The middle four fifths of the rounds, as text."""
    return f"{row.low:.2f} - {row.high:.2f}" if row.rounds > 1 else "one round"


def is_ours(row: BenchRow) -> bool:
    """Whether the row is what users of the layer get; it is shown in bold."""
    return row.is_chosen or row.kind in ("layer", "stack", "mixture")


def row_cells(
    row: BenchRow, old: Mapping[tuple[object, ...], float] | None = None
) -> dict[str, str]:
    """The cells of a row by column; `old` holds speeds of another run to compare with."""
    mixture, blocks = row.section == "experts", row.section == "blocks"
    columns = {
        "structure": row.structure,
        "width": str(row.width),
        "tokens": str(row.tokens),
        "dtype": row.dtype,
        "pass": row.mode.replace("forward", "fwd").replace("backward", "bwd"),
        "experts": f"{row.num_active} of {row.num_experts}" if mixture else None,
        "variant": f"{row.variant} *" if row.is_chosen else row.variant,
        "against": ("" if row.kind == "baseline" else row.baseline) if mixture else None,
        "limit": f"{row.limit:.1f}" if row.limit >= 1 else f"{row.limit:.2f}",
        "speed": f"{row.speed:.2f}",
        "from - to": speed_interval(row),
        "of limit": f"{row.speed / row.limit:.0%}",
        "ms": f"{row.milliseconds:.2f}",
        "peak MB": f"{row.peak_megabytes:.1f}",
        "tokens/s": f"{row.tokens_per_second:,.0f}" if blocks else None,
    }
    if old is not None:
        before = old.get(row_key(row))
        columns["by old"] = f"{row.speed / before:.2f}" if before else "-"
    return {name: word for name, word in columns.items() if word is not None}


def bench_json(result: BenchResult) -> dict[str, object]:
    """The machine, all rows and the notes, as plain data."""
    rows = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in result.rows]
    return {"machine": machine_facts(), "notes": list(result.notes), "rows": rows}


def merge_results(results: Sequence[BenchResult]) -> BenchResult:
    """Merge results: all rows, each note once, and how to install missing peers."""
    missing = missing_note()
    notes = [note for result in results for note in result.notes] + ([missing] if missing else [])
    rows = [row for result in results for row in result.rows]
    return BenchResult(tuple(rows), tuple(dict.fromkeys(notes)))


_KEY = "structure width tokens dtype mode num_experts num_active variant baseline".split()
_ABSENT = {"num_experts": 0, "num_active": 0}  # in files from before mixtures


def bench_tables(rows: Sequence[BenchRow]) -> list[list[list[BenchRow]]]:
    """Sort rows into tables, one for each section, and groups, which are shown together.

    A group has one structure, except for blocks, where one baseline is compared with all. In a
    group of mixtures each way to compute is followed through growing numbers of experts.
    """
    found = []
    for section in SECTIONS:
        groups: dict[tuple[object, ...], list[BenchRow]] = {}
        for row in rows:
            if row.section == section:
                key = (row.width, row.tokens, row.dtype, row.mode)
                groups.setdefault((*key, section != "blocks" and row.structure), []).append(row)
        for group in groups.values():
            ways = list(dict.fromkeys((row.variant, row.baseline) for row in group))
            if section == "experts":
                group.sort(key=lambda r: (ways.index((r.variant, r.baseline)), r.num_experts))
        if groups:
            found.append(list(groups.values()))
    return found


def check_fits(
    case: str, numbers: int, fix: str = "give smaller --widths, --tokens, --experts or --blocks"
) -> None:
    """Raise if the numbers of a case, at two bytes each, do not fit into memory."""
    needed, held = 2 * numbers, memory_bytes()
    if held is not None and needed > held:
        raise EinlinearError(
            what=f"{case}, needs {amount(needed)}B or more",
            rule=f"this machine has {amount(held)}B of memory",
            fix=fix,
        )


def read_speeds(text: str, name: str) -> dict[tuple[object, ...], float]:
    """Read the speed of every row of a bench.json, by what identifies the row."""
    try:
        rows = parse_object(text)["rows"]
        keys = [tuple((_ABSENT | row)[key] for key in _KEY) for row in rows]
        found = {key: float(row["speed"]) for key, row in zip(keys, rows, strict=True)}
        if not all(0 < speed < inf for speed in found.values()):
            raise ValueError("a speed is not a number above 0")
        return found
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise EinlinearError(
            what=f"{name} holds no rows of a benchmark: {type(error).__name__}: {reason(error)}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error


def row_key(row: BenchRow) -> tuple[object, ...]:
    """What identifies the same row in two runs."""
    return tuple(getattr(row, key) for key in _KEY)
