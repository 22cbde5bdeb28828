"""Huge numbers, odd types and endless values in the place of arguments: three lines, at once."""

import gzip
import zlib
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import einlinear as el
from einlinear import EinlinearError
from einlinear.data import token_folder, tokens
from einlinear.files.whole import parse_toml
from einlinear.landscapes.config import LandscapeConfig
from einlinear.runs.config import RunConfig
from einlinear.sweeps.study import Study
from kit.damage import within

HUGE = 10**5000


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ODD = {
    "edges, endless": (lambda: el.Structure.from_edges(count()), "the edges are given as count"),
    "edges, a number": (lambda: el.Structure.from_edges(np.array(3)), "the edges are given as"),
    "edges, huge": (lambda: el.Structure.from_edges({"XA": HUGE}), "about 5,000 digits"),
    "edges, twice": (
        lambda: el.Structure.from_edges([("XA", HUGE), ("AX", HUGE)]),
        "given twice: as a number of about 5,000 digits",
    ),
    "edges, a long name": (lambda: el.Structure.from_edges({"X" * 10**6: 1}), "a node twice"),
    "theta, endless": (lambda: el.Structure.from_theta(count()), "given as more than 7"),
    "theta, long": (lambda: el.Structure.from_theta(range(10**12)), "given as more than 7"),
    "theta, nested": (lambda: el.Structure.from_theta([nested(10**5)] * 7), "has the exponent"),
    "theta, huge": (lambda: el.Structure.from_theta([Fraction(HUGE)] * 7), "very many digits"),
    "a rank and its exponent": (
        lambda: el.btt(rank=HUGE, rank_exponent=Fraction(1, HUGE)),
        "rank=a number of about 5,000 digits and rank_exponent=a fraction of very many digits",
    ),
    "a text of 10 MB": (lambda: el.parse("btt," * 2_500_000), "of 10,000,000 characters"),
    "a text of bars": (lambda: el.parse("|" * 10_000), "has the exponent ''"),
    "a plan of huge sizes": (
        lambda: el.make_plan(
            el.Structure.from_edges(
                {"XA": 1, "YA": 1}
                | {f"X{e}": 10**9 for e in ("B", "C", "D", "AB", "AC", "BC")}
                | {f"X{e}": 10**9 for e in ("ABC", "BCD", "ABD", "ACD", "CD", "BD", "AD", "ABCD")}
                | {f"X{e}": 10**9 for e in ("E", "AE", "BE", "CE", "DE", "ABE", "ACE", "ADE")}
                | {f"X{e}": 10**9 for e in ("BCE", "BDE", "CDE", "F", "AF", "BF", "CF", "DF", "EF")}
                | {f"X{e}": 10**9 for e in ("ABF", "ACF", "ADF", "BCF", "BDF", "CDF")}
            ),
            64,
            64,
        ),
        "the width 64 at X is not a multiple of XB:1000000000",
    ),
    "a number beyond all bounds": (
        lambda: el.open_task("text", context=HUGE),
        "from 1 to 9,223,372,036,854,775,807",
    ),
    "too many samples": (lambda: el.sample_structures(10**9), "from 0 to 1,000,000"),
    "a range": (lambda: el.sample_structures(1, nu=nested(10**5)), "nu is|exponent"),
    "a grid": (lambda: el.grid_structures(HUGE), "denominator is a number of about 5,000 digits"),
    "a fine grid": (lambda: el.grid_structures(10**6, num_factors=4), "more than 10\\^15 points"),
    "a config, huge": (lambda: RunConfig(width=HUGE), "width is a number of about 5,000 digits"),
    "a config, a huge rate": (lambda: RunConfig(lr=10**400), "lr is a number of about 400 digits"),
    "a config, nested": (lambda: RunConfig(task=nested(10**5)), "task is"),
    "a config, an array": (lambda: RunConfig(tied=np.array([1, 2])), "tied is array"),
    "a config, a number": (lambda: RunConfig.from_dict({5: 1}), "unknown config key 5"),
    "a config, no table": (lambda: RunConfig.from_dict([1]), r"a config is \[1\]"),
    "a study, no table": (lambda: Study.from_dict(5), "a study is 5"),
    "a study, a number": (lambda: Study.from_dict({HUGE: 1}), "unknown key a number of about"),
    "a study, nested": (lambda: Study.from_dict({"grid": {"seed": nested(10**5)}}), "seed is"),
    "a study, huge": (
        lambda: Study.from_dict({"base": {"lr": Fraction(HUGE)}}),
        "lr is a fraction of very many digits",
    ),
    "a study, a long number": (
        lambda: Study.from_dict({"grid": {"seed": [HUGE]}}),
        "seed is a number of about 5,000 digits",
    ),
    "a landscape, lists": (lambda: LandscapeConfig(widths=([1],)), "width"),
    "a landscape, a number": (lambda: LandscapeConfig(widths=5), "widths are 5"),
    "a landscape, one rate": (lambda: LandscapeConfig(rates=-5), "rates are -5"),
    "a landscape, many runs": (lambda: LandscapeConfig(seeds=10**9), "the landscape has"),
    "observations, lists": (lambda: el.Observations([[1], [2]], [1, 2], [3, 4]), "run cannot be"),
    "observations, long": (lambda: el.Observations(range(10**9), [1], [1]), "50,000,000 points"),
    "observations, a range": (
        lambda: el.Observations([range(10**9)], [range(10**9)], [1.0]),
        "compute cannot be read: a value is not a number",
    ),
    "observations, arrays": (
        lambda: el.Observations(["a"], [1], [1], group=[np.array([1, 2])]),
        "group cannot be read",
    ),
    "observations, more": (lambda: el.Observations(["a"], [1], [1], more=5), "more is 5"),
    "a table, no path": (lambda: el.read_observations(5), "the table is given as 5"),
    "a table, NUL": (lambda: el.read_observations("a\0.csv"), "the table is given as"),
    "a task, a list": (lambda: el.open_task(["text"]), r"the task is \['text'\]"),
    "a task, unknown": (lambda: el.open_task("pixels", pool=1), "the settings of pixels are none"),
    "a task, a number": (lambda: el.open_task("text", 5), "a text is given as 5"),
    "a task, a long path": (lambda: el.open_task("cifar", "x" * 10**5), "is given as 'xxx"),
    "a task, an array": (lambda: el.open_task("pixels", np.array(3)), "pixels is given as array"),
    "a vocabulary": (lambda: el.open_task("text", vocabulary=[1]), r"the vocabulary is \[1\]"),
    "a large teacher": (
        lambda: el.open_task("regression", teacher_width=10**9),
        "teacher_width 1,000,000,000 and teacher_depth 7 needs",
    ),
    "a deep teacher": (lambda: el.open_task("regression", teacher_depth=10**9), "2 to 10,000"),
    "prepare, processes": (
        lambda: el.prepare(Path(__file__), "o", processes=10**9),
        "processes is 1000000000",
    ),
    "recommend, huge": (lambda: el.recommend(8, 8, share=HUGE), "share is a number of about 5,000"),
    "recommend, endless": (
        lambda: el.recommend(8, 8, structures=count()),
        "structures is count",
    ),
    "recommend, tokens": (lambda: el.recommend(8, 8, tokens=HUGE), "tokens is a number of about"),
    "prepare, no path": (lambda: el.prepare(5, "out"), "a text is given as 5"),
    "prepare, no folder": (lambda: el.prepare("hub:a/b", 5), "the folder for tokens is given as 5"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values(name):
    call, message = ODD[name]
    with within(60), pytest.raises(EinlinearError, match=message) as caught:
        call()
    assert len(caught.value.what) < 700


def test_names_of_many_parts_do_not_take_the_square_of_their_number():
    with within(60), pytest.raises(ValueError, match="more than 500 dots"):
        parse_toml("a." * 100_000 + "a = 1")
    many = ", ".join(["0.5"] * 2000)
    assert parse_toml(f"lr = [{many}]")["lr"] == [0.5] * 2000


def test_a_packed_text_that_grows_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "UNPACKED", 10**6)
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(b"a word and another. " * 100_000)
    assert (tmp_path / "a.txt.gz").stat().st_size < 10**4
    with pytest.raises(EinlinearError, match="more than 1,000,000 bytes, unpacked"):
        tokens.open_text(tmp_path / "a.txt.gz")


def test_a_token_outside_the_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n\n\n" * 50)
    el.prepare(tmp_path / "a.txt", tmp_path / "out", processes=1)
    path, info = tmp_path / "out" / "train.bin", tmp_path / "out" / "tokens.json"
    raw = path.read_bytes()
    old, new = (zlib.crc32(data) for data in (raw, b"\xff" + raw[1:]))
    path.write_bytes(b"\xff" + raw[1:])
    info.write_text(info.read_text().replace(str(old), str(new)))
    with pytest.raises(EinlinearError, match="has the token 255"):
        token_folder.open_tokens(tmp_path / "out")
