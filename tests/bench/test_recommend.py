import json
from math import isclose
from pathlib import Path

import pytest
import torch

import einlinear as el
from einlinear.bench import recommend as bench
from einlinear.bench.recommend import LEGEND, recommend
from einlinear.bench.rows import LINEAR
from einlinear.bench.tradeoff import draw_tradeoff
from einlinear.cli.main import main
from einlinear.errors import EinlinearError


@pytest.fixture
def timed(monkeypatch):
    """Replace the clock: seconds by structure, the same or by round; others take 1 second."""
    seconds = {}
    calls = []

    def times(actions, repeats, **_):
        calls.append(repeats)
        found = {}
        for name in actions:
            given = seconds.get(name, 1.0)
            found[name] = list(given) if isinstance(given, list) else [given] * repeats
        return found

    monkeypatch.setattr(bench, "interleaved", times)
    monkeypatch.setattr(bench, "peak_memory", lambda action: 2_500_000)
    seconds["calls"] = calls
    return seconds


def test_the_fastest_comes_first_and_full_rank_is_preferred(timed):
    timed |= {"btt": 0.5, "btt(rank=2)": 0.25, "low_rank": 0.1, "kronecker": 0.2}
    found = recommend(256, 256, tokens=4, repeats=3)
    assert [row.structure for row in found.rows[:4]] == [
        "low_rank",
        "kronecker",
        "btt(rank=2)",
        "btt",
    ]
    assert [row.speed for row in found.rows[:4]] == [10, 5, 4, 2]
    assert found.best.structure == "btt(rank=2)"
    assert found.code == 'el.EinsumLinear(256, 256, structure="btt(rank=2)")'
    text = str(found)
    assert "Use btt(rank=2): 4.0 x faster than nn.Linear here (4.0 to 4.0)" in text
    assert "low_rank is faster still (10 x), but its rank is at most 16." in text
    assert "btt(rank=2) *" in text
    assert "Speed says nothing about the loss" in text


def test_a_structure_that_shares_parameters_is_second_choice(timed):
    timed |= {"kronecker": 0.2, "btt": 0.5}
    found = recommend(256, 256, tokens=4, repeats=3)
    assert found.best.structure == "btt"
    assert "it uses each parameter many times per token" in " ".join(str(found).split())
    timed["btt"] = 1.0
    assert recommend(256, 256, tokens=4, repeats=3).best.structure == "kronecker"


def test_stay_dense_where_nothing_is_faster_beyond_the_noise(timed):
    timed |= {"btt": [0.5, 0.5, 0.5, 2.0], "low_rank": 0.97}  # not always faster; hardly faster
    found = recommend(256, 256, tokens=4, repeats=4)
    assert found.best is None
    assert found.code == "torch.nn.Linear(256, 256)"
    assert "Stay dense: none of the " in str(found)
    assert "btt reaches 0.95 to 2.00 x the speed of nn.Linear" in " ".join(str(found).split())
    assert "the loss" not in str(found)


def test_stay_dense_where_no_structure_is_cheap_enough(timed):
    found = recommend(8, 8, tokens=4, share=0.01, repeats=1, bias=False)
    assert found.rows == ()
    assert "there is no structure with at most 1.0% of its FLOPs" in str(found)
    assert found.code == "torch.nn.Linear(8, 8, bias=False)"


def test_the_numbers_of_a_row(timed):
    timed |= {LINEAR: [2.0, 4.0, 6.0], "kronecker": [1.0, 1.0, 1.0]}
    found = recommend(64, 256, tokens=4, structures=["kronecker"], repeats=3)
    plan = el.make_plan(el.kronecker(), 64, 256)
    (row,) = found.rows
    assert (row.macs, row.params, row.rank) == (plan.macs, plan.params, 64)
    assert isclose(row.flops_share, plan.macs / 64 / 256)
    assert isclose(row.params_share, plan.params / 64 / 256)
    assert (row.speed, row.milliseconds, row.rounds) == (4, 1000, 3)
    assert isclose(row.low, 2.4)  # a tenth of the way through 2, 4, 6
    assert isclose(row.high, 5.6)
    assert (str(row.omega), str(row.psi), str(row.nu)) == ("1/2", "1", "1/2")
    assert (found.dense.speed, found.dense.milliseconds) == (1, 4000)
    assert isclose(found.dense_spread, 5.6 / 2.4)
    assert "busy: the times of nn.Linear itself differ by a factor of 2.3" in str(found)
    timed[LINEAR] = 4.0
    assert "busy" not in str(recommend(64, 256, tokens=4, structures=["kronecker"], repeats=3))


