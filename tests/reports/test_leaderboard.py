"""The answer of a search on the page: rows, bars, formulas, drawings, code; and in a browser."""

from dataclasses import replace
from html import unescape

import pytest

from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.figures.figures import make_figures
from einlinear.reports.gather import gather
from einlinear.reports.leaderboard import MOST_ROWS, make_board
from einlinear.reports.shown import Lane, ShownSearch
from einlinear.searches.words import conclusions, paste_code
from einlinear.structures.text import parse
from kit.browser import CHROMIUM, browser
from kit.report_records import HOSTILE, page_of
from kit.search_records import CANDIDATES, SAMPLED, make_answer, make_row, usual_rows, write_search


def board_of(*rows):
    """The leaderboard of rows without runs."""
    lanes = tuple(Lane(row.label, row, row.state, (), "") for row in rows)
    return make_board(ShownSearch(make_answer(rows), lanes))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("search")
    records = write_search(path)
    return path, records, page_of(path)


def test_the_page_begins_with_the_answer(made):
    path, _, page = made
    text = unescape(page)
    sentences = conclusions(gather(path).search.answer)
    assert f'<p class="headline">{sentences[0]}</p>' in text
    for sentence in sentences[1:]:
        assert f"<li>{sentence}</li>" in text
    order = ['class="headline"', 'class="board"', 'id="figure-lanes"', 'id="figure-exponents"']
    places = [page.index(part) for part in [*order, 'id="figure-frontier"']]
    assert places == sorted(places)


def test_each_row_has_its_structure_formula_drawing_and_code(made):
    text = unescape(made[2])
    for row in usual_rows():
        assert f'<th scope="row">{row.label}' in text
        assert paste_code(row) in text
        assert f"<dd><code>{row.structure}</code></dd>" in text
        assert f"<title>{parse(row.structure)}</title>" in text
    assert text.count('<div class="drawing"><svg') == len(CANDIDATES)
    assert text.count("<dt>einsum</dt>") == len(CANDIDATES)


def test_short_names_are_explained_below_the_table(made):
    text = unescape(made[2])
    after = text.index("Names of structures")
    assert text.rindex('<table class="board">') < after
    assert f"<dt>s1</dt><dd><code>{SAMPLED}</code></dd>" in text[after:]
    assert text[after:].count("<dt>s1</dt>") == 1


def test_a_row_in_words():
    (low, shared, dense, experts) = board_of(
        make_row("low_rank", psi=0.5, nu=0.5),
        make_row("kronecker", omega=0.5, nu=0.5),
        make_row("dense", nu=1.0),
        make_row("btt", num_experts=8),
    ).first
    assert low.words.striptags() == (
        "Two factors; rank d0.50; no shared parameters; d1.50 multiply-adds per token, "
        "where a dense layer has d²."
    )
    assert "full rank; each parameter used d0.50 times;" in shared.words.striptags()
    assert dense.words == "A plain linear layer of width d, with d² multiply-adds per token."
    assert dense.code == "# stay dense"
    assert experts.words.endswith("; 8 experts, of which each token uses 2.")


def test_bars_are_on_one_logarithmic_axis():
    board = board_of(
        make_row("btt", multiplier=2.0, low=1.0, high=4.0), make_row("dense", multiplier=1.0)
    )
    first, dense = (one.bar for one in board.first)
    assert first.middle - first.low == pytest.approx(first.high - first.middle, abs=1e-3)
    assert dense.middle == board.unit == dict(board.ticks)[1.0] == first.low
    assert not first.is_cut_low
    assert not first.is_cut_high


def test_bars_that_leave_the_axis_are_cut():
    inf = float("inf")
    for low, high in ((0.0, inf), (1e-9, 1e9), (-1.0, 2.0)):
        (one,) = board_of(make_row("btt", low=low, high=high)).first
        assert 0 <= one.bar.low <= one.bar.middle <= one.bar.high <= 1
        assert one.bar.is_cut_low
        assert one.bar.is_cut_high == (high > 2)


def test_a_structure_that_cannot_be_read_has_no_drawing():
    (one,) = board_of(make_row("not a structure")).first
    assert (one.equation, one.drawing) == ("", "")


def test_at_most_ten_rows_are_open(tmp_path):
    more = [make_row(f"low_rank(rank={k})", structure=f"low_rank(rank={k})") for k in range(2, 11)]
    write_search(tmp_path, make_answer([*usual_rows(), *more]))
    page = page_of(tmp_path)
    folded = page.split('<details class="rest">')
    assert len(folded) == 2
    assert folded[0].count('<td class="rank">') == MOST_ROWS
    assert "<summary>3 more</summary>" in folded[1]
    assert folded[1].count('<td class="rank">') == 3
    assert "Its runs are not in this directory." in page


