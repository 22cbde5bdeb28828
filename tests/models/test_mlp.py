"""MLP and ResidualMLP: against their formulas, and what is done to models."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, linear

import einlinear as el
from kit.gpts import drawn

BOTH = [el.MLP, el.ResidualMLP]


def data(width=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, width, generator=generator)
    return x, torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def weights(model):
    named = dict(model.named_parameters())
    return lambda x, name: linear(x, named[f"{name}.weight"], named[f"{name}.bias"])


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("depth", [1, 3])
def test_the_formula_of_the_plain_one(depth, activation):
    model = drawn(el.MLP(8, 5, width=16, depth=depth, activation=activation))
    layer, x = weights(model), data()[0]
    act = gelu if activation == "gelu" else (lambda y: y.clamp(min=0))
    y = act(layer(x, "input"))
    for n in range(depth - 1):
        y = act(layer(y, f"blocks.{n}"))
    torch.testing.assert_close(model(x), layer(y, "head"))
    assert len(list(model.parameters())) == 2 * (depth + 1)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_formula_of_the_residual_one(depth):
    model = drawn(el.ResidualMLP(8, 1, width=16, depth=depth))
    layer, x = weights(model), data()[0]
    y = layer(x, "input")
    for n in range(depth):
        norm = model.blocks[n].norm
        z = layer_norm(y, (16,), norm.weight, norm.bias, eps=1e-5)
        z = gelu(layer(z, f"blocks.{n}.up"))
        assert z.shape == (64, 64)
        y = y + sqrt(3 / depth) * layer(z, f"blocks.{n}.down")
    torch.testing.assert_close(model(x), layer(y, "head"))


@pytest.mark.parametrize("make", BOTH)
def test_inner_layers_are_those_of_one_pattern(make):
    model = make(8, 1, width=64)
    conversion = el.convert_(model, {"blocks.*": "btt"})
    assert {left.names for left in conversion.left} == {("input",), ("head",)}
    assert {left.reason for left in conversion.left} == {"no rule", "output head"}
    assert len(conversion.swaps) == {el.MLP: 2, el.ResidualMLP: 6}[make]
    el.init_(model)
    assert not model(data()[0]).any()


@pytest.mark.parametrize("make", BOTH)
def test_a_new_model_starts_at_zero(make):
    model = make(8, 3, width=32)
    assert not model(data()[0]).any()
    zeros = {n for n, p in model.named_parameters() if n.endswith("weight") and not p.any()}
    ends = {f"blocks.{n}.down.weight" for n in range(3)} if make is el.ResidualMLP else set()
    assert zeros == {"head.weight", *ends}


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("structure", ["dense", "btt"])
def test_every_layer_moves_alike_at_every_width(make, structure):
    def model(width):
        made = make(8, 1, width=width)
        el.convert_(made, {"blocks.*": structure}, weight_norm=False)
        return made

    result = el.coordinate_check(model, [64, 256], batch=data(), lr=3e-3, steps=4, seeds=2)
    assert result.passed, str(result)


@pytest.mark.parametrize("make", BOTH)
def test_it_learns(make):
    torch.manual_seed(0)
    model = make(8, 1, width=64)
    el.convert_(model, {"blocks.*": "btt(rank=2)"})
    el.init_(model)
    optimizer = torch.optim.AdamW(el.param_groups(model, 3e-3, base_width=64))
    x, y = data()
    losses = []
    for _ in range(100):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(y.square().mean().item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("make", BOTH)
def test_compiled_in_half_precision_and_loaded(make):
    model = drawn(make(8, 3, width=32), std=0.1)
    x = data()[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x) - compiled(x)).abs().max() < 0.05 * model(x).abs().max()
    other = make(8, 3, width=32, device="meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("name", ["in_features", "out_features", "width", "depth"])
def test_bad_sizes(make, name):
    sizes = {"in_features": 8, "out_features": 1, "width": 8, "depth": 2} | {name: 0}
    with pytest.raises(el.EinlinearError, match=f"{name} is 0"):
        make(**sizes)


def test_a_bad_activation():
    with pytest.raises(el.EinlinearError, match=r"activation is 'tanh'\n.*'relu', 'gelu'"):
        el.MLP(8, 1, width=8, activation="tanh")
