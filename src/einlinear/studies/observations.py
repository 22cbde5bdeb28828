"""Observations: compute and loss of many runs as columns, out of records or out of any table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from einlinear.errors import EinlinearError
from einlinear.studies.config import RunConfig
from einlinear.studies.record import Point, RunRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Names = NDArray[np.object_]
Compute = Literal["macs", "linear_macs", "seconds", "params", "units"]

REQUIRED = ("run", "compute", "loss")
OPTIONAL = ("structure", "seed", "group")


@dataclass(frozen=True, eq=False)
class Observations:
    """Points of compute and loss, one for each evaluation of each run.

    Points without a loss (None, or not finite) are left out and counted. Points of no compute, such
    as the first of a run, are kept; no frontier or fit uses them.

    Args:
        run: the id of the run.
        compute: what was spent up to this point; 0 or more.
        loss: above 0.
        structure: whose points are compared and fitted together; "all" unless given.
        seed: of the run; 0 unless given.
        group: equal for runs that differ in their seed only; the run unless given.
        more: further columns by name.
        left_out: how many points had no loss.
    """

    run: Names
    compute: Floats
    loss: Floats
    structure: Names = None  # type: ignore[assignment]
    seed: Ints = None  # type: ignore[assignment]
    group: Names = None  # type: ignore[assignment]
    more: Mapping[str, Names] = field(default_factory=dict)
    left_out: int = 0

    def __post_init__(self) -> None:
        run = np.asarray(self.run, dtype=object)
        columns: dict[str, Any] = {
            "run": run,
            "compute": np.asarray(self.compute, dtype=float),
            "loss": np.array(self.loss, dtype=float),  # None becomes nan
            "structure": _filled(self.structure, "all", len(run)),
            "seed": _filled(self.seed, 0, len(run)).astype(np.int64),
            "group": run if self.group is None else np.asarray(self.group, dtype=object),
        }
        more = {name: np.asarray(column, dtype=object) for name, column in self.more.items()}
        for name, column in [*columns.items(), *more.items()]:
            if column.shape != run.shape:
                raise EinlinearError(
                    what=f"{name} has {len(column)} values, run has {len(run)}",
                    rule="the columns of observations are of one length",
                    fix="give one value of every column for every point",
                )
        keep = np.isfinite(columns["loss"])
        left_out = self.left_out + int((~keep).sum())
        for name, column in columns.items():
            object.__setattr__(self, name, column[keep])
        object.__setattr__(self, "more", {name: column[keep] for name, column in more.items()})
        object.__setattr__(self, "left_out", left_out)
        self._check()

    def _check(self) -> None:
        bad = np.flatnonzero(~(np.isfinite(self.compute) & (self.compute >= 0)))
        if len(bad):
            raise _bad_compute(f"point {bad[0]} of the observations", self.compute[bad[0]])
        bad = np.flatnonzero(self.loss <= 0)
        if len(bad):
            raise _bad_loss(f"point {bad[0]} of the observations", self.loss[bad[0]])
        if not len(self.run):
            raise EinlinearError(
                what=f"there are no observations ({self.left_out} points had no loss)",
                rule="an analysis needs points of compute and loss",
                fix="give records or a table with at least one finite loss",
            )

    def __len__(self) -> int:
        return len(self.run)

    @property
    def structures(self) -> tuple[str, ...]:
        """All structures, in the order in which they come."""
        return tuple(dict.fromkeys(self.structure.tolist()))

    def take(self, index: NDArray[Any]) -> Observations:
        """The points at these places."""
        return Observations(
            self.run[index],
            self.compute[index],
            self.loss[index],
            self.structure[index],
            self.seed[index],
            self.group[index],
            {name: column[index] for name, column in self.more.items()},
            self.left_out,
        )

    def of(self, structure: str) -> Observations:
        """The points of one structure."""
        if structure not in self.structures:
            raise EinlinearError(
                what=f"there is no structure {structure!r} in the observations",
                rule="a structure is one of those observed",
                fix=f"give one of {', '.join(self.structures)}",
            )
        return self.take(self.structure == structure)

    @classmethod
    def from_records(cls, records: Iterable[RunRecord], compute: Compute = "macs") -> Observations:
        """All points of the curves of runs; of runs that diverged those with a loss."""
        if compute not in get_args(Compute):
            raise EinlinearError(
                what=f"compute is {compute!r}",
                rule=f"compute is one of {', '.join(get_args(Compute))}",
                fix='give compute="macs"',
            )
        rows = [
            (record.id, _spent(record, point, compute), point.loss, *labels)
            for record in records
            for labels in [_labels(record.config)]
            for point in record.curve
        ]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(7)]
        run, spent, loss, structure, seed, group, width = map(_column, columns)
        return cls(run, spent, loss, structure, seed, group, more={"width": width})


def as_observations(data: Observations | Iterable[RunRecord]) -> Observations:
    """Observations as they are; records by their multiply-adds."""
    return data if isinstance(data, Observations) else Observations.from_records(data)


def read_observations(path: str | Path) -> Observations:
    """The observations of a CSV file with a header, or of a JSONL file (one object in a line).

    Columns run, compute and loss are needed; structure, seed and group are used where they are; all
    others are kept in `more`. A loss that is empty, null or nan is that of a run that diverged.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {error}",
            rule="observations are in a CSV or JSONL file in UTF-8",
            fix="check the path and its permissions",
        ) from error
    is_lines = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    rows = list(_json_rows(path, text) if is_lines else _csv_rows(path, text))
    if not rows:
        raise EinlinearError(
            what=f"{path} holds no observations",
            rule=f"the table has the columns {', '.join(REQUIRED)} and at least one row",
            fix="check that the runs have written something",
        )
    return _from_rows(path, rows)


