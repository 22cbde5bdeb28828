import copy
import pickle
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from cases import HALF, STRUCTURES, WIDTHS, structures
from einlinear import EinlinearError, make_plan
from einlinear.structures.edges import all_edges

TOL = 1e-10
ALL = [(name, *widths) for name in STRUCTURES for widths in WIDTHS]


def random_factors(plan, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in plan.factor_shapes.values()]


def matrix(plan, factors):
    """The padded matrix by one einsum, rows being outputs."""
    sizes = plan.sizes
    eye = np.eye(plan.d_in_padded).reshape(-1, *(sizes[edge] for edge in plan.x_edges))
    return np.einsum(plan.equation, eye, *factors).reshape(plan.d_in_padded, -1).T


def matrix_by_loops(plan, factors):
    """The same from the definition: for every index of every edge, multiply what it picks."""
    sizes, axes = plan.sizes, plan.factor_edges
    total = np.zeros((plan.d_out_padded, plan.d_in_padded))
    for values in product(*(range(size) for size in sizes.values())):
        index = dict(zip(sizes, values, strict=True))
        row = column = 0
        for edge in plan.y_edges:
            row = row * sizes[edge] + index[edge]
        for edge in plan.x_edges:
            column = column * sizes[edge] + index[edge]
        total[row, column] += prod(
            factor[tuple(index[edge] for edge in axes[name])]
            for name, factor in zip(axes, factors, strict=True)
        )
    return total


@settings(max_examples=60, deadline=None)
@given(structures(max_edges_per_side=3), st.integers(1, 6), st.integers(1, 6))
def test_equation_is_the_definition(s, d_in, d_out):
    plan = make_plan(s, d_in, d_out)
    factors = random_factors(plan)
    expected = matrix_by_loops(plan, factors)
    np.testing.assert_allclose(matrix(plan, factors), expected, atol=TOL)
    factors[-1] = factors[-1] + 1.0
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(matrix(plan, factors), expected, atol=TOL)


@pytest.mark.parametrize(("name", "d_in", "d_out"), ALL)
def test_steps_one_after_the_other_are_the_equation(name, d_in, d_out):
    plan = make_plan(STRUCTURES[name], d_in, d_out)
    factors = dict(zip(plan.factor_shapes, random_factors(plan), strict=True))
    rng = np.random.default_rng(1)
    sizes = plan.sizes
    x = rng.standard_normal((3, *(sizes[edge] for edge in plan.x_edges)))
    expected = np.einsum(plan.equation, x, *factors.values(), optimize=True)

    y = x
    for step in plan.steps:
        y = np.einsum(step.equation, y, factors[step.factor], optimize=True)
    np.testing.assert_allclose(y, expected, atol=TOL, rtol=TOL)


def counted_macs(plan, order):
    """Multiply-adds by the words of the design: who still needs which edge."""
    sizes = plan.sizes
    tensor = {edge for edge in sizes if "X" in edge}
    total = 0
    for i, factor in enumerate(order):
        later = set(order[i + 1 :]) | {"Y"}
        mine = {edge for edge in sizes if factor in edge}
        total += prod(sizes[edge] for edge in tensor | mine)
        contracted = {edge for edge in tensor & mine if not set(edge) & later}
        tensor = (tensor | mine) - contracted
    assert tensor == {edge for edge in sizes if "Y" in edge}
    return total


@given(structures(), st.integers(1, 300), st.integers(1, 300))
def test_order_is_the_cheapest_of_all_orders(s, d_in, d_out):
    plan = make_plan(s, d_in, d_out)
    costs = {order: counted_macs(plan, order) for order in permutations(s.factors)}
    assert plan.macs == min(costs.values()) == sum(step.macs for step in plan.steps)
    first = min(order for order, cost in costs.items() if cost == plan.macs)
    assert tuple(step.factor for step in plan.steps) == first


@given(structures(), st.integers(1, 300), st.integers(1, 300))
def test_steps_add_up(s, d_in, d_out):
    plan = make_plan(s, d_in, d_out)
    sizes = plan.sizes
    assert plan.params == sum(map(prod, plan.factor_shapes.values()))
    for step in plan.steps:
        own = {*step.batch, *step.contracted, *step.new}
        assert own == {edge for edge in sizes if step.factor in edge}
        assert len(own) == len(step.batch) + len(step.contracted) + len(step.new)
        assert not own & set(step.kept)
        assert step.fan_in == prod(sizes[e] for e in step.contracted) == plan.fan_in[step.factor]
        assert step.fan_out == prod(sizes[e] for e in step.new) == plan.fan_out[step.factor]
        shared = prod(sizes[edge] for edge in step.kept)
        assert step.macs == shared * prod(plan.factor_shapes[step.factor])
    assert sorted(plan.x_edges) == sorted(e for e in sizes if "X" in e)
    assert sorted(plan.y_edges) == sorted(e for e in sizes if "Y" in e)
    assert plan.d_in <= plan.d_in_padded
    assert plan.d_out <= plan.d_out_padded
    assert 1 <= plan.rank <= min(d_in, d_out)


@pytest.mark.parametrize("d", [64, 256, 1024, 4096])
@pytest.mark.parametrize("name", ["monarch", "btt(rank=2)", "kronecker", "low_rank", "generic"])
def test_the_papers_counts_of_a_square_layer(name, d):
    plan = make_plan(STRUCTURES[name], d, d)
    a, b, g, _, e, _, r = (plan.sizes.get(edge, 1) for edge in all_edges(2))
    delta = plan.sizes.get("YA", 1)
    assert a * b * g == d
    assert plan.macs * a * e == r * d * d * (a + e)
    assert plan.params * a * delta * b * e == r * d * d * (b * e + a * delta)


