"""convert_(init="project"): trained models in, structured models out, layer by layer."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.layers.projection.moments import Moments
from einlinear.models.convert.calibration import measure_moments

torch.manual_seed(0)


def mlp(*widths):
    layers = []
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out), nn.GELU()]
    return nn.Sequential(*layers[:-1]).double()


def skewed(count, width, seed=0):
    """Inputs whose numbers differ in size, and depend on each other."""
    make = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, dtype=torch.float64, generator=make)
    sizes = torch.logspace(-1, 1, width, dtype=torch.float64)
    return torch.randn(count, width, dtype=torch.float64, generator=make) * sizes @ mix


def states(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_full_rank_keeps_the_model():
    model, x = mlp(24, 32, 32, 8), skewed(50, 24)
    expected = model(x)
    report = el.convert_(model, "low_rank(rank=32)", init="project")
    assert isinstance(model[0], el.EinsumLinear)
    assert torch.allclose(model(x), expected, atol=1e-9)
    assert max(fit.error for fit in report.fits) < 1e-12
    assert "weights: projected" in str(report)


def test_each_level_is_better_on_other_inputs():
    """The error of the output, on inputs that calibration has not seen, falls level by level."""
    errors = {}
    for seed in range(3):
        torch.manual_seed(seed)
        model, x, other = mlp(32, 48, 48, 48, 4), skewed(2000, 32), skewed(2500, 32)[2000:]
        expected = model(other)
        for level, given in {
            "plain": {},
            "inputs": {"calibration": [x], "weighting": "inputs"},
            "both": {"calibration": [x]},
        }.items():
            new = copy.deepcopy(model)
            el.convert_(new, "low_rank(rank=8)", init="project", **given)
            errors.setdefault(level, []).append((new(other) - expected).square().mean().item())
    plain, inputs, both = (sum(errors[level]) for level in ("plain", "inputs", "both"))
    assert inputs < 0.9 * plain
    assert both < 0.9 * inputs


def test_moments_are_those_of_all_batches():
    model, x = mlp(12, 20, 6), skewed(300, 12)
    layers = {("0",): (12, 20), ("2",): (20, 6)}
    found = measure_moments(model, layers, list(x.split(77)), weighting="inputs")
    hidden = model[1](model[0](x)).detach()
    for names, seen in ((("0",), x), (("2",), hidden)):
        assert found[names].inputs.count == 300
        assert torch.allclose(found[names].inputs.mean, seen.T @ seen / 300)


def test_gradients_are_those_of_the_loss():
    model, x = mlp(12, 20, 6), skewed(40, 12)

    def loss(output, batch):
        return (output * batch[:, :6]).sum()

    found = measure_moments(model, {("0",): (12, 20)}, [x], loss=loss)[("0",)]
    hidden = model[0](x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad((model[1:](hidden) * x[:, :6]).sum(), hidden)
    assert torch.allclose(found.outputs.mean, gradient.T @ gradient / 40)


def test_random_signs_measure_the_jacobian():
    """With many batches, the moments of gradients are Jᵀ J: 1 / sqrt(4000) is 1.6 %."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    jacobian = model[1].weight
    x = torch.ones(4000, 6, dtype=torch.float64)
    found = measure_moments(model, {("0",): (6, 5)}, [x])[("0",)]
    exact = jacobian.T @ jacobian
    assert torch.dist(found.outputs.mean, exact) < 0.1 * exact.norm()


def test_frozen_models_are_calibrated_and_left_as_they_were():
    model = mlp(12, 20, 6).train().requires_grad_(False)
    before = states(model)
    moments = measure_moments(model, {("0",): (12, 20)}, [skewed(40, 12)])[("0",)]
    assert moments.outputs.count == 40
    assert float(moments.outputs.mean.diagonal().sum()) > 0
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[0]._forward_hooks


def test_hidden_positions_are_left_out():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, attention_mask):
            return {"last_hidden_state": self.layer(x)}

    x = torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    found = measure_moments(Masked(), {("layer",): (4, 4)}, [{"x": x, "attention_mask": mask}])
    seen = x[mask.bool()].double()
    assert found[("layer",)].inputs.count == found[("layer",)].outputs.count == 9
    assert torch.allclose(found[("layer",)].inputs.mean, seen.T @ seen / 9)


