"""Learning rates relative to a base model: by hand, to the bit at the base's own shapes."""

import copy
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError, EinsumLinear, MoELinear, Scaling

ADAMW = torch.optim.AdamW


def gpt(width, *, structure=None, device=None, tied=False, depth=2):
    model = el.GPT(96, context=16, width=width, depth=depth, head_size=16, tied=tied, device=device)
    if structure:
        el.convert_(model, {"blocks.*": structure})
    return model


def multipliers(model, **base):
    return {row.name: row.multiplier for row in el.scaling_table(model, 0.01, **base)}


# Of a GPT of width 256, by hand: in_features of each layer at base width 64 and expansion e, and
# the fan-ins at width 256 of the dense weight and of the factors A and B of a block tensor-train.
# 256 is 16 x 16 and 1024 is 32 x 32: A sums over one axis of the input, B over the other.
LAYERS = {
    "attention.q_proj": (lambda e: 64, 256, (16, 16)),
    "attention.k_proj": (lambda e: 64, 256, (16, 16)),
    "attention.v_proj": (lambda e: 64, 256, (16, 16)),
    "attention.o_proj": (lambda e: 64, 256, (16, 16)),
    "mlp.up": (lambda e: 64, 256, (16, 16)),
    "mlp.down": (lambda e: 64 * e, 1024, (32, 32)),
}
AT_LR = ("attention_norm.weight", "mlp_norm.weight", "attention.q_norm.weight",
         "attention.k_norm.weight")  # fmt: skip


def expected(structure, expansion):
    wanted = {"embedding.weight": 1.0, "places.weight": 1.0, "norm.weight": 1.0}
    wanted["head.weight"] = 64 / 256
    for block in (0, 1):
        wanted |= {f"blocks.{block}.{name}": 1.0 for name in AT_LR}
        for layer, (base_in, fan_in, factors) in LAYERS.items():
            name = f"blocks.{block}.{layer}"
            if structure is None:
                wanted[f"{name}.weight"] = base_in(expansion) / fan_in
            else:
                for factor, fan in zip("AB", factors, strict=True):
                    wanted[f"{name}.{factor}"] = base_in(expansion) / (2 * fan)
    return wanted


@pytest.mark.parametrize("structure", [None, "btt"])
@pytest.mark.parametrize("expansion", [1, 4])
def test_every_multiplier_of_a_gpt_by_hand(structure, expansion):
    model = gpt(256, structure=structure)
    wanted = expected(structure, expansion)
    table = {"*.down": 64 * expansion, "*": 64}
    assert multipliers(model, base=table) == wanted
    if expansion == 1:
        assert multipliers(model, base_width=64) == wanted
        return
    for base in (
        {"base": gpt(64)},
        {"base": gpt(64, device="meta")},
        {"base": gpt(64, structure="btt")},
        {"base": gpt(64, structure="low_rank")},
        {"base_width": 64, "width": 256},
    ):
        assert multipliers(model, **base) == wanted
    values = wanted["blocks.0.mlp.down.weight" if structure is None else "blocks.0.mlp.down.A"]
    assert values == (0.25 if structure is None else 4.0)


def test_numbers_of_numpy_are_as_good():
    whole, odd = (
        {"base_width": 64, "width": 256},
        {"base_width": np.int64(64), "width": np.int32(256)},
    )
    assert multipliers(gpt(256), **odd) == multipliers(gpt(256), **whole)
    groups = el.param_groups(gpt(256), 0.01, base={"*": np.int64(64)})
    assert {type(group["lr"]) for group in groups} == {float}


def test_rows_show_the_base():
    rows = {row.name: row for row in el.scaling_table(gpt(256, structure="btt"), 1, base=gpt(64))}
    assert rows["blocks.1.mlp.down.B"].base_in == 256
    assert rows["blocks.1.mlp.up.B"].base_in == rows["head.weight"].base_in == 64
    assert rows["blocks.1.mlp_norm.weight"].base_in == 1
    table = str(el.scaling_table(gpt(256), 0.01, base=gpt(64)))
    assert table.startswith("adam, lr 0.01 at the base's widths\n")
    assert str(el.scaling_table(gpt(256), 1, base_width=64, width=256)).startswith(
        "adam, lr 1 at base"
    )


class Perceptron(nn.Module):
    def __init__(self, width, inputs=12):
        super().__init__()
        self.input, self.up = nn.Linear(inputs, width), nn.Linear(width, 3 * width)
        self.down, self.head = nn.Linear(3 * width, width), nn.Linear(width, 5)

    def layer_roles(self):
        return {"head": "head"}

    def forward(self, x):
        x = torch.relu(self.input(x))
        return self.head(x + self.down(torch.relu(self.up(x))))


