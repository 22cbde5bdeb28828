"""SumLinear: against the dense sum of its terms, in float64."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import einlinear as el
from cases import structures
from einlinear.layers.projection.metric import Metric
from einlinear.layers.projection.project import project
from einlinear.layers.projection.summing import project_sum

TEXT = "low_rank(rank=3) + btt(rank=2)"


def layer_of(text=TEXT, d_in=24, d_out=30, **options):
    torch.manual_seed(0)
    layer = el.SumLinear(d_in, d_out, structure=text, dtype=torch.float64, **options)
    nn.init.normal_(layer.bias) if layer.bias is not None else None
    return layer


def shake_(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(structures(max_factors=3), min_size=2, max_size=3),
    st.sampled_from([(16, 16), (7, 12), (12, 5)]),
    st.booleans(),
)
def test_forward_and_gradients_are_those_of_the_dense_sum(terms, widths, weight_norm):
    layer = layer_of(el.StructureSum(tuple(terms)), *widths, weight_norm=weight_norm)
    shake_(layer)  # so that normalisation has something to do
    x = torch.randn(2, 3, widths[0], dtype=torch.float64, requires_grad=True)
    dense = sum(term.to_dense() for term in layer.terms)
    expected = nn.functional.linear(x, dense, layer.bias)
    inputs = [x, *layer.parameters()]
    toward = torch.randn_like(expected)
    found = torch.autograd.grad(layer(x), inputs, toward)
    for own, other in zip(found, torch.autograd.grad(expected, inputs, toward), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.weight, dense, rtol=1e-12, atol=1e-12)


def test_a_changed_term_changes_the_output():
    layer, x = layer_of(), torch.randn(4, 24, dtype=torch.float64)
    before = layer(x)
    nn.init.zeros_(layer.terms[1].B)
    assert not torch.allclose(layer(x), before)


@pytest.mark.parametrize("text", [TEXT, "btt + btt + btt", "dense + low_rank(rank=16)"])
def test_fresh_outputs_are_as_large_as_those_of_one_layer(text):
    """The variance of a sum is the mean of the variances of its terms alone.

    64 draws of 256 x 256 matrices: each squared norm varies by a few percent, their mean by less
    than one.
    """
    torch.manual_seed(0)

    def square(make):
        layers = [make() for _ in range(64)]
        return sum(float(layer.to_dense().detach().square().sum()) for layer in layers) / 64

    terms = el.parse(text).terms
    alone = [square(lambda s=s: el.EinsumLinear(256, 256, structure=s)) for s in terms]
    whole = square(lambda: el.SumLinear(256, 256, structure=text))
    assert whole == pytest.approx(sum(alone) / len(alone), rel=0.05)


def test_scaling_counts_all_factors():
    layer = layer_of()
    scaling = layer.param_scaling()
    assert set(scaling) == dict(layer.named_parameters()).keys()
    assert {s.num_factors for s in scaling.values() if s.kind == "matrix"} == {4}
    alone = el.EinsumLinear(24, 30, structure="btt(rank=2)").param_scaling()
    assert scaling["terms.1.A"].init_std == alone["A"].init_std
    assert scaling["terms.1.B"].init_std == pytest.approx(alone["B"].init_std / 2**0.5)


def test_normalisation_limits_factors_to_their_fresh_size():
    layer = layer_of()
    with torch.no_grad():
        fresh = [term.factors()[-1].square().mean().sqrt() for term in layer.terms]
        for parameter in layer.terms.parameters():
            parameter.mul_(100)
        for term, before in zip(layer.terms, fresh, strict=True):
            assert float(term.factors()[-1].square().mean().sqrt() / before) == pytest.approx(
                1, 0.3
            )


def test_reset_draws_again():
    layer = layer_of()
    shake_(layer)
    torch.manual_seed(1)
    layer.reset_parameters()
    assert not layer.bias.any()
    torch.manual_seed(1)
    fresh = el.SumLinear(24, 30, structure=TEXT, dtype=torch.float64)
    for own, other in zip(layer.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(own, other)


def test_weight_is_read_only():
    layer = layer_of()
    with pytest.raises(el.EinlinearError, match="read-only"):
        layer.weight.zero_()
    with pytest.raises(el.EinlinearError, match="cannot be replaced"):
        layer.weight = nn.Parameter(torch.zeros(30, 24))


def test_copies_and_pickles():
    layer, x = layer_of(), torch.randn(4, 24, dtype=torch.float64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    assert layer.structure == el.parse(TEXT)
    assert "structure='XA^1 YB^1 AB:3 + " in repr(layer)


def test_autocast_and_tune():
    layer = el.SumLinear(24, 30, structure=TEXT)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 24)).dtype == torch.bfloat16
    chosen = el.tune(nn.Sequential(layer), tokens=8, repeats=1)
    assert set(chosen) == {"0.terms.0", "0.terms.1"}


def test_export_has_only_operators_of_torch():
    layer = el.SumLinear(24, 30, structure=TEXT).eval()
    program = torch.export.export(layer, (torch.randn(4, 24),))
    assert "einlinear" not in str(program.graph)


# Projection


def _metric(width_in, width_out):
    make = torch.Generator().manual_seed(3)
    x = torch.randn(4 * width_in, width_in, generator=make, dtype=torch.float64)
    y = torch.randn(4 * width_out, width_out, generator=make, dtype=torch.float64)
    return Metric(x.T @ x / len(x), y.T @ y / len(y))


def _squares(matrix):
    return float(matrix.detach().square().sum())


METRICS = {"plain": lambda *_: None, "weighted": _metric}


@pytest.mark.parametrize("kind", METRICS)
def test_a_sum_is_found_again(kind):
    """A sum of low rank and BTT, which each alone misses by far."""
    target = layer_of("low_rank(rank=3) + btt", 36, 36, bias=False).to_dense().detach()
    plans = el.make_plan(el.parse("low_rank(rank=3) + btt"), 36, 36).plans
    metric = METRICS[kind](36, 36)
    found = project_sum(plans, target, metric)
    alone = [project(plan, target, metric).error for plan in plans]
    assert min(alone) > 1e-2
    assert found.error < 1e-3 * min(alone)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(structures(max_factors=3), min_size=2, max_size=3),
    st.sampled_from([(9, 9), (7, 12), (12, 5)]),
    st.sampled_from(sorted(METRICS)),
)
def test_never_worse_than_the_best_term_and_monotone(terms, widths, kind):
    torch.manual_seed(0)
    weight = torch.randn(widths[1], widths[0], dtype=torch.float64)
    plans = [el.make_plan(term, *widths) for term in terms]
    metric = METRICS[kind](*widths)
    alone = min(project(plan, weight, metric).error for plan in plans)
    errors = [project_sum(plans, weight, metric, most_rounds=n).error for n in (0, 1, 4)]
    assert errors[0] <= alone + 1e-12
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("make", [el.EinsumLinear.from_linear, el.SumLinear.from_linear])
def test_from_linear(make):
    torch.manual_seed(0)
    linear = nn.Linear(24, 30).double().eval()
    linear.bias.requires_grad_(False)
    state = torch.get_rng_state()
    layer = make(linear, TEXT)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(layer, el.SumLinear)
    assert not layer.training
    assert not layer.weight_norm
    assert torch.equal(layer.bias, linear.bias)
    assert not layer.bias.requires_grad
    lost = _squares(layer.to_dense() - linear.weight) / _squares(linear.weight)
    again = el.SumLinear(24, 30, structure=TEXT, weight_norm=False, dtype=torch.float64)
    assert again.project_(linear.weight) == pytest.approx(lost, rel=1e-6)
    for term in ("low_rank(rank=3)", "btt(rank=2)"):
        single = el.EinsumLinear.from_linear(linear, term)
        assert lost < _squares(single.to_dense() - linear.weight) / _squares(linear.weight)


def test_calibration_makes_outputs_closer():
    torch.manual_seed(0)
    linear = nn.Linear(24, 30).double()
    x = torch.randn(500, 24, dtype=torch.float64) * torch.logspace(-2, 1, 24)
    plain, seen = (el.SumLinear.from_linear(linear, TEXT, calibration=c) for c in (None, x))
    assert (seen(x) - linear(x)).square().sum() < 0.9 * (plain(x) - linear(x)).square().sum()


@pytest.mark.parametrize("weight", [torch.zeros(30, 24), torch.ones(30, 24)])
def test_terms_without_anything_to_do_can_learn(weight):
    """A weight that one term has exactly leaves nothing to the others, but a gradient."""
    layer = el.SumLinear(24, 30, structure=TEXT, weight_norm=False)
    assert layer.project_(weight) < 1e-12
    (layer(torch.randn(8, 24)) - 1).square().sum().backward()
    for term in layer.terms:
        assert any(bool((p.grad.abs() > 1e-6).any()) for p in term.parameters())


def test_errors():
    with pytest.raises(
        el.EinlinearError, match=r"EinsumLinear is given as the sum[\s\S]*SumLinear"
    ):
        el.EinsumLinear(24, 30, structure=TEXT)
    for single in ("btt", el.btt(), None):
        with pytest.raises(el.EinlinearError, match=r"two or more[\s\S]*EinsumLinear"):
            el.SumLinear(24, 30, structure=single)
    with pytest.raises(el.EinlinearError, match="weight normalisation"):
        layer_of().project_(torch.zeros(30, 24))
    with pytest.raises(el.EinlinearError, match=r"takes an nn\.Linear"):
        el.SumLinear.from_linear(nn.ReLU(), TEXT)
    with pytest.raises(el.EinlinearError, match="last axis of 24"):
        layer_of()(torch.randn(3, 23, dtype=torch.float64))
