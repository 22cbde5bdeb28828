import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import einlinear as el
from cases import STRUCTURES
from einlinear.bench import layers as bench
from einlinear.bench import peers
from einlinear.bench.blocks import (
    FUSED,
    bench_stack,
    make_stack,
    stack_cases,
    step_flops,
    training_step,
)
from einlinear.bench.layers import LayerCase, bench_case, bench_cases
from einlinear.bench.page import bench_page
from einlinear.bench.plot import draw_speeds, speed_rows
from einlinear.bench.rows import (
    LINEAR,
    LINEAR_BIAS,
    MODES,
    BenchResult,
    merge_results,
    speed_interval,
)
from einlinear.cli.main import main
from einlinear.errors import EinlinearError
from einlinear.layers.engine import binding, compiled
from einlinear.layers.measure import peak_memory
from einlinear.layers.reference import einsum_steps
from einlinear.layers.variants import VARIANTS

OWN = (LINEAR, *VARIANTS, LINEAR_BIAS, "layer")


@pytest.fixture(scope="module")
def result():
    return bench_case(LayerCase("btt(rank=2)", 64, 300), repeats=3)


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)


def factors_of(structure, width=64, dtype=torch.float64):
    layer = el.EinsumLinear(width, width, structure=structure, dtype=dtype)
    return layer.plan, [factor.detach() for factor in layer.factors()]


def test_everything_is_timed_both_ways(result):
    cases = [(row.mode, row.variant) for row in result.rows if row.kind != "peer"]
    assert cases == [(mode, name) for mode in MODES for name in OWN]
    for row in result.rows:
        assert 0 < row.low <= row.speed <= row.high
        assert row.limit == (1 if row.kind == "baseline" else 2)
        assert row.baseline == (LINEAR_BIAS if row.variant in (LINEAR_BIAS, "layer") else LINEAR)
    assert sum(row.is_chosen for row in result.rows) == 2
    assert all(row.speed == 1 for row in result.rows if row.kind == "baseline")


def test_the_layer_is_timed_with_its_bias(result):
    """The gradient of a bias is in what the layer and its baseline hold, and in no other row."""
    peaks = {row.variant: row.peak_bytes for row in result.rows if row.mode == MODES[1]}
    assert peaks[LINEAR_BIAS] >= peaks[LINEAR] + 64 * 4


def test_one_round_has_no_interval():
    rows = bench_case(LayerCase("low_rank", 16, 4), repeats=1).rows
    assert {speed_interval(row) for row in rows} == {"one round"}
    assert all(row.low == row.speed == row.high for row in rows)
    assert speed_interval(replace(rows[0], rounds=2, low=0.5, high=1.5)) == "0.50 - 1.50"


def test_peak_memory_counts_what_is_held_at_once():
    def action():
        a = torch.empty(1000, 1000)
        del a
        b, c = torch.empty(500, 1000), torch.empty(250, 1000)
        return b, c

    assert peak_memory(action) == pytest.approx(4e6, rel=0.01)


@pytest.mark.skipif(not binding.is_available(), reason="the engine is not built")
def test_peak_memory_has_the_workspace_of_the_engine():
    layer = el.EinsumLinear(256, 256, structure="btt")
    layer.choices = {"cpu float32 up to 512 tokens, forward": "engine"}
    x = torch.randn(500, 256)

    def action():
        with torch.no_grad():
            return layer(x)

    peak = peak_memory(action)
    workspace = binding.workspace_bytes()
    assert workspace > 24 * 256 * 4  # z of a block
    assert peak == 500 * 256 * 4 + workspace
    binding.release_workspace()
    assert binding.workspace_bytes() == 0
    torch.testing.assert_close(action(), x @ layer.to_dense().t() + layer.bias)


def test_backward_needs_more_memory_than_forward(result):
    peaks = {(row.mode, row.variant): row.peak_bytes for row in result.rows}
    for variant in VARIANTS:
        assert peaks["forward+backward", variant] > peaks["forward", variant] >= 64 * 300 * 4