def test_nothing_beats_dense(tmp_path):
    rows = sorted(usual_rows(), key=lambda row: row.label != "dense")
    rows[0] = replace(rows[0], state="leader")
    write_search(tmp_path, make_answer(rows))
    page = page_of(tmp_path)
    assert '<p class="headline">Nothing beats dense here: stay dense.</p>' in page
    assert "# stay dense" in page


def test_texts_of_an_answer_are_escaped(tmp_path):
    text = "".join(HOSTILE)
    rows = [replace(row, label=text) if k == 2 else row for k, row in enumerate(usual_rows())]
    rows.append(make_row("bad", structure=text))
    write_search(tmp_path, make_answer(rows, diverged=(text,), failed=(text,)))
    choices = tmp_path / "choices.jsonl"
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    choices.write_text(choices.read_text(encoding="utf-8").replace("reason 1", quoted), "utf-8")
    page = page_of(tmp_path)
    for bad in HOSTILE[:3]:
        assert bad not in page


def test_colours_are_exponents_and_losses_are_above_linf(made):
    found = analyse(gather(made[0]), ReportSettings(resamples=0))
    (figure,) = [one for one in make_figures(found) if one.name == "exponents"]
    by_name = {panel.name: panel for panel in figure.panels}
    shown = {name: {s.structure for s in panel.series} for name, panel in by_name.items()}
    sampled = "s1"
    assert shown["omega"] == {"monarch", "dense", sampled, "low_rank", "kronecker"}
    assert shown["psi"] == {"monarch", "dense", "low_rank"}
    assert shown["nu"] == {"monarch", "dense"}
    assert by_name["psi"].colour_range == (0.5, 1.0)
    assert "no panel" not in figure.about
    front = found.main.front.of("dense")
    (series,) = [s for s in by_name["nu"].series if (s.structure, s.role) == ("dense", "frontier")]
    assert sorted(series.y) == pytest.approx(sorted((front.loss - 0.5).tolist()))


def test_panels_without_structures_are_left_out(made, tmp_path):
    for record in made[1]:
        if record.config.structure == CANDIDATES[2][0].structure:
            folder = tmp_path / "runs" / record.id
            folder.mkdir(parents=True)
            text = (made[0] / "runs" / record.id / "record.json").read_text(encoding="utf-8")
            (folder / "record.json").write_text(text, encoding="utf-8")
    text = (made[0] / "answer.json").read_text(encoding="utf-8")
    (tmp_path / "answer.json").write_text(text, encoding="utf-8")
    found = analyse(gather(tmp_path), ReportSettings(resamples=0))
    (figure,) = [one for one in make_figures(found) if one.name == "exponents"]
    assert [panel.name for panel in figure.panels] == ["omega"]
    assert "There is no panel for ω = 0: no such structure was trained." in figure.about
    assert "There is no panel for ω = 0 and ψ = 1: no such" in figure.about


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")
def test_the_page_in_a_browser(made, tmp_path):
    _, records, text = made
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    drawn = """(() => { const at = n => document.querySelectorAll(`#figure-${n} .live`);
      const by = [...at("exponents")];
      const [lanes] = at("lanes"), dots = lanes.data.filter(t => t.mode === "markers" && t.name);
      return { dots: dots.flatMap(t => t.x), hover: dots.flatMap(t => t.text).join(),
        ends: lanes.data.filter(t => t.marker && t.marker.symbol === "x-thin").flatMap(t => t.y),
        titles: by.map(e => e.layout.title.text),
        low: Math.min(...by.flatMap(e => e.data.filter(t => t.meta?.role === "runs"))
          .flatMap(t => t.y).filter(Boolean)),
        colours: by[2].data.filter(t => t.meta).map(t => t.line?.color || t.marker.color),
        wide: document.documentElement.scrollWidth,
        cut: [...document.querySelectorAll(".board")].map(t => t.parentElement)
          .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth).length } })()"""
    with browser() as page:
        for width in (1200, 320):
            page.open(file.as_uri(), width=width)
            page.run("report.showAll(); new Promise(done => setTimeout(done, 300))")
            found = page.run(drawn)
            assert page.errors == []
            assert sorted(found["dots"]) == list(range(1, len(records) + 1))
            assert found["ends"] == [2, 3, 4]
            assert all(f"reason {k}" in found["hover"] for k in range(len(records)))
            assert [title.split(",")[0] for title in found["titles"]] == [
                "all structures", "ω = 0", "ω = 0 and ψ = 1",
            ]  # fmt: skip
            losses = [p.loss for r in records for p in r.curve if p.loss]
            assert 0 < found["low"] <= min(losses) - 0.5 + 1e-3
            assert set(found["colours"]) == {"rgb(47,127,209)", "rgb(199,105,26)"}
            assert found["wide"] == width
            assert found["cut"] == 0 or width < 1000
