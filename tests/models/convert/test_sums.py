"""Models with sums of structures: conversion, learning rates, adapters, counts."""

import copy

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.training.counting import count_model, counted_macs

SUM = "low_rank(rank=2) + btt"


def gpt():
    torch.manual_seed(0)
    return el.GPT(vocab_size=19, width=32, depth=2, num_heads=4, context=8)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5)
    ).double()


TOKENS = torch.arange(16).reshape(2, 8)


def test_a_gpt_of_sums_trains():
    model = gpt()
    report = el.convert_(model, {"*.up": SUM, "*.down": el.low_rank(rank=2) + el.btt()})
    assert "low_rank(rank=2) + btt" in str(report)
    sums = [m for m in model.modules() if isinstance(m, el.SumLinear)]
    assert len(sums) == len(report.swaps) == 4
    assert report.macs_after == sum(layer.plan.macs for layer in sums)
    assert report.params_after == sum(p.numel() for layer in sums for p in layer.parameters())
    assert report.model_params_after == sum(p.numel() for p in model.parameters())
    el.init_(model)
    optimizer = torch.optim.AdamW(el.param_groups(model, 0.01, base_width=16))
    losses = []
    for _ in range(20):
        logits = model(TOKENS)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_counts_are_those_of_torch():
    model = gpt()
    el.convert_(model, {"*.up": SUM, "head": SUM})
    counts = count_model(model, 8)
    assert counts.head_macs == model.get_submodule("head").plan.macs
    assert counts.params == sum(p.numel() for p in model.parameters())
    assert counted_macs(model, TOKENS) == 16 * (counts.macs - counts.norm_macs)


def test_layers_of_a_sum_are_structured_already():
    model = mlp()
    el.convert_(model, {"0": SUM})
    report = el.plan_conversion(model, {"2": "btt"})
    assert [note.names for note in report.left if "structured" in note.reason] == [("0",)]
    assert all("terms" not in unseen.name for unseen in report.unseen)
    with pytest.raises(el.EinlinearError, match="structured already"):
        el.convert_(model, {"0": "btt"})


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_rates_against_a_dense_base(optimizer):
    base, model = gpt(), gpt()
    el.convert_(model, {"*.up": SUM, "head": SUM})
    table = el.scaling_table(model, 0.1, base=base, optimizer=optimizer)
    rows = {row.name: row for row in table}
    assert rows.keys() == dict(model.named_parameters()).keys()
    assert rows["head.terms.0.B"].kind == "head"
    groups = el.param_groups(model, 0.1, base=base, optimizer=optimizer)
    assert sum(len(group["params"]) for group in groups) == len(rows)
    if optimizer == "adam":
        row = rows["blocks.0.mlp.up.terms.1.A"]
        assert row.rate == pytest.approx(0.1 * 32 / (4 * row.fan_in))


def test_muon_steps_through_all_terms():
    model = gpt()
    el.convert_(model, {"*.up": SUM})
    before = copy.deepcopy(model)
    groups = el.param_groups(model, 0.1, base_width=16, optimizer="muon")
    optimizer = el.Muon(groups)
    model(TOKENS).square().sum().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if ".terms." in name and parameter.grad.any():
            assert not torch.equal(parameter, before.get_parameter(name))


@pytest.mark.parametrize("head_init", ["zero", "small", "usual"])
def test_roles_reach_all_terms(head_init):
    model = gpt()
    el.convert_(model, {"*.down": SUM, "head": SUM})
    el.init_(model, head_init=head_init, base_width=16)
    assert not model.get_submodule("blocks.0.mlp.down").to_dense().any()
    head = model.get_submodule("head")
    assert head.to_dense().any() == (head_init != "zero")
    for term in head.terms:
        assert term.A.any()


def test_coordinate_check_runs():
    def make(width):
        model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                              nn.Linear(width, 3))  # fmt: skip
        el.convert_(model, {"2": SUM})
        return model

    x, y = torch.randn(16, 8), torch.randn(16, 3)

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    check = el.coordinate_check(make, [16, 32, 64], batch=(x, y), loss=loss, steps=2, seeds=1)
    assert "2" in str(check)


@pytest.mark.parametrize("anchored", [False, True])
def test_projection_with_calibration(anchored):
    model, x = mlp(), torch.randn(300, 24, dtype=torch.float64)
    expected = model(x)
    errors = {}
    for text in ("low_rank(rank=2)", "btt", SUM):
        new = copy.deepcopy(model)
        report = el.convert_(new, {"0": text, "2": text}, init="project", calibration=[x],
                             anchored=anchored)  # fmt: skip
        assert len(report.fits) == 2
        errors[text] = float((new(x) - expected).detach().square().sum())
    assert errors[SUM] < min(errors["btt"], errors["low_rank(rank=2)"])
    assert isinstance(new[0], el.SumLinear)


def test_adapters():
    model, x = mlp(), torch.randn(7, 24, dtype=torch.float64)
    before = copy.deepcopy(model)
    report = el.adapt_(model, {"0": SUM, "2": SUM})
    assert torch.equal(model(x), before(x))
    assert report.params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    loss = (model(x) - 1).square().sum()
    loss.backward()
    for term in model[0].update.terms:
        assert term.B.grad.any()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    changed = model(x)
    assert not torch.allclose(changed, before(x))
    el.merge_(model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), changed, rtol=1e-10, atol=1e-10)


def test_saved_adapters(tmp_path):
    model, x = mlp(), torch.randn(7, 24, dtype=torch.float64)
    plain = copy.deepcopy(model)
    el.adapt_(model, {"0": SUM})
    for parameter in model[0].update.parameters():
        nn.init.normal_(parameter)
    el.save_adapters(model, tmp_path / "adapters")
    el.load_adapters_(plain, tmp_path / "adapters")
    assert torch.equal(plain(x), model(x))


def test_lora():
    peft = pytest.importorskip("peft")
    model, x = nn.Sequential(), torch.randn(7, 24, dtype=torch.float64)
    for name, layer in zip(("up", "act", "down"), mlp(), strict=False):
        model.add_module(name, layer)
    el.convert_(model, {"up": SUM})
    expected = model(x)
    adapted = peft.get_peft_model(model, el.lora(peft.LoraConfig(target_modules=["up"], r=2)))
    assert torch.allclose(adapted(x), expected)
    assert any("lora_A" in name for name, _ in adapted.named_parameters())


def test_experts_of_a_sum_are_refused():
    with pytest.raises(el.EinlinearError, match=r"the sum XA[\s\S]*single structure"):
        el.convert_(mlp(), {"0": el.moe(el.parse(SUM), num_experts=2)})
