"""The coordinate check: passes under µP, fails under one rate for all."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError
from einlinear.models.mup.check import _OPTIMIZERS, slope
from einlinear.models.mup.check_result import CheckRow, CoordinateCheck
from kit.small_models import STRUCTURES, Perceptron, Transformer, tokens, vectors


def slow(*values):
    """Parameters that have cheaper companions."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def check(model, structure, **options):
    data = tokens() if model is Transformer else vectors()
    return el.coordinate_check(lambda width: model(width, structure), batch=data, **options)


@pytest.mark.no_cover
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_perceptron(structure):
    options = {"widths": (64, 128, 256, 512), "seeds": 3}
    mup = check(Perceptron, structure, **options)
    assert mup.passed, mup
    assert not check(Perceptron, structure, parametrization="naive", **options).passed


@pytest.mark.no_cover
@pytest.mark.parametrize("structure", ["kronecker", STRUCTURES[-1], *slow("dense", "btt(rank=2)")])
def test_a_perceptron_with_sgd(structure):
    widths = (64, 256, 1024) if structure == "dense" else (64, 256, 1024, 4096)
    options = {"widths": widths, "optimizer": "sgd", "lr": 1.0, "seeds": 4}
    mup = check(Perceptron, structure, **options)
    assert mup.passed, mup
    naive = check(Perceptron, structure, parametrization="naive", **options)
    assert {"first", "second"} <= {row.layer for row in naive.failures}


def test_low_rank_layers_hardly_move_with_sgd():
    """A limit that docs/training.md names: the rates are safe, but do not transfer."""
    result = check(Perceptron, "low_rank", widths=(64, 256, 1024), optimizer="sgd", lr=1.0)
    slopes = {row.layer: row.change_slope for row in result.last_rows}
    assert max(slopes.values()) < 0.1
    assert slopes["first"] < -0.6


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("structure", [*STRUCTURES[3:], *slow(*STRUCTURES[:3])])
def test_a_transformer(structure):
    options = {"lr": 0.003, "steps": 3}
    options["widths"] = (64, 128, 256) if structure == "dense" else (64, 256, 1024)
    mup = check(Transformer, structure, seeds=4, **options)
    assert mup.passed, mup
    assert len(mup.last_rows) == 1 + 2 * 8 + 2  # place is read as a tensor, not called
    naive = check(Transformer, structure, seeds=1, parametrization="naive", **options)
    assert {"blocks.0.out", "head"} <= {row.layer for row in naive.failures}, naive


def test_branches_that_start_at_zero():
    result = check(
        Transformer,
        "btt(rank=2)",
        widths=(64, 256),
        seeds=1,
        steps=2,
        zero=["blocks.*.out", "blocks.*.down"],
    )
    start = {row.layer: row for row in result.rows if row.step == 0}
    assert start["blocks.0.out"].sizes == (0.0, 0.0)
    assert start["blocks.0.query"].sizes[0] > 0
    assert start["blocks.0.query"].changes == (0.0, 0.0)
    last = {row.layer: row for row in result.last_rows}
    assert min(last["blocks.0.out"].changes) > 0


@pytest.mark.parametrize(
    ("base", "optimizer"),
    [(lambda: Perceptron(32, "dense"), "adam"), (lambda: Perceptron(32, "dense"), "sgd"),
     (lambda: {"input": 16, "*": 32}, "adam")],
)  # fmt: skip
def test_a_base_as_param_groups_takes_it(monkeypatch, base, optimizer):
    """The rates of its groups are those of param_groups with the same base."""
    seen, real = [], torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    monkeypatch.setitem(_OPTIMIZERS, optimizer, lambda g, lr: seen.append(g) or real(g, lr=lr))
    options = {"widths": (64, 128), "seeds": 1, "steps": 1, "optimizer": optimizer}
    result = check(Perceptron, "btt", base=base(), **options)
    assert "at the base's widths" in result.title
    for width, got in zip((64, 128), seen, strict=True):
        wanted = el.param_groups(Perceptron(width, "btt"), 0.01, base=base(), optimizer=optimizer)
        assert [group["lr"] for group in got] == [group["lr"] for group in wanted]
    with pytest.raises(EinlinearError, match="both base and base_width"):
        check(Perceptron, "btt", base=base(), base_width=32, **options)


