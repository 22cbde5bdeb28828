"""Learning rates: against formulas written by hand, and through all that torch does to a model."""

import copy
import io
from dataclasses import replace
from fractions import Fraction
from math import prod, sqrt

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import einlinear as el
from cases import structures
from einlinear import EinlinearError, EinsumLinear, Scaling
from einlinear.layers.scaling import adam_rate, factor_scaling, sgd_rate, uniform_base
from kit.pair import run_two
from kit.two_processes import compare_training, model_and_input, train_with_groups

D0 = 32

# Structure, widths, and by hand: fan-in, fan-out and repeats of each factor.
BY_HAND = [
    (el.dense(), 64, 48, {"A": (64, 48, 1)}),
    (el.low_rank(rank=4), 64, 32, {"A": (64, 4, 1), "B": (4, 32, 1)}),
    (el.kronecker(), 64, 64, {"A": (8, 8, 8), "B": (8, 8, 8)}),
    (el.tensor_train(rank=3), 64, 64, {"A": (8, 24, 8), "B": (24, 8, 8)}),
    (el.monarch(), 64, 64, {"A": (8, 8, 1), "B": (8, 8, 1)}),
    (el.btt(rank=2), 64, 64, {"A": (8, 16, 1), "B": (16, 8, 1)}),
    (
        el.parse("theta(1/2,1/4,1/4,1/4,1/2,1/4,0)"),  # sizes 16 4 4 4 16 4 1
        256,
        256,
        {"A": (16, 16, 4), "B": (16, 16, 4)},
    ),
    (
        el.parse("XA^1 AB:2 BC:3 YC^1"),
        64,
        32,
        {"A": (64, 2, 1), "B": (2, 3, 1), "C": (3, 32, 1)},
    ),
    (
        el.kronecker(num_factors=3),
        64,
        64,
        {"A": (4, 4, 16), "B": (4, 4, 16), "C": (4, 4, 16)},
    ),
]


