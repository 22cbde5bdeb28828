"""Observations out of files: any CSV or JSONL table with the columns run, compute and loss."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError, quote, reason, shorten
from einlinear.files import as_path, parse_object
from einlinear.studies.observations import (
    Floats,
    Observations,
    bad_compute,
    bad_loss,
    filled_column,
    no_run,
)

REQUIRED = ("run", "compute", "loss")
OPTIONAL = ("structure", "seed", "group", "size")
MOST_COLUMNS = 1_000
NO_LOSS = ("", "na", "n/a", "none", "null")

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How formulas of spreadsheets begin: CSV has an apostrophe before such a text."""

_COUNTS = ("flops", "macs", "FLOPs", "MACs")  # what compute may be called
_SHOWN = 20  # columns that a message names

Where = Callable[[int], str]  # the file and line of a row
Columns = Mapping[str, Sequence[Any]]


def read_observations(path: str | Path) -> Observations:
    """The observations of a CSV file with a header, or of a JSONL file (one object in a line).

    Columns run, compute and loss are needed; structure, seed, group and size are used where they
    are; all others are kept in `more`. A loss that is empty, null or nan is that of a run that
    diverged. Values of CSV are separated by commas, or by semicolons or tabs if its header is. An
    apostrophe before = + - @, as reports write it, is no part of a text.
    """
    path = as_path(path, "the table")
    is_lines = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines, columns = (_json_columns if is_lines else _csv_columns)(path, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule="observations are in a CSV or JSONL file in UTF-8",
            fix="check the path, its permissions and how the file was written",
        ) from error
    if not lines:
        raise EinlinearError(
            what=f"{path} holds no observations",
            rule=f"the table has the columns {', '.join(REQUIRED)} and at least one row",
            fix="check that the runs have written something",
        )
    return _from_columns(columns, lambda row: f"{path}, line {lines[row]}")


def _from_columns(columns: Columns, where: Where) -> Observations:
    """The observations of columns, all values checked."""
    run = _names("run", columns["run"], where)
    if "" in run:
        raise no_run(where(run.index("")))
    compute = _numbers("compute", columns["compute"], where)
    bad = np.flatnonzero(~(np.isfinite(compute) & (compute >= 0)))
    if len(bad):
        raise bad_compute(where(int(bad[0])), compute[bad[0]])
    given = [nan if _has_no_loss(value) else value for value in columns["loss"]]
    loss = _numbers("loss", given, where)
    bad = np.flatnonzero(np.isfinite(loss) & (loss <= 0))
    if len(bad):
        raise bad_loss(where(int(bad[0])), loss[bad[0]])
    names: dict[str, Any] = {
        name: filled_column(_names(name, columns[name], where))
        for name in ("structure", "group", "size")
        if name in columns
    }
    if "seed" in columns:
        names["seed"] = _seeds(columns["seed"], where)
    known = (*REQUIRED, *OPTIONAL)
    more = {n: filled_column(values) for n, values in columns.items() if n not in known}
    return Observations(filled_column(run), compute, loss, **names, more=more)