def perceptron():
    return Perceptron(28), (torch.randn(9, 12), torch.randint(5, (9,)))


def small_gpt():
    tokens = torch.randint(96, (2, 3, 10))
    return gpt(48), (tokens[0], tokens[1])


def small_llama():
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        vocab_size=41, hidden_size=32, intermediate_size=88, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    tokens = torch.randint(41, (2, 3, 10))
    return hf.LlamaForCausalLM(config), (tokens[0], tokens[1])


def train(model, batch, optimizer):
    inputs, targets = batch
    for _ in range(4):
        out = model(inputs)
        out = getattr(out, "logits", out)
        optimizer.zero_grad()
        nn.functional.cross_entropy(out.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("make", [perceptron, small_gpt, small_llama])
def test_a_base_of_the_same_shapes_changes_nothing(make, kind):
    model, batch = make()
    usual, before = copy.deepcopy(model), list(copy.deepcopy(model).parameters())
    base = copy.deepcopy(model).to("meta")
    make_optimizer = {"adam": ADAMW, "sgd": torch.optim.SGD}[kind]
    options = {"weight_decay": 0.01, "lr": 0.013}
    groups = el.param_groups(model, 0.013, base=base, optimizer=kind)
    assert [group["lr"] for group in groups] == [0.013]
    ours = train(model, batch, make_optimizer(groups, **options))
    theirs = train(usual, batch, make_optimizer(usual.parameters(), **options))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_input_layers_keep_lr_and_widths_that_grow_do_not(optimizer):
    model, base = Perceptron(56), Perceptron(28)
    for form in ({"base": base}, {"base_width": 28, "width": 56}):
        got = multipliers(model, optimizer=optimizer, **form)
        if optimizer == "adam":
            wanted = {"input": 1, "up": 0.5, "down": 0.5, "head": 0.5}
            assert got == {f"{k}.weight": v for k, v in wanted.items()} | {
                f"{k}.bias": 1 for k in wanted
            }
        else:  # relative to the base: out grows by 2, in by 1 or 2
            assert got == {
                "input.weight": 2, "input.bias": 2, "up.weight": 1, "up.bias": 2,
                "down.weight": 1, "down.bias": 2, "head.weight": 0.5, "head.bias": 1,
            }  # fmt: skip


def test_sgd_of_factors_relative_to_the_dense_base():
    """fan_out / (fan_in repeats) over out / in of the base's layer."""
    layer = EinsumLinear(64, 256, structure=el.tensor_train(rank=3))
    base = nn.Sequential(nn.Linear(16, 64))
    got = multipliers(nn.Sequential(layer), base=base, optimizer="sgd")
    for name, scaling in layer.param_scaling().items():
        if scaling.kind == "matrix":
            wanted = scaling.fan_out / (scaling.fan_in * scaling.repeats) / (64 / 16)
            assert got[f"0.{name}"] == pytest.approx(wanted, rel=1e-12)
    assert got["0.bias"] == 256 / 64


def test_layers_of_torch():
    def make(d):
        return nn.ModuleDict(
            {
                "conv": nn.Conv2d(3, 2 * d, 3),
                "deep": nn.Conv2d(2 * d, d, 3, groups=2),
                "attention": nn.MultiheadAttention(d, 2, kdim=12),
                "packed": nn.MultiheadAttention(d, 2),
                "lstm": nn.LSTM(7, d),
                "bilinear": nn.Bilinear(d, 5, d),
                "embedding": nn.Embedding(11, d),
            }
        )

    got = multipliers(make(32), base=make(8))
    same = {n: 1 for n, _ in make(8).named_parameters()}
    quarter = ("deep.weight", "attention.q_proj_weight", "attention.v_proj_weight",
               "attention.out_proj.weight", "packed.in_proj_weight", "packed.out_proj.weight",
               "lstm.weight_hh_l0", "bilinear.weight")  # fmt: skip
    assert got == same | dict.fromkeys(quarter, 0.25)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("kdim", [None, 12])
def test_attention_is_found_before_and_after_conversion(optimizer, kdim):
    def make(width, is_converted):
        model = nn.ModuleDict({"a": nn.MultiheadAttention(width, 2, kdim=kdim)})
        if is_converted:
            el.convert_(model, "XA^1 YA^1")  # a dense matrix as a structured layer
        return model

    wide = [multipliers(make(32, True), base=make(8, c), optimizer=optimizer) for c in (0, 1)]
    assert wide[0] == wide[1]
    assert wide[0]["a.q_proj.A"] == (0.25 if optimizer == "adam" else 1.0)
    assert wide[0]["a.k_proj.A"] == (1.0 if kdim else 0.25) * (1 if optimizer == "adam" else 4)
    packed = [multipliers(make(32, False), base=make(8, c), optimizer=optimizer) for c in (0, 1)]
    assert packed[0] == packed[1]


def test_conv1d_of_hugging_face():
    hf = pytest.importorskip("transformers")
    layers = [nn.Sequential(hf.pytorch_utils.Conv1D(4 * d, d)) for d in (32, 8)]
    assert multipliers(layers[0], base=layers[1]) == {"0.weight": 0.25, "0.bias": 1}
    el.convert_(layers[0], "btt")
    wide = multipliers(layers[0], base=layers[1])
    fan_in = layers[0][0].plan.fan_in
    assert wide["0.A"] == 8 / (2 * fan_in["A"])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_gates_of_mixtures(optimizer):
    model = gpt(64, structure=el.moe("btt", 4))
    bases = gpt(16), gpt(16, structure=el.moe("btt", 4)), gpt(16, structure=el.moe("low_rank", 4))
    first, *others = [multipliers(model, base=base, optimizer=optimizer) for base in bases]
    assert others == [first, first]
    assert first["blocks.0.mlp.up.gate.weight"] == 16 / 64
    assert first["blocks.0.mlp.down.gate.weight"] == 64 / 256
    if optimizer == "adam":
        fan_in = model.blocks[0].mlp.down.plan.fan_in["B"]
        assert first["blocks.0.mlp.down.B"] == 64 / (2 * fan_in)
        assert multipliers(model, base_width=16, width=64) == first


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_feed_forward_experts_and_the_dense_net_they_replace(optimizer):
    def make(width, is_mixed, bias=True):
        net = nn.Module()
        net.up, net.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        mixture = el.MoEFeedForward(width, 4 * width, num_experts=4, bias=bias)
        return nn.ModuleDict({"mlp": mixture if is_mixed else net})

    mixed = [multipliers(make(32, True), base=make(8, m), optimizer=optimizer) for m in (0, 1)]
    assert mixed[0] == mixed[1]
    plain = [multipliers(make(32, False), base=make(8, m), optimizer=optimizer) for m in (0, 1)]
    assert plain[0] == plain[1]
    assert (
        mixed[0]["mlp.down"] == plain[0]["mlp.down.weight"] == (0.25 if optimizer == "adam" else 1)
    )
    assert mixed[0]["mlp.gate.weight"] == 0.25


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("base_tied", [False, True])
def test_tied_weights(optimizer, base_tied):
    got = multipliers(gpt(64, tied=True), base=gpt(16, tied=base_tied), optimizer=optimizer)
    assert "head.weight" not in got
    embeddings = [n for n in got if not n.startswith("blocks") and "norm" not in n]
    assert {got[name] for name in embeddings} == {1.0 if optimizer == "adam" else 4.0}
    if optimizer == "adam":  # an untied head of a tied base
        assert multipliers(gpt(64), base=gpt(16, tied=True))["head.weight"] == 0.25


def test_layers_that_share_a_weight():
    def make(width, other, is_shared=True):
        model = nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(other, other)})
        if is_shared:
            model["b"].weight = model["a"].weight
        return model

    wide = make(32, 32)
    assert multipliers(wide, base=make(8, 8, is_shared=False))["a.weight"] == 0.25
    with pytest.raises(EinlinearError, match=r"a\.weight has \(8, 8\) and b\.weight has \(4, 4\)"):
        multipliers(wide, base=make(8, 4, is_shared=False))
    both = nn.ModuleDict({"a": wide["a"], "again": wide["a"]})
    assert multipliers(both, base=nn.ModuleDict({"again": nn.Linear(8, 8), "a": nn.Linear(8, 8)}))


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
def test_compiled_models_and_bases():
    wanted = multipliers(gpt(64), base=gpt(16))
    assert multipliers(torch.compile(gpt(64), backend="eager"), base=gpt(16)) == wanted
    assert multipliers(gpt(64), base=torch.compile(gpt(16), backend="eager")) == wanted