def rates(model, **options):
    """The rate of every parameter, read back from the groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = el.param_groups(model, 0.01, base_width=D0, **options)
    return {names[id(p)]: group["lr"] for group in groups for p in group["params"]}


def structured(structure, d_in, d_out):
    return nn.Sequential(EinsumLinear(d_in, d_out, structure=structure))


@pytest.mark.parametrize(("structure", "d_in", "d_out", "factors"), BY_HAND)
def test_adam_rates_by_hand(structure, d_in, d_out, factors):
    got = rates(structured(structure, d_in, d_out))
    wanted = {f"0.{f}": 0.01 * D0 / (len(factors) * i) for f, (i, _, _) in factors.items()}
    assert got == pytest.approx(wanted | {"0.bias": 0.01}, rel=1e-12)


@pytest.mark.parametrize(("structure", "d_in", "d_out", "factors"), BY_HAND)
def test_sgd_rates_by_hand(structure, d_in, d_out, factors):
    got = rates(structured(structure, d_in, d_out), optimizer="sgd")
    wanted = {f"0.{f}": 0.01 * o / (i * r) for f, (i, o, r) in factors.items()}
    assert got == pytest.approx(wanted | {"0.bias": 0.01 * d_out / D0}, rel=1e-12)


@given(structures(min_factors=2, max_factors=2))
def test_sgd_rates_are_the_corrected_formulas(structure):
    assume(structure.num_factors == 2)
    plan = el.make_plan(structure, 192, 320)
    first, second = (step.factor for step in plan.steps)
    d = {"XAB": 1, "YAB": 1, "AB": 1} | {s + f: 1 for s in "XY" for f in "AB"} | plan.sizes
    scaling = factor_scaling(plan)
    new = d["Y" + first] * d["YAB"] * d["AB"]
    wanted = new / d["X" + first] / d["X" + second]
    base = uniform_base(scaling[first], 64)
    assert sgd_rate(scaling[first], 1.0, base) == pytest.approx(wanted)
    contracted = d["X" + second] * d["XAB"] * d["AB"]
    wanted = d["Y" + second] / contracted / d["Y" + first]
    assert sgd_rate(scaling[second], 1.0, base) == pytest.approx(wanted)


@given(structures())
def test_rates_times_repeats_and_fan_in_are_those_of_counting(structure):
    """Repeats, counted another way: how often a step uses each number of the factor."""
    plan = el.make_plan(structure, 96, 80)
    for step in plan.steps:
        scaling = factor_scaling(plan)[step.factor]
        assert scaling.repeats == step.macs // prod(plan.factor_shapes[step.factor])
        rate = adam_rate(scaling, 1.0, uniform_base(scaling, 96))
        assert rate * scaling.fan_in * len(plan.steps) == pytest.approx(96)


@given(st.floats(1e-6, 10), st.integers(1, 10**5), st.integers(1, 10**5))
def test_rates_at_the_base_width_are_lr_to_the_bit(lr, width, vocabulary):
    inner, bias = el.matrix_scaling(width, width), el.vector_scaling(width)
    head = replace(el.matrix_scaling(width, vocabulary), head_width=vocabulary)
    head_bias = replace(el.vector_scaling(vocabulary), head_width=vocabulary)
    for scaling in (inner, bias, el.embedding_scaling(width), head, head_bias):
        base = uniform_base(scaling, width)
        assert adam_rate(scaling, lr, base) == lr
        assert sgd_rate(scaling, lr, base) == lr


def test_layers_of_torch_by_hand():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(48, 80),
            "bilinear": nn.Bilinear(4, 6, 10),
            "conv": nn.Conv2d(8, 12, (3, 5), groups=2),
            "up": nn.ConvTranspose1d(6, 10, 3, groups=2),
            "embedding": nn.Embedding(11, 24),
            "norm": nn.LayerNorm(24),
            "rms": nn.RMSNorm(16),
            "batch": nn.BatchNorm2d(20),
            "prelu": nn.PReLU(7),
            "attention": nn.MultiheadAttention(16, 2, kdim=12, vdim=20, add_bias_kv=True),
            "packed": nn.MultiheadAttention(16, 2),
            "lstm": nn.LSTM(9, 14),
        }
    )
    fans = {
        "linear.weight": (48, 80),
        "bilinear.weight": (24, 10),
        "conv.weight": (4 * 15, 6),
        "up.weight": (3 * 3, 5),
        "attention.q_proj_weight": (16, 16),
        "attention.k_proj_weight": (12, 16),
        "attention.v_proj_weight": (20, 16),
        "attention.out_proj.weight": (16, 16),
        "packed.in_proj_weight": (16, 16),
        "packed.out_proj.weight": (16, 16),
        "lstm.weight_ih_l0": (9, 14),
        "lstm.weight_hh_l0": (14, 14),
    }
    widths = {
        "linear.bias": 80,
        "bilinear.bias": 10,
        "conv.bias": 12,
        "up.bias": 10,
        "embedding.weight": 24,
        "norm.weight": 24,
        "norm.bias": 24,
        "rms.weight": 16,
        "batch.weight": 20,
        "batch.bias": 20,
        "prelu.weight": 7,
        "attention.in_proj_bias": 16,
        "attention.bias_k": 16,
        "attention.bias_v": 16,
        "attention.out_proj.bias": 16,
        "packed.in_proj_bias": 16,
        "packed.out_proj.bias": 16,
        "lstm.bias_ih_l0": 14,
        "lstm.bias_hh_l0": 14,
    }
    adam = {name: 0.01 * D0 / i for name, (i, _) in fans.items()} | dict.fromkeys(widths, 0.01)
    assert rates(model) == pytest.approx(adam, rel=1e-12)
    sgd = {name: 0.01 * o / i for name, (i, o) in fans.items()}
    sgd |= {name: 0.01 * o / D0 for name, o in widths.items()}
    assert rates(model, optimizer="sgd") == pytest.approx(sgd, rel=1e-12)


class Tiny(nn.Module):
    """A dense model whose inner layers are square, with everything a model has."""

    def __init__(self, width, vocabulary=11, names_head=True):
        super().__init__()
        self.names_head = names_head
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def layer_roles(self):
        return {"head": "head"} if self.names_head else {}

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + torch.relu(self.inner(self.norm(x))))


def step(model, optimizer, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(11, (2, 5, 7), generator=g)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make_optimizer", "kind"),
    [
        (lambda groups: torch.optim.AdamW(groups, lr=0.013), "adam"),
        (lambda groups: torch.optim.Adam(groups, lr=0.013, foreach=True), "adam"),
        (lambda groups: torch.optim.SGD(groups, lr=0.013, momentum=0.9), "sgd"),
    ],
)
@pytest.mark.parametrize("width", [24, 25])
def test_nothing_changes_at_the_base_width(make_optimizer, kind, width):
    torch.manual_seed(0)
    model = Tiny(width)
    usual = copy.deepcopy(model)
    ours = make_optimizer(el.param_groups(model, 0.013, base_width=width, optimizer=kind))
    theirs = make_optimizer(usual.parameters())
    for seed in range(6):
        step(model, ours, seed)
        step(usual, theirs, seed)
    for a, b in zip(model.parameters(), usual.parameters(), strict=True):
        assert torch.equal(a, b)


def test_elsewhere_something_does():
    got = rates(Tiny(2 * D0))
    assert got["inner.weight"] == 0.005
    assert got["head.weight"] == 0.005
    assert got["embedding.weight"] == got["norm.bias"] == got["head.bias"] == 0.01
    got = rates(Tiny(2 * D0), optimizer="sgd")
    assert got["inner.weight"] == 0.01
    assert got["inner.bias"] == got["embedding.weight"] == got["norm.weight"] == 0.02
    assert got["head.weight"] == 0.005
    assert got["head.bias"] == pytest.approx(0.01)


def test_a_feed_forward_part_is_not_all_at_the_base_width():
    """docs/training.md names this limit."""
    got = rates(nn.Sequential(nn.Linear(D0, 4 * D0), nn.GELU(), nn.Linear(4 * D0, D0)))
    assert (got["0.weight"], got["2.weight"], got["2.bias"]) == (0.01, 0.0025, 0.01)


def test_the_head_can_be_named_in_the_call():
    named, unnamed = Tiny(64), Tiny(64, names_head=False)
    unnamed.inner = nn.Linear(64, 64)
    unnamed.last = nn.Linear(64, 7)  # neither this one nor what is called head is looked for
    got = rates(unnamed, optimizer="sgd", head="inn*")
    assert got["inner.weight"] == 0.01 * D0 / 64
    assert got["head.weight"] == pytest.approx(0.01 * 11 / 64)
    assert got["last.weight"] == pytest.approx(0.01 * 7 / 64)
    del unnamed.last
    assert rates(unnamed, optimizer="sgd", head=["head"]) == rates(named, optimizer="sgd")
    with pytest.raises(EinlinearError, match=r"'haed' matches no layer(.|\n)*inner and head"):
        rates(unnamed, head="haed")


@pytest.mark.parametrize("structure", [None, "btt()"])
def test_a_head_that_nobody_names_is_found(structure):
    """The same layer that convert_ leaves alone; the table shows it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if structure:
        el.convert_(model, structure)
    by_name = {
        row.name: row for row in el.scaling_table(model, lr=1.0, base_width=32, optimizer="sgd")
    }
    assert (by_name["2.weight"].kind, by_name["2.weight"].rate) == ("head", 32 / 64)
    assert by_name["2.bias"].rate == 1.0
    assert {row.kind for name, row in by_name.items() if name[0] == "0"} == {"matrix", "vector"}
    if not structure:
        assert by_name["0.weight"].rate == 1.0
        assert by_name["0.bias"].rate == 64 / 32
    # What convert_ passes by is the head, also by its name, and also if it is frozen.
    assert rates(Tiny(64, names_head=False), optimizer="sgd") == rates(Tiny(64), optimizer="sgd")
    model[2].requires_grad_(False)
    assert {row.kind for row in el.scaling_table(model, 1.0, base_width=32)} == {"matrix", "vector"}


