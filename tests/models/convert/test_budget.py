"""convert_(budget=...): ranks that lose least, within the budget."""

import copy
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import einlinear as el
from einlinear.models.convert.budget import Option, choose_options


def mlp(*widths):
    torch.manual_seed(0)
    layers = []
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out), nn.GELU()]
    return nn.Sequential(*layers[:-1])


costs = st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True)
tables = st.lists(costs.flatmap(lambda c: st.lists(
    st.floats(0, 100), min_size=len(c), max_size=len(c)).map(
        lambda e: [Option(None, float(x), y) for x, y in zip(c, e, strict=True)])),
    min_size=1, max_size=4)  # fmt: skip


@given(tables, st.floats(0, 1))
def test_close_to_the_best_choice(table, share):
    """Within the budget, and at most one step of a hull worse than trying all choices."""
    options = {(str(i),): found for i, found in enumerate(table)}
    least = sum(min(o.cost for o in found) for found in table)
    most = sum(max(o.cost for o in found) for found in table)
    budget = least + share * (most - least)
    chosen = choose_options(options, budget)
    assert sum(option.cost for option in chosen.values()) <= budget + 1e-9
    best = min(
        sum(o.error for o in each) for each in product(*table)
        if sum(o.cost for o in each) <= budget + 1e-9
    )  # fmt: skip
    step = max(max(o.error for o in found) - min(o.error for o in found) for found in table)
    assert sum(option.error for option in chosen.values()) <= best + step + 1e-9


def test_too_small_a_budget_is_refused():
    with pytest.raises(
        el.EinlinearError, match=r"the budget is 0\.4, and layers of rank 1 cost 0\.5"
    ):
        choose_options({("a",): [Option(None, 0.5, 0.0)]}, 0.4)


@pytest.mark.parametrize(("unit", "count"), [("flops", "macs"), ("parameters", "params")])
def test_the_budget_is_used_and_kept(unit, count):
    model = mlp(48, 96, 96, 8)
    x = torch.randn(400, 48)
    report = el.convert_(model, budget=0.5, unit=unit, calibration=[x])
    layers = [
        module for module in model.modules() if isinstance(module, el.EinsumLinear | nn.Linear)
    ]
    spent = sum(
        getattr(layer.plan, count) if isinstance(layer, el.EinsumLinear) else layer.weight.numel()
        for layer in layers[:-1]
    )  # the head is left alone
    dense = 48 * 96 + 96 * 96
    assert 0.4 * dense < spent <= 0.5 * dense
    assert report.fits


def test_important_layers_get_more():
    """One layer has weights of low rank, so that the other can have most of the budget."""
    model = mlp(64, 64, 64, 4)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 2) @ torch.randn(2, 64))
    report = el.convert_(model, budget=0.6, calibration=[torch.randn(999, 64)])
    ranks = {swap.name: swap.plan.sizes["AB"] for swap in report.swaps}
    assert ranks["0"] <= 4
    assert "2" not in ranks or ranks["2"] > 20


def test_unequal_ranks_are_better_than_equal_ones():
    errors = []
    for options in ({"budget": 0.5}, {"rules": "low_rank(rank=16)", "init": "project"}):
        model = mlp(64, 64, 64, 64, 4)
        with torch.no_grad():
            model[2].weight.copy_(torch.randn(64, 6) @ torch.randn(6, 64) / 8)
        x, dense = torch.randn(3000, 64), copy.deepcopy(model)
        el.convert_(model, calibration=[x[:2000]], **options)
        errors.append((model(x[2000:]) - dense(x[2000:])).square().mean().item())
    assert errors[0] < 0.8 * errors[1]


def test_seconds_are_measured():
    model = mlp(64, 512, 512, 8)
    report = el.convert_(model, budget=0.7, unit="seconds", tokens=64)
    assert len(report.swaps) + sum("within the budget" in n.reason for n in report.left) == 2


def test_layers_can_be_left_alone():
    model = mlp(32, 32, 32, 32, 4)
    report = el.convert_(model, {"2": None}, budget=0.5)
    assert {swap.name for swap in report.swaps} <= {"0", "4"}
    assert type(model[2]) is nn.Linear


def refused(what, *rules, **given):
    with pytest.raises(el.EinlinearError) as error:
        el.convert_(mlp(16, 16, 16, 4), *rules, **given)
    assert what in error.value.what
    return error.value


def test_refusals():
    refused("neither rules nor a budget")
    for budget in (0, 1, 1.5, -0.5, "half"):
        refused("the budget is", budget=budget)
    refused("a budget with 'btt'", "btt", budget=0.5)
    refused("a budget with init='fresh'", budget=0.5, init="fresh")
    refused("unit is 'tokens'", budget=0.5, unit="tokens")
    error = refused("the budget is 0.001, and layers of rank 1 cost 0.125", budget=0.001)
    assert "give a budget of 0.125 or more" in error.fix
    refused("tokens is -3", budget=0.5, unit="seconds", tokens=-3)
    error = refused("a budget with {'*': None}", {"*": None}, budget=0.5)
    assert "these are all" in error.rule


def test_small_budgets_have_small_ranks():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4))
    report = el.convert_(model, budget=0.02)
    assert [swap.shown for swap in report.swaps] == ["low_rank(rank=4)"]
    assert "budget: 0.02 of the flops of 1 layer; 0.02 used" in " ".join(str(report).split())


class Looped(nn.Module):
    """One layer is called eight times, another once, a third never, and one is in vain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.once, self.loop, self.never, self.vain = (nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.once(x)
        self.vain(x)
        for _ in range(8):
            x = x + self.loop(x).tanh()
        return self.head(x)


def test_costs_count_calls():
    model = Looped()
    report = el.convert_(model, budget=0.5, calibration=[torch.randn(400, 32)])
    layers = {"once": 1, "loop": 8, "vain": 1}
    spent = sum(
        calls * (32 * 32 if type(layer := getattr(model, name)) is nn.Linear else layer.plan.macs)
        for name, calls in layers.items()
    )
    assert spent <= 0.5 * 10 * 32 * 32
    assert type(model.never) is nn.Linear
    assert any(note.reason == "calibration never called it" for note in report.left)
    assert model.vain.plan.macs == 64  # rank 1: nothing depends on it


def test_a_head_of_zeros_does_not_make_all_layers_worthless():
    """No gradient reaches any layer then; their inputs decide."""
    model = mlp(64, 64, 64, 4)
    nn.init.zeros_(model[4].weight)
    report = el.convert_(model, budget=0.6, calibration=[torch.randn(300, 64)])
    assert report.weighting == "inputs"
    layers = [model[0], model[2]]
    spent = sum(64 * 64 if type(m) is nn.Linear else m.plan.macs for m in layers)
    assert 0.5 * 2 * 64 * 64 < spent <= 0.6 * 2 * 64 * 64


def test_heads_stay_dense_when_all_else_is_structured():
    model = mlp(48, 96, 96, 8)
    el.convert_(model, "low_rank(rank=4)")
    with pytest.raises(el.EinlinearError, match="all but output heads are structured already"):
        el.convert_(model, budget=0.5)
    assert type(model[4]) is nn.Linear


def test_rules_that_leave_nothing_for_the_budget():
    with pytest.raises(el.EinlinearError, match="leave all linear layers alone"):
        el.convert_(mlp(48, 96, 8), {"0": None, "2": None}, budget=0.5)
