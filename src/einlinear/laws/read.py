"""Read observations from any CSV or JSONL table with the columns run, compute and loss."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from einlinear.errors import EinlinearError, quote, shorten
from einlinear.files.whole import as_path, checked_reading, parse_object
from einlinear.laws.observations import Objects, Observations, check_points, object_column

REQUIRED = ("run", "compute", "loss")
OPTIONAL = ("structure", "seed", "group", "size")
MOST_COLUMNS = 1_000
NO_LOSS = ("", "na", "n/a", "none", "null")

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How spreadsheet formulas begin; reports put an apostrophe before such a text in CSV."""

_COUNTS = ("flops", "macs", "FLOPs", "MACs")  # what compute may be called
_SHOWN = 20  # columns that a message names

Columns = Mapping[str, Sequence[Any]]


def read_observations(path: str | Path) -> Observations:
    """Read observations from a CSV file with a header, or a JSONL file with one object per line.

    The columns run, compute and loss are required; structure, seed, group and size are optional;
    all others are kept in `more`. An empty, null or nan loss means that the run diverged. CSV
    values are separated by commas, or by semicolons or tabs if the header is. The apostrophe that
    reports put before a text that begins with = + - @ is removed.
    """
    path = as_path(path, "the table")
    is_lines = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    with checked_reading(
        path,
        rule="observations are read from a UTF-8 CSV or JSONL file",
        fix="check the path, the permissions and the encoding of the file",
        errors=(OSError, UnicodeDecodeError, csv.Error),
    ):
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines, columns = (_json_columns if is_lines else _csv_columns)(path, file)
    if not lines:
        raise EinlinearError(
            what=f"{path} holds no observations",
            rule=f"the table has the columns {', '.join(REQUIRED)} and at least one row",
            fix="check that the runs have written results",
        )

    def where(row: int) -> str:
        return f"{path}, line {lines[row]}"

    known = [name for name in (*REQUIRED, *OPTIONAL) if name in columns]
    own: dict[str, Any] = {name: _parsed(name, columns[name], where) for name in known}
    compute, loss = (own[name].astype(float) for name in ("compute", "loss"))
    check_points(own["run"], compute, loss, where)
    more = {n: object_column(values) for n, values in columns.items() if n not in known}
    return Observations(**own, more=more)


def _parsed(name: str, values: Sequence[Any], where: Callable[[int], str]) -> Objects:
    """The parsed values of a column."""
    parse, kind = _PARSERS.get(name, (_name, "a text or a number"))
    parsed = []
    try:
        for value in values:
            parsed.append(parse(value))
    except (TypeError, ValueError, OverflowError):
        row = len(parsed)
        plain = '"a" or 12' if parse is _name else "12 or 1.5e9, without units or separators"
        raise EinlinearError(
            what=f"{where(row)}: {name} is {quote(values[row])}",
            rule=f"{name} is {kind}",
            fix=f"write {name} as {plain}",
        ) from None
    return object_column(parsed)


def _name(value: Any) -> str:
    """Stripped text; empty for None."""
    if isinstance(value, list | dict):
        raise TypeError
    return "" if value is None else str(value).strip()


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _loss(value: Any) -> float:
    has_none = value is None or (isinstance(value, str) and value.strip().lower() in NO_LOSS)
    return nan if has_none else _number(value)


def _seed(value: Any) -> int:
    """A whole number, exact even where floats skip whole numbers."""
    if value is None or value == "":
        return 0
    number = _number(value)
    try:
        whole = int(value)
    except ValueError:  # a text such as 1e18
        whole = int(number)
    if float(whole) != number or abs(whole) >= 2**63:
        raise ValueError
    return whole


_PARSERS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "compute": (_number, "a number"),
    "loss": (_loss, "a number"),
    "seed": (_seed, "a whole number below 2⁶³"),
}


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
    for line, row in zip(lines, rows, strict=True):
        if len(row) < len(names):
            raise _no_value(path, line, names[len(row)], names[: len(row)])
        if len(row) > len(names):
            raise EinlinearError(
                what=f"{path}, line {line}: there are more values than columns",
                rule="every row has as many values as the header has names",
                fix="check quotes, and that the separator is the comma, semicolon or tab of the "
                "header",
            )
    columns = dict(zip(names, map(_plain, zip(*rows, strict=True)), strict=True))
    columns.pop("", None)  # the index of a data frame, or a separator at the end of lines
    return lines, columns


def _plain(column: tuple[str, ...]) -> tuple[str, ...]:
    """Remove the apostrophe that keeps spreadsheets from reading a text as a formula."""
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
            rule="column names are unique",
            fix="rename one of them",
        )


def _no_value(path: Path, line: int, name: str, names: Sequence[str]) -> EinlinearError:
    rule = f"every row has {', '.join(REQUIRED)}, and in CSV the columns of the header"
    fix = f"add {quote(name)}; the row has {shorten(', '.join(names[:_SHOWN])) or 'nothing'}"
    other = next((given for given in _COUNTS if given in names), None)
    if name == "compute" and other is not None:
        rule = f"every row has {', '.join(REQUIRED)}; structures are compared by compute"
        fix = f"rename {quote(other)} to {quote(name)}"
    what = f"{path}, line {line}: there is no {quote(name)}"
    return EinlinearError(what=what, rule=rule, fix=fix)


def _json_columns(path: Path, file: Any) -> tuple[list[int], Columns]:
    """The line of each row, and the columns by name; rows may lack optional columns."""
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
            fix="give every line the same names, and move what differs into values",
        )
    return lines, {name: [row.get(name) for row in rows] for name in names}
