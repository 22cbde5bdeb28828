"""convert_(anchored=True): layers fitted to the original model, on the inputs they really get."""

import copy
import threading
import types
from itertools import pairwise

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.layers.projection.pairs import Pairs
from einlinear.models.convert.anchoring import sharing_copy


def mlp(*widths):
    layers = []
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out), nn.GELU()]
    return lively(nn.Sequential(*layers[:-1])).double()


def lively(model):
    """Large weights, so that errors of one layer are seen in the next."""
    for value in model.parameters():
        if value.ndim == 2:
            nn.init.normal_(value, std=(2 / value.shape[1]) ** 0.5)
    return model


def inputs(count, width, seed=0):
    make = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, dtype=torch.float64, generator=make)
    sizes = torch.logspace(-1, 1, width, dtype=torch.float64)
    return torch.randn(count, width, dtype=torch.float64, generator=make) * sizes @ mix / width


@pytest.mark.parametrize("has_bias", [True, False])
def test_pairs_are_least_squares(has_bias):
    x, y = inputs(200, 7) + 1, inputs(200, 5, seed=1) - 2
    weights = inputs(9, 5, seed=2)
    counts = weights.T @ weights
    pairs = Pairs(7, 5, has_bias=has_bias, outputs=counts)
    for some, other in zip(x.split(33), y.split(33), strict=True):
        pairs.add(some, other)
    full = torch.cat([x, torch.ones(200, 1, dtype=x.dtype)], 1) if has_bias else x
    solved = torch.linalg.lstsq(full, y).solution.T
    found = pairs.best_weight(torch.zeros(5, 7), damping=0)
    assert torch.allclose(found, solved[:, :7])
    residual = y - full @ solved.T
    around = y - y.mean(0) if has_bias else y
    expected = (residual @ counts * residual).sum() / (around @ counts * around).sum()
    assert pairs.error(found) == pytest.approx(float(expected))
    if has_bias:
        assert torch.allclose(pairs.best_bias(found), solved[:, 7])


def test_damping_keeps_what_was_not_seen():
    near = inputs(4, 6)
    x = inputs(50, 6, seed=1)
    x[:, 3:] = 0
    pairs = Pairs(6, 4, has_bias=False)
    pairs.add(x, x @ near.T)
    assert torch.allclose(pairs.best_weight(near, damping=1e-2), near)


def test_better_than_projection_alone_on_other_inputs():
    """Errors of deep models add up unless layers are anchored."""
    for seed in range(3):
        torch.manual_seed(seed)
        model, x = mlp(32, *[48] * 6, 4), inputs(3000, 32)
        expected = model(x)
        errors = {}
        for anchored in (False, True):
            new = copy.deepcopy(model)
            el.convert_(
                new,
                "low_rank(rank=12)",
                init="project",
                calibration=list(x[:2500].split(500)),
                anchored=anchored,
            )
            errors[anchored] = float((new(x) - expected)[2500:].square().mean().detach())
        assert errors[True] < 0.9 * errors[False]


@pytest.mark.parametrize("structure", ["low_rank(rank=32)", "btt(rank=6)"])
def test_what_can_be_represented_stays(structure):
    model, x = mlp(16, 32, 32, 8), inputs(500, 16)
    el.convert_(model, structure, init="project")
    dense = nn.Sequential(*[_dense(module) for module in model])
    expected = dense(x)
    report = el.convert_(dense, structure, init="project", calibration=[x], anchored=True)
    assert torch.allclose(dense(x), expected, atol=1e-4)
    assert max(fit.error for fit in report.fits) < 1e-5


def _dense(module):
    if not isinstance(module, el.EinsumLinear):
        return module
    linear = nn.Linear(module.in_features, module.out_features).double()
    linear.weight.data, linear.bias.data = module.to_dense().detach(), module.bias.detach()
    return linear


