"""Packed records: the records of many runs in one small file that can be committed and shared.

The file is JSON lines. The first line is the header: what most configs have in common, and every
environment once. Every other line is a run: where its config differs, and its curve as columns.
Lines are sorted, and each has its own checksum, so that a new run changes few lines.

Losses and accuracies are rounded to 8 significant digits, learning rates to 6, and seconds to 4.
The routing of experts is left out; all other fields of a record are kept, and so is its id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields
from math import isfinite
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from einlinear.errors import EinlinearError, quote, reason
from einlinear.files.fields import typed
from einlinear.files.seals import SEAL, seal_of
from einlinear.files.whole import checked_reading, parse_object, write_whole
from einlinear.runs.record import SCHEMA, Counts, NewerError, Point, RunRecord
from einlinear.show.numbers import counted

PACKED_FORMAT, PACKED_SCHEMA = "einlinear records", 1

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # editors write one
_MARKS = (b'"einlinear records"', b'"units_per_step"')  # of a header, and of a run
_MOST_START = 1_000_000
_OWN = ("structure", "width", "steps", "seed")  # in every line, so that it says which run it is
_LOSS_DIGITS, _RATE_DIGITS, _SECONDS_DIGITS = 8, 6, 4
_SEAL_DIGITS, _NAME_DIGITS = 16, 12
_KEPT = "a file is replaced only if the new one has all of its runs"
_RULE = "packed records are a file that einlinear pack has written, and that has not changed since"


@dataclass(frozen=True, slots=True)
class _Header:
    """The first line.

    runs: how many lines follow, so that a missing one is noticed.
    counts: the names of the counts in each line.
    base: settings of more than half of the runs.
    environments: by the beginning of their checksums, which stay when others are added.
    """

    format: str
    schema: int
    runs: int
    counts: tuple[str, ...]
    base: dict[str, Any]
    environments: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Columns:
    """A curve; units are None if they are steps times `units_per_step`, macs if they follow too."""

    step: tuple[int, ...]
    loss: tuple[float | None, ...]
    train_loss: tuple[float | None, ...]
    rate: tuple[float, ...]
    seconds: tuple[float, ...]
    data_seconds: tuple[float, ...]
    units_per_step: int
    units: tuple[int, ...] | None
    macs: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Line:
    """One run.

    config: settings that differ from the base.
    without: names of settings of the base that are not stored for this run.
    environment: its name in the header.
    """

    id: str
    config: dict[str, Any]
    without: tuple[str, ...]
    status: str
    steps_done: int
    unit: str
    counts: tuple[int, ...]
    peak_bytes: int
    train_loss: float | None
    accuracy: float | None
    environment: str
    curve: _Columns


_LINE_DEFAULTS: dict[str, Any] = {
    "without": [],
    "train_loss": None,
    "accuracy": None,
}  # not written
_CURVE_DEFAULTS: dict[str, Any] = {"units": None, "macs": None}


def write_packed(records: Iterable[RunRecord], path: str | Path) -> int:
    """Write records to one file, whole or not at all; return its size in bytes.

    Rounds numbers and leaves out the routing of experts; see the docstring of this module.
    """
    data = packed_bytes(records)
    write_whole(Path(path), data)
    return len(data)


def packed_bytes(records: Iterable[RunRecord]) -> bytes:
    """The content of a file of packed records. The order of the records does not matter."""
    ordered = sorted(records, key=_order)
    if not ordered:
        raise EinlinearError(
            what="there are no records to pack",
            rule="a file of packed records holds at least one run",
            fix="give the records of runs that have finished",
        )
    double = [run for run, count in Counter(r.id for r in ordered).items() if count > 1]
    if double:
        raise EinlinearError(
            what=f"there are two records of run {double[0]}",
            rule="a file of packed records holds each run once",
            fix="leave one of them out; collect_records keeps the first of each run",
        )
    base = _base([record.config.as_dict() for record in ordered])
    environments = {_name(record.environment): record.environment for record in ordered}
    header = _Header(
        format=PACKED_FORMAT,
        schema=PACKED_SCHEMA,
        runs=len(ordered),
        counts=tuple(field.name for field in fields(Counts)),
        base=base,
        environments=dict(sorted(environments.items())),
    )
    lines = [_text(asdict(header)), *(_text(_packed(record, base)) for record in ordered)]
    return "".join(lines).encode()


def read_packed(path: str | Path) -> tuple[RunRecord, ...]:
    """Read the records of a file that `write_packed` wrote; any damage is an error."""
    path = Path(path)
    with checked_reading(path, rule=_RULE, fix="check the path and the permissions of the file"):
        raw = path.read_bytes()
    if not _has_marks(raw.split(b"\n", 2)[:2]):
        raise EinlinearError(
            what=f"{path} does not hold packed records",
            rule=_RULE,
            fix="give the --out of einlinear pack; a table is read with el.read_observations",
        )
    texts = raw.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    lines = ((k, text) for k, text in enumerate(texts, 1) if text.strip())
    number, text = next(lines)
    header = _read_header(path, number, text, is_cut=len(texts) == number)
    records: dict[str, RunRecord] = {}
    for number, text in lines:
        record = _read_run(path, number, text, header, is_cut=len(texts) == number)
        if record.id in records:
            raise _damaged(path, number, f"run {record.id} is in the file twice")
        records[record.id] = record
    if len(records) != header.runs:
        raise _damaged(path, number, f"the file ends after {len(records)} of {header.runs} runs")
    return tuple(sorted(records.values(), key=_order))


def is_packed(path: Path) -> bool:
    """Whether a file holds packed records, perhaps damaged ones, by its first two lines."""
    with suppress(OSError), path.open("rb") as file:
        return _has_marks([file.readline(_MOST_START), file.readline(_MOST_START)])
    return False


def _has_marks(lines: Sequence[bytes]) -> bool:
    """Whether the first lines are those of packed records; one of them may be damaged."""
    return any(mark in line[:_MOST_START] for line in lines for mark in _MARKS)


def check_replaceable(path: Path, records: Iterable[RunRecord]) -> None:
    """Refuse to replace a file by packed records if anything in it would be lost."""
    with checked_reading(path, rule=_KEPT, fix="choose another --out"):
        is_file = path.is_file()
    if not is_file:
        return
    if not is_packed(path):
        raise EinlinearError(
            what=f"{path} exists, and does not hold packed records",
            rule=_KEPT,
            fix="choose another --out, or remove the file first",
        )
    try:
        held = read_packed(path)
    except EinlinearError as error:
        raise EinlinearError(
            what=error.what,
            rule=_KEPT,
            fix="choose another --out; or restore the file, or remove it first",
        ) from error
    given = {record.id for record in records}
    lost = sum(record.id not in given for record in held)
    if lost:
        raise EinlinearError(
            what=f"{path} has {counted(lost, 'run')} that the new file would not have",
            rule=_KEPT,
            fix=f"give {path} as a SOURCE too, which keeps them; or choose another --out",
        )


def absolute_paths(records: Iterable[RunRecord]) -> tuple[str, ...]:
    """The absolute paths of data in configs, each once: other machines will not have them."""
    paths = [path for r in records for path in (r.config.data, r.config.validation) if path]
    return tuple(path for path in dict.fromkeys(paths) if _is_absolute(path))


def _is_absolute(path: str) -> bool:
    return any(kind(path).is_absolute() for kind in (PurePosixPath, PureWindowsPath))


def _order(record: RunRecord) -> tuple[Any, ...]:
    """The place of a run in the file; a new run does not move the others."""
    run = record.config
    size = (run.num_experts, run.width, run.depth, run.steps)
    return (run.task, run.structure, *size, run.seed, record.id)


def _base(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that more than half of the runs have.

    Not those that all have: one run with another setting would then change every line.
    """
    counts: dict[str, Counter[str]] = {}
    for config in configs:
        for name, value in config.items():
            counts.setdefault(name, Counter())[json.dumps(value)] += 1
    common = {name: found.most_common(1)[0] for name, found in counts.items() if name not in _OWN}
    return {
        name: json.loads(text)
        for name, (text, count) in sorted(common.items())
        if 2 * count > len(configs)
    }