def test_a_head_that_is_found_does_not_change_rates_of_adam():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    assert rates(model)["2.weight"] == rates(model, head="0")["2.weight"] == 0.005


@pytest.mark.filterwarnings("ignore")
def test_a_head_is_found_in_compiled_models():
    model = torch.compile(Tiny(64, names_head=False), backend="aot_eager")
    table = el.scaling_table(model, 0.01, base_width=D0, optimizer="sgd")
    assert {row.name: row.rate for row in table} == rates(Tiny(64), optimizer="sgd")


def test_a_structured_layer_is_a_head_only_if_named():
    model = nn.Sequential(nn.Linear(64, 64), EinsumLinear(64, 10, structure="btt()"))
    kinds = {row.kind for row in el.scaling_table(model, 0.01, base_width=D0, optimizer="sgd")}
    assert "head" not in kinds
    named = el.scaling_table(model, 0.01, base_width=D0, optimizer="sgd", head="1")
    assert {row.name for row in named if row.kind == "head"} == {"1.A", "1.B"}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("order", [("inner", "head"), ("head", "inner")])
def test_a_weight_tied_to_the_head_is_a_head(order, optimizer):
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in order})
    model["inner"].weight = model["head"].weight
    [row] = el.scaling_table(model, 0.01, base_width=D0, optimizer=optimizer)
    assert (row.kind, row.rate) == ("head", 0.005)


