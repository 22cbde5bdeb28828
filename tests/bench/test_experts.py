import json
import re

import pytest
import torch

import einlinear as el
from cases import STRUCTURES
from einlinear.bench.experts import ALL, MIXTURE, ExpertsCase, Summed, bench_experts, experts_cases
from einlinear.bench.layers import LayerCase
from einlinear.bench.page import bench_page
from einlinear.bench.peers import all_experts
from einlinear.bench.rows import (
    LINEAR_BIAS,
    MODES,
    BenchResult,
    bench_tables,
    read_speeds,
    row_cells,
    timing_fields,
)
from einlinear.cli.main import main
from einlinear.layers.measure import interleaved


@pytest.fixture(scope="module")
def rows():
    found = []
    for structure in ("btt", "dense"):
        for number in (8, 2):
            case = ExpertsCase(structure, 64, 40, number, 2)
            found += bench_experts(case, repeats=4).rows
    return found


def make(structure, width=24, **options):
    torch.manual_seed(0)
    options = {"num_experts": 5, "num_active": 2, "dtype": torch.float64} | options
    layer = el.MoELinear(width, width, structure=structure, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def by_hand(layer, x):
    """Every token by itself: the softmax of the largest logits, times whole matrices."""
    matrices = layer.to_dense()
    rows = []
    for token in x:
        logits = layer.gate.weight @ token
        experts = logits.argsort(descending=True)[: layer.num_active]
        total = logits[experts].exp().sum()
        row = sum(logits[e].exp() / total * (matrices[e] @ token) for e in experts)
        rows.append(row if layer.bias is None else row + layer.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("width", [24, 13])
def test_all_experts_give_what_the_mixture_is(name, width):
    layer = make(STRUCTURES[name], width)
    x = torch.randn(7, width, dtype=torch.float64, requires_grad=True)
    tensors = (x, *layer.parameters())
    expected, given = by_hand(layer, x), all_experts(layer, x)
    torch.testing.assert_close(given, expected)
    grad = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(given, tensors, grad),
        torch.autograd.grad(expected, tensors, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(layer(x), given)


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"weight_norm": False}, {"num_active": 5}, {"num_experts": 2}]
)
def test_all_experts_of_other_mixtures(options):
    layer = make("btt", **options)
    x = torch.randn(7, 24, dtype=torch.float64)
    torch.testing.assert_close(all_experts(layer, x), by_hand(layer, x))


def test_every_way_is_compared_with_the_dense_layer_and_the_mixture_with_all(rows):
    for row in rows:
        assert 0 < row.low <= row.speed <= row.high
        assert (row.section, row.num_active, row.width, row.tokens) == ("experts", 2, 64, 40)
    for structure, active in (("btt", "2 EinsumLinear"), ("dense", "2 nn.Linear")):
        ways = [(name, LINEAR_BIAS) for name in (LINEAR_BIAS, active, ALL, MIXTURE)]
        ways += [(MIXTURE, active), (MIXTURE, ALL)]
        for number in (2, 8):
            for mode in MODES:
                found = [
                    (row.variant, row.baseline)
                    for row in rows
                    if (row.structure, row.num_experts, row.mode) == (structure, number, mode)
                ]
                assert found == ways


def test_limits_are_ratios_of_multiply_adds(rows):
    expert = {"btt": 2 * 64 * 8, "dense": 64 * 64}
    for row in rows:
        gate = 64 * row.num_experts
        macs = {
            LINEAR_BIAS: 64 * 64,
            "2 EinsumLinear": 2 * expert[row.structure],
            "2 nn.Linear": 2 * expert[row.structure],
            ALL: row.num_experts * expert[row.structure] + gate,
            MIXTURE: 2 * expert[row.structure] + gate,
        }
        assert row.limit == macs[row.baseline] / macs[row.variant]


def test_all_experts_get_three_rounds(rows):
    for row in rows:
        assert row.rounds == (3 if ALL in (row.variant, row.baseline) else 4)


def test_all_experts_need_memory_for_each(rows):
    peaks = {
        (row.num_experts, row.variant): row.peak_bytes
        for row in rows
        if (row.structure, row.mode) == ("btt", MODES[0])
    }
    per_expert = 40 * 64 * 4  # one intermediate
    assert peaks[8, ALL] - peaks[2, ALL] > 6 * per_expert
    assert peaks[8, MIXTURE] < peaks[8, ALL]


def test_actions_that_are_few_take_part_in_the_first_rounds():
    order, told = [], []
    actions = {name: lambda name=name: order.append(name) for name in "abc"}
    times = interleaved(actions, 3, few={"b": 2, "c": 9}, on_progress=told.append)
    assert "".join(order) == "aabbcc" * 2 + "aacc"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 2, "c": 3}
    assert told[:2] == ["round 1 of 3, a", "round 1 of 3, b"]
    assert told[-1] == "round 3 of 3, c"


def test_rounds_that_both_took_part_in_are_compared():
    found = timing_fields([2.0, 4.0], [1.0, 1.0, 5.0])
    assert found["speed"] == 3.0
    assert found["rounds"] == 2
    assert found["milliseconds"] == 1000.0


