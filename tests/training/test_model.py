"""The model of a run: its weights are drawn once, from the seed of the run."""

from dataclasses import replace

import pytest
import torch

from einlinear.layers.linear import EinsumLinear
from einlinear.layers.moe.layers import MoELinear
from einlinear.models.mup.groups import scaling_table
from einlinear.models.mup.init import init_
from einlinear.runs.config import RunConfig
from einlinear.runs.schedule import rate_multiplier
from einlinear.training.load import load_writer
from einlinear.training.model import _allocate_, base_inputs, make_model, make_shape
from einlinear.training.state import make_optimizer
from einlinear.training.train import train
from kit.runs import tiny

GPT = {"width": 32, "depth": 2, "head_size": 16}
CONFIGS = {
    "dense": GPT,
    "structured": GPT | {"structure": "btt", "convert_head": True, "head_aligned": True},
    "own axis": GPT | {"structure": "btt", "head_aligned": True, "head_axis": "own"},
    "tied": GPT | {"tied": True, "positions": "learned"},
    "experts": GPT | {"structure": "low_rank", "num_experts": 3},
    "MoE": GPT | {"experts": "ffn", "num_experts": 3},
    "residual MLP": {"task": "regression", "width": 16, "structure": "kronecker"},
    "MLP": {"task": "cifar", "width": 16, "structure": "btt", "activation": "gelu"},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_weights_are_those_of_a_model_that_was_built_in_memory(settings):
    config = RunConfig(seed=5, **settings)
    slow = make_shape(config, (96, 64))
    zero = ("blocks.*.mlp",) if config.experts == "ffn" else ()
    init_(slow, zero=zero, base_width=64, generator=torch.Generator().manual_seed(5))
    before = torch.get_rng_state()
    model = make_model(config, (96, 64))
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn besides
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in slow.named_parameters()
    }
    for name, parameter in slow.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_a_parameter_that_one_module_has_twice_stays_one():
    model = torch.nn.Linear(2, 2, bias=False, device="meta")
    model.again = model.weight
    _allocate_(model)
    assert model.again is model.weight
    assert model.weight.device.type == "cpu"


def test_a_tied_head_stays_tied():
    model = make_model(RunConfig(**CONFIGS["tied"]), (96, 64))
    assert model.head.weight is model.embedding.weight


def test_a_naive_model_starts_without_zeros():
    model = make_model(RunConfig(parametrization="naive", **CONFIGS["MoE"]), (96, 64))
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    assert all(parameter.any() for parameter in matrices.values())


# Of every matrix: 1 in the blocks, 1/sqrt(fan_in) in input layers, heads and gates.
UNIT = {
    "MLP, dense": {"task": "cifar", "width": 256},
    "MLP, low rank": {"task": "cifar", "width": 256, "structure": "low_rank(rank=16)"},
    "GPT, experts": {"width": 64, "depth": 1, "structure": "btt", "num_experts": 9},
    "GPT, MoE": {"width": 64, "depth": 1, "experts": "ffn", "num_experts": 9},
}


@pytest.mark.parametrize("settings", UNIT.values(), ids=UNIT)
def test_a_unit_model_has_unit_weights_in_its_blocks_and_one_rate(settings):
    config = RunConfig(parametrization="unit", **settings)
    model = make_model(config, (48, 1000))
    naive = make_model(replace(config, parametrization="naive"), (48, 1000))
    sizes = {"input.weight": 48, "head.weight": config.width}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std, error = parameter.std().item(), 5 / (2 * parameter.numel()) ** 0.5  # five sigma
        if name.startswith("blocks.") and "gate" not in name:
            assert std == pytest.approx(1, rel=error), name
        else:  # inputs of gates are those of the layers that they choose for
            assert std == pytest.approx(naive.get_parameter(name).std().item(), rel=2 * error)
            if name in sizes:
                assert std == pytest.approx(sizes[name] ** -0.5, rel=error)
    assert {group["lr"] for group in make_optimizer(config, model).param_groups} == {config.lr}
    assert config.head_init == "usual"


def base_of(rows):
    return {row.name: row.base_in for row in rows if row.base_in > 1}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_rates_on_a_cpu_are_those_of_one_base_width_for_all_layers(settings):
    config = RunConfig(**settings, base_width=24)
    model = make_shape(config, (96, 64))
    rows = scaling_table(model, 0.01, base=base_inputs(config, model)).rows
    assert rows == scaling_table(model, 0.01, base_width=24).rows


