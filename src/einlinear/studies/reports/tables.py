"""The numbers of a report as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from einlinear.studies.reports.analyse import Analysis
from einlinear.studies.reports.finals import find_finals
from einlinear.studies.tables import FORMULA

Row = dict[str, Any]


def run_rows(analysis: Analysis) -> Iterator[Row]:
    """One row for each run of every task."""
    for run in analysis.gathered.runs:
        place = run.exponents
        yield {
            "run": run.id,
            "status": run.state,
            "structure": run.structure,
            "omega": None if place is None else float(place.omega),
            "psi": None if place is None else float(place.psi),
            "nu": None if place is None else float(place.nu),
            "task": run.task,
            "width": run.width,
            "depth": run.depth,
            "experts": run.experts,
            "seed": run.seed,
            "params": run.params,
            "macs_per_unit": run.macs,
            "training_flops_per_unit": run.flops,
            "steps": run.steps_done,
            "compute": run.spent("compute") or None,
            "loss": run.loss,
            "best_loss": run.best_loss,
            "seconds": run.seconds,
            "units_per_second": run.units_per_second,
            "peak_bytes": run.peak_bytes,
            "message": run.message,
        }


def point_rows(analysis: Analysis) -> Iterator[Row]:
    """One row for each point that counts, as `read_observations` reads it, by FLOPs."""
    for run in analysis.runs:
        for point in filter(run.counts, run.curve):
            spent = dict(point.spent)
            yield {
                "run": run.id,
                "compute": spent.pop("compute", spent.get("flops")),
                "loss": point.loss,
                "structure": run.structure,
                "seed": run.seed,
                "group": run.group,
                "size": run.size,
                "status": run.state,
                "width": run.width,
                "depth": run.depth,
                "step": point.step,
                **{
                    name: spent.get(name) for name in ("linear_flops", "seconds", "params", "units")
                },
            }


def law_rows(analysis: Analysis) -> Iterator[Row]:
    """One row for each structure and measure."""
    for measure, found in analysis.measured.items():
        for row in found.laws.values():
            law = row.law
            values: Row = {"measure": measure, "structure": row.structure}
            for name in ("linf", "b", "a"):
                ends = (None, None) if law is None else getattr(law, f"{name}_interval")
                values[name] = None if law is None else getattr(law, name)
                values[f"{name}_low"], values[f"{name}_high"] = ends
            for name in ("r2", "rms", "num_points", "num_runs", "decades"):
                values[name] = None if law is None else getattr(law, name)
            thirds = (None, None, None) if law is None else law.thirds
            for name, value in zip(("first", "middle", "last"), thirds, strict=True):
                values[f"residual_{name}"] = value
            for name in ("is_systematic", "undercut", "overshoot", "stray", "at_bound"):
                values[name] = None if law is None else getattr(law, name)
            yield values | {"points": "" if law is None else row.points, "note": row.note}


def multiplier_rows(analysis: Analysis) -> Iterator[Row]:
    """One row for each structure and measure by which it is compared."""
    for measure, found in analysis.measured.items():
        for name, one in found.multipliers.items():
            low, high = one.median_interval
            mean_low, mean_high = one.mean_interval
            yield {
                "measure": measure,
                "structure": name,
                "reference": one.reference,
                "median": one.median,
                "median_low": low,
                "median_high": high,
                "mean": one.mean,
                "std": one.std,
                "mean_low": mean_low,
                "mean_high": mean_high,
                "num_points": one.num_points,
                "is_extrapolated": one.mean_is_extrapolated,
            }


def linf_rows(analysis: Analysis) -> Iterator[Row]:
    """One row for each structure and given linf."""
    for row in analysis.linf_rows:
        names = ("linf", "structure", "a", "b", "r2", "rms", "multiplier")
        yield {name: getattr(row, name) for name in names}


def final_rows(analysis: Analysis) -> Iterator[Row]:
    """One row for each structure and width."""
    return (asdict(final) for final in find_finals(analysis))


TABLES: dict[str, Callable[[Analysis], Iterator[Row]]] = {
    "runs": run_rows,
    "points": point_rows,
    "finals": final_rows,
    "power-laws": law_rows,
    "multipliers": multiplier_rows,
    "linf": linf_rows,
}
"""All tables by the name of their file."""


def to_csv(rows: Iterator[Row]) -> str:
    """The rows as CSV with a header; nothing if there are none."""
    listed = list(rows)
    if not listed:
        return ""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, listed[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in row.items()} for row in listed)
    return file.getvalue()


def _safe(value: Any) -> Any:
    """A value that no spreadsheet takes for a formula: such a text gets an apostrophe before it.

    `read_observations` takes it away again.
    """
    if not isinstance(value, str) or not value.lstrip("'").startswith(FORMULA):
        return value
    try:
        float(value)  # of a text that is a number a spreadsheet makes just that
    except ValueError:
        return f"'{value}"
    return value