def test_a_structured_head():
    model = nn.Sequential(EinsumLinear(64, 48, structure=el.low_rank(rank=4)))
    plain, head = rates(model, optimizer="sgd"), rates(model, optimizer="sgd", head="0")
    assert head == pytest.approx({name: rate * D0 / 48 for name, rate in plain.items()})
    assert head["0.bias"] == 0.01


def test_every_parameter_is_in_one_group():
    model = nn.Sequential(
        Tiny(64),
        EinsumLinear(64, 64, structure=el.btt(rank=2)),
        EinsumLinear(64, 64, structure=el.low_rank()),
    )
    groups = el.param_groups(model, 0.01, base_width=D0)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert len({group["lr"] for group in groups}) == len(groups)
    names = {group["lr"]: group["name"] for group in groups}
    assert names[0.005] == "fan_in 64; head, fan_in 64"
    assert names[0.01] == "embedding; vector; fan_in 16, 2 factors"
    assert names[0.02] == "fan_in 8, 2 factors"
    assert all(set(group) == {"params", "lr", "name"} for group in groups)


def test_shared_and_frozen_parameters():
    model = Tiny(64, names_head=False)
    model.again = nn.Linear(64, 64)
    model.again.weight = model.inner.weight
    model.twin = model.norm
    model.inner.bias.requires_grad_(False)
    got = rates(model)
    assert sorted(got) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert got["inner.weight"] == 0.005
    model.requires_grad_(False)
    with pytest.raises(EinlinearError, match="no trainable parameters"):
        rates(model)


@pytest.mark.parametrize("first", ["embedding", "head"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_embedding_tied_to_the_head_is_an_embedding(first, optimizer):
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(11, 64), "head": nn.Linear(64, 11, bias=False)}
    )
    if first == "head":
        model = nn.ModuleDict(dict(reversed(model.items())))
    model["head"].weight = model["embedding"].weight
    [group] = el.param_groups(model, 0.01, base_width=D0, optimizer=optimizer)
    assert group["lr"] == {"adam": 0.01, "sgd": 0.02}[optimizer]
    assert len(group["params"]) == 1