def _packed(record: RunRecord, base: Mapping[str, Any]) -> dict[str, Any]:
    config = record.config.as_dict()
    line = _Line(
        id=record.id,
        config={
            name: value
            for name, value in config.items()
            if name not in base or json.dumps(base[name]) != json.dumps(value)
        },
        without=tuple(name for name in base if name not in config),
        status=record.status,
        steps_done=record.steps_done,
        unit=record.unit,
        counts=astuple(record.counts),
        peak_bytes=record.peak_bytes,
        train_loss=_rounded(record.train_loss, _LOSS_DIGITS),
        accuracy=_rounded(record.accuracy, _LOSS_DIGITS),
        environment=_name(record.environment),
        curve=_columns(record.curve, record.counts),
    )
    values = asdict(line)
    curve = _without_defaults(values["curve"], _CURVE_DEFAULTS)
    return _without_defaults(values, _LINE_DEFAULTS) | {"curve": curve}


def _without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if name not in defaults or v not in (None, ())}


def _columns(curve: Sequence[Point], counts: Counts) -> _Columns:
    per_step = next((point.units // point.step for point in curve if point.step), 0)
    has_units = all(point.units == point.step * per_step for point in curve)
    has_macs = all(point.macs == point.units * counts.macs for point in curve)
    return _Columns(
        step=tuple(point.step for point in curve),
        loss=tuple(_rounded(point.loss, _LOSS_DIGITS) for point in curve),
        train_loss=tuple(_rounded(point.train_loss, _LOSS_DIGITS) for point in curve),
        rate=tuple(_significant(point.rate, _RATE_DIGITS) for point in curve),
        seconds=tuple(_significant(point.seconds, _SECONDS_DIGITS) for point in curve),
        data_seconds=tuple(_significant(point.data_seconds, _SECONDS_DIGITS) for point in curve),
        units_per_step=per_step,
        units=None if has_units else tuple(point.units for point in curve),
        macs=None if has_macs else tuple(point.macs for point in curve),
    )


def rounded_losses(record: RunRecord) -> tuple[float | None, ...]:
    """The losses of a curve as a packed file holds them."""
    return tuple(_rounded(point.loss, _LOSS_DIGITS) for point in record.curve)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else _significant(value, digits)


def _significant(value: float, digits: int) -> float:
    short = float(f"{value:.{digits}g}")
    return short if isfinite(short) else value  # the largest floats round up to infinity


def _name(environment: Mapping[str, Any]) -> str:
    return seal_of(environment)[:_NAME_DIGITS]


def _text(values: Mapping[str, Any]) -> str:
    """One line, with its checksum."""
    seal = seal_of(values)[:_SEAL_DIGITS]
    return json.dumps({**values, SEAL: seal}, separators=(",", ":")) + "\n"


def _parsed(path: Path, number: int, text: bytes, is_cut: bool) -> dict[str, Any]:
    """The values of a line and its checksum; whatever is wrong is an error that names the line.

    is_cut: whether the line has no end, as the last one of a file that was not copied to its end.
    """
    try:
        return parse_object(text.decode())
    except ValueError as error:
        why = "the line is cut off" if is_cut else reason(error)
        raise _damaged(path, number, why) from error


def _unseal_(values: dict[str, Any]) -> None:
    """Check and remove the checksum of a line; raise a ValueError if the line has changed."""
    seal = values.pop(SEAL, None)
    if seal is None:
        raise ValueError("it has no checksum")
    if seal != seal_of(values)[:_SEAL_DIGITS]:
        raise ValueError("its checksum is wrong: it has changed since it was written")


def _read_header(path: Path, number: int, text: bytes, *, is_cut: bool) -> _Header:
    values = _parsed(path, number, text, is_cut)
    schema = values.get("schema")
    if type(schema) is int and schema > PACKED_SCHEMA:
        raise NewerError(
            what=f"cannot read {path}: its schema is {quote(schema)}, not {PACKED_SCHEMA}",
            rule="packed records are read by the version of einlinear that wrote them, or a later "
            "one",
            fix="pip install --upgrade einlinear",
        )
    try:
        if schema != PACKED_SCHEMA:
            raise ValueError(f"its schema is {quote(schema)}, not {PACKED_SCHEMA}")
        _unseal_(values)
        header: _Header = typed(_Header, values, "the header")
        return header
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error


def _read_run(path: Path, number: int, text: bytes, header: _Header, *, is_cut: bool) -> RunRecord:
    values = _parsed(path, number, text, is_cut)
    source = f"{path}, line {number}"
    try:
        _unseal_(values)
        values = _LINE_DEFAULTS | values
        if isinstance(values.get("curve"), dict):
            values["curve"] = _CURVE_DEFAULTS | values["curve"]
        line: _Line = typed(_Line, values, "the run")
        record = RunRecord.from_dict(_unpacked(line, header), source)
    except EinlinearError as error:
        raise _damaged(path, number, error.what.removeprefix(f"cannot read {source}: ")) from error
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error
    if record.id != line.id:
        raise EinlinearError(
            what=f"{source}: the run is {quote(line.id)}, but its settings now have the id "
            f"{record.id}",
            rule="the id of a run is a hash of its settings and of the rules for sizes",
            fix="read the file with the version of einlinear that wrote it, or train the runs "
            "again",
        )
    return record


def _unpacked(line: _Line, header: _Header) -> dict[str, Any]:
    """The run as the JSON object of a record."""
    if line.environment not in header.environments:
        raise ValueError(f"the header has no environment {quote(line.environment)}")
    if len(line.counts) != len(header.counts):
        raise ValueError(f"it has {len(line.counts)} counts, and the header {len(header.counts)}")
    base = {name: value for name, value in header.base.items() if name not in line.without}
    counts = dict(zip(header.counts, line.counts, strict=True))
    names = ("status", "steps_done", "unit", "peak_bytes", "train_loss", "accuracy")
    return {name: getattr(line, name) for name in names} | {
        "schema": SCHEMA,
        "config": base | line.config,
        "counts": counts,
        "environment": header.environments[line.environment],
        "curve": list(_points(line.curve, counts.get("macs", 0))),
    }


def _points(curve: _Columns, macs_per_unit: int) -> Iterator[dict[str, Any]]:
    """The points of a curve as JSON objects; raises a ValueError if columns differ in length."""
    units = curve.units
    if units is None:
        units = tuple(step * curve.units_per_step for step in curve.step)
    macs = curve.macs
    if macs is None:
        macs = tuple(count * macs_per_unit for count in units)
    names = ("step", "loss", "train_loss", "rate", "seconds", "data_seconds")
    columns = {name: getattr(curve, name) for name in names} | {"units": units, "macs": macs}
    for name, column in columns.items():
        if len(column) != len(curve.step):
            raise ValueError(f"{name} has {len(column)} points, and step {len(curve.step)}")
    for row in zip(*columns.values(), strict=True):
        yield {**dict(zip(columns, row, strict=True)), "routing": []}


def _damaged(path: Path, number: int, why: str) -> EinlinearError:
    return EinlinearError(
        what=f"cannot read {path}, line {number}: {why}",
        rule=_RULE,
        fix="restore the file, or pack the runs again with einlinear pack; if a later version "
        "wrote it, pip install --upgrade einlinear",
    )