def test_what_is_measured_is_what_happened():
    """One linear layer, trained by hand."""
    x, y = torch.ones(4, 8), torch.zeros(4, 3)

    class Doubled(nn.Linear):
        pass

    result = el.coordinate_check(
        lambda width: Doubled(8, 3, bias=False),
        [16, 32],
        batch=lambda width: (x * width, y),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        lr=0.001,
        base_width=8,
        seeds=2,
        steps=2,
        parametrization="naive",
        optimizer="sgd",
    )
    for i, width in enumerate((16, 32)):
        expected = [[0.0, 0.0] for _ in range(3)]
        for seed in range(2):
            torch.manual_seed(seed)
            Doubled(8, 3, bias=False)  # draws its own numbers first
            weight = torch.empty(3, 8).normal_(0, 1 / math.sqrt(8))
            before = x @ weight.T * width
            for step in range(3):
                output = x @ weight.T * width
                expected[step][0] += output.square().mean().sqrt().item() / 2
                expected[step][1] += (output - before).square().mean().sqrt().item() / 2
                gradient = 2 / output.numel() * output.T @ (x * width)
                weight = weight - 0.001 * gradient
        rows = {row.step: row for row in result.rows}
        for step in range(3):
            assert rows[step].sizes[i] == pytest.approx(expected[step][0], rel=1e-4)
            assert rows[step].changes[i] == pytest.approx(expected[step][1], rel=1e-4, abs=1e-6)


def test_runs_are_repeatable_and_leave_the_generator_alone():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    results = [check(Perceptron, "btt", widths=(64, 256), seeds=2, steps=2) for _ in range(2)]
    assert results[0] == results[1]
    assert torch.equal(torch.rand(2), wanted)


class Dropped(Perceptron):
    """With dropout after every inner layer."""

    def __init__(self, width, rate):
        super().__init__(width, "dense")
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        for layer in (self.input, self.first, self.second):
            x = self.drop(torch.relu(layer(x)))
        return self.head(x)


def test_dropout_is_not_measured():
    """Every pass drops the same numbers: what changes has been learned."""

    def dropped(rate, **options):
        return el.coordinate_check(
            lambda width: Dropped(width, rate), (64, 256), batch=vectors(), seeds=2, **options
        )

    still = dropped(0.3, lr=1e-12)
    assert {row.step for row in still.rows} == {0, 1, 2, 3, 4}
    assert max(max(row.changes) for row in still.rows) < 1e-6
    with_it, without = dropped(0.3), dropped(0.0)
    assert {max(row.changes) for row in with_it.rows if row.step == 0} == {0.0}
    assert with_it.passed
    for ours, plain in zip(with_it.last_rows, without.last_rows, strict=True):
        assert ours.change_slope == pytest.approx(plain.change_slope, abs=0.2)
        assert ours.changes == pytest.approx(plain.changes, rel=0.5)


class Stuck(Perceptron):
    """Whose second layer gets no gradient, and reads what never changes."""

    def forward(self, x):
        with torch.no_grad():
            still = self.second(torch.ones(64, self.second.in_features))
        return self.head(torch.relu(self.input(x) + still))


def test_a_layer_that_never_moves_is_a_failure():
    def stuck(change=lambda model: None):
        def make(width):
            model = Stuck(width, "dense")
            change(model)
            return model

        return el.coordinate_check(make, (64, 128), batch=vectors(), seeds=1, steps=2)

    result = stuck()
    assert [row.layer for row in result.failures] == ["second"]
    assert result.failures[0].is_stuck
    [line] = [line for line in str(result).splitlines() if line.startswith("second")]
    assert line.endswith("FAIL: never moves")
    assert str(result).splitlines()[-1].startswith("FAIL: 1 of 3 layers")
    frozen = stuck(lambda model: model.second.requires_grad_(False))
    assert frozen.passed, frozen
    assert {row.layer: row.is_trained for row in frozen.last_rows} == {
        "input": True, "second": False, "head": True,
    }  # fmt: skip
    part = stuck(lambda model: model.second.bias.requires_grad_(False))
    assert [row.layer for row in part.failures] == ["second"]


def test_moving_at_one_width_is_moving():
    rows = (CheckRow("a", 1, (1.0, 1.0), (0.0, 1e-9), 0.0, 0.0),)
    assert CoordinateCheck(rows, (64, 128), 0.2, 0.75, "test").passed
    rows = (CheckRow("a", 1, (1.0, 1.0), (0.0, 0.0), 0.0, 0.0),)
    assert not CoordinateCheck(rows, (64, 128), 0.2, 0.75, "test").passed


@pytest.mark.parametrize("wide_only", [True, False])
def test_layers_that_differ_between_widths(wide_only):
    def make(width):
        layers = {"first": nn.Linear(16, width), "last": nn.Linear(width, 10)}
        if (width > 64) == wide_only:
            layers = {"extra": nn.Linear(16, 16)} | layers
        return nn.Sequential(OrderedDict(layers))

    with pytest.raises(EinlinearError, match=r"layers at width 128 .* width 64: extra") as error:
        el.coordinate_check(make, (64, 128), batch=vectors(), seeds=1, steps=1)
    assert "every width" in error.value.rule