def figures_of(page):
    return json.loads(re.search(r'id="figures">(.*)</script>', page)[1])


def test_the_page_draws_every_row_but_the_baselines(result):
    further = [
        replace(row, variant=f"further {i}", kind="peer") for i, row in enumerate(result.rows)
    ]
    page = bench_page(BenchResult((*result.rows, *further), ("a note & more",)))
    assert list(figures_of(page)) == ["speeds0", "speeds1"]
    for variant in (*VARIANTS, *(row.variant for row in further)):
        assert f'"name":"{variant}"' in page
    assert "layer, with bias" in page
    assert f'"name":"{LINEAR}"' not in page
    assert "a note &amp; more" in page
    assert "A bar is above it where nn.Linear computes fewer per second" in page
    assert "<b>Mixtures of experts.</b>" not in page


def test_cases_are_measured_once():
    cases = bench_cases(["btt", "btt", "low_rank"], [64, 64], [8, 9, 8])
    assert cases == [LayerCase(s, 64, t) for s in ("btt", "low_rank") for t in (8, 9)]


@pytest.mark.parametrize("name", ["structures", "widths", "tokens"])
def test_an_empty_list_is_an_error(name, capsys, tmp_path):
    values = {"structures": ["btt"], "widths": [64], "tokens": [8]} | {name: []}
    with pytest.raises(EinlinearError, match=f"--{name} has no values"):
        bench_cases(**values)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--out", str(tmp_path), f"--{name}"])
    assert stop.value.code == 2
    assert f"fix:  --{name} " in capsys.readouterr().err


def test_the_command_writes_a_table_and_files(capsys, tmp_path):
    words = "bench --structures monarch --widths 64 --tokens 8 8 --repeats 2 --dtype float64 --out"
    main([*words.split(), str(tmp_path)])
    shown = capsys.readouterr()
    assert "case 1 of 1: monarch at width 64, 8 tokens" in shown.err
    assert all(name in shown.out for name in ("monarch", *OWN))
    said = [line for line in shown.out.splitlines() if not line.startswith("wrote ")]
    assert max(map(len, said)) <= 80
    assert "FLOPs/token (forward): 2,048, nn.Linear 8,192\n" in shown.out
    result = " ".join(shown.out.partition("monarch: ")[2].split())
    assert re.match(
        r"(\d+(\.\d)? x (faster|slower) than|about as fast as) nn.Linear here \(.*"
        r"width 64, 8 tokens, forward \+ backward\) wrote ",
        result,
    )
    payload = json.loads((tmp_path / "bench.json").read_text())
    assert payload["machine"]["torch"] == torch.__version__
    assert {row["dtype"] for row in payload["rows"]} == {"float64"}
    assert "nn.Linear" in (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert "monarch" in (tmp_path / "speed.svg").read_text(encoding="utf-8")


def test_a_run_is_compared_with_another(capsys, tmp_path, no_peers):
    words = [
        "bench",
        "--structures",
        "monarch",
        "--widths",
        "64",
        "--tokens",
        "8",
        "--repeats",
        "1",
    ]
    words += ["--out", str(tmp_path)]
    main(words)
    old = tmp_path / "old.json"
    payload = json.loads((tmp_path / "bench.json").read_text())
    for row in payload["rows"]:
        row["speed"] = 1e-9 if row["variant"] == "nn.Linear" else row["speed"]
    payload["rows"] = [row for row in payload["rows"] if row["variant"] != "layer"]
    old.write_text(json.dumps(payload))
    capsys.readouterr()
    main([*words, "--compare", str(old)])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("wrote")) <= 80
    last = {line.split("  ")[0]: line.split()[-1] for line in lines if line}
    assert last["nn.Linear"] == "1000000000.00"
    assert last["layer"] == "-"
    huge = json.dumps({"rows": [payload["rows"][0] | {"speed": 10**400}]})
    for text in ("{}", "[]", "no json", '{"rows": [{}]}', "[" * 100_000, huge):
        old.write_text(text)
        with pytest.raises(SystemExit) as stop:
            main([*words, "--compare", str(old)])
        assert stop.value.code == 2
        assert "holds no rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--compare", str(tmp_path / "none.json")])
    assert "No such file" in capsys.readouterr().err


