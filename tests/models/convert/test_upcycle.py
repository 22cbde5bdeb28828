"""upcycle_: mixtures that start as the dense layer, and whose experts then diverge."""

import copy

import pytest
import torch
from torch import nn

import einlinear as el


def mlp():
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.Linear(16, 4)).double()


def inputs(count=64, seed=0):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(count, 16, dtype=torch.float64, generator=make)


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("norm", ["each", "together"])
@pytest.mark.parametrize("num_active", [1, 2, 4])
def test_dense_experts_leave_the_output_unchanged(num_active, norm, gain):
    model, x = mlp(), inputs()
    expected = model(x)
    rule = el.moe("dense", 4, num_active, expert_norm=norm, expert_gain=gain)
    report = el.upcycle_(model, rule)
    assert isinstance(model[0], el.MoELinear)
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)
    assert max(fit.error for fit in report.fits) < 1e-12
    assert "experts: all start alike; gates: random" in str(report)


@pytest.mark.parametrize("structure", ["btt(rank=2)", "low_rank(rank=4)", "kronecker"])
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_the_output_is_that_of_the_projected_layers(structure, is_calibrated):
    model, x = mlp(), inputs()
    options = {"calibration": [inputs(200, 1)]} if is_calibrated else {}
    projected = copy.deepcopy(model)
    expected = el.convert_(projected, structure, init="project", **options)
    found = el.upcycle_(model, el.moe(structure, 4), **options)
    torch.testing.assert_close(model(x), projected(x), atol=1e-10, rtol=1e-10)
    assert found.fits == expected.fits
    assert found.weighting == expected.weighting
    with torch.no_grad():
        model[0].A[1] += 0.1
    assert torch.dist(model(x), projected(x)) > 1e-3


@pytest.mark.parametrize("gate_std", [0.0, 0.02])
def test_experts_get_other_gradients_and_diverge(gate_std):
    model, x = mlp(), inputs(256)
    target = x[:, :4].sign() * x[:, 4:5]
    el.upcycle_(model, el.moe("dense", 4), gate_std=gate_std)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = (model(x) - target).square().mean() + 0.01 * el.balance_loss(model)
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            grads = model[0].A.grad
            assert all(torch.dist(grads[0], other) > 1e-6 for other in grads[1:])
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    dense = model[0].to_dense()
    assert all(torch.dist(dense[0], other) > 0.01 * dense[0].norm() for other in dense[1:])
    assert model[0].gate.weight.grad.any()


def test_noise_and_seeds():
    first, second, x = mlp(), None, inputs()
    expected, second = first(x), copy.deepcopy(first)
    for model in (first, second):
        torch.manual_seed(3)
        el.upcycle_(model, el.moe("dense", 4), noise=0.01)
    assert torch.equal(first(x), second(x))
    experts = first[0].to_dense()
    share = torch.dist(experts[0], experts[1]) / experts[0].norm()
    assert 0.005 < share < 0.03  # two independent noises of 1 %
    assert 0 < torch.dist(first(x), expected) < 0.1 * expected.norm()


def refused(what, rule, fix):
    return pytest.raises(el.EinlinearError, match=f"(?s){what}.*rule: .*{rule}.*fix:  .*{fix}")


def test_what_cannot_be_upcycled():
    with refused("rules without experts: \\{0,2\\}", "mixtures of experts", r"el\.moe"):
        el.upcycle_(mlp(), "btt")
    with refused("gate_std is -1", "0 or more", "leave out gate_std"):
        el.upcycle_(mlp(), el.moe("btt", 4), gate_std=-1)
    with refused("noise is 'a'", "finite number", "leave out noise"):
        el.upcycle_(mlp(), el.moe("btt", 4), noise="a")
    with refused('experts with init="project": \\{0,2\\}', "without experts", r"el\.upcycle_"):
        el.convert_(mlp(), el.moe("btt", 4), init="project")
    with refused("loss is given with no calibration", "differentiated", "leave out loss"):
        el.upcycle_(mlp(), el.moe("btt", 4), loss=lambda output, batch: output.sum())
    layer = el.MoELinear(8, 8, structure="btt", num_experts=2)
    with refused("the layer has weight normalisation", "any size", "weight_norm=False"):
        layer.project_(torch.randn(8, 8))