def test_frozen_parts_of_the_base_and_parts_without_a_rule():
    class Odd(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(3, width), requires_grad=False)
            self.mix = nn.Linear(width, width)

    assert multipliers(Odd(32), base=Odd(8).requires_grad_(False)) == {
        "mix.weight": 0.25, "mix.bias": 1.0
    }  # fmt: skip


class Twofold(nn.Module):
    """A layer of two factors of its own."""

    def __init__(self, d_in, d_out, tells=True):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(4, n)) for n in (d_in, d_out))
        self.widths = {"d_in": d_in, "d_out": d_out} if tells else {}
        self.fans = (d_in, 4), (4, d_out)

    def param_scaling(self):
        return {
            name: Scaling(*fans, 0.1, num_factors=2, **self.widths)
            for name, fans in zip(("first", "second"), self.fans, strict=True)
        }


def test_own_layers_of_several_factors():
    wanted = {"0.first": 16 / (2 * 64), "0.second": 16 / (2 * 4)}
    model = nn.Sequential(Twofold(64, 64))
    for base in (nn.Linear(16, 16), Twofold(16, 16)):
        assert multipliers(model, base=nn.Sequential(base)) == wanted
    assert multipliers(model, base_width=16, width=64) == wanted
    silent = nn.Sequential(Twofold(64, 64, tells=False))
    assert multipliers(silent, base=nn.Sequential(nn.Linear(16, 16))) == wanted
    for arguments in ({"base": silent}, {"base_width": 16, "width": 64}):
        with pytest.raises(EinlinearError, match=r"of 0\.first in .* is unknown(.|\n)*add d_in"):
            multipliers(silent, **arguments)