def _names(name: str, values: Sequence[Any], where: Where) -> list[str]:
    """The values as text without spaces around it, that of nothing being empty."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return [value.strip() for value in values]
    if kinds & {list, dict}:
        row = next(k for k, value in enumerate(values) if isinstance(value, list | dict))
        raise EinlinearError(
            what=f"{where(row)}: {name} is {quote(values[row])}",
            rule=f"{name} is a text or a number",
            fix=f'write {name} as "a" or 12',
        )
    return ["" if value is None else str(value).strip() for value in values]


def _has_no_loss(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in NO_LOSS)


def _numbers(name: str, values: Sequence[Any], where: Where, kind: str = "a number") -> Floats:
    try:
        if bool in set(map(type, values)):
            raise TypeError
        return np.fromiter(map(float, values), float, len(values))
    except (TypeError, ValueError, OverflowError):
        row = next(k for k, value in enumerate(values) if not _is_number(value))
        raise _not_a_number(where(row), name, values[row], kind) from None


def _not_a_number(where: str, name: str, value: Any, kind: str) -> EinlinearError:
    return EinlinearError(
        what=f"{where}: {name} is {quote(value)}",
        rule=f"{name} is {kind}",
        fix=f"write {name} as 12 or 1.5e9, without units or separators",
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, bool)


def _seeds(values: Sequence[Any], where: Where) -> Any:
    kind = "a whole number below 2^63"
    given = [0 if value is None or value == "" else value for value in values]
    seeds = _numbers("seed", given, where, kind)
    bad = np.flatnonzero((seeds != np.floor(seeds)) | (np.abs(seeds) >= 2**63))
    if len(bad):
        raise _not_a_number(where(int(bad[0])), "seed", given[bad[0]], kind)
    whole = seeds.astype(np.int64)
    for row in np.flatnonzero(np.abs(seeds) >= 2**53):  # beyond, floats miss whole numbers
        whole[row] = _exact(given[row])
    return whole


def _exact(value: Any) -> int:
    try:
        return int(value)
    except ValueError:  # a text such as 1e18
        return int(float(value))


def _csv_columns(path: Path, file: Any) -> tuple[list[int], Columns]:
    """The line of each row, and the columns by name."""
    first = file.readline()
    file.seek(0)
    marks = [mark for mark in ",;\t" if mark in first] or [","]
    reader = csv.reader(file, delimiter=marks[0], skipinitialspace=True, strict=True)
    names = [name.strip() for name in next(reader, [])]
    lines, rows = [], []
    for row in reader:
        if row:
            lines.append(reader.line_num)
            rows.append(row)
    if not rows:
        return [], {}
    _check_header(path, names)
    wrong = next((k for k, row in enumerate(rows) if len(row) != len(names)), None)
    if wrong is not None:
        raise _wrong_length(path, lines[wrong], rows[wrong], names)
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    columns = {name: _plain(column) for name, column in columns.items()}
    columns.pop("", None)  # the index of a data frame, or a separator at the end of lines
    return lines, columns


def _plain(column: tuple[str, ...]) -> tuple[str, ...]:
    """The texts without the apostrophe that keeps a spreadsheet from taking them for formulas."""
    if not any(text[:1] == "'" for text in column):
        return column
    return tuple(
        text[1:] if text[:1] == "'" and text.lstrip("'").startswith(FORMULA) else text
        for text in column
    )


def _check_header(path: Path, names: Sequence[str]) -> None:
    for name in REQUIRED:
        if name not in names:
            raise _no_value(path, 1, name, names)
    double = [name for name, count in Counter(names).items() if name and count > 1]
    if double:
        raise EinlinearError(
            what=f"{path}, line 1: there are two columns {quote(double[0])}",
            rule="every column has a name of its own",
            fix="rename one of them",
        )


def _wrong_length(
    path: Path, line: int, row: Sequence[str], names: Sequence[str]
) -> EinlinearError:
    if len(row) < len(names):
        return _no_value(path, line, names[len(row)], names[: len(row)])
    return EinlinearError(
        what=f"{path}, line {line}: there are more values than columns",
        rule="every row has as many values as the header has names",
        fix="check quotes, and the separator, which is a comma, semicolon or tab as in the header",
    )


def _no_value(path: Path, line: int, name: str, names: Sequence[str]) -> EinlinearError:
    other = next((given for given in _COUNTS if given in names), None)
    if name == "compute" and other is not None:
        return EinlinearError(
            what=f"{path}, line {line}: there is no {quote(name)}",
            rule=f"every row has {', '.join(REQUIRED)}; compute is what structures are compared by",
            fix=f"rename {quote(other)} to {quote(name)}",
        )
    return EinlinearError(
        what=f"{path}, line {line}: there is no {quote(name)}",
        rule=f"every row has {', '.join(REQUIRED)}, and in CSV the columns of the header",
        fix=f"add {quote(name)}; the row has {shorten(', '.join(names[:_SHOWN])) or 'nothing'}",
    )


def _json_columns(path: Path, file: Any) -> tuple[list[int], Columns]:
    """The line of each row, and the columns by name; a row may lack those that may be left out."""
    lines, rows = [], []
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = parse_object(text)
        except ValueError:
            raise EinlinearError(
                what=f"{path}, line {line}: there is no JSON object",
                rule='each line is one object such as {"run": "a", "compute": 1e9, "loss": 2.5}',
                fix="write one object in each line, or use CSV",
            ) from None
        for name in REQUIRED:
            if name not in row:
                raise _no_value(path, line, name, list(row))
        lines.append(line)
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    if len(names) > MOST_COLUMNS:
        raise EinlinearError(
            what=f"{path}: its lines have {len(names):,} different names",
            rule=f"a table has at most {MOST_COLUMNS:,} columns",
            fix="give every line the same names, and put what differs into values",
        )
    return lines, {name: [row.get(name) for row in rows] for name in names}