def test_layers_added_up():
    one, two = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4, bias=False)
    x = torch.randn(5, 3)
    torch.testing.assert_close(Summed([one, two])(x), one(x) + two(x))


def test_cases_are_measured_once():
    cases = experts_cases([LayerCase("btt", 64, 8), LayerCase("dense", 64, 8)], [4, 16, 4], 2)
    assert [(c.structure, c.num_experts) for c in cases] == [
        ("btt", 4),
        ("btt", 16),
        ("dense", 4),
        ("dense", 16),
    ]


def test_the_number_of_experts_grows_downwards(rows):
    ((first, *_),) = bench_tables(rows)
    assert {(row.structure, row.mode) for row in first} == {("btt", MODES[0])}
    assert [row.num_experts for row in first] == [2, 8] * 6
    assert [row.variant for row in first[-2:]] == [MIXTURE] * 2
    assert {row.baseline for row in first[-2:]} == {ALL}
    assert row_cells(first[-1])["experts"] == "2 of 8"
    assert row_cells(first[-1])["against"] == ALL


def figures_of(page):
    return json.loads(re.search(r'id="figures">(.*)</script>', page)[1])


def test_the_page_shows_speed_time_and_memory(rows):
    page = bench_page(BenchResult(tuple(rows), ()))
    assert "<b>Mixtures of experts.</b>" in page
    assert "<b>Layers.</b>" not in page
    assert "<h2>forward + backward, width 64, 2 active experts</h2>" in page
    figures = figures_of(page)
    assert [name for name in figures if name.startswith("speeds")] == ["speeds0", "speeds1"]
    figure = figures["speeds0"]
    assert figure["isLog"]
    assert figure["labels"] == [f"{s}<br>{e} experts" for s in ("btt", "dense") for e in (8, 2)]
    held = [row for row in rows if row.mode == MODES[0] and row.baseline == LINEAR_BIAS]
    mixture = next(series for series in figure["data"] if series["name"] == MIXTURE)
    assert mixture["y"] == [row.speed for row in held if row.variant == MIXTURE]
    for field, unit in (("milliseconds", "ms"), ("peak_megabytes", "peak MB")):
        assert figures[f"{field}0"]["unit"] == unit
        lines = {line["name"]: line for line in figures[f"{field}0"]["data"]}
        assert len(lines) == 5
        numbers = {
            row.num_experts: getattr(row, field)
            for row in held
            if (row.structure, row.variant) == ("dense", ALL)
        }
        line = lines["dense, all experts, masked"]
        assert (line["x"], line["y"]) == ([2, 8], [numbers[2], numbers[8]])
        both = [getattr(r, field) for r in held if r.variant == LINEAR_BIAS and r.num_experts == 8]
        assert lines["nn.Linear"]["y"][1] == pytest.approx(sum(both) / 2)


def test_one_number_of_experts_has_no_lines(rows):
    page = bench_page(BenchResult(tuple(row for row in rows if row.num_experts == 8), ()))
    assert list(figures_of(page)) == ["speeds0", "speeds1"]


def test_files_older_than_mixtures_can_be_compared_with():
    row = dict.fromkeys(("structure", "width", "tokens", "dtype", "mode", "variant", "baseline"), 1)
    assert list(read_speeds(json.dumps({"rows": [{**row, "speed": 3}]}), "old").values()) == [3.0]


def test_the_command_measures_mixtures_instead_of_layers(capsys, tmp_path):
    words = "bench --experts 2 4 --structures monarch --widths 16 --tokens 8 --repeats 1 --out"
    main([*words.split(), str(tmp_path)])
    shown = capsys.readouterr()
    assert "case 2 of 2: monarch, 2 of 4 experts, at width 16, 8 tokens" in shown.err
    assert re.findall(r"^2 of \d", shown.out, re.MULTILINE) == ["2 of 2", "2 of 4"] * 12
    assert max(map(len, shown.out.splitlines()[:-2])) <= 80
    assert shown.out.count("; against all experts") == 2
    assert re.findall(r"^monarch, (2 of \d) experts: ", shown.out, re.MULTILINE) == [
        "2 of 2",
        "2 of 4",
    ]
    found = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["num_experts"] for row in found} == {2, 4}
    assert {row["kind"] for row in found} == {"baseline", "active", "masked", "mixture"}
    main(
        [*words.split(), str(tmp_path), "--active", "1", "--compare", str(tmp_path / "bench.json")]
    )
    shown = capsys.readouterr().out
    assert "1 EinsumLinear" in shown
    assert "by old" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--experts 16 1", "2 of 1 experts are active"),
        ("--experts 4 --active 5", "fix:  --active 4, or --experts 5 and more"),
        ("--experts 4 --active 0", "active is 0"),
        ("--experts 0", "experts is 0"),
        ("--experts", "--experts has no values"),
        ("--active 2", "--active 2 without --experts"),
        ("--experts 4 --tokens 0", "tokens is 0"),
    ],
)
def test_bad_mixtures(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--structures", "btt", "--out", str(tmp_path), *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
