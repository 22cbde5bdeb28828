"""The numbers of a report as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from einlinear.laws.fit import PowerLaw
from einlinear.laws.multiplier import Multiplier
from einlinear.laws.read import FORMULA
from einlinear.reports.analyse import Analysis
from einlinear.reports.shown import RUN_COLUMNS

CsvRow = dict[str, Any]


def run_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per run, of every task."""
    for run in analysis.gathered.runs:
        yield {column.name: column.value(run) for column in RUN_COLUMNS}


def point_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per point after warm-up, in the format of `read_observations`, by FLOPs."""
    for run in analysis.runs:
        compute = run.spent.get("compute", run.spent.get("flops"))
        for k, point in enumerate(run.curve):
            if run.counts(point):
                yield {
                    "run": run.id,
                    "compute": None if compute is None else compute[k],
                    "loss": point.loss,
                    "structure": run.structure,
                    "seed": run.seed,
                    "group": run.group,
                    "size": run.size,
                    "status": run.state,
                    "width": run.width,
                    "depth": run.depth,
                    "step": run.step(point),
                    **{
                        name: run.spent[name][k] if name in run.spent else None
                        for name in ("linear_flops", "seconds", "params", "units")
                    },
                    "base_structure": run.label.structure,
                    "variant": run.label.variant,
                }


def leaderboard_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per candidate of a search, the best first."""
    search = analysis.gathered.search
    for row in () if search is None else search.answer.rows:
        values: CsvRow = {}
        for name, value in asdict(row).items():
            if name.endswith("_interval"):
                ends = (None, None) if value is None else value
                values |= dict(zip((f"{name[:-9]}_low", f"{name[:-9]}_high"), ends, strict=True))
            else:
                values[name] = value
        yield values


def chosen_run_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per run of a search, also those that longer ones go on from, in their order."""
    search = analysis.gathered.search
    lanes = () if search is None else search.lanes
    pairs = [(one, lane) for lane in lanes for one in lane.runs]
    for one, lane in sorted(pairs, key=lambda pair: pair[0].number):
        yield {
            "number": one.number,
            "run": one.run.id,
            "candidate": lane.name,
            "state": lane.state,
            "width": one.run.width,
            "steps": one.run.steps_done,
            "seed": one.run.seed,
            "rate": one.rate,
            "loss": one.run.loss,
            "flops": one.flops,
            "spent_before": one.spent,
            "why": one.why,
        }


def law_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per structure and measure."""
    for measure, found in analysis.measured.items():
        for row in found.laws.values():
            law = row.law
            values: CsvRow = {"measure": measure, "structure": row.structure}
            for name in ("linf", "b", "a"):
                values |= _with_ends(law, name)
            for name in ("r2", "rms", "num_points", "num_runs", "decades"):
                values[name] = getattr(law, name, None)
            for k, third in enumerate(("first", "middle", "last")):
                values[f"residual_{third}"] = None if law is None else law.thirds[k]
            for name in ("is_systematic", "undercut", "overshoot", "stray", "at_bound"):
                values[name] = getattr(law, name, None)
            yield values | {"points": "" if law is None else row.points, "note": row.note}


def _with_ends(found: PowerLaw | Multiplier | None, name: str) -> CsvRow:
    """A number and the ends of its interval; None if there is no law."""
    low, high = getattr(found, f"{name}_interval", (None, None))
    return {name: getattr(found, name, None), f"{name}_low": low, f"{name}_high": high}


def multiplier_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per structure and measure that it is compared by."""
    for measure, found in analysis.measured.items():
        for name, one in found.multipliers.items():
            values: CsvRow = {"measure": measure, "structure": name, "reference": one.reference}
            values |= _with_ends(one, "median") | {"mean": one.mean, "std": one.std}
            values |= _with_ends(one, "mean") | {"num_points": one.num_points}
            yield values | {"is_extrapolated": one.mean_is_extrapolated}


def linf_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per structure and given linf."""
    return map(asdict, analysis.linf_rows)


def final_rows(analysis: Analysis) -> Iterator[CsvRow]:
    """One row per structure and width."""
    return map(asdict, analysis.finals)


TABLES: dict[str, Callable[[Analysis], Iterator[CsvRow]]] = {
    "runs": run_rows,
    "points": point_rows,
    "finals": final_rows,
    "power-laws": law_rows,
    "multipliers": multiplier_rows,
    "linf": linf_rows,
    "leaderboard": leaderboard_rows,
    "chosen-runs": chosen_run_rows,
}
"""All tables, by file name."""


def to_csv(rows: Iterator[CsvRow]) -> str:
    """Format rows as CSV with a header; empty if there are no rows."""
    listed = list(rows)
    if not listed:
        return ""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, listed[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in row.items()} for row in listed)
    return file.getvalue()


def _safe(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would run as a formula.

    `read_observations` removes it again. Fractions become decimal numbers.
    """
    if isinstance(value, Fraction):
        return float(value)
    if not isinstance(value, str) or not value.lstrip("'").startswith(FORMULA):
        return value
    try:
        float(value)  # a spreadsheet reads such a text as a number, which is harmless
    except ValueError:
        return f"'{value}"
    return value