class Repeated(nn.Module):
    """A layer that is called twice, and one under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.twice = nn.Linear(12, 12)
        self.alias = self.first

    def forward(self, x):
        return self.alias(self.twice(torch.tanh(self.twice(self.first(x)))))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Repeated(), torch.randn(50, 12)),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
            torch.randn(8, 10, 16),
        ),
        (el.GPT(19, width=32, depth=2, num_heads=2, context=8), torch.arange(64).view(8, 8) % 19),
    ],
    ids=["repeated", "encoder", "gpt"],
)
def test_models(model, batch):
    torch.manual_seed(0)
    model = lively(copy.deepcopy(model)).eval()
    expected = model(batch).detach()
    errors = []
    for anchored in (False, True):
        new = copy.deepcopy(model)
        rules = {"calibration": [batch], "init": "project", "anchored": anchored}
        report = el.convert_(new, "low_rank(rank=4)", **rules)
        assert all(0 <= fit.error < 1 for fit in report.fits)
        errors.append(float((new(batch) - expected).square().mean().detach()))
    assert errors[1] < errors[0] or isinstance(model, Repeated)  # its inputs move as it is fitted


def test_a_generator_of_batches_is_enough():
    model, x = mlp(8, 12, 4), inputs(100, 8)
    el.convert_(
        model,
        "low_rank(rank=2)",
        init="project",
        calibration=(batch for batch in x.split(25)),
        anchored=True,
    )
    assert isinstance(model[0], el.EinsumLinear)


def test_nothing_changes_if_a_pass_fails():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.calls = mlp(8, 12, 4), 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("tired")
            return self.layers(x)

    model = Fragile()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(el.EinlinearError, match="tired"):
        el.convert_(
            model,
            "low_rank(rank=2)",
            init="project",
            calibration=[inputs(30, 8)] * 2,
            anchored=True,
        )
    assert isinstance(model.layers[0], nn.Linear)
    assert not model.layers[0]._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_sharing_copy_holds_no_second_weights():
    model = mlp(8, 12, 4)
    model.register_buffer("steps", torch.zeros(1))
    other = sharing_copy(model)
    assert other[0] is not model[0]
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert other.steps is model.steps


def test_anchored_without_calibration():
    with pytest.raises(el.EinlinearError, match="anchored=True without calibration"):
        el.convert_(mlp(8, 12, 4), "low_rank(rank=2)", init="project", anchored=True)


@pytest.mark.parametrize(
    "x",
    [torch.randn(2000, 16) + 1000, torch.ones(50, 16), torch.randn(1, 16), torch.randn(0, 16)],
    ids=["far from zero", "constant", "one token", "none"],
)
def test_odd_inputs(x):
    torch.manual_seed(0)
    model = mlp(16, 32, 8).float()
    batches = [x, x] if len(x) else [torch.randn(300, 16), x]
    before = model(batches[0])
    report = el.convert_(
        model, "low_rank(rank=8)", init="project", calibration=batches, anchored=True
    )
    assert all(0 <= fit.error <= 1 for fit in report.fits)
    assert "biases as before" not in str(report)
    after = model(batches[0])
    assert ((after - before).norm() / before.norm()) < 0.5


def test_layers_of_some_batches_only():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x, use):
            x = torch.tanh(self.a(x))
            return self.b(x) if use else x

    x = torch.randn(400, 12)
    torch.manual_seed(0)
    first = Forked()
    found = []
    for batches in ([(x, False), (x, True)], [(x, True), (x, False)]):
        model = copy.deepcopy(first)
        el.convert_(
            model,
            {"a": "low_rank(rank=4)", "b": "low_rank(rank=4)"},
            init="project",
            calibration=batches,
            weighting="inputs",
            anchored=True,
        )
        found.append(model.b.to_dense())
    assert torch.allclose(*found, atol=1e-4)


def test_a_model_that_cannot_be_copied():
    model = mlp(8, 12, 4)
    model.lock = threading.Lock()
    with pytest.raises(el.EinlinearError, match="leave out anchored"):
        el.convert_(
            model,
            "low_rank(rank=2)",
            init="project",
            calibration=[inputs(30, 8)],
            anchored=True,
        )
    assert isinstance(model[0], nn.Linear)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def halved(block, x):
    return 0.5 * (x + block.b(torch.relu(block.a(x))))


def test_a_forward_of_a_single_block_is_kept():
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(400, 16)
    for block in model.blocks:
        block.forward = types.MethodType(halved, block)
    before = model(x).detach()
    el.convert_(model, "low_rank(rank=7)", init="project", calibration=[x, x + 1], anchored=True)
    assert all("forward" in vars(block) for block in model.blocks)
    assert (model(x) - before).norm() < 0.5 * before.norm()


def test_a_copy_that_calls_the_layers_of_the_original_is_refused():
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(400, 16)
    for block in model.blocks:
        block.forward = (lambda old: lambda x: old(x))(block.forward)
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(el.EinlinearError, match=r"never called: blocks\.\{0\.\.2\}\.a") as caught:
        el.convert_(model, "low_rank(rank=7)", init="project", calibration=[x], anchored=True)
    assert "leave out anchored" in str(caught.value)
    assert all(map(torch.equal, weights, model.parameters()))
