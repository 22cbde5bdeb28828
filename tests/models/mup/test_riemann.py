"""Riemannian rates against the exact metric J'J, built entry by entry in float64."""

from math import prod, sqrt

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import einlinear as el
from cases import STRUCTURES, structures
from einlinear.layers.scaling import factor_scaling, sgd_rate, uniform_base


def random_factors(plan, seed=0):
    g = torch.Generator().manual_seed(seed)
    scaling = factor_scaling(plan)
    return {
        name: scaling[name].init_std * torch.randn(*shape, generator=g, dtype=torch.float64)
        for name, shape in plan.factor_shapes.items()
    }


def matrix(plan, factors):
    """The padded W, straight from the definition: the sum over ranks of products of factors."""
    letter = {edge: chr(97 + i) for i, edge in enumerate(plan.sizes)}
    words = ["".join(letter[e] for e in plan.factor_edges[name]) for name in factors]
    output = "".join(letter[e] for e in (*plan.y_edges, *plan.x_edges))
    return torch.einsum(f"{','.join(words)}->{output}", *factors.values()).flatten()


def jacobian(plan, factors):
    """The derivative of vec(W) by each factor: W is linear in it, so W of the unit tensors."""
    blocks = {}
    for name, factor in factors.items():
        units = torch.eye(factor.numel(), dtype=torch.float64).reshape(-1, *factor.shape)
        columns = torch.vmap(lambda unit, name=name: matrix(plan, factors | {name: unit}))(units)
        blocks[name] = columns.T
    return blocks


SMALL = [
    "dense",
    "low_rank(rank=5)",
    "kronecker",
    "tensor_train(rank=3)",
    "monarch",
    "btt(rank=2)",
    "generic",
    "kronecker(num_factors=3)",
    "btt(num_factors=3)",
]


@pytest.mark.parametrize("name", SMALL)
def test_the_matrix_is_that_of_the_layer(name):
    layer = el.EinsumLinear(
        16, 16, structure=STRUCTURES[name], weight_norm=False, dtype=torch.float64
    )
    factors = {f: layer.get_parameter(f).detach() for f in layer.plan.factor_shapes}
    torch.testing.assert_close(matrix(layer.plan, factors).reshape(16, 16), layer.to_dense())


@pytest.mark.parametrize("name", SMALL)
def test_rates_are_the_inverse_of_the_metrics_diagonal(name):
    plan = el.make_plan(STRUCTURES[name], 16, 16)
    rates = el.rsgd_rates(plan)
    assert set(rates) == set(plan.factor_shapes)
    seeds = 20
    mean = dict.fromkeys(rates, 0.0)
    for seed in range(seeds):
        for factor, block in jacobian(plan, random_factors(plan, seed)).items():
            mean[factor] += float(block.square().sum(0).mean()) / seeds
    for factor, rate in rates.items():
        # Each is a product of mean squares, off by sqrt(2 / n) at one sigma; five are allowed.
        others = [prod(s) for f, s in plan.factor_shapes.items() if f != factor]
        sigma = sqrt(sum(2 / (n * seeds) for n in others))
        assert abs(mean[factor] * rate - 1) < 5 * sigma + 1e-12