def test_patterns_name_layers_and_parameters_and_the_first_match_decides():
    model = nn.ModuleDict(
        {"a": nn.Linear(64, 64), "mlp": el.MoEFeedForward(64, 256, num_experts=2, bias=False)}
    )
    got = multipliers(model, base={"mlp.down": 48, "mlp*": 32, "*": 16})
    wanted = {"a.weight": 16 / 64, "a.bias": 1, "mlp.up": 32 / 64, "mlp.down": 48 / 256}
    assert got == wanted | {"mlp.gate.weight": 32 / 64}


def linear(*names):
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["no base is given", "base_width=64"]),
        ({"base": linear("up"), "base_width": 4}, ["both base and base_width are given"]),
        ({"base": linear("up"), "width": 4}, ["width is 4, with base", "leave out width"]),
        ({"width": 4}, ["no base is given"]),
        ({"base": 64}, ["base is 64", "base_width=64"]),
        ({"base": linear("Up", "head")}, ["no layer 'up'", "nearest", "'Up'", "narrower"]),
        ({"base": nn.ModuleDict({"up": nn.Embedding(4, 4)})}, ["kind matrix", "kind embedding"]),
        ({"base": {"upp": 4}}, ["'upp' matches no layer", "did you mean 'up'?"]),
        ({"base": {"up.bias": 4}}, ["no pattern matches the layer 'up'", "'up.bias'", '"*"']),
        ({"base": {}}, ["no pattern matches the layer 'up'", "are none"]),
        ({"base": {"up": 0}}, ["base['up'] is 0"]),
        ({"base": {"up": 4.5}}, ["base['up'] is 4.5"]),
        ({"base": {3: 4}}, ["the pattern 3 matches no layer"]),
        ({"base": {"up": 4}, "optimizer": "sgd"}, ["a table of in_features", "meta device"]),
        ({"base_width": 4, "width": 0}, ["width is 0"]),
        ({"base_width": 2, "width": 3}, ["no layer has a multiple of it", "have 4 inputs"]),
    ],
)
@pytest.mark.parametrize("make", [el.param_groups, el.scaling_table])
def test_bases_that_cannot_be(make, arguments, words):
    with pytest.raises(EinlinearError) as caught:
        make(linear("up"), 0.01, **arguments)
    assert len(str(caught.value).splitlines()) == 3
    for word in words:
        assert word in str(caught.value)


def test_experts_and_structures_together():
    """The released formula, base d_in / (factors * fan-in), for every factor of every expert."""
    layer = MoELinear(64, 128, structure=el.btt(rank=2), num_experts=3)
    got = multipliers(nn.Sequential(layer), base={"*": 24})
    for step in layer.plan.steps:
        fan_in = prod(layer.plan.sizes[edge] for edge in step.contracted)
        assert got[f"0.{step.factor}"] == 24 / (2 * fan_in)


def test_gains_of_experts_have_one_rate_whatever_the_form_of_the_base():
    """A gain multiplies a whole matrix: by theory its rate under SGD is lr at every width."""

    def mixture(width):
        options = {"structure": "btt", "num_experts": 3, "expert_gain": True}
        return nn.ModuleDict({"a": MoELinear(width, width, **options), "b": nn.Linear(width, 8)})

    forms = [
        {"base_width": 16},
        {"base_width": 16, "width": 64},
        {"base": mixture(16)},
        {"base": nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 8)})},
    ]
    for head in ((), "a"):
        for form in forms:
            got = multipliers(mixture(64), optimizer="sgd", head=head, **form)
            assert got["a.gain"] == 1.0, (head, form)
    for form in [*forms, {"base": {"*": 16}}]:
        assert multipliers(mixture(64), **form)["a.gain"] == 1.0
