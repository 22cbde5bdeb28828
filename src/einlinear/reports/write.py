"""Write a report: a page, figures and tables in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from einlinear.files.whole import write_whole
from einlinear.laws.fit import Linf
from einlinear.reports.analyse import MEASURES, Analysis, ReportSettings, analyse
from einlinear.reports.csv_files import TABLES, to_csv
from einlinear.reports.figures.figures import FIGURES, make_figures
from einlinear.reports.figures.lanes import draw_lanes, lanes_about
from einlinear.reports.figures.panels import make_looks
from einlinear.reports.figures.routing import draw_routing
from einlinear.reports.figures.static import drawings, inline_svg, save_drawing
from einlinear.reports.gather import gather
from einlinear.reports.page import make_page, routed_runs
from einlinear.reports.words import Words, conclude


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The files of a report, and its conclusions.

    page: the self-contained page.
    figures: its figures as SVG and PNG.
    tables: its numbers as CSV.
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
    times: str | Path | None = None,
) -> ReportFiles:
    """Build an HTML report from runs, with its figures and tables as files for papers.

    Args:
        directory: a sweep, a folder of runs, a single run, a file of packed records, or a CSV or
            JSONL file of observations.
        out: folder to write to; defaults to report/ in the directory, or beside the file.
        reference: structure to compare with; defaults to dense, or the one with the most runs.
        linf: "shared" by all laws, "fitted" for each structure, or a number.
        task: task to analyse; defaults to the one with the most runs.
        level: level of the intervals.
        resamples: bootstrap samples for the intervals; 0 for no intervals.
        seed: random seed of the samples.
        times: the steps.json of `einlinear time`; seconds are then steps times the time of a step,
            instead of those that the clocks of the runs showed.
    """
    settings = ReportSettings(reference, linf, task, level, resamples, seed, times)
    source = Path(directory)
    return write_report(analyse(gather(source), settings), place_for(source, out))


def place_for(source: Path, out: str | Path | None) -> Path:
    """The folder of a report: `out`, or report/ in the directory or beside the file."""
    if out is not None:
        return Path(out)
    return (source.parent if source.is_file() else source) / "report"


def _remove_old(out: Path, written: set[Path]) -> None:
    """Remove figures and tables of an earlier report that this one does not have."""
    measures = (*MEASURES, "macs", "linear_macs")  # the last two are of reports of early versions
    figures = [
        out / "figures" / f"{name}{measure}{ending}"
        for name in (*FIGURES, "routing", "lanes")
        for measure in ("", *(f"-{measure}" for measure in measures))
        for ending in (".svg", ".png")
    ]
    for path in {*figures, *(out / "tables" / f"{name}.csv" for name in TABLES)} - written:
        path.unlink(missing_ok=True)


def write_report(analysis: Analysis, out: Path) -> ReportFiles:
    """Write the tables, the figures and, last and atomically, the page."""
    words, figures, looks = conclude(analysis), make_figures(analysis), make_looks(analysis)
    tables = []
    for name, rows in TABLES.items():
        text = to_csv(rows(analysis))
        if text:
            tables.append(out / "tables" / f"{name}.csv")
            write_whole(tables[-1], text.encode())
    drawn, svgs = [], {}
    for drawing in drawings(figures):
        drawn += save_drawing(drawing, analysis, looks, out / "figures")
        svgs[drawing.name] = inline_svg(drawn[-2], drawing.name, drawing.alt)
    search = analysis.gathered.search
    if search is not None:
        drawn += [draw_lanes(search, out / "figures" / f"lanes.{k}") for k in ("svg", "png")]
        svgs["lanes"] = inline_svg(drawn[-2], "lanes", lanes_about(search))
    routed = [run.record for run in routed_runs(analysis) if run.record is not None]
    if routed:
        alt = f"Load of each expert over training, of run {routed[0].id}"
        drawn += [draw_routing(routed[0], out / "figures" / f"routing.{k}") for k in ("svg", "png")]
        svgs["routing"] = inline_svg(drawn[-2], "routing", alt)
    _remove_old(out, {*drawn, *tables})
    page = out / "index.html"
    write_whole(page, make_page(analysis, words, figures, looks, svgs).encode())
    return ReportFiles(page, tuple(drawn), tuple(tables), words)