@pytest.mark.parametrize("power", [-1.5, 0.0, 0.5])
def test_slopes(power):
    widths = (32, 64, 256, 300)
    assert slope(widths, [3 * w**power for w in widths]) == pytest.approx(power)
    assert slope(widths, [0.0, *(w**power for w in widths[1:])]) == pytest.approx(power)
    assert slope(widths, [1.0, 1.0, math.nan, 1.0]) == math.inf
    assert slope(widths, [0.0, 0.0, 0.0, 1.0]) == 0.0


def row(layer, change_slope, size_slope=0.0, step=1):
    return CheckRow(layer, step, (1.0, 1.0), (1.0, 1.5), size_slope, change_slope)


@pytest.mark.parametrize(
    ("change_slope", "size_slope", "is_fine"),
    [
        (0.19, 0.19, True),
        (0.21, 0.0, False),
        (0.0, 0.21, False),
        (-0.74, -3.0, True),
        (-0.76, 0.0, False),
        (math.inf, 0.0, False),
    ],
)
def test_the_verdict(change_slope, size_slope, is_fine):
    rows = (row("a", 9.0, step=1), row("a", change_slope, size_slope, step=2), row("b", 0, step=2))
    result = CoordinateCheck(rows, (64, 128), bound=0.2, shrink_bound=0.75, title="test")
    assert result.passed == is_fine
    assert [r.layer for r in result.failures] == ([] if is_fine else ["a"])
    assert str(result).splitlines()[-1].startswith("PASS" if is_fine else "FAIL: 1 of 2 layers")


def test_the_table():
    # From two steps on: in the first only the head moves, since it starts at zero.
    result = check(Perceptron, "dense", widths=(64, 128), seeds=1, steps=2)
    lines = str(result).splitlines()
    assert lines[0] == "mup, adam, lr 0.01 at base width 64, 2 steps"
    assert "change at 128" in lines[1]
    assert [line.split()[0] for line in lines[3:-1]] == ["input", "first", "second", "head"]
    assert lines[3].split()[-1] == "ok"


def test_diverging_runs_are_failures_not_crashes():
    result = check(
        Perceptron, "dense", widths=(64, 256), lr=1e4, optimizer="sgd", seeds=1, steps=8,
        parametrization="naive",
    )  # fmt: skip
    assert math.inf in {r.change_slope for r in result.failures}
    assert "inf" in str(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": [64]}, r"the widths are \[64\]"),
        ({"parametrization": "ntk"}, "parametrization is 'ntk'"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"steps": 0}, "steps is 0"),
        ({"batch": torch.ones(3, 16)}, "the batch is a Tensor"),
        ({"zero": "nothing"}, "matches no layer"),
    ],
)
def test_bad_arguments(options, message):
    given = {"widths": (8, 16), "batch": vectors(), "seeds": 1} | options
    with pytest.raises(EinlinearError, match=message):
        el.coordinate_check(lambda width: Perceptron(width, "dense"), **given)


@pytest.mark.parametrize("ending", ["svg", *slow("png")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what matplotlib imports
def test_plots(ending, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(f"layer {i}", 0.5 * i, step=s) for s in (0, 1, 2) for i in range(5)]
    rows.append(CheckRow("broken", 2, (1.0, 1.0), (math.inf, 0.0), 0.0, math.inf))
    rows.append(CheckRow("still", 2, (1.0, 1.0), (0.0, 0.0), 0.0, 0.0))
    result = CoordinateCheck(tuple(rows), (64, 128), 0.2, 0.75, "a title")
    path = result.plot(tmp_path / f"check.{ending}")
    content = path.read_bytes()
    assert content[:4] == {"png": b"\x89PNG", "svg": b"<?xm"}[ending]
    assert result.plot(tmp_path / f"again.{ending}").read_bytes() == content
    if ending == "svg":
        text = content.decode()
        assert "layer 4  +2.00" in text
        assert "still, never moves" in text
        assert "a title: fail" in text
    with pytest.raises(EinlinearError, match="suffix of the file"):
        result.plot(tmp_path / "check.xyz")


def test_plots_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = CoordinateCheck((row("a", 0.0),), (64, 128), 0.2, 0.75, "a title")
    with pytest.raises(EinlinearError, match="need matplotlib"):
        result.plot(tmp_path / "check.svg")
