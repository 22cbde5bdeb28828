"""The files of a report: the page without a browser, figures, tables, commands."""

import csv
import json
import re
import shlex
from collections import defaultdict
from dataclasses import asdict
from html.parser import HTMLParser

import hypothesis
import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

import einlinear as el
from einlinear.cli.commands.train import RunFlags, _run_config
from einlinear.cli.main import main
from einlinear.reports.analyse import ReportSettings, analyse
from einlinear.reports.csv_files import run_rows, to_csv
from einlinear.reports.figures.figures import make_figures
from einlinear.reports.gather import gather
from einlinear.reports.page import marked
from einlinear.reports.reproduce import train_command
from einlinear.runs.config import RunConfig
from einlinear.show.numbers import amount, duration, short
from einlinear.show.pages import script_json
from kit.report_records import (
    DENSE,
    HOSTILE,
    KINDS,
    hostile_sweep,
    hostile_table,
    make_record,
    page_of,
    write_diverged,
    write_failure,
    write_record,
    write_runs,
    write_sweep,
    write_unfinished,
)


class Elements(HTMLParser):
    """The elements, texts and ids of a page."""

    def __init__(self, text):
        super().__init__()
        self.names, self.attributes, self.ids, self.texts = defaultdict(int), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names[tag] += 1
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.texts.append(data)


