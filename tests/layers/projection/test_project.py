"""Projection against the optima that are known, and the laws that every projection obeys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import STRUCTURES, structures
from einlinear import EinsumLinear, make_plan, parse
from einlinear.layers.projection.metric import Metric, damped
from einlinear.layers.projection.project import balanced, project, rank_errors
from einlinear.layers.projection.splitting import split_weight
from einlinear.layers.reference import dense_weight


def made(plan, factors):
    return dense_weight(plan, [factors[step.factor] for step in plan.steps])


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moments(width, seed):
    """Second moments of inputs whose sizes differ by a factor of a hundred."""
    rows = normal(4 * width, width, seed=seed) * torch.logspace(-1, 1, width, dtype=torch.float64)
    rows = rows @ normal(width, width, seed=seed + 1)
    return rows.T @ rows / len(rows)


def root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T


def tail(matrix, rank):
    """The squared distance to the closest matrix of a rank, by Eckart and Young."""
    return float(torch.linalg.svdvals(matrix)[..., rank:].square().sum())


def test_low_rank_is_the_truncated_svd():
    weight = normal(30, 20)
    found = project(make_plan(parse("low_rank(rank=5)"), 20, 30), weight)
    assert found.error == pytest.approx(tail(weight, 5) / float(weight.square().sum()), rel=1e-10)
    assert found.sweeps == 0


@pytest.mark.parametrize("has_outputs", [False, True])
def test_weighted_low_rank_is_the_generalised_optimum(has_outputs):
    weight, inputs = normal(30, 20), moments(20, 1)
    outputs = moments(30, 5) if has_outputs else None
    plan = make_plan(parse("low_rank(rank=5)"), 20, 30)
    found = project(plan, weight, Metric(inputs, outputs), damping=0.0)
    scaled = weight @ root(inputs)
    scaled = root(outputs) @ scaled if has_outputs else scaled
    best = tail(scaled, 5) / float(scaled.square().sum())
    assert found.error == pytest.approx(best, rel=1e-8)
    plain = project(plan, weight).factors
    assert found.error < Metric(inputs, outputs).square(weight - made(plan, plain)) / float(
        scaled.square().sum()
    )


def test_errors_of_all_ranks():
    weight, metric = normal(14, 20), Metric(moments(20, 1), moments(14, 5))
    found = rank_errors(weight, metric)
    assert len(found) == 15
    for rank in (1, 3, 14):
        plan = make_plan(parse(f"low_rank(rank={rank})"), 20, 14)
        assert float(found[rank]) == pytest.approx(project(plan, weight, metric).error, abs=1e-9)
    assert float(found[0]) == 1


def test_kronecker_is_the_rearranged_svd():
    plan = make_plan(parse("kronecker"), 36, 64)
    a, b = plan.sizes["XA"], plan.sizes["XB"]
    c, d = plan.sizes["YA"], plan.sizes["YB"]
    weight = normal(64, 36)
    orders = [  # [V93]: rows are the numbers of one factor, columns those of the other
        weight.reshape(c, d, *order).permute(*axes).reshape(c * a, d * b)
        for order, axes in (((a, b), (0, 2, 1, 3)), ((b, a), (0, 3, 1, 2)))
    ]
    swapped = [
        weight.reshape(d, c, *order).permute(*axes).reshape(c * a, d * b)
        for order, axes in (((a, b), (1, 2, 0, 3)), ((b, a), (1, 3, 0, 2)))
    ]
    lost = [tail(matrix, 1) for matrix in (*orders, *swapped)]
    found = project(plan, weight).error * float(weight.square().sum())
    assert min(abs(found - other) for other in lost) < 1e-8


def test_btt_is_the_svd_of_every_block():
    plan = make_plan(parse("btt(rank=2)"), 36, 64)
    weight = normal(64, 36)
    x_sizes = [plan.sizes[edge] for edge in plan.x_edges]
    y_sizes = [plan.sizes[edge] for edge in plan.y_edges]
    axes = [*plan.y_edges, *plan.x_edges]
    order = [axes.index(edge) for edge in ("YAB", "XAB", "YB", "XA")]
    blocks = weight.reshape(*y_sizes, *x_sizes).permute(order)
    best = tail(blocks, 2) / float(weight.square().sum())
    assert project(plan, weight).error == pytest.approx(best, rel=1e-10)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("widths", [(48, 80), (13, 17)])
def test_recovers_what_it_can_represent(name, widths):
    torch.manual_seed(0)
    layer = EinsumLinear(*widths, structure=STRUCTURES[name], weight_norm=False).double()
    weight = layer.to_dense().detach()
    found = project(layer.plan, weight, tolerance=1e-9, most_sweeps=400)
    assert torch.dist(made(layer.plan, found.factors), weight) < 1e-5 * weight.norm()


@pytest.mark.parametrize("structure", ["btt(rank=2)", "kronecker", "low_rank(rank=4)"])
def test_recovers_it_in_a_weighted_norm(structure):
    torch.manual_seed(0)
    layer = EinsumLinear(24, 30, structure=structure, weight_norm=False).double()
    weight = layer.to_dense().detach()
    metric = Metric(moments(24, 1), moments(30, 7))
    found = project(layer.plan, weight, metric, tolerance=1e-9, most_sweeps=400)
    assert torch.dist(made(layer.plan, found.factors), weight) < 1e-5 * weight.norm()


@pytest.mark.slow
@given(structures(max_factors=3), st.integers(0, 99), st.booleans(), st.booleans())
def test_never_worse_than_its_start(structure, seed, has_inputs, has_outputs):
    plan = make_plan(structure, 12, 18)
    weight = normal(18, 12, seed=seed)
    metric = Metric(
        damped(moments(12, seed), 1e-3) if has_inputs else None,
        damped(moments(18, seed + 9), 1e-3) if has_outputs else None,
    )
    full = weight.new_zeros(plan.d_out_padded, plan.d_in_padded)
    full[:18, :12] = weight
    start = metric.square(weight - made(plan, split_weight(plan, full)))
    errors = [
        metric.square(
            weight - made(plan, project(plan, weight, metric, damping=0, most_sweeps=n).factors)
        )
        for n in (0, 1, 3)
    ]
    slack = 1e-9 * metric.square(weight)  # rounding
    assert errors[0] <= start + slack
    assert errors[1] <= errors[0] + slack
    assert errors[2] <= errors[1] + slack


def test_weights_of_inputs_help_on_such_inputs():
    """A weighted projection has the smaller error in its own norm, the plain one in its own."""
    weight, inputs = normal(40, 32), moments(32, 3)
    for structure in ("btt", "kronecker", "XA^1/3 XAB^1/3 XABC^1/3 YC^1/3 YBC^1/3 YABC^1/3"):
        plan = make_plan(parse(structure), 32, 40)
        plain, weighted = project(plan, weight), project(plan, weight, Metric(inputs))
        norms = Metric(), Metric(damped(inputs, 1e-3))
        first, second = (
            [norm.square(weight - made(plan, found.factors)) for norm in norms]
            for found in (plain, weighted)
        )
        assert second[1] < first[1]
        assert first[0] < second[0]


def test_balance_keeps_the_weight_and_equalises_the_factors():
    plan = make_plan(parse("btt(rank=2)"), 48, 80)
    factors = project(plan, normal(80, 48)).factors
    uneven = {"A": factors["A"] * 50, "B": factors["B"] / 50}
    even = balanced(plan, uneven)
    assert torch.allclose(made(plan, even), made(plan, factors), rtol=1e-10, atol=1e-12)
    assert torch.allclose(even["A"], factors["A"])
    assert torch.allclose(even["B"], factors["B"])


def test_zero_stays_zero():
    plan = make_plan(parse("btt"), 16, 16)
    found = project(plan, torch.zeros(16, 16))
    assert found.error == 0
    assert not any(factor.any() for factor in found.factors.values())


def test_moments_that_are_zero_become_the_identity():
    assert torch.equal(damped(torch.zeros(3, 3), 0.1), torch.eye(3))


def test_an_edge_of_size_one_is_no_obstacle():
    """At this width YA has size 1: the structure is not a table of blocks, but has its edges."""
    plan = make_plan(parse("XA^1 YA^1/7 YB^2/7 YAB^4/7"), 9, 9)
    assert plan.sizes["YA"] == 1
    weight = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = project(plan, weight, Metric(torch.eye(9, dtype=torch.float64) * 2))
    assert 0 <= found.error < 1