def test_one_parameter_with_two_rules():
    class Other(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def param_scaling(self):
            return {"weight": el.matrix_scaling(5, 64)}

    linear = nn.Linear(64, 64)
    with pytest.raises(EinlinearError, match=r"0\.weight and 1\.weight are one parameter"):
        rates(nn.Sequential(linear, Other(linear.weight)))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.ones(3, 5))


def test_layers_without_a_rule_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"deep": Gain()}))
    with pytest.raises(EinlinearError) as caught:
        rates(model)
    message = str(caught.value)
    assert "gain (), table (3, 5) of 1.deep, a " in message
    assert ".Gain" in message
    for p in model[1].parameters():
        p.requires_grad_(False)
    assert len(rates(model)) == 2  # what is not trained needs no rule
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.raises(EinlinearError, match="original0"):
        rates(norm)


def test_a_rule_that_forgets_a_parameter():
    class Forgetful(Gain):
        def param_scaling(self):
            return {"gain": el.vector_scaling(1)}

    with pytest.raises(EinlinearError, match=r"known for table \(3, 5\) of the model itself"):
        rates(Forgetful())


def test_registered_rules_and_the_most_specific_class():
    class Mine(Gain):
        pass

    class Special(Mine):
        def param_scaling(self):
            return {"gain": el.vector_scaling(1), "table": el.matrix_scaling(2, 2)}

    class Narrow(nn.Linear):
        pass

    @el.register_scaling(Mine)
    def rule(layer):
        return {"gain": el.vector_scaling(1), "table": el.matrix_scaling(4, 4)}

    assert rule(None)["table"].fan_in == 4  # the decorator gives the function back
    assert rates(Mine())["table"] == 0.01 * 8
    assert rates(Special())["table"] == 0.01 * 16
    el.register_scaling(Special, lambda layer: {n: el.vector_scaling(1) for n in ("gain", "table")})
    assert rates(Special())["table"] == 0.01
    assert rates(Narrow(16, 16))["weight"] == 0.02
    el.register_scaling(Narrow, lambda layer: {n: el.vector_scaling(1) for n in ("weight", "bias")})
    assert rates(Narrow(16, 16))["weight"] == 0.01
    assert rates(nn.Linear(16, 16))["weight"] == 0.02
    with pytest.raises(EinlinearError, match="registered for"):
        el.register_scaling(Mine(), rule)


def test_layers_of_hugging_face():
    conv = type(
        "Conv1D",
        (nn.Module,),
        {"__module__": "transformers.pytorch_utils", "__qualname__": "Conv1D"},
    )()
    conv.weight, conv.bias = nn.Parameter(torch.ones(16, 48)), nn.Parameter(torch.ones(48))
    norm = type(
        "LlamaRMSNorm", (nn.Module,), {"__module__": "transformers.models.llama.modeling_llama"}
    )()
    norm.weight = nn.Parameter(torch.ones(16))
    got = rates(nn.Sequential(conv, norm))
    assert got == {"0.weight": 0.02, "0.bias": 0.01, "1.weight": 0.01}


