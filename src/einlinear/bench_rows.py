"""What a benchmark measures: rows, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from typing import Any

from einlinear.errors import EinlinearError, reason
from einlinear.files import parse_object
from einlinear.machine import machine_facts, memory_bytes
from einlinear.peers import missing_note
from einlinear.studies.numbers import amount

MODES = ("forward", "forward+backward")
LINEAR, LINEAR_BIAS = "nn.Linear", "nn.Linear + bias"
WORDS = ("structure", "width", "tokens", "dtype", "pass", "variant", "against")
"""The columns that stand to the left."""
SECTIONS = ("layers", "experts", "blocks")
"""The tables of a benchmark: single layers, mixtures of experts, blocks in training."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One way to compute one layer: how many times faster than nn.Linear of the same widths.

    kind is "baseline", "variant" (our multiply alone, one of VARIANTS), "peer" (another library's),
    "layer" (EinsumLinear as it is called, with bias and weight normalisation), "stack" (a step of
    training transformer blocks, see blocks.py), or for mixtures of experts "mixture", "active" or
    "masked" (see bench_experts.py); baseline is the row it is compared with, which has a bias if
    this one has. limit is the ratio of the FLOPs: the speed if both do equally many per second; a
    speed above it says that nn.Linear does fewer. speed is the median over rounds of the baseline's
    time by this one's, low and high the ends of the middle four fifths; peak_bytes is the most
    memory that torch held at once beyond what was there, plus the engine's workspace. num_experts
    and num_active are 0 where there are no experts.
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
        """By the median of the times."""
        return 1e3 * self.tokens / self.milliseconds


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The rows of one or more cases, and a line for everything that a reader might miss in them."""

    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...]


def compared(dense: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that follow from the seconds of its baseline and its own, by round.

    Where one took part in the first rounds only, those are compared.
    """
    ratios = sorted(before / after for before, after in zip(dense, ours, strict=False))
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


def is_ours(row: BenchRow) -> bool:
    """Whether the row is what a user of the layer gets, to be shown in bold."""
    return row.is_chosen or row.kind in ("layer", "stack", "mixture")


def cells(row: BenchRow, old: Mapping[tuple[object, ...], float] | None = None) -> dict[str, str]:
    """The row as words under the names of their columns; old are speeds to compare with."""
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
        "from - to": interval(row),
        "of limit": f"{row.speed / row.limit:.0%}",
        "ms": f"{row.milliseconds:.2f}",
        "peak MB": f"{row.peak_megabytes:.1f}",
        "tokens/s": f"{row.tokens_per_second:,.0f}" if blocks else None,
    }
    if old is not None:
        before = old.get(row_key(row))
        columns["by old"] = f"{row.speed / before:.2f}" if before else "-"
    return {name: word for name, word in columns.items() if word is not None}


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


_CASE = ("structure", "width", "tokens", "dtype", "mode", "num_experts", "num_active")
_KEY = (*_CASE, "variant", "baseline")
_ABSENT = {"num_experts": 0, "num_active": 0}  # in files that are older than mixtures


def tables(rows: Sequence[BenchRow]) -> list[list[list[BenchRow]]]:
    """The rows as they are read: tables of one section each, of groups that are seen together.

    A group has one structure, except for blocks, where one baseline is compared with all. In a
    group of mixtures the number of experts grows downwards, one way to compute after the other.
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


def check_memory(case: str, numbers: int) -> None:
    """Raise if a case holds more numbers at once than fit into memory, at two bytes each."""
    needed, held = 2 * numbers, memory_bytes()
    if held is not None and needed > held:
        raise EinlinearError(
            what=f"{case}, needs {amount(needed)}B or more",
            rule=f"this machine has {amount(held)}B of memory",
            fix="give smaller --widths, --tokens, --experts or --blocks",
        )


def speeds(text: str, name: str) -> dict[tuple[object, ...], float]:
    """The speed of every row of a bench.json, by what identifies the row."""
    try:
        rows = parse_object(text)["rows"]
        keys = [tuple((_ABSENT | row)[key] for key in _KEY) for row in rows]
        found = {key: float(row["speed"]) for key, row in zip(keys, rows, strict=True)}
        if not all(0 < speed < inf for speed in found.values()):
            raise ValueError("a speed is no number above 0")
        return found
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise EinlinearError(
            what=f"{name} holds no rows of a benchmark: {type(error).__name__}: {reason(error)}",
            rule="a run is compared with the bench.json of another run",
            fix="name a file that einlinear bench has written",
        ) from error


def row_key(row: BenchRow) -> tuple[object, ...]:
    """What identifies a row in two runs."""
    return tuple(getattr(row, key) for key in _KEY)