@pytest.mark.parametrize("expansion", [1, 4])
@pytest.mark.parametrize("name", ["dense", "structured", "experts", "MoE"])
def test_the_base_of_a_gpt(name, expansion):
    config = RunConfig(**CONFIGS[name], base_width=24, base_expansion=expansion)
    model = make_shape(config, (96, 64))
    found = base_of(scaling_table(model, 1.0, base=base_inputs(config, model)))
    # Second layers with their gates, and the second matrix of feed-forward experts.
    downs = {n: base for n, base in found.items() if "mlp.down" in n}
    assert set(downs.values()) == {24 * expansion}
    assert {base for n, base in found.items() if n not in downs} == {24}
    last = {"dense": ".weight", "structured": ".B", "experts": ".gate.weight", "MoE": ""}[name]
    assert f"blocks.1.mlp.down{last}" in downs


@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_base_of_an_mlp(is_fixed):
    for name in ("residual MLP", "MLP"):
        settings = CONFIGS[name] | ({"base_expansion": 4} if name == "residual MLP" else {})
        config = RunConfig(**settings, base_width=24, fixed_input=is_fixed)
        model = make_shape(config, (8, 10))
        found = base_of(scaling_table(model, 1.0, base=base_inputs(config, model)))
        assert found.pop("input.weight") == (8 if is_fixed else 24)
        assert found.pop("head.weight") == 24
        assert {base for n, base in found.items() if "down" not in n} == {24}
        assert {base for n, base in found.items() if "down" in n} <= {96}


@pytest.mark.parametrize("parametrization", ["mup", "naive"])
def test_how_the_head_of_a_run_starts(parametrization):
    settings = {"task": "cifar", "width": 256, "parametrization": parametrization, "base_width": 64}
    heads = {
        kind: make_model(RunConfig(head_init=kind, **settings), (8, 1000)).head.weight.detach()
        for kind in (None, "zero", "small", "usual")
    }
    assert torch.equal(heads[None], heads["small" if parametrization == "mup" else "usual"])
    assert not heads["zero"].any()
    # 256,000 draws have their deviation to within 1 / sqrt(512000); five times that is 0.7 %.
    assert float(heads["small"].std()) == pytest.approx(8 / 256, rel=0.007)
    assert float(heads["usual"].std()) == pytest.approx(1 / 16, rel=0.007)


ATTENTION = {f"attention.{name}_proj" for name in "qkvo"}
MIXED = {
    "all": {*ATTENTION, "mlp.up", "mlp.down"},
    "vo": {"attention.v_proj", "attention.o_proj"},
    "ffn": {"mlp.up", "mlp.down"},
}


@pytest.mark.parametrize(
    ("structure", "is_aligned"), [("dense", False), ("btt", False), ("btt", True)]
)
@pytest.mark.parametrize("layers", MIXED)
def test_which_layers_have_experts(layers, structure, is_aligned):
    own = GPT | {"structure": structure, "head_aligned": is_aligned, "convert_head": True}
    config = RunConfig(num_experts=3, expert_layers=layers, expert_gain=True, **own)
    model = make_shape(config, (96, 64))
    alone = make_shape(replace(config, num_experts=0), (96, 64))
    for name in ATTENTION | MIXED["ffn"]:
        layer, plain = (m.get_submodule(f"blocks.1.{name}") for m in (model, alone))
        assert isinstance(layer, MoELinear) == (name in MIXED[layers]), name
        if name not in MIXED[layers]:
            assert repr(layer) == repr(plain)  # the class, structure and norm without experts
        elif structure != "dense":
            assert layer.structure == plain.structure  # aligned with heads, if asked
    assert isinstance(model.head, MoELinear) == (layers == "all")
    assert repr(model.head) == repr(alone.head) or layers == "all"


def test_a_run_with_factors_by_fan_in_is_capped_at_that_deviation(tmp_path):
    """16 features to rank 2: 1/4 instead of sqrt(2)/16; the widening factor has 1/sqrt(2)."""
    config = tiny(structure="low_rank(rank=2)", factor_init="fan_in", lr=1.0, save_model=True)
    train(config, tmp_path)
    layers = [
        module
        for module in load_writer(tmp_path).model.modules()
        if isinstance(module, EinsumLinear) and module.in_features == 16
    ]
    assert len(layers) == 5  # queries, keys, values, output, up
    raw, used = (
        [[f.square().mean().sqrt().item() for f in factors] for factors in both]
        for both in ([(m.A, m.B) for m in layers], [m.factors() for m in layers])
    )
    assert min(a for a, _ in raw) > 0.25  # so that the norm has something to do
    assert [a for a, _ in used] == pytest.approx([0.25] * 5)
    assert [b for _, b in used] == pytest.approx([min(b, 0.5**0.5) for _, b in raw])


