"""Mixtures of experts in whole models: conversion, rates, initialisation."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import einlinear as el


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    return nn.Sequential(
        nn.Embedding(50, 64), nn.TransformerEncoder(layer, num_layers=2), nn.Linear(64, 50)
    )


def test_every_layer_of_a_model_in_one_call():
    model = encoder()
    conversion = el.convert_(model, el.moe("btt", num_experts=4))
    layers = [module for module in model.modules() if isinstance(module, el.MoELinear)]
    assert len(layers) == len(conversion.swaps) == 2 * 6
    assert isinstance(model[2], nn.Linear)
    assert conversion.model_params_after == sum(p.numel() for p in model.parameters())
    assert conversion.macs_after == sum(layer.macs for layer in layers)
    assert "moe(monarch(), num_experts=4, num_active=2)" in str(conversion)
    loss = model(torch.randint(0, 50, (3, 7))).square().mean() + el.balance_loss(model)
    loss.backward()
    assert all(layer.last_routing.experts.shape == (21, 2) for layer in layers)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():  # the fused path of the encoder would read weights
        model.eval()(torch.randint(0, 50, (2, 5)))
    assert all(layer.last_routing.experts.shape == (10, 2) for layer in layers)


def test_the_report_counts_what_runs():
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64), nn.Linear(64, 3))
    conversion = el.convert_(model, {"0": el.moe("btt(rank=2)", 8, 3), "1": el.moe("dense", 4, 1)})
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(100, 64))
    assert counter.get_total_flops() == 2 * 100 * (conversion.macs_after + 64 * 3)
    assert model[0].num_active == 3
    assert model[0].bias is None


def test_rules_mix_and_keep_flags():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 5))
    model = model.double().eval()
    model[0].weight.requires_grad_(False)
    rules = {"0": el.moe("low_rank", 4, 1), "1": "btt", "2": None}
    el.convert_(model, rules, init="fresh", weight_norm=False)
    assert [type(layer).__name__ for layer in model] == [
        "MoELinear",
        "EinsumLinear",
        *["Linear"] * 2,
    ]
    assert not model[0].A.requires_grad
    assert not model[0].gate.weight.requires_grad
    assert model[0].bias.requires_grad
    assert not model[0].weight_norm
    assert not model[0].training
    assert model[0].gate.weight.dtype == torch.float64


def test_a_gate_is_not_converted():
    model = nn.Sequential(el.MoELinear(32, 32, structure="btt", num_experts=4), nn.Linear(32, 32))
    model.append(el.MoEFeedForward(32, 64, num_experts=2))
    model.append(nn.Linear(32, 5))
    conversion = el.convert_(model, el.btt())
    assert [swap.name for swap in conversion.swaps] == ["1"]
    reasons = {left.names[0]: left.reason for left in conversion.left}
    assert reasons == {"0": "structured already", "2": "structured already", "3": "output head"}


def test_experts_in_line_with_heads():
    model = encoder()
    conversion = el.convert_(model, {"*.q_proj": el.moe(el.heads(), 4)})
    assert conversion.swaps[0].structure == el.heads().structure_for(
        encoder(), conversion.swaps[0].name, 64, 64
    )
    model(torch.randint(0, 50, (2, 5)))


def test_rates_and_starts_are_those_of_one_expert():
    plain = nn.Sequential(el.EinsumLinear(64, 128, structure="btt"), nn.Linear(128, 5))
    mixed = nn.Sequential(el.MoELinear(64, 128, structure="btt", num_experts=4), nn.Linear(128, 5))
    for optimizer in ("adam", "sgd"):
        one, many = (
            {row.name: row for row in el.scaling_table(m, 0.1, base_width=32, optimizer=optimizer)}
            for m in (plain, mixed)
        )
        for name, row in one.items():
            assert (many[name].rate, many[name].init_std) == (row.rate, row.init_std)
        gate = many["0.gate.weight"]
        assert (gate.kind, gate.fan_in, gate.fan_out, gate.init_std) == ("matrix", 64, 4, 0.0)
    groups = el.param_groups(mixed, 0.1, base_width=32)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert rates[id(mixed[0].gate.weight)] == pytest.approx(0.1 * 32 / 64)
    assert rates[id(mixed[0].A)] == pytest.approx(0.1 * 32 / (2 * mixed[0].plan.fan_in["A"]))
    assert len(rates) == len(list(mixed.parameters()))


def test_initialisation():
    model = nn.Sequential(el.MoELinear(256, 256, structure="btt", num_experts=4))
    model.append(el.MoEFeedForward(256, 512, num_experts=2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    el.init_(model, zero="1")
    assert not model[0].gate.weight.any()
    assert not model[0].bias.any()
    std = model[0].param_scaling()["A"].init_std
    # 4 * 16**3 numbers: the deviation is known to 0.6 %.
    assert model[0].A.std().item() == pytest.approx(std, rel=0.03)
    assert model[1].up.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert not model[1].down.any()


def test_bad_rules():
    with pytest.raises(el.EinlinearError, match=r"num_active is 2\n.*from 1 to 1"):
        el.moe("btt", 1)
    with pytest.raises(el.EinlinearError, match="num_experts is 0"):
        el.moe("btt", 0)
    with pytest.raises(el.EinlinearError, match="bttt"):
        el.moe("bttt", 4)
    with pytest.raises(el.EinlinearError):
        el.moe(None, 4)
    for make in (el.moe, lambda *options, **more: el.MoELinear(8, 8, structure="btt", **more)):
        for value in ("no", 1, None):
            with pytest.raises(el.EinlinearError, match=r"expert_gain is .*\n.*true or false"):
                make("btt", num_experts=4, expert_gain=value)


def test_converting_twice_leaves_the_head_alone():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    el.convert_(model, el.moe("btt", num_experts=4))
    with pytest.raises(el.EinlinearError, match=r"no layer would be replaced.*output head"):
        el.convert_(model, "btt")