def test_bad_requests(capsys, tmp_path):
    for words in (
        "--structures bttt",
        "--structures btt bttt",
        "--widths 0",
        "--structures btt --tokens -1",
        "--structures btt --tokens 0",
        "--structures btt --repeats 0",
        "--structures btt --repeats 1000000000",
    ):
        with pytest.raises(SystemExit) as stop:
            main(["bench", "--out", str(tmp_path), *words.split()])
        assert stop.value.code == 2
        assert "rule:" in capsys.readouterr().err


def test_missing_peers_are_a_note(no_peers):
    found = merge_results([bench_case(LayerCase("kronecker", 16, 4), repeats=1)])
    assert {row.variant for row in found.rows} == set(OWN)
    assert found.notes == (peers.missing_note(),)
    assert "pip install tensorly-torch tensorly cola-ml" in found.notes[0]


def test_a_failing_peer_is_a_note(monkeypatch):
    def broken(*_):
        raise RuntimeError("first line\nsecond line")

    def wrong(plan, factors, *_):
        return peers.Peer("cola", torch.zeros_like, (), plan.x_edges, plan.y_edges)

    def late(plan, factors, *_):
        run = lambda x: einsum_steps(plan, x, factors).detach()  # noqa: E731
        return peers.Peer("cola", run, (), plan.x_edges, plan.y_edges)

    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    monkeypatch.setattr(peers, "tltorch_peer", broken)
    for maker, message in ((wrong, "off by 100.0%"), (late, "does not require grad")):
        monkeypatch.setattr(peers, "cola_peer", maker)
        found = bench_case(LayerCase("kronecker", 16, 4), repeats=1)
        assert {row.variant for row in found.rows} == set(OWN)
        assert len(found.notes) == 3
        assert found.notes[0] == "tltorch is left out of kronecker: RuntimeError: first line"
        assert message in found.notes[2]
    assert peers.missing_note() is None


@pytest.mark.parametrize("name", STRUCTURES)
def test_cola_computes_every_structure_with_our_parameters(name):
    pytest.importorskip("cola")
    plan, factors = factors_of(STRUCTURES[name])
    peer = peers.cola_peer(plan, factors)
    peers.check_peer(peer, plan, factors)
    assert sum(tensor.numel() for tensor in peer.tensors) == plan.params
    with pytest.raises(ArithmeticError):
        peers.check_peer(peer, plan, [1.01 * factor for factor in factors])


