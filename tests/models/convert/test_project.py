"""convert_(init="project"): trained models in, structured models out, layer by layer."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    refused("inputs of layer '0' contain numbers", init="project", calibration=[x / 0])
    error = refused("the model fails on calibration batch 2, given as list", init="project",
                    calibration=[x, [x, x]])  # fmt: skip
    assert "(x for x, _ in loader)" in error.fix
    error = refused("the calibration is a tensor of shape (20, 8)", init="project", calibration=x)
    assert "calibration=[batch]" in error.fix
    refused("the calibration is 5", init="project", calibration=5)
    given = {"init": "project", "calibration": [x]}
    refused("loss returns a tensor of shape (20, 8)", loss=lambda out, _: out, **given)
    refused("loss returns 3.0", loss=lambda *_: 3.0, **given)
    refused("loss is given with weighting='inputs'", loss=max, weighting="inputs", **given)
    refused("loss is given with no calibration", loss=max, init="project")
    for number, words in ((torch.inf, "not finite"), (torch.nan, "not finite")):
        broken = mlp(8, 8, 8)
        with torch.no_grad():
            broken[0].weight[0, 0] = number
        refused(f"the weight of layer '0' is {words}", model=broken, init="project")
    refused("is on the meta device", model=mlp(8, 8, 8).to("meta"), init="project")
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


def test_what_follows_may_write_into_outputs():
    """The gradients are those before an activation in place, also in a frozen model."""
    x, found = skewed(60, 12), []
    for in_place in (False, True):
        for is_frozen in (False, True):
            torch.manual_seed(0)
            layers = [nn.Linear(12, 20), nn.ReLU(in_place), nn.Linear(20, 6)]
            model = nn.Sequential(*layers).double().requires_grad_(not is_frozen)
            moments = measure_moments(model, {("0",): (12, 20)}, [x])[("0",)]
            found.append(moments.outputs.mean)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_one_logit_is_not_a_class():
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.score = nn.Linear(6, 5), nn.Linear(5, 1)

        def forward(self, x):
            return {"logits": self.score(self.body(x))}

    found = measure_moments(Scorer(), {("body",): (6, 5)}, [torch.randn(9, 6)])[("body",)]
    assert found.has_gradient


def test_weights_of_zero_can_learn():
    model = mlp(16, 16, 16, 4)
    nn.init.zeros_(model[2].weight)
    report = el.convert_(model, "btt(rank=2)", init="project")
    assert report.fits[1].error == 0
    assert "loses 0 %" in str(report)
    assert not model[2].to_dense().any()
    model(skewed(20, 16)).square().sum().backward()
    assert any(factor.grad.any() for name, factor in model[2].named_parameters() if name != "bias")


def test_padding_of_encoders():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    pad = torch.zeros(4, 6, dtype=torch.bool)
    pad[:, 4:] = True
    batch = {"src": torch.randn(4, 6, 16), "src_key_padding_mask": pad}
    before = model.use_nested_tensor, model.layers[0].activation_relu_or_gelu
    for weighting in ("inputs", "both"):
        found = measure_moments(
            model, {("layers.0.linear1",): (16, 32)}, [batch], weighting=weighting
        )
        assert found[("layers.0.linear1",)].inputs.count == 24
    assert (model.use_nested_tensor, model.layers[0].activation_relu_or_gelu) == before


def test_other_attention_is_left_as_it_is():
    """Only attentions whose projections are measured are opened."""
    model = nn.ModuleDict(
        {"attn": nn.MultiheadAttention(16, 2, add_bias_kv=True), "up": nn.Linear(16, 16)}
    )
    nn.init.normal_(model["attn"].bias_v, std=5)
    model.forward = lambda x: model["up"](model["attn"](x, x, x)[0])
    x = torch.randn(7, 3, 16)
    seen = model["attn"].eval()(x, x, x)[0].detach().double().reshape(-1, 16)
    found = measure_moments(model, {("up",): (16, 16)}, [x])[("up",)]
    assert torch.allclose(found.inputs.mean, seen.T @ seen / 21, atol=1e-5)


def test_layers_called_by_keyword_and_again_in_the_backward_pass():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=False)
            return self.b(input=x)

    layers = {("a",): (6, 6), ("b",): (6, 6)}
    found = measure_moments(Checkpointed(), layers, [torch.randn(9, 6)])
    assert [m.inputs.count for m in found.values()] == [9, 9]


def test_the_random_state_stays():
    model, x = mlp(8, 8, 4), skewed(9, 8)
    linear = nn.Linear(8, 8)
    state = torch.random.get_rng_state()
    el.convert_(model, "low_rank(rank=2)", init="project", calibration=[x])
    el.EinsumLinear.from_linear(linear, "btt")
    assert torch.equal(torch.random.get_rng_state(), state)


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
    for wrong in ([inputs], inputs.numpy(), inputs[:0], Moments(7)):
        with pytest.raises(el.EinlinearError, match="the calibration is"):
            el.EinsumLinear.from_linear(linear, "btt", calibration=wrong)
    linear.bias.requires_grad_(False)
    assert not el.EinsumLinear.from_linear(linear, "btt").bias.requires_grad
    with pytest.raises(el.EinlinearError, match="the layer to start from is Conv2d"):
        el.EinsumLinear.from_linear(nn.Conv2d(3, 3, 1), "btt")
    with pytest.raises(el.EinlinearError, match=r"the calibration inputs have shape \(5, 7\)"):
        el.EinsumLinear.from_linear(linear, "btt", calibration=torch.randn(5, 7))
    with pytest.raises(el.EinlinearError, match="the layer has weight normalisation"):
        el.EinsumLinear(24, 40, structure="btt").project_(linear.weight)


def test_progress_names_every_batch_and_layer():
    model = mlp(12, 20, 16, 4)
    batches = list(skewed(120, 12).split(40))
    texts = []
    el.convert_(
        model,
        "low_rank(rank=3)",
        init="project",
        calibration=batches,
        anchored=True,
        on_progress=texts.append,
    )
    assert texts == [
        "calibrating: batch 1",
        "calibrating: batch 2",
        "calibrating: batch 3",
        "projecting: layer 1 of 2, 0",
        "projecting: layer 2 of 2, 2",
        "anchoring: step 1 of 2, 0",
        "anchoring: step 2 of 2, 2",
    ]
    texts.clear()
    el.convert_(mlp(12, 20, 16, 4), budget=0.6, calibration=batches, on_progress=texts.append)
    assert texts[3:5] == ["choosing ranks: layer 1 of 2, 0", "choosing ranks: layer 2 of 2, 2"]


def test_outputs_that_gradients_ignore_are_not_given_up():
    """Gradients hold for small errors only: for btt, whose errors are large, they count less."""
    torch.manual_seed(1)
    model = mlp(64, 64, 64, 4)
    with torch.no_grad():
        model[2].weight.mul_(torch.logspace(-2, 0, 64, dtype=torch.float64))  # of the inputs
    x = skewed(2000, 64)
    missed = {}
    for weighting in ("inputs", "both"):
        copied = copy.deepcopy(model)
        el.convert_(
            copied, {"0": "btt(rank=2)"}, init="project", calibration=[x], weighting=weighting
        )
        wanted, got = (each[0](x).detach() for each in (model, copied))
        missed[weighting] = float((wanted - got).square().sum() / wanted.square().sum())
    assert missed["inputs"] <= missed["both"] <= 2 * missed["inputs"]


def test_progress_goes_to_a_function():
    with pytest.raises(el.EinlinearError, match="on_progress is True"):
        el.convert_(mlp(12, 20, 4), "btt", init="project", on_progress=True)


@pytest.mark.parametrize("size", [1e20, 1e-25])
def test_the_size_of_numbers_does_not_matter(size):
    """Products of large or small float32 numbers leave its range."""
    x = torch.randn(50, 8)
    whole, scaled = Moments(8), Moments(8)
    whole.add(x)
    scaled.add(size * x)
    torch.testing.assert_close(scaled.mean / size**2, whole.mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("structure", ["low_rank(rank=2)", "low_rank(rank=2) + btt"])
def test_weights_that_cannot_be_projected(structure):
    layer = el.EinsumLinear.from_linear(nn.Linear(8, 12), structure)
    with pytest.raises(el.EinlinearError, match=r"has the shape \(8, 12\)"):
        layer.project_(torch.randn(8, 12))
    with pytest.raises(el.EinlinearError, match="infinite or not a number"):
        layer.project_(torch.full((12, 8), float("nan")))