def test_rounds_follow_from_the_time_of_one(timed):
    timed |= {LINEAR: 0.05, "btt": 0.05}
    recommend(64, 64, tokens=4, structures=["btt"])
    recommend(64, 64, tokens=4, structures=["btt", "kronecker"])  # 1 s: the fewest rounds
    assert timed["calls"] == [1, 25, 1, 9]


def test_plain_data(timed):
    found = recommend(64, 64, tokens=4, structures=["btt"], repeats=2, threads=1)
    data = json.loads(json.dumps(found.as_dict()))
    assert (data["d_in"], data["tokens"], data["best"]) == (64, 4, None)
    assert data["rows"][0]["structure"] == "btt"
    assert data["rows"][0]["nu"] == "1/2"
    assert (data["machine"]["threads"], data["threads"]) == (1, 1)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_text_fits(timed, width):
    timed |= {"btt": 0.013}
    lines = recommend(1024, 4096, tokens=4, repeats=3).text(width).splitlines()
    assert max(map(len, lines[:-1])) <= width  # the code is not wrapped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_in": 0}, "the input width is 0"),
        ({"d_out": 2.5}, "the output width is 2.5"),
        ({"share": 0}, "share is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 10**15}, "needs .*B or more"),
        ({"repeats": 0}, "repeats is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"structures": "btt"}, "structures is 'btt'"),
        ({"structures": [3]}, r"structures is \[3\]"),
        ({"structures": ["btx"]}, "there is no structure named 'btx'"),
    ],
)
def test_errors(options, message):
    given = {"d_in": 8, "d_out": 8, "tokens": 4, "repeats": 1} | options
    with pytest.raises(EinlinearError, match=message):
        recommend(given.pop("d_in"), given.pop("d_out"), **given)


def test_threads_are_given_back(timed):
    before = torch.get_num_threads()
    assert recommend(8, 8, tokens=4, repeats=1, threads=before + 1).threads == before + 1
    assert torch.get_num_threads() == before


def test_the_picture_has_every_name_and_the_limit(timed, tmp_path):
    timed |= {"btt": [0.1, 0.2, 0.3], "low_rank": 0.1}
    found = recommend(256, 256, tokens=4, repeats=3)
    dense = recommend(8, 8, tokens=4, repeats=3, share=0.01)
    path = draw_tradeoff([found, dense], tmp_path / "a.svg")
    picture = path.read_text(encoding="utf-8")
    for row in found.rows:
        assert f">{row.structure}</text>" in picture
    assert picture.count(">limit: time = FLOPs</text>") == 2
    assert picture.count(">nn.Linear</text>") == 2
    assert ">256 → 256: use btt, 5 x faster</text>" in picture
    assert ">8 → 8: stay dense</text>" in picture
    assert "(prefers-color-scheme:dark)" in picture


def test_the_command_for_a_shape(capsys, tmp_path):
    plot, data = tmp_path / "a.png", tmp_path / "a.json"
    words = "recommend --d-in 32 --d-out 64 --tokens 8 --repeats 2 --threads 1".split()
    main([*words, "--plot", str(plot), "--json", str(data)])
    out = capsys.readouterr().out
    assert out.startswith("32 -> 64, 8 tokens, float32, 1 thread, forward + backward\n")
    assert " ".join(LEGEND.split()) in " ".join(out.split())
    assert "Stay dense: " in out or "Use " in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(data.read_text())["rows"]
    assert all(row["speed"] > 0 and row["peak_bytes"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "given: neither a shape nor a model"),
        ("--d-in 8", "given: --d-in\n"),
        ("--d-in 8 --d-out 8 --model a:b", "given: --d-in and --d-out and --model"),
        ("--d-in 8 --d-out 8 --share 2", "--share is 2.0"),
        ("--d-in 8 --d-out 8 --plot a.gif", "--plot is 'a.gif'"),
        ("--model nothing_here:make", "there is no module 'nothing_here'"),
    ],
)
def test_what_the_command_refuses(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["recommend", *words.split()])
    lines = capsys.readouterr().err.removeprefix("measuring\n")
    assert lines.startswith(f"einlinear: {message}")
    assert lines.count("\n") == 3
    assert list(Path().iterdir()) == []