def _from_rows(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> Observations:
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, row in rows:
        where = f"{path}, line {number}"
        for name in dict.fromkeys([*REQUIRED, *names]):
            if name not in row:
                raise EinlinearError(
                    what=f"{where}: there is no {name!r}",
                    rule=f"every row has {', '.join(REQUIRED)} and the columns of the others",
                    fix=f"add {name!r}; the row has {', '.join(row) or 'nothing'}",
                )
            columns[name].append(_value(where, name, row[name]))
    more: Any = {n: _column(c) for n, c in columns.items() if n not in (*REQUIRED, *OPTIONAL)}
    given: dict[str, Any] = {n: _column(columns[n]) for n in (*REQUIRED, *OPTIONAL) if n in columns}
    return Observations(**given, more=more)


def _value(where: str, name: str, value: Any) -> Any:
    """One value of a table, checked."""
    if name == "loss":
        number = float("nan") if value in (None, "") else _number(where, name, value)
        if number <= 0 and isfinite(number):
            raise _bad_loss(where, number)
        return number
    if name == "compute":
        number = _number(where, name, value)
        if not (isfinite(number) and number >= 0):
            raise _bad_compute(where, number)
        return number
    if name == "seed":
        number = _number(where, name, value)
        if not number.is_integer():
            raise _not_a_number(where, name, value, "a whole number")
        return int(number)
    return str(value) if name in ("run", "structure", "group") else value


def _number(where: str, name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise _not_a_number(where, name, value, "a number") from None


def _not_a_number(where: str, name: str, value: Any, kind: str) -> EinlinearError:
    return EinlinearError(
        what=f"{where}: {name} is {value!r}",
        rule=f"{name} is {kind}",
        fix=f"write {name} as 12 or 1.5e9, without units or separators",
    )


def _bad_compute(where: str, value: float) -> EinlinearError:
    return EinlinearError(
        what=f"{where}: compute is {value:g}",
        rule="compute is a finite number of 0 or more",
        fix="give what was spent up to this point, not its logarithm",
    )


def _bad_loss(where: str, value: float) -> EinlinearError:
    return EinlinearError(
        what=f"{where}: loss is {value:g}",
        rule="a power law is fitted to losses above 0",
        fix="give the loss, not its logarithm; leave it empty where a run diverged",
    )


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        if None in row:
            raise EinlinearError(
                what=f"{path}, line {reader.line_num}: there are more values than columns",
                rule="every row has as many values as the header has names",
                fix="check the separator, which is a comma, and quotes",
            )
        yield reader.line_num, {name: value for name, value in row.items() if value is not None}


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            row = str(error)
        if not isinstance(row, dict):
            raise EinlinearError(
                what=f"{path}, line {number}: there is no JSON object",
                rule='each line is one object such as {"run": "a", "compute": 1e9, "loss": 2.5}',
                fix="write one object in each line, or use CSV",
            )
        yield number, row


def _column(values: Sequence[Any]) -> Any:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _filled(column: Any, default: object, length: int) -> NDArray[Any]:
    return np.full(length, default, object) if column is None else np.asarray(column, dtype=object)


def _spent(record: RunRecord, point: Point, compute: Compute) -> float:
    if compute == "params":
        return float(record.counts.params)
    if compute == "linear_macs":
        return float(point.units * record.counts.linear_macs)
    return float(getattr(point, compute))


def _labels(config: RunConfig) -> tuple[str, int, str, int]:
    """Structure, seed, group and width of a run."""
    structure = config.structure
    if config.num_experts:
        kind = "ffn-" if config.experts == "ffn" else ""
        structure = f"{structure} {kind}moe {config.num_active}/{config.num_experts}"
    return structure, config.seed, replace(config, seed=0).id, config.width
