"""report: runs become a page, figures and tables in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from einlinear.files import write_whole
from einlinear.studies.fit import Linf
from einlinear.studies.reports.analyse import MEASURES, Analysis, Settings, analyse
from einlinear.studies.reports.figures import make_figures
from einlinear.studies.reports.gather import gather
from einlinear.studies.reports.looks import make_looks
from einlinear.studies.reports.page import make_page, routed_runs
from einlinear.studies.reports.static import draw_picture, inline_svg, pictures
from einlinear.studies.reports.tables import TABLES, to_csv
from einlinear.studies.reports.words import Words, conclude
from einlinear.studies.routing_plot import draw_routing


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """What was written, and what it says.

    page: the page, which needs no other file.
    figures: the same figures as SVG and PNG.
    tables: the numbers as CSV.
    words: the conclusions.
    """

    page: Path
    figures: tuple[Path, ...]
    tables: tuple[Path, ...]
    words: Words


def report(
    directory: str | Path,
    out: str | Path | None = None,
    *,
    reference: str | None = None,
    linf: Linf = "shared",
    task: str | None = None,
    level: float = 0.9,
    resamples: int = 500,
    seed: int = 0,
) -> ReportFiles:
    """Write a page with everything that runs say, and its figures and tables for papers.

    Args:
        directory: of a sweep, a folder of runs, one run, or a CSV or JSONL file of observations.
        out: folder to write to; report/ in the directory, or beside the file, unless given.
        reference: what structures are compared with; dense, or what has the most runs.
        linf: of the laws: "shared" by all, "fitted" for each structure, or a number.
        task: whose runs are analysed; that with the most runs unless given.
        level: of the intervals.
        resamples: samples of the runs for the intervals; 0 is no intervals.
        seed: of the samples.
    """
    settings = Settings(reference, linf, task, level, resamples, seed)
    source = Path(directory)
    return write_report(analyse(gather(source), settings), place_for(source, out))


def place_for(source: Path, out: str | Path | None) -> Path:
    """Where a report goes: where it is told to, or in the directory, or beside the file."""
    if out is not None:
        return Path(out)
    return (source.parent if source.is_file() else source) / "report"


def _remove_old(out: Path, written: set[Path]) -> None:
    """Remove figures and tables of an earlier report that this one does not have."""
    names = ("residuals", "multipliers", "multiplier-curves", "taxonomy", "routing")
    measures = (*MEASURES, "macs", "linear_macs")  # by which reports were made once
    figures = [*names, *(f"{figure}-{m}" for figure in ("frontier", "curves") for m in measures)]
    ours = [out / "figures" / f"{name}{ending}" for name in figures for ending in (".svg", ".png")]
    for path in {*ours, *(out / "tables" / f"{name}.csv" for name in TABLES)} - written:
        path.unlink(missing_ok=True)


def write_report(analysis: Analysis, out: Path) -> ReportFiles:
    """Write the page, the figures and the tables; the page is last, whole or not at all."""
    words, figures, looks = conclude(analysis), make_figures(analysis), make_looks(analysis)
    tables = []
    for name, rows in TABLES.items():
        text = to_csv(rows(analysis))
        if text:
            tables.append(out / "tables" / f"{name}.csv")
            write_whole(tables[-1], text.encode())
    drawn, svgs = [], {}
    for picture in pictures(figures):
        drawn += draw_picture(picture, analysis, looks, out / "figures")
        svgs[picture.name] = inline_svg(drawn[-2], picture.name, picture.words)
    routed = [run.record for run in routed_runs(analysis) if run.record is not None]
    if routed:
        words_of = f"Load of each expert over training, of run {routed[0].id}"
        drawn += [draw_routing(routed[0], out / "figures" / f"routing.{k}") for k in ("svg", "png")]
        svgs["routing"] = inline_svg(drawn[-2], "routing", words_of)
    _remove_old(out, {*drawn, *tables})
    page = out / "index.html"
    write_whole(page, make_page(analysis, words, figures, looks, svgs).encode())
    return ReportFiles(page, tuple(drawn), tuple(tables), words)