def rows_of(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def data_of(page):
    return json.loads(re.search('id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep")
    write_sweep(path, widths=(32, 64, 128, 256, 512), kinds=KINDS[:4:3] + KINDS[4:])
    return path, el.report(path, resamples=50)


def test_everything_is_written(made):
    path, files = made
    assert files.page == path / "report" / "index.html"
    names = {file.name for file in files.figures}
    kinds = (
        "frontier-flops",
        "frontier-seconds",
        "multipliers",
        "taxonomy",
        "curves-flops",
        "routing",
    )
    assert {f"{kind}.{ending}" for kind in kinds for ending in ("svg", "png")} <= names
    for file in (*files.figures, *files.tables, files.page):
        assert file.stat().st_size > 100, file
    assert not list(path.rglob("*.part"))


def test_the_page_needs_no_script_to_be_read(made):
    page = made[1].page.read_text(encoding="utf-8")
    found = Elements(page)
    assert found.names["svg"] > 6
    assert found.names["table"] == 6
    assert found.names["h1"] == 1
    assert len(found.ids) == len(set(found.ids)), "ids of figures do not clash"
    words = made[1].words
    text = " ".join("".join(found.texts).split())
    for sentence in (words.headline, *words.results, *words.cautions):
        plain = sentence.replace("`", "")
        assert " ".join(plain.split()) in text
    assert all(not name.startswith("on") for name, _ in found.attributes)
    outside = [v for n, v in found.attributes if n in ("src", "href") and v and v[0] not in "#d"]
    assert outside == []


def test_figures_have_words_for_those_who_do_not_see_them(made):
    page = made[1].page.read_text(encoding="utf-8")
    labels = re.findall(r'<svg[^>]*role="img"[^>]*aria-label="([^"]+)"', page)
    assert len(labels) == 6
    assert all(len(label) > 30 for label in labels)


def test_the_same_runs_give_the_same_page(tmp_path):
    write_sweep(tmp_path, widths=(32, 64), kinds=KINDS[:2])
    assert page_of(tmp_path) == page_of(tmp_path)


def test_the_tables_hold_the_numbers(made):
    path, files = made
    tables = {file.stem: rows_of(file) for file in files.tables}
    runs = {row["run"]: row for row in tables["runs"]}
    assert len(runs) == len(list((path / "runs").iterdir()))
    for folder in (path / "runs").iterdir():
        if (folder / "record.json").exists():
            record = el.read_record(folder)
            row = runs[record.id]
            assert row["status"] == record.status
            assert int(row["params"]) == record.counts.params
            if record.status == "finished":
                assert float(row["loss"]) == record.final_loss
    assert {row["status"] for row in runs.values()} >= {"failed", "running"}
    assert {row["measure"] for row in tables["multipliers"]} == {"flops", "seconds"}
    assert len(tables["power-laws"]) == 4 * 5


def test_the_points_make_the_same_report(made, tmp_path):
    """The table of points is a table of observations, with the same laws."""
    rows = rows_of(made[0] / "report" / "tables" / "points.csv")
    ended = [row for row in rows if row["status"] in ("finished", "diverged")]
    table = tmp_path / "points.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(ended)
    ours = analyse(gather(made[0]), ReportSettings(resamples=20)).main
    theirs = analyse(gather(table), ReportSettings(resamples=20)).main
    assert set(ours.laws) == set(theirs.laws)
    assert set(ours.data.size) == set(theirs.data.size)
    places = [
        {r.label: r.exponents for r in gather(p).runs if r.has_result} for p in (made[0], table)
    ]
    assert places[0] == places[1]
    assert {label.variant for label in places[1]} == {"", "moe 2/8"}
    for name, row in ours.laws.items():
        assert repr(theirs.laws[name].law) == repr(row.law)  # nan is nan


def test_the_data_of_the_page(made):
    data = data_of(made[1].page.read_text(encoding="utf-8"))
    names = [look["structure"] for look in data["structures"]]
    assert names[0] == "dense"
    assert len({look["colour"] for look in data["structures"]}) == len(names)
    assert [f["name"] for f in data["figures"]] == [
        "frontier", "multipliers", "multiplier-curves", "taxonomy", "curves",
    ]  # fmt: skip
    open_runs = [run for run in data["runs"] if run["open"]]
    assert len(open_runs) == 2
    assert all("linear_flops" not in run for run in open_runs)
    roles = {s["role"] for f in data["figures"] for p in f["panels"] for s in p["series"]}
    assert roles == {
        "runs", "open", "frontier", "law", "beyond", "band", "value", "guess", "dot", "place",
    }  # fmt: skip


def test_a_law_is_dashed_where_there_are_no_points(made):
    found = analyse(gather(made[0]), ReportSettings(resamples=0))
    for panel in make_figures(found)[0].panels:
        laws = found.measured[panel.name].laws
        for series in panel.series:
            law = laws[series.structure].law
            if law is None or series.role not in ("law", "beyond"):
                continue
            low, high = law.compute_range
            inside = [low * 0.999 <= x <= high * 1.001 for x in series.x if x == x]
            if series.role == "law":
                assert all(inside)
            else:
                assert sum(inside) <= 2
                assert max(series.x) > 5 * high


def one_point(path):
    write_record(path / "a", make_record(DENSE, 64, 0, points=1, steps=1))


CASES = {
    "one run": (lambda p: write_runs(p, (DENSE,), (64,), 1), "Only `dense` has results"),
    "one point": (one_point, "Only `dense` has results"),
    "one structure": (lambda p: write_runs(p, (DENSE,), (32, 64, 128), 1), "Only `dense`"),
    "all diverged": (lambda p: write_diverged(p, DENSE), "Only `dense` has results"),
    "no dense": (lambda p: write_runs(p, KINDS[1:3], (32, 64), 1), ""),
    "one run each": (lambda p: write_runs(p, KINDS, (64,), 1), ""),
    "under way": (write_unfinished, "No run has a result yet"),
    "failed": (lambda p: write_failure(write_unfinished(p, share=-1.0)), "No run has a result"),
}


@pytest.mark.parametrize("case", CASES)
def test_few_runs_make_a_page_too(tmp_path, case):
    write, expected = CASES[case]
    write(tmp_path)
    page = page_of(tmp_path)
    assert expected.replace("`", "") in re.sub("<[^>]*>", "", page.split("<script")[0])
    assert data_of(page)["runs"]


@pytest.mark.parametrize("make", [hostile_table, hostile_sweep])
def test_hostile_texts_stay_texts(tmp_path, make):
    path = make(tmp_path / "x.jsonl" if make is hostile_table else tmp_path)
    page = page_of(path)
    if make is hostile_table:  # structures have names in figures, too
        files = el.report(path, tmp_path / "out", resamples=0)
        page = files.page.read_text(encoding="utf-8")
    found = Elements(page)
    assert found.names["script"] == 3
    assert found.names["img"] == 0
    assert all(not name.startswith("on") for name, _ in found.attributes)
    text = "".join(found.texts)
    for words in HOSTILE if make is hostile_table else HOSTILE[:1]:
        assert words in text
    assert page.count("</script") == 3
    assert "<!--" not in page.split("<body>")[1].split('<script type="application/json"')[0]


def test_final_losses_and_times_by_structure_and_width(tmp_path):
    """Of two rates at a width the one of the lower mean; of its two seeds the mean."""
    records = write_runs(tmp_path, KINDS[:2], (32, 64), 2, points=4)
    worse = make_record(DENSE, 64, 0, points=4, lr=0.5)
    last = asdict(worse.curve[-1]) | {"loss": 9.0}
    values = worse.as_dict() | {"curve": [*worse.as_dict()["curve"][:-1], last]}
    write_record(tmp_path / "runs" / "worse", el.RunRecord.from_dict(values))
    found = analyse(gather(tmp_path), ReportSettings(resamples=0))
    finals = {(final.structure, final.width): final for final in found.finals}
    assert list(finals) == [("dense", 32), ("dense", 64), ("btt(rank=2)", 32), ("btt(rank=2)", 64)]
    for (structure, width), final in finals.items():
        own = [r for r in records if (r.config.structure, r.config.width) == (structure, width)]
        assert final.loss == pytest.approx(sum(r.final_loss for r in own) / 2)
        assert (final.low, final.high) == tuple(sorted(r.final_loss for r in own))
        assert final.seconds == pytest.approx(sum(r.seconds for r in own) / 2)
        assert final.flops == pytest.approx(6 * sum(r.curve[-1].macs for r in own) / 2)
        assert (final.num_runs, final.num_settings) == (2, 1 + (final == finals["dense", 64]))
    page = page_of(tmp_path)
    best = finals["dense", 64]
    assert finals["btt(rank=2)", 64].loss > best.loss
    cell = f"<td><b>{short(best.loss, 4)}</b><small>{duration(best.seconds)}</small></td>"
    assert page.count(cell) == 1
    assert "With several settings, the best one counts." in page


def test_a_note_on_many_laws_stands_once(tmp_path):
    write_runs(tmp_path, KINDS[:3], (32, 64, 128), 1)
    found = analyse(gather(tmp_path), ReportSettings(resamples=0))
    rows = [row for m in ("flops", "seconds") for row in found.measured[m].laws.values()]
    assert [row.note[:10] for row in rows] == ["few sizes:"] * 6
    page = page_of(tmp_path)
    assert page.lower().count(rows[0].note) == 1
    assert page.count("<sup>1</sup>") == 6


def test_no_text_in_a_csv_is_a_formula():
    rows = [
        {"text": text, "number": -1.5} for text in ("=1+1", "+x", "-x", "@x", "\tx", "a=b", "-2")
    ]
    text = to_csv(iter(rows))
    assert text.splitlines() == [
        "text,number",
        *("'=1+1,-1.5", "'+x,-1.5", "'-x,-1.5", "'@x,-1.5", "'\tx,-1.5", "a=b,-1.5", "-2,-1.5"),
    ]


def test_tables_of_a_report_hold_no_formulas(tmp_path):
    table = tmp_path / "runs.jsonl"
    lines = [
        {"run": f"=r{k}", "compute": 10**k, "loss": 1 + 2**-k, "structure": "@SUM(A1)"}
        for k in range(1, 7)
    ]
    table.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    files = el.report(table, resamples=0)
    cells = [cell for file in files.tables for row in rows_of(file) for cell in row.values()]
    assert "'@SUM(A1)" in cells
    points = next(file for file in files.tables if file.name == "points.csv")
    assert el.read_observations(points).structures == ("@SUM(A1)",)
    assert not [cell for cell in cells if cell[:1] in ("=", "@")]


def test_sentences_as_html():
    assert marked("`a<b` is below <L∞>, `c`; a ` stays.") == (
        "<code>a&lt;b</code> is below &lt;L∞&gt;, <code>c</code>; a ` stays."
    )


def test_values_inside_scripts():
    value = {"a": [*HOSTILE, float("nan"), 1.5, None, True]}
    text = script_json(value)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": [*HOSTILE, None, 1.5, None, True]}


settings = st.fixed_dictionaries(
    {},
    optional={
        "structure": st.sampled_from(["btt(rank=2)", "XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:4"]),
        "preset": st.sampled_from(["cpu", "paper"]),
        "task": st.sampled_from(["text", "pixels"]),
        "width": st.sampled_from([64, 128]),
        "steps": st.integers(1, 10**6),
        "warmup": st.integers(0, 100),
        "lr": st.floats(1e-6, 1.0),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
        "weight_norm": st.booleans(),
        "tied": st.booleans(),
        "num_experts": st.sampled_from([0, 4]),
        "data": st.sampled_from(['a b\'s "c".txt', "$HOME/`x`;rm -rf *", "-x", "--out"]),
        "seed": st.integers(0, 2**40),
    },
)


@hypothesis.settings(max_examples=12)
@given(settings)
def test_the_command_trains_the_same_run(values):
    config = RunConfig(**values)
    words = shlex.split(train_command(config, "a folder"))
    assert words[:2] == ["einlinear", "train"]
    assert words[-2:] == ["--out", "a folder"]
    flags = tyro.cli(RunFlags, args=words[2:-2])
    assert _run_config(flags, None) == config


def test_the_page_says_how_to_do_it_again(made, tmp_path):
    text = "".join(Elements(made[1].page.read_text(encoding="utf-8")).texts)
    study = f"{made[0]}/studies/0123456789ab.toml"
    assert f"einlinear sweep {study} --out {made[0].name}-again" in text
    assert f"einlinear report {made[0]} --resamples 50" in text
    assert 'structure = ["dense", "btt(rank=2)"' in text
    assert "2.13.0" in text


def test_the_command(tmp_path, capsys):
    write_runs(tmp_path, (DENSE,), (32, 64), 1, points=5)
    main(["report", str(tmp_path), "--out", str(tmp_path / "out"), "--linf", "0.5"])
    out = capsys.readouterr().out
    assert "L∞ was set to 0.5" in out
    assert "`" not in out
    assert f"wrote {tmp_path / 'out' / 'index.html'}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--linf", "low"], "linf is 'low'"),
        (["--reference", "tt"], "'tt', which was not run"),
        (["--task", "cifar"], "no runs of the task 'cifar'"),
        (["--level", "2"], "level is 2"),
    ],
)
def test_bad_input(made, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        main(["report", str(made[0]), "--out", str(tmp_path), *words])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (short(1.2345), "1.23"),
        (short(0.000123), "0.000123"),
        (short(123456.0), "123,456"),
        (short(1.5e9), "1.50e9"),
        (short(2.5e-7), "2.50e-7"),
        (short(1e20), "1.00e20"),
        (short(float("nan")), "\u2013"),
        (short(None), "\u2013"),
        (short(0.0), "0"),
        (amount(999), "999"),
        (amount(1210000), "1.21 M"),
        (amount(999_999), "1.00 M"),
        (amount(None), "\u2013"),
        (duration(0.04), "0.0400 s"),
        (duration(5.0), "5.00 s"),
        (duration(119), "119 s"),
        (duration(11_400), "3.17 h"),
        (duration(600), "10.0 min"),
        (duration(86400 * 3), "3.00 days"),
    ],
)
def test_numbers(shown, expected):
    assert shown == expected


def test_flops_of_a_unit_are_those_of_training(tmp_path):
    """Three times those of the forward pass, which `train` prints."""
    (record,) = write_runs(tmp_path, (DENSE,), (32,), 1, points=6)
    assert "training FLOPs / token" in page_of(tmp_path)
    (row,) = run_rows(analyse(gather(tmp_path), ReportSettings(resamples=0)))
    assert row["training_flops_per_unit"] == 6 * record.counts.macs