class FaceModel(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(11, 64), nn.Linear(64, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def get_output_embeddings(self):
        return self.lm_head


def test_the_head_of_a_hugging_face_model():
    got = rates(FaceModel(tied=False), optimizer="sgd")
    assert got == {"wte.weight": 0.02, "lm_head.weight": 0.005}
    assert rates(FaceModel(tied=True), optimizer="sgd") == {"wte.weight": 0.02}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weight_decay_per_step_is_the_same_at_every_width(optimizer):
    model = nn.Sequential(Tiny(64), EinsumLinear(64, 64, structure=el.btt(rank=2)))
    groups = el.param_groups(model, 0.01, base_width=D0, optimizer=optimizer, weight_decay=0.1)
    matrices = {id(p) for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n}
    for group in groups:
        is_matrix = {id(p) in matrices for p in group["params"]}
        assert len(is_matrix) == 1  # rates may agree, decays do not
        wanted = 0.1 * 0.01 if is_matrix.pop() else 0.0
        assert group["lr"] * group["weight_decay"] == pytest.approx(wanted)
    standard = el.param_groups(
        model, 0.01, base_width=D0, optimizer=optimizer, weight_decay=0.1, decay="standard"
    )
    for group in standard:
        is_matrix = {id(p) in matrices for p in group["params"]}
        assert is_matrix == {group["weight_decay"] == 0.1}
    [weight] = [g for g in el.param_groups(nn.Linear(7, 7, bias=False), 0.013, base_width=7,
                                           weight_decay=0.1)]  # fmt: skip
    assert weight["weight_decay"] == 0.1


def test_the_table_says_what_the_groups_do():
    model = nn.Sequential(Tiny(64), EinsumLinear(64, 64, structure=el.tensor_train(rank=3)))
    table = el.scaling_table(model, lr=0.01, base_width=D0, optimizer="sgd")
    assert {row.name: row.rate for row in table} == rates(model, optimizer="sgd")
    assert len(table) == len(list(model.parameters()))
    by_name = {row.name: row for row in table}
    row = by_name["1.A"]
    plan = model[1].plan
    assert (row.shape, row.kind) == (plan.factor_shapes["A"], "matrix")
    assert (row.fan_in, row.fan_out) == (plan.fan_in["A"], plan.fan_out["A"])
    assert (row.num_factors, row.repeats) == (2, plan.sizes["XB"])
    assert row.rate == pytest.approx(0.01 * row.multiplier)
    assert row.init_std == pytest.approx(sqrt(min(row.fan_in, row.fan_out)) / row.fan_in)
    assert by_name["0.head.weight"].kind == "head"
    lines = str(table).splitlines()
    assert lines[0] == "sgd, lr 0.01 at base width 32"
    head = ["parameter", "shape", "kind", "fan-in", "fan-out", "factors", "init", "base-in"]
    assert lines[1].split() == [*head, "x", "lr", "lr"]
    inner = next(line for line in lines if line.startswith("0.inner.weight"))
    assert inner.split() == (
        ["0.inner.weight", "64", "x", "64", "matrix", "64", "64", "1", "0.125", "32", "1", "0.01"]
    )
    assert len({line.index(word) for line, word in ((lines[1], "kind"), (inner, "matrix"))}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adamw"}, "optimizer is 'adamw'"),
        ({"base_width": 0}, "base_width is 0"),
        ({"base_width": 3.5}, "base_width is 3.5"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"decay": "coupled"}, "decay is 'coupled'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(EinlinearError, match=message):
        el.param_groups(nn.Linear(4, 4), **({"lr": 0.01, "base_width": 4} | options))


@pytest.mark.parametrize("make", [el.param_groups, el.scaling_table])
@pytest.mark.parametrize("model", [nn.Linear(4, 4).parameters(), "model", nn.Linear, None])
def test_what_is_no_model(make, model):
    with pytest.raises(EinlinearError, match="the model is given as"):
        make(model, 0.01, base_width=4)


@pytest.mark.parametrize("make", [el.param_groups, el.scaling_table])
@pytest.mark.parametrize(
    "lazy", [nn.LazyLinear(4), nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d()], ids=lambda m: str(m)[:9]
)
def test_lazy_layers(make, lazy):
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "lazy": lazy})
    with pytest.raises(EinlinearError, match=r"lazy\.weight(.|\n)*run the model once"):
        make(model, 0.01, base_width=4)


@pytest.mark.parametrize(
    "number", [np.float32(0.25), np.float64(0.25), Fraction(1, 4), np.int64(1)]
)
def test_numbers_of_other_kinds(number):
    [group] = el.param_groups(
        nn.Linear(4, 4, bias=False), number, base_width=4, weight_decay=number
    )
    assert type(group["lr"]) is type(group["weight_decay"]) is float
    assert group["lr"] == group["weight_decay"] == float(number)
    for bad in (np.float32("nan"), np.bool_(True), True, 1j, torch.tensor(0.25), "0.25"):
        with pytest.raises(EinlinearError, match="lr is "):
            el.param_groups(nn.Linear(4, 4), bad, base_width=4)


@pytest.mark.parametrize(
    "options", [{"fan_in": 0}, {"repeats": 0}, {"init_std": -1.0}, {"kind": "tensor"}]
)
def test_a_scaling_is_checked_at_birth(options):
    with pytest.raises(EinlinearError, match="scaling of a parameter"):
        Scaling(**({"fan_in": 1, "fan_out": 1, "init_std": 0.0} | options))


def test_roles_are_checked():
    Odd = type("Odd", (Tiny,), {"layer_roles": lambda self: {"head": "tail"}})  # noqa: N806
    with pytest.raises(EinlinearError, match=r"Odd\.layer_roles is 'tail'"):
        rates(Odd(8))
    Lost = type("Lost", (Tiny,), {"layer_roles": lambda self: {"haed": "head"}})  # noqa: N806
    with pytest.raises(EinlinearError, match=r"'inside\.haed' matches no layer"):
        rates(nn.ModuleDict({"inside": Lost(8)}))


def structured_model():
    torch.manual_seed(0)
    model = Tiny(64)
    model.inner = EinsumLinear(64, 64, structure=el.btt(rank=2))
    return model


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_copies_casts_and_compiled_models_have_the_same_rates(optimizer):
    model = structured_model()
    wanted = rates(model, optimizer=optimizer)
    assert rates(copy.deepcopy(model), optimizer=optimizer) == wanted
    assert rates(copy.deepcopy(model).to(torch.bfloat16), optimizer=optimizer) == wanted
    compiled = torch.compile(model, backend="aot_eager")
    table = el.scaling_table(compiled, 0.01, base_width=D0, optimizer=optimizer)
    assert {row.name: row.rate for row in table} == wanted
    model.inner = torch.compile(model.inner, backend="aot_eager")  # a compiled part
    table = el.scaling_table(model, 0.01, base_width=D0, optimizer=optimizer)
    assert {row.name: row.rate for row in table} == wanted
    step(model, torch.optim.AdamW(el.param_groups(model, 0.01, base_width=D0)))


def test_training_goes_on_after_saving_and_loading():
    def make():
        model = structured_model()
        return model, torch.optim.AdamW(el.param_groups(model, 0.01, base_width=D0))

    model, optimizer = make()
    for seed in range(3):
        step(model, optimizer, seed)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved)
    again, optimizer_again = make()
    again.load_state_dict(state["model"])
    optimizer_again.load_state_dict(state["optimizer"])
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(again, optimizer_again, seed)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_schedulers_scale_every_group():
    groups = el.param_groups(structured_model(), 0.01, base_width=D0)
    before = [group["lr"] for group in groups]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 2 for lr in before]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_takes_the_dense_matrices():
    model = structured_model()
    model.extra = nn.Linear(64, 64)
    table = el.scaling_table(model, 0.01, base_width=D0)
    dense = {row.name for row in table if row.kind == "matrix" and len(row.shape) == 2}
    assert dense == {"extra.weight"}
    parameters = dict(model.named_parameters())
    muon = torch.optim.Muon([parameters[name] for name in dense], lr=0.02)
    chosen = {id(parameters[name]) for name in dense}
    groups = el.param_groups(model, 0.01, base_width=D0)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    adam = torch.optim.AdamW([group for group in groups if group["params"]])
    count = sum(len(g["params"]) for o in (muon, adam) for g in o.param_groups)
    assert count == len(parameters)
    model.extra(torch.randn(3, 64)).square().sum().backward()
    muon.step()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(kind):
    run_two(compare_training, kind, train_with_groups(*model_and_input()))