@pytest.mark.parametrize("implementation", ["factorized", "reconstructed"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_tltorch_computes_the_trains_with_our_parameters(name, implementation):
    pytest.importorskip("tensorly")
    pytest.importorskip("tltorch")
    plan, factors = factors_of(STRUCTURES[name])
    peer = peers.tltorch_peer(plan, factors, implementation)
    is_train = name.split("(")[0] in ("dense", "low_rank", "kronecker", "tensor_train")
    assert (peer is not None) == is_train
    if peer is not None:
        peers.check_peer(peer, plan, factors)
        assert sum(tensor.numel() for tensor in peer.tensors) == plan.params


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float64, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_installed_peers_are_timed(dtype):
    for module in peers.PACKAGES:
        pytest.importorskip(module)
    found = merge_results([bench_case(LayerCase("kronecker", 64, 32), dtype, repeats=2)])
    timed = [(row.mode, row.variant) for row in found.rows if row.kind == "peer"]
    names = ("tltorch", "tltorch rebuilt", "cola")
    assert timed == [(mode, name) for mode in MODES for name in names]
    assert found.notes == ()


@pytest.fixture(scope="module")
def stack():
    (case,) = stack_cases(["btt", "low_rank", "btt"], [64], [300, 256], 2)
    return bench_stack(case, repeats=2)


def test_a_stack_is_timed_against_the_dense_one(stack):
    cases = [(row.structure, row.variant, row.kind) for row in stack.rows]
    names = ("btt", "low_rank", "btt, fused", "low_rank, fused")
    structured = [(name, "layer", "stack") for name in names]
    assert cases == [("dense", LINEAR, "baseline"), *structured]
    for row in stack.rows:
        assert (row.mode, row.width, row.tokens) == ("training, 2 blocks", 64, 256)
        assert row.section == "blocks"
        assert 0 < row.low <= row.speed <= row.high
        assert row.tokens_per_second == pytest.approx(256 / (row.milliseconds / 1e3))
    assert stack.rows[0].limit == stack.rows[0].speed == 1


def test_the_limit_of_a_stack_counts_layers_and_attention(stack):
    def flops(structure):
        widths = [(64, 192), (64, 64), (64, 256), (256, 64)]
        plans = [el.make_plan(el.parse(structure), *pair) for pair in widths]
        linear = 6 * 256 * sum(plan.macs for plan in plans)
        attention = 2 * (2 * 2 * 128 * 128 * 64) * 3  # sequences, products, backward
        return 2 * (linear + attention)

    for row in stack.rows:
        name = row.structure.removesuffix(FUSED)
        assert step_flops(None if row.kind == "baseline" else name, 64, 256, 2) == flops(name)
        assert row.limit == flops("dense") / flops(name)


@pytest.mark.skipif(not compiled.IS_AVAILABLE, reason="the engine is not built")
def test_fused_stacks_hold_less_memory(stack):
    _, btt, low_rank, fused, fused_low_rank = stack.rows
    assert fused.peak_bytes < btt.peak_bytes
    assert fused_low_rank.peak_bytes < low_rank.peak_bytes


def test_a_dense_step_holds_more_memory_than_its_gradients(stack):
    dense = stack.rows[0]
    gradients = 4 * sum(p.numel() for p in make_stack(None, 64, 2).parameters())
    activations = 4 * 256 * 64 * 2 * 10  # what the linear layers of two blocks keep, and more
    assert dense.peak_bytes > gradients + activations


@pytest.mark.parametrize("structure", [None, "btt"])
def test_a_stack_is_causal_and_learns(structure):
    torch.manual_seed(0)
    model = make_stack(structure, 64, 2).double()
    kind = torch.nn.Linear if structure is None else el.EinsumLinear
    layers = [m for m in model.modules() if type(m) is kind]
    assert len(layers) == 8
    assert structure is None or not [m for m in model.modules() if type(m) is torch.nn.Linear]
    x, target = torch.randn(2, 2, 16, 64, dtype=torch.float64)
    other = torch.cat([x[:, :9], torch.randn(2, 7, 64, dtype=torch.float64)], dim=1)
    y, y_other = model(x), model(other)
    torch.testing.assert_close(y[:, :9], y_other[:, :9])
    assert not torch.allclose(y[:, 9:], y_other[:, 9:])
    before = torch.nn.functional.mse_loss(y, target).item()
    step = training_step(model, x, target)
    for _ in range(5):
        step()
    assert torch.nn.functional.mse_loss(model(x), target).item() < before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_stacks_have_their_own_panel_and_table(result, stack, capsys, tmp_path, no_peers):
    page = bench_page(BenchResult((*result.rows, *stack.rows), ()))
    assert "<h2>training, 2 blocks, width 64</h2>" in page
    figure = list(figures_of(page).values())[2]
    (bars,) = figure["data"]
    assert figure["labels"] == ["btt", "low_rank", "btt, fused", "low_rank, fused"]
    assert bars["y"] == [row.speed for row in stack.rows[1:]]
    assert figure["limits"] == [[k, row.limit] for k, row in enumerate(stack.rows[1:])]
    words = "bench --structures monarch --widths 64 --tokens 8 --repeats 1 --blocks 1 --out"
    main([*words.split(), str(tmp_path)])
    shown = capsys.readouterr()
    assert "case 2 of 2: 1 blocks at width 64, 128 tokens" in shown.err
    assert shown.out.count("tokens/s") == 1
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    stacks = [row for row in rows if row["mode"] == "training, 1 block"]
    assert [row["kind"] for row in stacks] == ["baseline", "stack", "stack"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    main([*words.split(), str(tmp_path), "--compare", str(tmp_path / "bench.json")])
    lines = capsys.readouterr().out.partition("training, 1 block")[2].splitlines()
    rows = [line.split() for line in lines[3:5]]
    assert [row[0] for row in rows] == ["dense", "monarch"]
    assert rows[0][-1] == "1.00"


def test_no_blocks_no_stacks():
    assert stack_cases(["btt"], [63], [8], 0) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--blocks -1", "blocks is -1"),
        ("--blocks 1 --widths 96", "--widths 64, or leave --blocks out"),
        ("--blocks 1 --widths 32", "--widths 64, or leave --blocks out"),
    ],
)
def test_bad_stacks(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--structures", "btt", "--out", str(tmp_path), *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_cases_that_are_done_survive_an_interruption(tmp_path, monkeypatch):
    case = bench.bench_case

    def interrupted(one, *arguments, **options):
        if one.width == 32:
            raise KeyboardInterrupt
        return case(one, *arguments, **options)

    monkeypatch.setattr(bench, "bench_case", interrupted)
    words = "bench --structures btt --widths 16 32 --tokens 8 --repeats 1 --out"
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), str(tmp_path)])
    assert stop.value.code == 130
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["width"] for row in rows} == {16}
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--widths 64 16777216 --tokens 8", "width 16,777,216, 8 tokens"),
        ("--widths 64 --tokens 8 10000000000000", "width 64, 10,000,000,000,000 tokens"),
        (
            "--widths 64 --tokens 8 --experts 999999999",
            "width 64, 8 tokens, 999,999,999 experts",
        ),
        ("--widths 64 --tokens 8 --blocks 9999999999", "9,999,999,999 blocks, width 64"),
    ],
)
def test_what_needs_more_memory_than_there_is(words, named, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--structures", "btt", "--out", str(tmp_path / "out"), *words.split()])
    assert stop.value.code == 2
    what, rule, fix = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"einlinear: (btt, )?{named}, needs [\d,.]+ (G|T|P)B or more", what)
    assert re.fullmatch(r"  rule: this machine has [\d,.]+ (G|T)B of memory", rule)
    assert fix.startswith("  fix:  give smaller --widths")
    assert not (tmp_path / "out").exists()


def test_the_picture_shows_each_layer_with_its_limit(tmp_path):
    rows = bench_case(LayerCase("monarch", 16, 4), torch.float32, repeats=1).rows
    (row,) = speed_rows(rows)
    assert (row.structure, row.width, row.mode) == ("monarch", 16, "forward+backward")
    text = draw_speeds(rows, tmp_path / "speed.svg").read_text(encoding="utf-8")
    assert f"{row.speed:.1f} of {row.limit:.0f}" in text
    assert "monarch" in text
    assert "width 16" in text
    style = ElementTree.fromstring(text).find(".//{*}style").text
    dark = style.partition("@media (prefers-color-scheme:dark)")[2]
    for colour in set(re.findall(r"(?:fill|stroke): (#\w+)", text.partition("</style>")[2])):
        assert f": {colour}" in dark, "every colour has another on a dark page"
