"""Observations: compute and loss of many runs as columns, out of records or of arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from einlinear.errors import EinlinearError, quote, reason, shorten
from einlinear.structures.text import parse
from einlinear.studies.config import RunConfig
from einlinear.studies.numbers import FLOPS_PER_MAC
from einlinear.studies.record import Point, RunRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Names = NDArray[np.object_]
Compute = Literal["flops", "linear_flops", "seconds", "params", "units", "macs", "linear_macs"]
"""FLOPs are those of training: 6 for each multiply-add of forward passes, which `macs` counts."""
_MOST = 50_000_000
# What a label has beside the structure, see `structure_label`.
_ADDED = r"( (ffn-)?moe \d+/\d+)?( head-aligned)?( with head)?( without norm)?$"


@dataclass(frozen=True, eq=False)
class Observations:
    """Points of compute and loss, one for each evaluation of each run.

    Points without a loss (None, or not finite) are left out and counted. Points of no compute, such
    as the first of a run, are kept; no frontier or fit uses them. An empty value of a column that
    may be left out stands for its default.

    Args:
        run: the id of the run; runs of one id with different seeds are different runs.
        compute: what was spent up to this point; 0 or more.
        loss: above 0.
        structure: whose points are compared and fitted together; "all" unless given.
        seed: of the run; 0 unless given.
        group: equal for runs that differ in their seed only; the run unless given.
        size: equal for runs of one size of model; the group unless given.
        more: further columns by name.
        left_out: how many points had no loss.
    """

    run: Names
    compute: Floats
    loss: Floats
    structure: Names = None  # type: ignore[assignment]
    seed: Ints = None  # type: ignore[assignment]
    group: Names = None  # type: ignore[assignment]
    size: Names = None  # type: ignore[assignment]
    more: Mapping[str, Names] = field(default_factory=dict)
    left_out: int = 0

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {
            "run": _names(self.run),
            "compute": _converted(self.compute, "compute", _floats),
            "loss": _converted(self.loss, "loss", _floats),  # None becomes nan
        }
        _check_names("run", columns["run"])
        count = len(columns["run"])
        columns["structure"] = _filled("structure", self.structure, np.full(count, "all", object))
        seed = _filled("seed", self.seed, np.zeros(count, object))
        columns["seed"] = _converted(seed, "seed", _whole)
        columns["group"] = _filled("group", self.group, columns["run"])
        columns["size"] = _filled("size", self.size, columns["group"])
        if not isinstance(self.more, Mapping):
            raise EinlinearError(
                what=f"more is {quote(self.more)}",
                rule="more holds further columns by name",
                fix='give {"width": [...]}, or leave it out',
            )
        more = {name: _names(column) for name, column in self.more.items()}
        for name, column in [*columns.items(), *more.items()]:
            if column.shape != (count,):
                raise _not_of_length(name, column.size, count)
        keep = np.isfinite(columns["loss"])
        left_out = self.left_out + int((~keep).sum())
        for name, column in columns.items():
            kept = column[keep]
            kept.flags.writeable = False  # what was made of it stays true
            object.__setattr__(self, name, kept)
        object.__setattr__(self, "more", {name: column[keep] for name, column in more.items()})
        object.__setattr__(self, "left_out", left_out)
        self._check()

    def _check(self) -> None:
        bad = np.flatnonzero(~(np.isfinite(self.compute) & (self.compute >= 0)))
        if len(bad):
            raise bad_compute(f"point {bad[0]} of the observations", self.compute[bad[0]])
        bad = np.flatnonzero(self.loss <= 0)
        if len(bad):
            raise bad_loss(f"point {bad[0]} of the observations", self.loss[bad[0]])
        bad = np.flatnonzero(_is_empty(self.run))
        if len(bad):
            raise no_run(f"point {bad[0]} of the observations")
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
            self.size[index],
            {name: column[index] for name, column in self.more.items()},
            self.left_out,
        )

    def of(self, structure: str) -> Observations:
        """The points of one structure."""
        if structure not in self.structures:
            raise EinlinearError(
                what=f"there is no structure {quote(structure)} in the observations",
                rule="a structure is one of those observed",
                fix=f"give one of {shorten(', '.join(map(str, self.structures)))}",
            )
        return self.take(self.structure == structure)

    @classmethod
    def from_records(cls, records: Iterable[RunRecord], compute: Compute = "flops") -> Observations:
        """All points of the curves of runs after the warm-up; of runs that diverged with a loss.

        The size of a run is its number of parameters. What a structure is called by its first
        record holds for all spellings of it.
        """
        if compute not in get_args(Compute):
            raise EinlinearError(
                what=f"compute is {quote(compute)}",
                rule=f"compute is one of {', '.join(get_args(Compute))}",
                fix='give compute="flops"',
            )
        records = list(records)
        _check_records(records)
        spelling: dict[str, str] = {}
        rows = [
            (record.id, spent_at(record, point, compute), point.loss, *labels)
            for record in records
            for labels in [_labels(record, spelling)]
            for point in record.curve
            if is_warm(record.config, point.step)
        ]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(8)]
        run, spent, loss, structure, seed, group, size, width = map(filled_column, columns)
        return cls(run, spent, loss, structure, seed, group, size, {"width": width})


def as_observations(data: Observations | Iterable[RunRecord]) -> Observations:
    """Observations as they are; records by their FLOPs."""
    if isinstance(data, Observations):
        return data
    if not isinstance(data, Iterable):
        raise EinlinearError(
            what=f"observations are {quote(data)}",
            rule="a law is fitted to Observations, or to a list of records",
            fix="read a table by el.read_observations, or records by el.read_record",
        )
    return Observations.from_records(data)


def codes(values: NDArray[Any]) -> Ints:
    """A number for each value, in the order in which they come."""
    listed = values.tolist()
    number = {value: code for code, value in enumerate(dict.fromkeys(listed))}
    return np.fromiter(map(number.__getitem__, listed), np.int64, len(listed))


def filled_column(values: Sequence[Any]) -> Any:
    """The values as one column, also if they are lists."""
    return np.fromiter(values, dtype=object, count=len(values))


def no_run(where: str) -> EinlinearError:
    """The error for a point of no run."""
    return EinlinearError(
        what=f"{where}: run is empty",
        rule="every point belongs to a run",
        fix="give the id of the run",
    )


def bad_compute(where: str, value: float) -> EinlinearError:
    """The error for a compute that is none."""
    return EinlinearError(
        what=f"{where}: compute is {value:g}",
        rule="compute is a finite number of 0 or more",
        fix="give what was spent up to this point, not its logarithm",
    )


def bad_loss(where: str, value: float) -> EinlinearError:
    """The error for a loss that is none."""
    return EinlinearError(
        what=f"{where}: loss is {value:g}",
        rule="a power law is fitted to losses above 0",
        fix="give the loss, not its logarithm; leave it empty where a run diverged",
    )


def _not_of_length(name: str, count: int, expected: int) -> EinlinearError:
    return EinlinearError(
        what=f"{name} has {count} values, run has {expected}",
        rule="the columns of observations are flat and of one length",
        fix="give one value of every column for every point",
    )


def _check_size(values: Any) -> None:
    if isinstance(values, Sized) and not isinstance(values, np.ndarray) and len(values) > _MOST:
        raise EinlinearError(
            what=f"a column of observations has {len(values):,} values",
            rule=f"observations are at most {_MOST:,} points",
            fix="leave out points that lie close to others",
        )


def _names(values: Any) -> Any:
    _check_size(values)
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return np.asarray(values, dtype=object)
    is_column = isinstance(values, Sized) and isinstance(values, Iterable)
    is_column &= not isinstance(values, str | bytes | Mapping | Set)
    if not is_column or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise _not_of_length("a column", 1, 0)
    return filled_column(list(values))


def _check_names(name: str, column: Names) -> None:
    """Refuse values that cannot be told apart from others, such as lists."""
    try:
        set(column.tolist())
    except (TypeError, RecursionError) as error:
        raise EinlinearError(
            what=f"{name} cannot be read: {reason(error)}",
            rule=f"{name} is a column of texts or numbers",
            fix="give one text or number for every point",
        ) from error


def _floats(values: Any) -> Floats:
    if isinstance(values, list | tuple) and set(map(type, values)) & {list, tuple, range, dict}:
        raise ValueError("a value is no number")
    return np.array(values, dtype=float)


def _whole(values: Any) -> Ints:
    with np.errstate(invalid="ignore"):  # infinite ones are found below
        whole = np.asarray(values).astype(np.int64)
    if (whole != values).any():
        raise ValueError("a number is not whole")
    return np.asarray(whole)


def _converted(values: Any, name: str, convert: Callable[[Any], Any]) -> Any:
    _check_size(values)
    try:
        return convert(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise EinlinearError(
            what=f"{name} cannot be read: {reason(error)}",
            rule=f"{name} is a column of {'whole ' if name == 'seed' else ''}numbers",
            fix="give one number for every point",
        ) from error


def _is_empty(column: Any) -> NDArray[np.bool_]:
    nothing: Any = None
    is_none, is_nan = column == nothing, column != column
    return np.asarray(is_none | is_nan | (column == ""), dtype=bool)


def _filled(name: str, column: Any, default: NDArray[Any]) -> Any:
    if column is None:
        return default
    given = _names(column)
    _check_names(name, given)
    if given.shape != default.shape:
        return given
    return np.where(_is_empty(given), default, given)


def _check_records(records: Sequence[Any]) -> None:
    """Refuse what is no record, and records whose losses cannot be compared."""
    for record in records:
        if not isinstance(record, RunRecord):
            raise EinlinearError(
                what=f"observations hold {quote(record)}",
                rule="observations are Observations, or records of runs",
                fix="read a table by read_observations, a record by read_record",
            )
    kinds = {(r.config.task, str(r.environment.get("data"))): r.id for r in records}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise EinlinearError(
            what=f"run {first} was on {one[0]} (data {one[1]}), run {second} on {other[0]} "
            f"(data {other[1]})",
            rule="losses are compared on one task and its data",
            fix="give the records of one task",
        )


def is_warm(config: RunConfig, step: int) -> bool:
    """Whether a step is after the warm-up, or the last; before that no loss follows a law."""
    return step >= min(config.warmup, config.steps)


def spent_at(record: RunRecord, point: Point, compute: Compute) -> float:
    """The compute of a run up to one of its points."""
    if compute == "params":
        return float(record.counts.params)
    if compute == "flops":
        return float(FLOPS_PER_MAC * point.macs)
    if compute in ("linear_macs", "linear_flops"):
        macs = point.units * record.counts.linear_macs
        return float(macs if compute == "linear_macs" else FLOPS_PER_MAC * macs)
    return float(getattr(point, compute))


def _labels(record: RunRecord, spelling: dict[str, str]) -> tuple[str, int, str, int, int]:
    """Structure, seed, group, size and width of a run."""
    config = record.config
    group = replace(config, seed=0).id
    return structure_label(config, spelling), config.seed, group, record.counts.params, config.width


def structure_label(config: RunConfig, spelling: dict[str, str]) -> str:
    """The structure as it was called first, and what else makes its layers others."""
    name = config.structure
    if name != "dense":
        name = spelling.setdefault(str(parse(name)), name)
    if config.num_experts:
        kind = "ffn-" if config.experts == "ffn" else ""
        name += f" {kind}moe {config.num_active}/{config.num_experts}"
    if name != "dense":
        name += " head-aligned" if config.head_aligned else ""
        name += " with head" if config.convert_head else ""
        name += "" if config.weight_norm else " without norm"
    return name


def plain_label(label: str) -> str:
    """A label with its structure in the one spelling that all have; others as they are."""
    structure, added = split_label(label)
    try:
        return str(parse(structure)) + added
    except EinlinearError:
        return label


def split_label(label: str) -> tuple[str, str]:
    """The structure of a label, and what `structure_label` adds to it."""
    added = re.search(_ADDED, label)
    place = len(label) if added is None else added.start()
    return label[:place], label[place:]
