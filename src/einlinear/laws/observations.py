"""Observations: the one table of compute and loss, built from records or arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from einlinear.errors import EinlinearError, quote, reason, shorten
from einlinear.runs.config import RunConfig
from einlinear.runs.record import Counts, Point, RunRecord
from einlinear.runs.step_times import StepTimes, as_step_times
from einlinear.show.numbers import FLOPS_PER_MAC
from einlinear.structures.text import parse_structure
from einlinear.structures.values import one_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Objects = NDArray[np.object_]
Compute = Literal["flops", "linear_flops", "seconds", "params", "units", "macs", "linear_macs"]
"""FLOPs count training: 6 per multiply-add of the forward pass, which is what `macs` counts."""
_MOST = 50_000_000
_EXPERT_LAYERS = {"all": [], "vo": ["in V and O"], "ffn": ["in FFNs"]}
_COLUMNS = ("run", "compute", "loss", "structure", "seed", "group", "size")


class StructureLabel(NamedTuple):
    """A structure, as its first record spells it, and what else sets its runs apart.

    variant: experts with their layers, norm and gains, head alignment, a converted head, no weight
        norm, factors that start by their fan-in, Muon, standard decay; "" for plain layers that
        AdamW trains.
    """

    structure: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.structure} {self.variant}".rstrip()

    def matches(self, text: str) -> bool:
        """Whether a text names the same layers, in any spelling of the structure."""
        if text == str(self):
            return True
        if not text.endswith(self.variant):
            return False
        try:
            return parse_structure(text.removesuffix(self.variant)) == parse_structure(
                self.structure
            )
        except EinlinearError:
            return False


@dataclass(frozen=True, eq=False)
class Observations:
    """A table of compute and loss, one row for each evaluation of each run.

    Rows without a finite loss are dropped and counted in `left_out`. Rows with zero compute, such
    as the first of a run, are kept, but no frontier or fit uses them. An empty value in an optional
    column means its default.

    Args:
        run: the id of the run; runs with the same id but different seeds are different runs.
        compute: what the run had spent at this point; 0 or more.
        loss: above 0.
        structure: rows with the same structure are fitted together; default "all".
        seed: the random seed of the run; default 0.
        group: the same for runs that differ only in their seed; defaults to the run.
        size: the same for runs with the same model size; defaults to the group.
        more: additional columns by name.
        left_out: how many rows had no loss.
    """

    run: Objects
    compute: Floats
    loss: Floats
    structure: Objects = None  # type: ignore[assignment]
    seed: Ints = None  # type: ignore[assignment]
    group: Objects = None  # type: ignore[assignment]
    size: Objects = None  # type: ignore[assignment]
    more: Mapping[str, Objects] = field(default_factory=dict)
    left_out: int = 0

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {
            "run": _names("run", self.run),
            "compute": _converted(self.compute, "compute", _floats),
            "loss": _converted(self.loss, "loss", _floats),  # None becomes nan
        }
        count = len(columns["run"])
        columns["structure"] = _filled("structure", self.structure, np.full(count, "all", object))
        seed = _filled("seed", self.seed, np.zeros(count, object))
        columns["seed"] = _converted(seed, "seed", _whole, "whole number")
        columns["group"] = _filled("group", self.group, columns["run"])
        columns["size"] = _filled("size", self.size, columns["group"])
        if not isinstance(self.more, Mapping):
            raise EinlinearError(
                what=f"more is {quote(self.more)}",
                rule="more holds additional columns by name",
                fix='give {"width": [...]}, or leave it out',
            )
        more = {name: _column(column) for name, column in self.more.items()}
        for name, column in [*columns.items(), *more.items()]:
            if column.shape != (count,):
                raise _not_of_length(name, column.size, count)
        keep = np.isfinite(columns["loss"])
        left_out = self.left_out + int((~keep).sum())
        for name, column in columns.items():
            kept = column[keep]
            kept.flags.writeable = False  # views of it are cached
            object.__setattr__(self, name, kept)
        object.__setattr__(self, "more", {name: column[keep] for name, column in more.items()})
        object.__setattr__(self, "left_out", left_out)
        check_points(self.run, self.compute, self.loss, lambda k: f"point {k} of the observations")
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
        """All structures, in order of first appearance."""
        return tuple(dict.fromkeys(self.structure.tolist()))

    def take(self, index: NDArray[Any]) -> Observations:
        """The points at these positions, or where a mask is true."""
        own = {name: getattr(self, name)[index] for name in _COLUMNS}
        more = {name: column[index] for name, column in self.more.items()}
        return replace(self, **own, more=more)

    def of(self, structure: str) -> Observations:
        """The points of one structure."""
        if structure not in self.structures:
            raise EinlinearError(
                what=f"there is no structure {quote(structure)} in the observations",
                rule="the structure must be one of those observed",
                fix=f"give one of {shorten(', '.join(map(str, self.structures)))}",
            )
        return self.take(self.structure == structure)

    @classmethod
    def from_records(
        cls,
        records: Iterable[RunRecord],
        compute: Compute = "flops",
        *,
        times: StepTimes | str | Path | None = None,
    ) -> Observations:
        """Observations from the curves of runs, without warm-up.

        The size of a run is its number of parameters. All spellings of a structure count as one and
        are named as in the first record. `more` has the width of each run, its structure without
        experts and other variations (`base_structure`), and those (`variant`).

        Args:
            records: of one task, on the same data.
            compute: what to count.
            times: with compute="seconds", the measured time of a step of each model, or the file
                that holds them. Seconds are then steps times the time of a step, and do not depend
                on what else the machine did while a run was trained.
        """
        one_of(compute, "compute", get_args(Compute))
        if times is not None and compute != "seconds":
            raise EinlinearError(
                what=f"times are given, and compute is {quote(compute)}",
                rule="the time of a step decides seconds, and nothing else",
                fix='give compute="seconds", or leave times out',
            )
        measured = as_step_times(times)
        records = list(records)
        _check_records(records)
        spelling: dict[str, str] = {}
        rows: list[tuple[Any, ...]] = []
        for record in records:
            config, size = record.config, record.counts.params
            label, group = structure_label(config, spelling), group_of(config)
            labels = (str(label), config.seed, group, size, config.width, *label)
            step = None if measured is None else measured.seconds_of(config)
            rows += [
                (record.id, spent_at(point, compute, record.counts, step), point.loss, *labels)
                for point in record.curve
                if is_warm(config, point.step)
            ]
        names = (*_COLUMNS, "width", "base_structure", "variant")
        more = {name: object_column([row[k] for row in rows]) for k, name in enumerate(names)}
        own: Any = {name: more.pop(name) for name in _COLUMNS}
        return cls(**own, more=more)


def as_observations(data: Observations | Iterable[RunRecord]) -> Observations:
    """Convert records to observations by their FLOPs; return observations as they are."""
    if isinstance(data, Observations):
        return data
    if not isinstance(data, Iterable):
        raise EinlinearError(
            what=f"observations are {quote(data)}",
            rule="a law is fitted to Observations, or to a list of records",
            fix="read a table with el.read_observations, or records with el.read_record",
        )
    return Observations.from_records(data)


def numbered(values: NDArray[Any]) -> Ints:
    """Number the distinct values in order of first appearance; return the number of each value."""
    listed = values.tolist()
    number = {value: code for code, value in enumerate(dict.fromkeys(listed))}
    return np.fromiter(map(number.__getitem__, listed), np.int64, len(listed))


def object_column(values: Sequence[Any]) -> Objects:
    """A flat array of Python objects, even if the values are lists."""
    return np.fromiter(values, dtype=object, count=len(values))


def check_points(run: Objects, compute: Floats, loss: Floats, where: Callable[[int], str]) -> None:
    """Refuse points that no law can use; `where` says where the point of an index comes from."""
    for index in np.flatnonzero(_is_empty(run))[:1].tolist():
        raise EinlinearError(
            what=f"{where(index)}: run is empty",
            rule="every point belongs to a run",
            fix="give the id of the run",
        )
    for index in np.flatnonzero(~(np.isfinite(compute) & (compute >= 0)))[:1].tolist():
        raise EinlinearError(
            what=f"{where(index)}: compute is {compute[index]:g}",
            rule="compute is a finite number of 0 or more",
            fix="give what was spent up to this point, not its logarithm",
        )
    for index in np.flatnonzero(np.isfinite(loss) & (loss <= 0))[:1].tolist():
        raise EinlinearError(
            what=f"{where(index)}: loss is {loss[index]:g}",
            rule="a power law is fitted to losses above 0",
            fix="give the loss, not its logarithm; leave it empty where a run diverged",
        )


def _not_of_length(name: str, count: int, expected: int) -> EinlinearError:
    return EinlinearError(
        what=f"{name} has {count} values, run has {expected}",
        rule="all columns are flat and have the same length",
        fix="give each column one value per point",
    )


def _check_size(values: Any) -> None:
    if isinstance(values, Sized) and not isinstance(values, np.ndarray) and len(values) > _MOST:
        raise EinlinearError(
            what=f"a column of observations has {len(values):,} values",
            rule=f"observations are at most {_MOST:,} points",
            fix="drop points that are close to others",
        )


def _column(values: Any) -> Any:
    _check_size(values)
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return np.asarray(values, dtype=object)
    is_column = isinstance(values, Sized) and isinstance(values, Iterable)
    is_column &= not isinstance(values, str | bytes | Mapping | Set)
    if not is_column or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise _not_of_length("a column", 1, 0)
    return object_column(list(values))


def _names(name: str, values: Any) -> Any:
    """A column of names; refuses values that cannot be compared, such as lists."""
    column = _column(values)
    _converted(column.tolist(), name, set, "text", "number")
    return column


def _floats(values: Any) -> Floats:
    if isinstance(values, list | tuple) and set(map(type, values)) & {list, tuple, range, dict}:
        raise ValueError("a value is not a number")
    return np.array(values, dtype=float)


def _whole(values: Any) -> Ints:
    with np.errstate(invalid="ignore"):  # infinite values fail the check below
        whole = np.asarray(values).astype(np.int64)
    if (whole != values).any():
        raise ValueError("a number is not whole")
    return np.asarray(whole)


def _converted(values: Any, name: str, convert: Callable[[Any], Any], *kinds: str) -> Any:
    _check_size(values)
    kinds = kinds or ("number",)
    try:
        return convert(values)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EinlinearError(
            what=f"{name} cannot be read: {reason(error)}",
            rule=f"{name} is a column of {' or '.join(f'{kind}s' for kind in kinds)}",
            fix=f"give one {' or '.join(kinds)} per point",
        ) from error


def _is_empty(column: Any) -> Bools:
    nothing: Any = None
    is_none, is_nan = column == nothing, column != column
    return np.asarray(is_none | is_nan | (column == ""), dtype=bool)


def _filled(name: str, column: Any, default: NDArray[Any]) -> Any:
    if column is None:
        return default
    given = _names(name, column)
    if given.shape != default.shape:
        return given
    return np.where(_is_empty(given), default, given)


def _check_records(records: Sequence[Any]) -> None:
    """Refuse anything but records, and records whose losses cannot be compared."""
    for record in records:
        if not isinstance(record, RunRecord):
            raise EinlinearError(
                what=f"observations hold {quote(record)}",
                rule="observations are Observations, or records of runs",
                fix="read a table with read_observations, a record with read_record",
            )
    kinds = {(r.config.task, str(r.environment.get("data"))): r.id for r in records}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise EinlinearError(
            what=f"run {first} was on {one[0]} (data {one[1]}), run {second} on {other[0]} "
            f"(data {other[1]})",
            rule="losses can only be compared on the same task and data",
            fix="give the records of one task",
        )


def is_warm(config: RunConfig, step: int) -> bool:
    """Whether a step is after warm-up, or the last one; earlier losses follow no law."""
    return step >= min(config.warmup, config.steps)


def spent_at(
    point: Point, compute: Compute, counts: Counts | None, step_seconds: float | None = None
) -> float:
    """What a run had spent at one of its points; only some measures need its counts.

    `step_seconds` is the measured time of a step; without it, seconds are those of the run's clock.
    """
    if compute == "seconds" and step_seconds is not None:
        return point.step * step_seconds
    if compute == "flops":
        return float(FLOPS_PER_MAC * point.macs)
    if compute in ("macs", "seconds", "units"):
        return float(getattr(point, compute))
    assert counts is not None, f"{compute} is known only with the counts of a record"
    if compute == "params":
        return float(counts.params)
    macs = point.units * counts.linear_macs
    return float(macs if compute == "linear_macs" else FLOPS_PER_MAC * macs)


def group_of(config: RunConfig) -> str:
    """A key that runs share if they differ only in their seed."""
    return replace(config, seed=0).id


def structure_label(config: RunConfig, spelling: dict[str, str]) -> StructureLabel:
    """The label of a run's layers; `spelling` remembers how each structure was first spelled."""
    name = config.structure
    if name != "dense":
        name = spelling.setdefault(str(parse_structure(name)), name)
    variant = []
    if config.num_experts:
        kind = "ffn-moe" if config.experts == "ffn" else "moe"
        variant.append(f"{kind} {config.num_active}/{config.num_experts}")
        if config.experts == "linear":
            variant += _EXPERT_LAYERS[config.expert_layers]
            is_together = config.weight_norm and config.expert_norm == "together"
            variant += ["norm together"] if is_together else []
            variant += ["gains"] if config.expert_gain else []
    if name != "dense" or variant:
        variant += ["head-aligned"] if config.head_aligned else []
        variant += ["own axis"] if config.head_aligned and config.head_axis == "own" else []
        variant += ["with head"] if config.convert_head else []
        variant += [] if config.weight_norm else ["without norm"]
        has_factors = config.structure != "dense" or config.experts == "linear"
        is_wide = has_factors and config.factor_init == "fan_in"
        variant += ["fan-in factors"] if is_wide else []
    variant += ["muon"] if config.optimizer == "muon" else []
    has_decay = config.weight_decay > 0 and config.parametrization == "mup"
    variant += ["standard decay"] if has_decay and config.decay == "standard" else []
    return StructureLabel(name, " ".join(variant))