ALIKE = [
    ({}, {"num_active": 1}),
    ({}, {"balance": 0.5}),
    ({}, {"expert_norm": "together"}),
    ({}, {"expert_gain": True}),
    ({"structure": "btt"}, {"expert_layers": "vo"}),
    ({}, {"factor_init": "fan_in"}),
    ({"structure": "btt"}, {"head_axis": "own"}),
    ({"experts": "ffn", "num_experts": 3}, {"factor_init": "fan_in"}),
    (
        {"parametrization": "naive", "structure": "low_rank", "weight_norm": False},
        {"factor_init": "fan_in"},
    ),
    ({}, {"num_heads": 2, "head_size": None}),
    ({}, {"decay": "standard"}),
    ({}, {"final_rate": 0.5}),
    ({"schedule": "cosine"}, {"decay_share": 0.5}),
    ({"optimizer": "muon", "weight_decay": 0.1}, {"base_expansion": 4}),
    ({"parametrization": "naive"}, {"base_expansion": 4}),
    ({"parametrization": "naive", "weight_decay": 0.1}, {"decay": "standard"}),
    ({"parametrization": "naive", "task": "cifar"}, {"fixed_input": True}),
    ({"parametrization": "unit"}, {"base_expansion": 4}),
    ({"parametrization": "unit", "weight_decay": 0.1}, {"decay": "standard"}),
    ({"optimizer": "muon", "task": "cifar", "weight_decay": 0.1}, {"fixed_input": True}),
    ({"experts": "ffn", "num_experts": 3}, {"expert_norm": "together", "expert_gain": True}),
    ({"num_experts": 3, "weight_norm": False}, {"expert_norm": "together"}),
]


def start_of(config):
    """All that a run starts with: weights, rates and decays by parameter, and the schedule."""
    model = make_model(config, (96, 64))
    rates = {
        id(p): (group["lr"], group["weight_decay"])
        for group in make_optimizer(config, model).param_groups
        for p in group["params"]
    }
    weights = {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}
    schedule = [rate_multiplier(config, step) for step in range(0, config.steps, 7)]
    return weights, {name: rates[id(p)] for name, p in model.named_parameters()}, schedule


@pytest.mark.parametrize(("settings", "change"), ALIKE, ids=lambda given: " ".join(given) or "-")
def test_settings_without_an_effect_are_not_in_the_id(settings, change):
    """Such runs start the same and train the same, and any other value would do."""
    own = GPT if settings.get("task", "text") == "text" else {"width": 16}
    one, other = (RunConfig(**own | settings | more) for more in ({}, change))
    assert one != other
    assert one.id == other.id
    assert start_of(one) == start_of(other)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"weight_decay": 0.1}, {"decay": "standard"}),
        ({"weight_decay": 0.1, "optimizer": "muon"}, {"decay": "standard"}),
        ({}, {"base_expansion": 4}),
        ({}, {"head_init": "zero"}),
        ({"parametrization": "naive"}, {"parametrization": "unit"}),
        ({"schedule": "cosine"}, {"final_rate": 0.5}),
        ({"schedule": "wsd"}, {"decay_share": 0.5}),
        ({"num_experts": 3}, {"expert_gain": True}),
        ({"num_experts": 3}, {"expert_layers": "vo"}),
        ({"structure": "low_rank"}, {"factor_init": "fan_in"}),
        ({"structure": "btt", "head_aligned": True}, {"head_axis": "own"}),
        ({"num_experts": 3, "structure": "low_rank"}, {"factor_init": "fan_in"}),
    ],
    ids=str,
)
def test_settings_with_an_effect_are_in_the_id(settings, change):
    one, other = (RunConfig(**GPT | {"width": 64} | settings | more) for more in ({}, change))
    assert one.id != other.id
    assert start_of(one) != start_of(other)


def test_the_decay_of_a_run_is_that_of_param_groups():
    config = RunConfig(width=64, base_width=32, weight_decay=0.1, decay="standard", depth=1)
    model = make_model(config, (96, 64))
    groups = make_optimizer(config, model).param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    config = replace(config, decay="independent")
    groups = make_optimizer(config, model).param_groups
    decays = {round(group["weight_decay"] * group["lr"], 12) for group in groups}
    assert decays == {0.0, round(0.1 * config.lr, 12)}
