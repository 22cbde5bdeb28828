"""What figures show of odd sweeps: runs that diverge, many structures, few sizes, tables."""

import re
from dataclasses import asdict

import pytest

import einlinear as el
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.figures.figures import make_figures
from einlinear.reports.figures.panels import COLOURS, make_looks
from einlinear.reports.gather import gather
from einlinear.reports.words import conclude
from einlinear.runs.record import RunRecord
from einlinear.show.numbers import short
from kit.report_records import (
    DENSE,
    KINDS,
    Kind,
    hostile_table,
    make_record,
    page_of,
    write_bent,
    write_diverged,
    write_record,
    write_runs,
)

QUICK = ReportSettings(resamples=0)


def figures_of(path):
    return {figure.name: figure for figure in make_figures(analyse(gather(path), QUICK))}


def explode(directory):
    """A run whose losses are finite, and enormous."""
    record = make_record(DENSE, 64, 5, lr=9.0)
    curve = [asdict(p) | {"loss": p.loss * 1e8 if p.step else p.loss} for p in record.curve]
    values = record.as_dict() | {"status": "diverged", "curve": curve}
    write_record(directory / "runs" / "bad", RunRecord.from_dict(values))


def test_a_run_that_diverges_does_not_flatten_the_others(tmp_path):
    write_runs(tmp_path, KINDS[:2], (32, 64, 128), 1)
    assert figures_of(tmp_path)["frontier"].panels[0].y_range is None
    explode(tmp_path)
    for name, most in (("frontier", 3), ("curves", 30)):
        figure = figures_of(tmp_path)[name]
        low, high = figure.panels[0].y_range
        assert 1 <= low < 1.3 < high < most
        assert f"Losses above {short(high)} are cut off." in figure.about


def test_no_two_structures_look_alike(tmp_path):
    kinds = [DENSE, *(Kind(f"btt(rank={k})") for k in range(1, 2 * len(COLOURS) + 3))]
    write_runs(tmp_path, kinds, (32,), 1, points=4)
    looks = make_looks(analyse(gather(tmp_path), QUICK)).values()
    assert len({(look.colour, look.symbol) for look in looks}) == len(looks) == len(kinds)


def test_the_caption_says_which_points_count(tmp_path):
    write_runs(tmp_path / "few", KINDS[:2], (32, 64), 1)
    assert "are not fitted" not in figures_of(tmp_path / "few")["frontier"].about
    write_runs(tmp_path / "many", KINDS[:2], (32, 64, 128, 256, 512), 1)
    assert (
        "the smallest and largest runs are not fitted."
        in figures_of(tmp_path / "many")["frontier"].about
    )


def test_a_table_has_no_warm_up_and_no_empty_columns(tmp_path):
    path = hostile_table(tmp_path / "table.jsonl")
    page = page_of(path)
    assert "warm-up" not in page.split("<main>")[1].split("<script")[0]
    heads = re.findall(r'<button type="button">([^<]*)</button></th>', page)
    assert heads == [
        *("run", "status", "structure", "\u03c9", "\u03c8", "\u03bd"),
        *("seed", "compute", "loss", "best loss"),
    ]
    assert page.count('<td data-v="100000.0">100,000</td>') == 6


def test_runs_that_diverged_have_more_than_one_point(tmp_path):
    write_diverged(tmp_path)
    cautions = " ".join(conclude(analyse(gather(tmp_path), QUICK)).cautions)
    assert "one point" not in cautions


@pytest.mark.slow
def test_names_of_structures_are_inside_the_picture(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.figure")
    seen = []
    save = matplotlib.Figure.savefig

    def look(figure, path, **how):
        for axes in figure.axes:
            seen.extend(
                (text.get_text(), text.get_window_extent())
                for text in axes.get_yticklabels()
                if text.get_text()
            )
        return save(figure, path, **how)

    write_runs(tmp_path, (DENSE, KINDS[1], KINDS[4]), (32, 64, 128), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.Figure, "savefig", look)
        el.report(tmp_path, resamples=0)
    assert "monarch moe 2/8" in {text for text, _ in seen}
    assert min(place.x0 for _, place in seen) >= 0


@pytest.mark.slow
def test_nothing_of_an_earlier_report_is_left(tmp_path):
    write_runs(tmp_path / "two", KINDS[:2], (32, 64, 128), 1)
    write_runs(tmp_path / "one", KINDS[:1], (32, 64, 128), 1)
    out = tmp_path / "out"
    el.report(tmp_path / "two", out, resamples=0)
    (out / "figures" / "mine.svg").write_text("", encoding="utf-8")
    files = el.report(tmp_path / "one", out, resamples=0)
    left = {path for path in out.rglob("*") if path.is_file()}
    assert left == {files.page, *files.figures, *files.tables, out / "figures" / "mine.svg"}
    assert not (out / "tables" / "multipliers.csv").exists()


def test_residuals_are_shown_where_a_law_does_not_hold(tmp_path):
    write_runs(tmp_path / "good", KINDS[:2], (32, 64, 128, 256, 512), 2)
    assert "residuals" not in figures_of(tmp_path / "good")
    table = write_bent(tmp_path / "runs.csv")
    (panel,) = figures_of(table)["residuals"].panels
    dense, flat = panel.series
    assert (dense.structure, flat.structure, flat.role) == ("dense", "low_rank", "residual")
    law = analyse(gather(table), QUICK).main.laws["low_rank"].law
    assert flat.y[0] == pytest.approx(100 * (4.1 / law.loss(1e12) - 1))
    assert flat.y[0] > 5 > 0 > min(flat.y)
    page = page_of(table)
    assert page.count('<span class="off">at its bound</span>') == 2
    assert 'data-figure="residuals"' in page
    files = el.report(table, resamples=0)
    assert "residuals.svg" in {file.name for file in files.figures}
    (laws,) = [file for file in files.tables if file.name == "power-laws.csv"]
    assert ",lowest loss," in laws.read_text(encoding="utf-8")
