"""The page of a report in a real browser: what is drawn, and what pressing things does."""

import json
import re

import pytest

import einlinear as el
from kit.browser import CHROMIUM, browser
from kit.report_records import (
    HOSTILE,
    KINDS,
    hostile_sweep,
    hostile_table,
    page_of,
    write_runs,
    write_sweep,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")

DRAWN = """[...document.querySelectorAll(".live")].filter(e => e.data).map(e => ({
  figure: e.closest("figure").dataset.figure, title: e.layout.xaxis.title.text,
  traces: e.data.map(t => ({ ...t.meta, visible: t.visible, points: (t.x || t.z || []).length,
    colour: (t.line && t.line.color) || (t.marker && t.marker.color) || t.fillcolor })) }))"""
ALL = "report.showAll(); new Promise(done => setTimeout(done, 300))"


@pytest.fixture(scope="module")
def page():
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep")
    kinds = (KINDS[0], KINDS[3], KINDS[4])
    write_sweep(path, widths=(32, 64, 128, 256, 512), kinds=kinds)
    return el.report(path, resamples=20).page.as_uri()


def saved(folder, text):
    """The address of a page."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


def opened(page, address, **how):
    """Load a page, unless it is there; tests leave it as it was."""
    if page.shown == (address, how):
        return
    page.shown = (address, how)
    page.errors.clear()
    page.requests.clear()
    page.open(address, **how)
    if how.get("script", True):
        page.run(ALL)


def test_it_loads_alone_and_without_complaints(page, address):
    opened(page, address)
    assert page.errors == []
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data", "blob"}
    assert [url for url in page.requests if url.startswith("file")] == [address]


def test_figures_have_points(page, address):
    opened(page, address)
    drawn = page.run(DRAWN)
    names = [d["figure"] for d in drawn]
    assert set(names) == {
        "frontier", "multipliers", "multiplier-curves", "taxonomy", "curves", "routing",
    }  # fmt: skip
    for one in drawn:
        assert one["traces"], one["figure"]
        assert sum(trace["points"] for trace in one["traces"]) > 1, one["figure"]
    (frontier,) = [d for d in drawn if d["figure"] == "frontier"]
    runs = [t for t in frontier["traces"] if t.get("role") == "runs"]
    data = page.run("report.data")
    ended = [run for run in data["runs"] if not run["open"]]
    assert any(run["cold"] > 1 for run in ended)
    points = sum(sum(x > 0 for x in run["flops"][run["cold"] :]) for run in ended)
    assert sum(trace["points"] for trace in runs) == points + len(ended)  # and a gap after each
    (curves,) = [d for d in drawn if d["figure"] == "curves"]
    points = sum(sum(x > 0 for x in run["flops"]) for run in ended)
    runs = [t for t in curves["traces"] if t.get("role") == "runs"]
    assert sum(trace["points"] for trace in runs) == points + len(ended)
    assert page.run('document.querySelectorAll("figure.ready .static svg").length') >= 5
    hidden = '[...document.querySelectorAll(".static")].every(e => e.offsetHeight === 0)'
    assert page.run(hidden)


def test_one_press_hides_a_structure_everywhere(page, address):
    opened(page, address)
    number = page.run('report.data.structures.findIndex(s => s.structure === "low_rank")')
    chip = f'.chip[data-s="{number}"]'
    assert page.run(f"document.querySelector('{chip}').ariaPressed") == "true"
    for shown in (False, True):
        page.click(chip)
        page.run(ALL)
        assert page.run(f"document.querySelector('{chip}').ariaPressed") == str(shown).lower()
        seen = set()
        for one in page.run(DRAWN):
            for trace in one["traces"]:
                if trace.get("structure") == number:
                    seen.add(one["figure"])
                    assert trace["visible"] is shown, one["figure"]
                elif "structure" in trace:
                    assert trace["visible"] is True
        assert seen == {"frontier", "multipliers", "multiplier-curves", "taxonomy", "curves"}


def test_the_axis_can_be_chosen(page, address):
    opened(page, address)
    titles = {}
    for number in range(5):
        page.click(f'#figure-frontier [data-panel="{number}"]')
        (one,) = [d for d in page.run(DRAWN) if d["figure"] == "frontier"]
        titles[one["title"]] = [t["points"] for t in one["traces"]]
        pressed = '[...document.querySelectorAll("#figure-frontier [aria-pressed=true]")].length'
        assert page.run(pressed) == 1
    assert list(titles) == [
        "training FLOPs",
        "FLOPs in linear layers",
        "seconds",
        "parameters",
        "tokens",
    ]
    assert all(sum(points) > 100 for points in titles.values())
    page.click('#figure-frontier [data-panel="0"]')


def test_colours_can_mean_exponents(page, address):
    opened(page, address)

    def colours():
        return {
            (one["figure"], trace["structure"]): trace["colour"]
            for one in page.run(DRAWN)
            for trace in one["traces"]
            if "structure" in trace
        }

    before = colours()
    page.click('#colour [data-by="1"]')
    psi = colours()
    assert psi.keys() == before.keys()
    assert all(psi[key] != before[key] for key in psi)
    names = [s["structure"] for s in page.run("report.data.structures")]
    by_name = {names[k]: {c for (_, s), c in psi.items() if s == k} for k in range(len(names))}
    assert all(len(found) == 1 for found in by_name.values())
    assert by_name["dense"] == by_name["monarch moe 2/8"] != by_name["low_rank"]  # psi is 1, 1, 1/2
    assert page.run('document.getElementById("scale").textContent.trim()') == "ψ 0.51"
    page.click('#colour [data-by="-1"]')
    assert colours() == before


def test_the_table_can_be_sorted_and_filtered(page, address):
    opened(page, address)
    column = page.run(
        '[...document.querySelectorAll(".runs thead th")].findIndex(h => h.textContent === "loss")'
    )
    head = f".runs thead th:nth-child({column + 1})"
    read = f'[...document.querySelectorAll(".runs tbody tr")].map(r => r.cells[{column}].dataset.v)'
    page.click(f"{head} button")
    assert page.run(f'document.querySelector("{head}").ariaSort') == "ascending"
    up = [float(text) for text in page.run(read) if text]
    assert up == sorted(up)
    assert page.run(read)[-1] == "", "runs without a loss come last"
    page.run(f'document.querySelector("{head} button").focus()')
    page.key("Enter", "\r")
    assert page.run(f'document.querySelector("{head}").ariaSort') == "descending"
    assert [float(text) for text in page.run(read) if text] == up[::-1]
    page.run('document.getElementById("filter").focus()')
    for letter in "failed":
        page.key(letter, letter)
    shown = '[...document.querySelectorAll(".runs tbody tr")].filter(r => !r.hidden).length'
    assert page.run(shown) == 1
    assert page.run('document.getElementById("filtered").textContent').startswith("1 of ")


def test_without_scripts_there_are_figures_and_tables(page, address):
    opened(page, address, script=False)
    seen = '[...document.querySelectorAll(".static svg")].filter(e => e.clientWidth > 300).length'
    assert page.run(seen) == 6
    assert page.run('document.querySelectorAll(".runs tbody tr").length') > 20
    buttons = '[...document.querySelectorAll(".js")].every(e => e.offsetHeight === 0)'
    assert page.run(buttons)


@pytest.mark.parametrize("width", [320, 1920])
def test_it_fits_the_window(page, address, width):
    opened(page, address, width=width)
    assert page.run("document.documentElement.scrollWidth") <= width


def test_one_figure_is_above_the_fold(page, address):
    """At 1280 x 800 the axis of the first figure is in the window, and in a phone's most of it."""
    box = """(() => { const e = document.querySelector("#figure-frontier .live .xtitle");
      return e.getBoundingClientRect().bottom + scrollY })()"""
    opened(page, address, width=1280, height=800)
    assert page.run(box) <= 800
    first = 'document.querySelector("main figure").id'
    assert page.run(first) == "figure-frontier"
    top = 'document.querySelector("#figure-frontier").getBoundingClientRect().top + scrollY'
    opened(page, address, width=390, height=844)
    assert page.run(top) <= 844 / 2 + 100


def test_text_can_be_read(page, address):
    """The contrast of text that is shown is 4.5 or more, in light and in dark."""
    measure = """(() => {
      const parse = c => c.match(/[\\d.]+/g).map(Number);
      const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 :
        ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = e => { for (; e; e = e.parentElement) {
        const c = parse(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0.5) return c; } return [255, 255, 255]; };
      const says = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
      let worst = 99;
      for (const e of document.querySelectorAll("main *, header *, footer")) {
        if (e.closest("svg") || !says(e)) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
        worst = Math.min(worst, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)); }
      return worst })()"""
    for dark in (False, True):
        opened(page, address, dark=dark)
        assert page.run(measure) >= 4.5
    ink = 'document.querySelector(".live").layout.font.color'
    assert page.run(ink) == "#e7ebf0"


@pytest.mark.parametrize(
    "make", [hostile_table, pytest.param(hostile_sweep, marks=pytest.mark.slow)]
)
def test_hostile_texts_run_nothing(page, tmp_path, make):
    path = make(tmp_path / "x.jsonl" if make is hostile_table else tmp_path)
    opened(page, saved(tmp_path, page_of(path)))
    page.click(".chip:last-child")
    assert page.errors == [], "no dialog, no image that is missing, no script that is refused"
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
    assert page.run('document.querySelectorAll("img").length') == 0
    texts = page.run('JSON.stringify([...document.querySelectorAll(".live")].map(e => e.data))')
    assert not re.search("<(?!br>)", texts), "plotly is given texts, not elements"
    if make is hostile_table:
        names = page.run('[...document.querySelectorAll(".chip")].map(e => e.textContent)')
        assert set(HOSTILE) <= set(names)


@pytest.mark.slow
def test_a_thousand_runs_are_drawn(page, tmp_path):
    """The page of many runs, drawn as it is opened; how long it takes is in docs/report.md."""
    write_runs(tmp_path, KINDS[:1], (32, 64), 1, points=25)
    text = page_of(tmp_path)
    start = text.index('id="data">') + len('id="data">')
    end = text.index("</script>", start)
    data = json.loads(text[start:end])
    data["runs"] = data["runs"][:1] * 1000
    opened(page, saved(tmp_path, text[:start] + json.dumps(data) + text[end:]))
    assert page.errors == []
    (curves,) = [d for d in page.run(DRAWN) if d["figure"] == "curves"]
    assert sum(trace["points"] for trace in curves["traces"]) > 20_000
