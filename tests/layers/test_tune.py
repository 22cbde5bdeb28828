import copy
import json
import pickle

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError, EinsumLinear
from einlinear.layers.cost import nanoseconds
from einlinear.layers.measure import interleaved
from einlinear.layers.variants import VARIANTS, choose_variant, fitting_variants, situation


def make():
    return nn.Sequential(
        EinsumLinear(64, 64, structure="btt(rank=2)"),
        nn.ReLU(),
        EinsumLinear(64, 64, structure="kronecker"),
    )


def test_choices_are_made_kept_and_given_back():
    model = make()
    choices = el.tune(model, tokens=300, repeats=2)
    assert sorted(choices) == ["0", "2"]
    name = "cpu float32 up to 512 tokens"
    assert all(set(chosen) == {name, f"{name}, forward"} for chosen in choices.values())
    assert all(set(chosen.values()) <= set(VARIANTS) for chosen in choices.values())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again[0].choices == model[0].choices
    other = make()
    assert el.tune(other, choices=json.loads(json.dumps(choices))) == choices
    assert other[2].choices == model[2].choices


def watch(monkeypatch, result):
    """The variants that layers use from now on; what they compute is of no matter."""
    used = []
    monkeypatch.setattr(
        "einlinear.layers.linear.multiply",
        lambda plan, x, factors, variant, bias: used.append(variant) or result(x),
    )
    monkeypatch.setattr(
        "einlinear.layers.linear.multiply_eagerly",
        lambda call, x, factors, bias: used.append("engine") or result(x),
    )
    monkeypatch.setattr(
        "einlinear.layers.linear.multiply_densely",
        lambda call, x, factors, bias: used.append("dense") or result(x),
    )
    return used


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_choice_is_used(variant, monkeypatch):
    layer = EinsumLinear(64, 64, structure="btt(rank=2)")
    x = torch.randn(300, 64)
    expected = layer(x)
    el.tune(layer, choices={"": {"cpu float32 up to 512 tokens": variant}})
    used = watch(monkeypatch, lambda x: x @ layer.to_dense().t())
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)
    assert used == [variant]


@pytest.mark.parametrize(
    ("tokens", "name"), [(0, 1), (1, 1), (2, 2), (3, 4), (2048, 2048), (2049, 4096)]
)
def test_situations(tokens, name):
    x = torch.empty(1, dtype=torch.bfloat16)
    assert situation(x, tokens, True) == f"cpu bfloat16 up to {name} tokens"
    assert situation(x, tokens, False) == f"cpu bfloat16 up to {name} tokens, forward"


def test_a_choice_is_for_its_dtype(monkeypatch):
    layer = EinsumLinear(64, 64, structure="btt(rank=2)")
    untuned = choose_variant(layer.plan, 300, "cpu", torch.float64)
    tuned = next(variant for variant in VARIANTS if variant != untuned)
    layer.choices = {"cpu float32 up to 512 tokens": tuned}
    used = watch(monkeypatch, lambda x: x)
    layer(torch.randn(300, 64))
    layer.double()(torch.randn(300, 64).double())
    assert used == [tuned, untuned]


def test_times_are_taken_in_turns():
    order = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "a", "b", "b"] * 2
    assert [len(values) for values in times.values()] == [2, 2]


def test_a_dtype_that_the_engine_does_not_know():
    layer = EinsumLinear(64, 64, structure="btt", dtype=torch.float16)
    (chosen,) = el.tune(layer, tokens=4, repeats=1).values()
    assert set(chosen.values()) <= {"einsum", "strided", "dense"}
    layer.choices = dict.fromkeys(chosen, "engine")  # as if from elsewhere: not used
    assert layer(torch.ones(4, 64, dtype=torch.float16)).isfinite().all()


def test_both_ways_of_calling_are_timed(monkeypatch):
    seen = set()

    forward = EinsumLinear.forward

    def watched(layer, x):
        seen.add((torch.is_grad_enabled(), *layer.choices.values()))
        return forward(layer, x)

    monkeypatch.setattr(EinsumLinear, "forward", watched)
    el.tune(make(), tokens=4, repeats=1)
    assert seen == {(both, variant) for both in (True, False) for variant in VARIANTS}


def test_a_device_that_the_cost_model_does_not_know():
    plan = EinsumLinear(64, 64, structure="btt(rank=8)").plan
    for device in ("cuda", "mps"):
        assert choose_variant(plan, 8192, device, torch.float32) == "einsum"  # no guess
        assert fitting_variants(device, torch.float32) == ("einsum", "strided", "dense")
        with pytest.raises(EinlinearError, match=f"unknown device, '{device}'"):
            nanoseconds(plan, 8, "dense", True, device=device)


@pytest.mark.parametrize("variant", ["einsum", "strided", "dense"])
def test_a_tuned_choice_is_used_on_another_device(variant):
    """On the meta device, which stands for those without an engine."""
    layer = EinsumLinear(64, 64, structure="btt(rank=2)", device="meta")
    layer.choices = {"meta float32 up to 8 tokens": variant}
    x = torch.randn(8, 64, device="meta")
    assert layer._variant(x, 8) == variant
    y = layer(x)
    assert y.is_meta
    grads = torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y))
    assert [g.shape for g in grads] == [p.shape for p in layer.parameters()]


def test_tuning_disturbs_nothing():
    model = make()
    torch.manual_seed(3)
    wanted = torch.randn(3)
    torch.manual_seed(3)
    with torch.no_grad():
        el.tune(model, tokens=16, repeats=1)
    assert torch.equal(torch.randn(3), wanted)
    with pytest.raises(EinlinearError, match="repeats is 0"):
        el.tune(model, tokens=16, repeats=0)


def test_bad_requests():
    with pytest.raises(EinlinearError, match="no EinsumLinear"):
        el.tune(nn.Linear(3, 3))
    with pytest.raises(EinlinearError, match="tokens is 0"):
        el.tune(make(), tokens=0)
    situation = "cpu float32 up to 1 tokens"
    model = make()
    for wrong in ({"1": {}}, {"2": {situation: "magic"}}, {"2": {"up to 1": "dense"}}):
        with pytest.raises(EinlinearError, match="layers are '0', '2'"):
            el.tune(model, choices={"0": {situation: "dense"}} | wrong)
    assert model[0].choices == {}
    with pytest.raises(EinlinearError, match="meta device"):
        el.tune(EinsumLinear(64, 64, structure="btt", device="meta"))
