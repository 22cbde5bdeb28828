"""Initialisation of whole models."""

import copy
from math import sqrt

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError, EinsumLinear
from einlinear.models.mup.init import plan_init


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = EinsumLinear(width, 2 * width, structure=el.btt(rank=2))
        self.down = EinsumLinear(2 * width, width, structure=el.btt(rank=2))

    def layer_roles(self):
        return {"down": "zero"}

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=256, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, width, padding_idx=3)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.mix = nn.Linear(width, 2 * width)
        self.unmix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 50, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def layer_roles(self):
        return {"head": "head"}

    def forward(self, tokens):
        x = self.blocks(self.embedding(tokens))
        return self.head(self.unmix(self.mix(x)))


def spoiled(model):
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    return model


def start(model, seed=0, **options):
    el.init_(model, generator=torch.Generator().manual_seed(seed), **options)
    return model


def check_deviation(tensor, std):
    # The deviation of n normal numbers is off by 1 / sqrt(2 n) at one sigma; five are allowed.
    assert abs(tensor.double().std().item() / std - 1) < 5 / sqrt(2 * tensor.numel())
    assert abs(tensor.double().mean().item()) < 5 * std / sqrt(tensor.numel())


def test_every_parameter_starts_as_mup_says():
    model = start(spoiled(Model()))
    check_deviation(model.mix.weight, sqrt(256) / 256)
    check_deviation(model.unmix.weight, sqrt(256) / 512)
    check_deviation(model.embedding.weight[4:], 0.02)
    assert model.embedding.weight[3].abs().max() == 0
    block = model.blocks[1]
    for layer, names in ((block.up, "AB"), (block.down, "A")):
        for name in names:
            fans = layer.plan.fan_in[name], layer.plan.fan_out[name]
            check_deviation(layer.get_parameter(name), sqrt(min(fans)) / fans[0])
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
    assert torch.equal(block.norm.weight, torch.ones(256))


def test_the_naive_parametrization_draws_every_matrix_by_its_fan_in():
    plan = plan_init(Model(), zero="mix", parametrization="naive", use_roles=False)
    stds = {start.name: start.std for start in plan}
    assert stds["unmix.weight"] == pytest.approx(512**-0.5)
    assert stds["head.weight"] == pytest.approx(256**-0.5)
    fans = Model().blocks[0].down.plan.fan_in
    assert stds["blocks.0.down.A"] == pytest.approx(fans["A"] ** -0.5)
    assert stds["blocks.0.down.B"] == pytest.approx(fans["B"] ** -0.5)
    assert stds["embedding.weight"] == 0.02
    assert stds["mix.weight"] == stds["blocks.0.down.bias"] == stds["head.bias"] == 0
    means = {start.name: start.mean for start in plan}
    assert means["blocks.0.norm.weight"] == 1
    zeros = {start.name for start in plan_init(Model(), parametrization="naive") if not start.std}
    assert {"head.weight", "blocks.0.down.B"} < zeros
    with pytest.raises(EinlinearError, match="parametrization is 'ntk'"):
        plan_init(Model(), parametrization="ntk")


def test_what_the_model_names_starts_at_zero():
    model = start(spoiled(Model()))
    assert model.head.weight.abs().max() == 0
    for block in model.blocks:
        assert block.down.plan.steps[-1].factor == "B"
        assert block.down.B.abs().max() == 0
        assert block.down.A.abs().min() > 0
        x = torch.randn(5, 256)
        assert torch.equal(block(x), x)
    assert torch.equal(model(torch.arange(6)), torch.zeros(6, 50))


@pytest.mark.parametrize("structure", [None, "low_rank(rank=4)"])
def test_how_the_head_starts(structure):
    model = Model()
    if structure:
        model.head = EinsumLinear(256, 50, structure=structure)
    last, first = ("head.B", "head.A") if structure else ("head.weight", None)
    fans = {"head.weight": 256, "head.A": 256, "head.B": 4}
    plain = {s.name: s.std for s in plan_init(model)}
    wanted = {"zero": 0.0, "small": sqrt(64 / 256 / fans[last]), "usual": sqrt(1 / fans[last])}
    for kind, std in wanted.items():
        for parametrization, use_roles in (("mup", True), ("naive", False)):
            plan = plan_init(
                model, head_init=kind, base_width=64, parametrization=parametrization,
                use_roles=use_roles,
            )  # fmt: skip
            stds = {s.name: s.std for s in plan}
            assert stds[last] == pytest.approx(std, rel=1e-12)
            assert stds["head.bias"] == 0
            if parametrization == "mup":  # nothing else changes
                usual = {first: 1 / 16} if kind == "usual" and first else {}
                assert stds == pytest.approx(plain | {last: std} | usual, rel=1e-12)
            else:
                assert stds["blocks.0.down.B"] > 0
    assert plain[last] == 0
    start(model, head_init="small", base_width=64)
    check_deviation(model.get_parameter(last), wanted["small"])


def test_a_small_head_has_outputs_of_unit_variance_at_the_base_width():
    for width, size in ((64, 1.0), (256, 0.5), (1024, 0.25)):
        model = start(el.MLP(8, 2000, width=width), head_init="small", base_width=64)
        y = model.head(torch.randn(1, width).sign())
        check_deviation(y.detach(), size)