def test_attention_and_encoders():
    """The packed projections of torch's attention are calibrated and projected one by one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(16, 10, 32)
    expected = model(x)
    report = el.convert_(model, "low_rank(rank=32)", init="project", calibration=[x])
    assert len(report.fits) == 12
    assert all(fit.samples == 160 for fit in report.fits)
    assert torch.allclose(model(x), expected, atol=1e-4)


def test_other_kinds_of_batches():
    model = mlp(8, 16, 4)
    x = skewed(30, 8)
    for batch in (x, (x,), {"input": x}):
        report = el.convert_(
            copy.deepcopy(model), "low_rank(rank=4)", init="project", calibration=[batch]
        )
        assert report.fits[0].samples == 30


def test_few_inputs_are_reported():
    report = el.convert_(
        mlp(40, 64, 4), "btt", init="project", calibration=[skewed(30, 40)], weighting="inputs"
    )
    assert "too few calibration inputs for 0: at most 30" in " ".join(str(report).split())


def test_a_layer_that_is_never_called_is_projected_by_its_weight():
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "spare": nn.Linear(8, 8), "head": mlp(8, 2)})
    model.forward = lambda x: model["head"](model["used"](x).double())
    report = el.convert_(
        model, {"used": "btt", "spare": "btt"}, init="project", calibration=[torch.randn(99, 8)]
    )
    assert [fit.samples for fit in report.fits] == [99, 0]
    assert "too few calibration inputs for spare" in " ".join(str(report).split())


def refused(what, model=None, rules="btt", **given):
    model = mlp(8, 8, 8, 8) if model is None else model
    before = dict(model.named_modules())
    with pytest.raises(el.EinlinearError) as error:
        el.convert_(model, rules, **given)
    assert what in error.value.what
    assert dict(model.named_modules()) == before
    return error.value


def test_refusals():
    x = skewed(20, 8)
    refused("no calibration batches", init="project", calibration=[])
    refused("a calibration batch is 3", init="project", calibration=[3])
    refused("there are calibration batches, and init is 'fresh'", init="fresh", calibration=[x])
    refused("there are calibration batches", calibration=[x])
    refused("weight_norm=True", init="project", weight_norm=True)
    refused("experts", rules=el.moe("btt", 4), init="project")
    refused("infinite or not a number", init="project", calibration=[x / 0])
    error = refused("weighting is 'all'", init="project", calibration=[x], weighting="all")
    assert "inputs" in error.rule + error.fix

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(8, 8, 8)

        def forward(self, x):
            return {"text": "none"} if self.layers(x) is not None else None

    error = refused("returns dict", model=Odd(), init="project", calibration=[x])
    assert "loss=" in error.fix


def test_from_linear():
    linear = nn.Linear(24, 40).double()
    inputs = skewed(400, 24)
    plain = el.EinsumLinear.from_linear(linear, "btt")
    fitted = el.EinsumLinear.from_linear(linear, "btt", calibration=inputs)
    seen = Moments(24)
    for part in inputs.split(130):
        seen.add(part)
    streamed = el.EinsumLinear.from_linear(linear, "btt", calibration=seen)
    assert torch.allclose(streamed.to_dense(), fitted.to_dense(), atol=1e-8)
    assert torch.equal(plain.bias, linear.bias)
    assert torch.dist(fitted(inputs), linear(inputs)) < torch.dist(plain(inputs), linear(inputs))
    assert torch.dist(plain.to_dense(), linear.weight) < torch.dist(
        fitted.to_dense(), linear.weight
    )
    assert not plain.weight_norm
    with pytest.raises(el.EinlinearError, match="the layer to start from is Conv2d"):
        el.EinsumLinear.from_linear(nn.Conv2d(3, 3, 1), "btt")
    with pytest.raises(el.EinlinearError, match=r"the calibration inputs have shape \(5, 7\)"):
        el.EinsumLinear.from_linear(linear, "btt", calibration=torch.randn(5, 7))
    with pytest.raises(el.EinlinearError, match="the layer has weight normalisation"):
        el.EinsumLinear(24, 40, structure="btt").project_(linear.weight)