def relative_errors(text, width, seed=0):
    """How far J'J is from its diagonal model, and the step with the model from the exact one."""
    plan = el.make_plan(el.parse(text), width, width)
    rates = el.rsgd_rates(plan)
    blocks = jacobian(plan, random_factors(plan, seed))
    j = torch.cat(list(blocks.values()), dim=1)
    scale = torch.cat([torch.full((b.shape[1],), rates[f]).double() for f, b in blocks.items()])
    # In units in which the model is the identity.
    metric = scale.sqrt()[:, None] * (j.T @ j) * scale.sqrt()
    identity = torch.eye(len(metric), dtype=torch.float64)
    error = (metric - identity).norm() / identity.norm()
    g = torch.Generator().manual_seed(seed + 1)
    gradient = j.T @ torch.randn(j.shape[0], generator=g, dtype=torch.float64)
    exact = torch.linalg.pinv(j.T @ j, hermitian=True, rtol=1e-10) @ gradient
    step = scale * gradient
    return float(error), float((step - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("text", "narrow", "wide", "tolerance"),
    [
        ("kronecker", 16, 144, 0.2),
        ("XA^1 XAB:2 YAB:2 YB^1", 16, 128, 0.2),
        ("low_rank(rank=2)", 16, 96, 0.2),
        ("theta(1/2,1/4,1/4,1/4,1/2,1/4,0)", 16, 81, 0.45),  # its sizes are 9 and 3 only
    ],
)
def test_the_diagonal_model_is_right_for_wide_layers(text, narrow, wide, tolerance):
    """Off-diagonal blocks included: the error is that of the whole metric."""
    metric_narrow, step_narrow = relative_errors(text, narrow)
    metric_wide, step_wide = relative_errors(text, wide)
    assert metric_wide < tolerance
    assert step_wide < tolerance
    assert metric_wide < 0.7 * metric_narrow
    assert step_wide < 0.7 * step_narrow


def test_the_diagonal_model_is_wrong_for_high_ranks():
    """What the condition on d_AB is for: at rank 8 of width 16 it says nothing."""
    assert relative_errors("low_rank(rank=8)", 16)[0] > 0.7


@settings(max_examples=40)
@given(st.tuples(*[st.integers(1, 3)] * 7))
def test_the_metric_is_singular_along_the_ranks(sizes):
    """Moving an invertible matrix from one factor to the other along AB leaves W as it is."""
    d = dict(zip(("XA", "XB", "XAB", "YA", "YB", "YAB", "AB"), sizes, strict=True))
    assume(d["AB"] <= min(d["XA"] * d["YA"], d["XB"] * d["YB"]))
    g = torch.Generator().manual_seed(0)
    edges = {f: [edge for edge in d if f in edge] for f in "AB"}
    letter = dict(zip(d, "abgdefr", strict=True))
    factors = {
        f: torch.randn([d[e] for e in edges[f]], generator=g, dtype=torch.float64) for f in "AB"
    }
    words = {f: "".join(letter[e] for e in edges[f]) for f in "AB"}
    columns = []
    for f in "AB":
        for unit in torch.eye(factors[f].numel(), dtype=torch.float64):
            both = factors | {f: unit.reshape(factors[f].shape)}
            columns.append(
                torch.einsum(f"{words['A']},{words['B']}->defabg", both["A"], both["B"]).flatten()
            )
    j = torch.stack(columns, dim=1)
    nullity = j.shape[1] - int(torch.linalg.matrix_rank(j.T @ j, rtol=1e-11, hermitian=True))
    assert nullity == d["XAB"] * d["YAB"] * d["AB"] ** 2


@given(structures(min_factors=2, max_factors=2), st.sampled_from([16, 64, 144, 256, 1296]))
def test_riemannian_rates_and_those_of_mup(structure, width):
    """Equal where the intermediate is no wider than the layer, else larger by that ratio."""
    assume(structure.num_factors == 2)
    plan = el.make_plan(structure, width, width)
    assume(plan.d_in_padded == plan.d_out_padded == width)
    first, second = (step.factor for step in plan.steps)
    sizes = plan.sizes
    crossing = ("X" + second, "XAB", "Y" + first, "YAB", "AB")
    inner = prod(sizes.get(edge, 1) for edge in crossing)
    scaling = factor_scaling(plan)
    for factor, rate in el.rsgd_rates(plan).items():
        mup = sgd_rate(scaling[factor], 1.0, uniform_base(scaling[factor], width))
        assert rate / mup == pytest.approx(max(1.0, inner / width))


def test_a_dense_layer_has_the_rate_of_plain_sgd():
    assert el.rsgd_rates(el.make_plan(el.dense(), 64, 48)) == {"A": 1.0}