def test_heads_that_cannot_start_so():
    with pytest.raises(EinlinearError, match=r"base_width is None(.|\n)*base_width=64"):
        el.init_(Model(), head_init="small")
    with pytest.raises(EinlinearError, match="head_init is 'tiny'"):
        el.init_(Model(), head_init="tiny")
    tied = start(Model(tied=True), head_init="small", base_width=64)
    check_deviation(tied.head.weight[4:], 0.02)


def test_patterns_name_more():
    model = start(spoiled(Model()), zero=["un*", "blocks.*.up"])
    assert model.unmix.weight.abs().max() == 0
    assert model.blocks[0].up.B.abs().max() == 0
    assert model.blocks[0].up.A.abs().max() > 0
    assert model.mix.weight.abs().max() > 0
    with pytest.raises(EinlinearError, match=r"'mixed' matches no layer(.|\n)*blocks\.0\.up"):
        el.init_(model, zero="mixed")
    with pytest.raises(EinlinearError, match="matches no layer"):
        el.init_(model, zero="embedding")  # it has no matrix


def test_the_last_factor_is_the_one_that_is_met_last():
    layer = EinsumLinear(64, 48, structure=el.tensor_train(rank=3))
    assert [step.factor for step in layer.plan.steps] == ["B", "A"]
    start(nn.Sequential(layer), zero="0")
    assert layer.A.abs().max() == 0
    assert layer.B.abs().max() > 0
    assert layer(torch.randn(4, 64)).abs().max() == 0


def test_a_tied_head_is_not_zero():
    model = start(spoiled(Model(tied=True)))
    check_deviation(model.head.weight[4:], 0.02)
    with pytest.raises(EinlinearError, match=r"tied to embedding\.weight"):
        el.init_(model, zero="head")


def test_a_head_tied_to_another_layer_is_not_zero():
    """Both would be zero, and neither would ever get a gradient."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
            self.head.weight = self.inner.weight

        def layer_roles(self):
            return {"head": "head"}

    model = Tied()
    el.init_(model)
    assert model.head.weight.std() > 0.1


def test_only_named_heads_start_at_zero():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    el.init_(model)
    assert model[2].weight.std() > 0
    el.init_(model, zero="2")
    assert (model[2].weight == 0).all()


def test_hugging_face_heads():
    class Face(Model):
        def layer_roles(self):
            return {}

        def get_output_embeddings(self):
            return self.head

    assert start(Face()).head.weight.abs().max() == 0
    check_deviation(start(Face(tied=True)).head.weight[4:], 0.02)


def test_the_plan_is_what_is_done():
    model = spoiled(Model())
    before = copy.deepcopy(model.state_dict())
    plan = plan_init(model, embedding_std=0.5)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert el.init_(model, embedding_std=0.5) is None  # a long value would flood a prompt
    planned = {row.name: (row.mean, row.std) for row in plan}
    assert list(planned) == [name for name, _ in model.named_parameters()]
    assert planned["embedding.weight"] == (0.0, 0.5)
    assert planned["blocks.0.norm.weight"] == (1.0, 0.0)
    assert planned["head.weight"] == planned["head.bias"] == (0.0, 0.0)
    check_deviation(model.embedding.weight[4:], 0.5)


def test_seeds_dtypes_and_frozen_parameters():
    model, same, other = (spoiled(Model(64)) for _ in range(3))
    model.mix.requires_grad_(False)
    for each, seed in ((model, 0), (same, 0), (other, 1)):
        start(each, seed)
    assert torch.equal(model.mix.weight, same.mix.weight)
    assert not torch.equal(model.mix.weight, other.mix.weight)
    half = start(Model(64).to(torch.bfloat16))
    assert half.mix.weight.dtype == torch.bfloat16
    assert torch.equal(half.mix.weight, model.mix.weight.to(torch.bfloat16))
    assert start(Model(64).double()).mix.weight.dtype == torch.float64
    assert not model.mix.weight.requires_grad
    torch.manual_seed(5)
    el.init_(model)
    torch.manual_seed(5)
    el.init_(same)
    assert torch.equal(model.mix.weight, same.mix.weight)


def test_meta_and_unknown_layers():
    with torch.device("meta"):
        model = Model(64)
    with pytest.raises(EinlinearError, match=r"on the meta device: embedding\.weight, "):
        el.init_(model)
    assert start(model.to_empty(device="cpu")).mix.weight.isfinite().all()
    strange = nn.ParameterList([nn.Parameter(torch.ones(3))]).requires_grad_(False)
    with pytest.raises(EinlinearError, match="ParameterList"):
        el.init_(strange)


def test_attention_of_torch():
    model = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    start(spoiled(model), zero=["self_attn.out_proj", "linear2"])
    check_deviation(model.self_attn.in_proj_weight, 1 / sqrt(128))
    assert model.self_attn.out_proj.weight.abs().max() == 0
    x = torch.randn(2, 3, 128)
    torch.testing.assert_close(model(x), model.norm2(model.norm1(x)))