def is_run(group, layout):
    """Whether the edges stand side by side in the layout, in this order."""
    return any(layout[i : i + len(group)] == group for i in range(len(layout) + 1))


@given(structures())
def test_no_step_needs_a_transpose(s):
    plan = make_plan(s, 64, 64)
    for step, before, after in zip(plan.steps, plan.layouts, plan.layouts[1:], strict=False):
        assert is_run(step.contracted, before)
        assert after[len(after) - len(step.new) :] == step.new
        loops = [edge for edge in before if edge not in step.contracted]
        assert sorted(loops) == sorted({*step.batch, *step.kept})
    first = plan.steps[0].contracted
    assert plan.x_edges[len(plan.x_edges) - len(first) :] == first


def test_layout_of_a_two_factor_layer():
    plan = make_plan(STRUCTURES["generic"], 1024, 1024)
    assert plan.layouts[1] == ("XB", "XAB", "AB", "YA", "YAB")
    assert plan.x_edges == ("XB", "XAB", "XA")
    assert plan.y_edges == ("YA", "YAB", "YB")
    assert plan.equation == "...bga,gardf,fbgre->...dfe"
    assert plan.factor_edges["A"] == ("XAB", "XA", "AB", "YA", "YAB")


def test_fans_of_named_structures():
    assert make_plan(el.dense(), 64, 256).fan_in == {"A": 64}
    btt = make_plan(el.btt(rank=4), 1024, 1024)
    assert (btt.fan_in, btt.fan_out) == ({"A": 32, "B": 128}, {"A": 128, "B": 32})
    assert make_plan(el.low_rank(rank=8), 64, 256).fan_in == {"A": 64, "B": 8}


def test_dense_costs_what_a_linear_layer_costs():
    plan = make_plan(el.dense(), 100, 300)
    assert plan.macs == plan.params == plan.dense_macs == 30_000
    assert plan.rank == 100


def test_padding_is_reported():
    plan = make_plan(el.monarch(), 1009, 1009)
    assert (plan.d_in_padded, plan.d_out_padded) == (1015, 1015)
    assert plan.sizes["XA"] * plan.sizes["XAB"] == 1015
    assert plan.rank == 1009


def test_plans_are_values():
    plan = make_plan(el.btt(rank=2), 64, 64)
    assert make_plan(el.parse("btt(rank=2)"), np.int64(64), 64) is plan
    assert copy.deepcopy(plan) == plan == pickle.loads(pickle.dumps(plan))
    assert hash(copy.deepcopy(plan)) == hash(plan)
    plan.sizes["XA"] = 0
    plan.factor_shapes.clear()
    assert make_plan(el.btt(rank=2), 64, 64).sizes["XA"] == 8


@pytest.mark.parametrize("width", [0, -1, 1.5, "64", None, True, 2**24 + 1, float("nan")])
def test_bad_widths(width):
    for d_in, d_out in ((width, 64), (64, width)):
        with pytest.raises(EinlinearError, match="whole number from 1 to 16,777,216"):
            make_plan(el.dense(), d_in, d_out)


def test_more_edges_than_letters():
    ranks = [edge for edge in all_edges(6) if edge[0] not in "XY"]
    edges = {"XA": 1, "YA": 1} | dict.fromkeys(ranks, 2)
    with pytest.raises(EinlinearError, match="59 edges"):
        make_plan(el.Structure.from_edges(edges), 8, 8)


def test_six_factors_work():
    plan = make_plan(el.btt(rank=2, num_factors=6), 64, 64)
    assert plan.rank == 64
    assert plan.sizes["XA"] == 2
    assert el.btt(rank_exponent=HALF, num_factors=6).num_factors == 6


def test_a_plan_as_text():
    text = str(make_plan(el.btt(rank=2), 1009, 1024))
    assert text.splitlines() == [
        "structure              btt(rank=2)",
        "as edges               XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:2",
        "widths                 1,009 -> 1,024",
        "sizes                  XA 35, XAB 29, YB 32, YAB 32, AB 2",
        "padding                input 1,009 -> 1,015 (0.6%)",
        "equation               ...ga,garf,fgre->...fe",
        "parameters             124,352  (12.04% of dense)",
        "FLOPs/token (forward)  248,704  (12.04% of dense, 8.31 x fewer)",
        "rank                   1,009 of 1,009",
        "step A                 29 x 35 x 2 x 32: contracts XA, makes AB YAB; 129,920 FLOPs/token",
        "step B                 32 x 29 x 2 x 32: contracts XAB AB, makes YB; 118,784 FLOPs/token",
    ]
    nameless = make_plan(el.parse("XA^1/2 XAB^1/2 YB^1"), 64, 64)
    assert str(nameless).splitlines()[:2] == [
        "structure              XA^1/2 XAB^1/2 YB^1",
        "widths                 64 -> 64",
    ]


@given(structures(max_factors=4), st.sampled_from(WIDTHS))
def test_plans_count_compute_in_flops(s, widths):
    plan = make_plan(s, *widths)
    facts = plan.facts()
    assert facts["FLOPs/token (forward)"].startswith(f"{2 * plan.macs:,}  (")
    steps = [text for name, text in facts.items() if name.startswith("step ")]
    flops = [int(text.split("; ")[1].split()[0].replace(",", "")) for text in steps]
    assert sum(flops) == 2 * plan.macs


def test_how_the_compute_of_a_plan_compares_with_dense():
    def compared(structure, width=64):
        return make_plan(el.parse(structure), width, width).facts()["FLOPs/token (forward)"]

    assert compared("dense") == "8,192  (as many as dense)"
    assert compared("btt(rank=8)") == "16,384  (200.00% of dense, 2.00 x more)"
