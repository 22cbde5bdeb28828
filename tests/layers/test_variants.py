"""Every variant against the dense matrix in numpy: outputs, gradients, FLOPs, torch's checks."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import bench_grid
import einlinear as el
from cases import STRUCTURES, WIDTHS, structures
from einlinear import EinlinearError, make_plan
from einlinear.layers import cost, opaque, operators, strided
from einlinear.layers.engine import compiled
from einlinear.layers.reference import dense_weight
from einlinear.layers.variants import VARIANTS, choose_variant, multiply

FAST = [variant for variant in VARIANTS if variant not in ("einsum", "dense")]
# A fast variant, and whether it keeps intermediates for the backward pass.
KINDS = [("strided", True), *((variant, False) for variant in FAST)]

TOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(plan, num_tokens, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [plan.factor_shapes[step.factor] for step in plan.steps]
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(num_tokens, plan.d_in), *shapes]
    ]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def oracle(plan, x, factors):
    """The dense matrix by one einsum in numpy, and its product with the input."""
    by_name = dict(zip((step.factor for step in plan.steps), factors, strict=True))
    arrays = [by_name[name].detach().double().numpy() for name in plan.factor_shapes]
    eye = np.eye(plan.d_in, plan.d_in_padded)
    eye = eye.reshape(-1, *(plan.sizes[e] for e in plan.x_edges))
    rows = np.einsum(plan.equation, eye, *arrays, optimize=True).reshape(plan.d_in, -1)
    rows = rows[:, : plan.d_out]
    return x.detach().double().numpy() @ rows, rows.T


def gradients(y, tensors):
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return torch.autograd.grad(y, tensors, weights)


def assert_near(got, wanted, tolerance):
    got, wanted = got.detach(), wanted.detach()
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got, wanted, atol=tolerance * scale, rtol=0)


@pytest.mark.no_cover
@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=100)
@given(
    s=structures(),
    d_in=st.integers(1, 40),
    d_out=st.integers(1, 40),
    num_tokens=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_every_variant_is_the_oracle_with_all_gradients(variant, s, d_in, d_out, num_tokens, seed):
    plan = make_plan(s, d_in, d_out)
    x, *factors = inputs(plan, num_tokens, seed=seed)
    bias = torch.linspace(-1, 1, d_out, dtype=torch.float64).requires_grad_()
    everything = [x, bias, *factors]
    y = multiply(plan, x, factors, variant, bias)
    expected, weight = oracle(plan, x, factors)
    assert_near(y, torch.from_numpy(expected) + bias, 1e-10)
    assert_near(multiply(plan, x, factors, variant), torch.from_numpy(expected), 1e-10)
    assert_near(dense_weight(plan, factors), torch.from_numpy(weight), 1e-10)
    reference = gradients(multiply(plan, x, factors, "einsum", bias), everything)
    for got, wanted in zip(gradients(y, everything), reference, strict=True):
        assert_near(got, wanted, 1e-10)


def test_the_oracle_sees_a_changed_factor():
    plan = make_plan(el.btt(rank=2), 16, 16)
    x, *factors = inputs(plan, 4)
    expected, _ = oracle(plan, x, factors)
    with torch.no_grad():
        factors[1].flatten()[3] += 1e-3
    with pytest.raises(AssertionError):
        assert_near(multiply(plan, x, factors, "strided"), torch.from_numpy(expected), 1e-10)


CHECKED = ("dense", "low_rank", "btt(rank=2)", "generic", "btt(num_factors=3)")


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's forward mode uses torch.jit
@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize(
    "name",
    [
        name if name in CHECKED else pytest.param(name, marks=pytest.mark.slow)
        for name in STRUCTURES
    ],
)
def test_gradcheck(name, variant):
    plan = make_plan(STRUCTURES[name], 12, 8)
    x, *factors = inputs(plan, 3)
    tensors = [x, torch.ones(8, dtype=torch.float64, requires_grad=True), *factors]

    def layer(x, bias, *factors):
        return multiply(plan, x, factors, variant, bias)

    assert gradcheck(layer, tensors, check_forward_ad=True)  # backward, too
    if plan.params < 200:
        assert gradgradcheck(layer, tensors)


@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize("name", STRUCTURES)
def test_only_gradients_that_are_wanted_are_made(name, variant):
    plan = make_plan(STRUCTURES[name], 64, 48)
    tensors = inputs(plan, 5)
    everything = gradients(multiply(plan, tensors[0], tensors[1:], variant), tensors)
    counts = set()
    for wanted in product([True, False], repeat=len(tensors)):
        if not any(wanted):
            continue
        for tensor, flag in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(flag)
        y = multiply(plan, tensors[0], tensors[1:], variant)
        held = [tensor for tensor in tensors if tensor.requires_grad]
        with FlopCounterMode(display=False) as counter:
            got = iter(gradients(y, held))
        counts.add(counter.get_total_flops())
        for reference, flag in zip(everything, wanted, strict=True):
            if flag:
                assert_near(next(got), reference, 1e-12)
    again = plan.macs - plan.steps[-1].macs
    assert max(counts) == 2 * 5 * (2 * plan.macs + again)
    assert min(counts) < max(counts)  # what is not wanted costs nothing


def test_second_derivatives_need_no_great_tensors():
    plan = make_plan(el.btt(rank=2), 256, 256)
    x, *factors = inputs(plan, 300, torch.float32)

    def twice():
        y = multiply(plan, x, factors, "strided")
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *factors])

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        twice()
    largest = max(
        int(np.prod(shape)) for event in record.events() for shape in event.input_shapes if shape
    )
    assert largest <= 300 * plan.inner_width


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 301])
@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize("name", STRUCTURES)
def test_blocks_do_not_show(name, variant, num_tokens, monkeypatch):
    monkeypatch.setattr(strided, "_BLOCK_RANGE", (50, 50))
    plan = make_plan(STRUCTURES[name], 64, 48)
    x, *factors = inputs(plan, num_tokens)
    y = multiply(plan, x, factors, variant)
    reference = multiply(plan, x, factors, "einsum")
    assert_near(y, reference, 1e-10)
    wanted = gradients(reference, [x, *factors])
    for got, want in zip(gradients(y, [x, *factors]), wanted, strict=True):
        assert_near(got, want, 1e-10)


@given(st.integers(0, 5000), st.integers(0, 2**18))
def test_blocks_cover_all_tokens_once(num_tokens, bytes_per_token):
    blocks = strided.blocks(num_tokens, bytes_per_token)
    covered = [i for start, length in blocks for i in range(start, start + length)]
    assert covered == list(range(num_tokens))
    assert all(length <= 1112 for _, length in blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_precisions(variant, dtype):
    plan = make_plan(el.btt(rank=2), 64, 64)
    x, *factors = inputs(plan, 33, dtype)
    factors = [f / step.fan_in**0.5 for f, step in zip(factors, plan.steps, strict=True)]
    y = multiply(plan, x, factors, variant)
    assert y.dtype == dtype
    assert_near(y.double(), torch.from_numpy(oracle(plan, x, factors)[0]), TOL[dtype])


@pytest.mark.parametrize("variant", FAST)
def test_rows_far_apart_need_no_copy(variant):
    plan = make_plan(el.btt(rank=2), 64, 64)
    x, *factors = inputs(plan, 10)
    wide = torch.zeros(10, 200, dtype=x.dtype)
    wide[:, 50:114] = x.detach()
    view = wide[:, 50:114]
    assert_near(multiply(plan, view, factors, variant), multiply(plan, x, factors, "einsum"), 1e-10)
    turned = x.detach().t().contiguous().t()
    assert_near(
        multiply(plan, turned, factors, variant), multiply(plan, x, factors, "einsum"), 1e-10
    )


@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize(
    "name", ["monarch", "btt(rank=2)", "kronecker", "generic", "btt(num_factors=3)"]
)
def test_the_fast_path_copies_nothing(name, variant):
    plan = make_plan(STRUCTURES[name], 256, 256)
    x, *factors = inputs(plan, 512, torch.float32)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        y = multiply(plan, x, factors, variant)
        torch.autograd.grad(y, [x, *factors], torch.ones_like(y))
    copied = [
        max((int(np.prod(shape)) for shape in event.input_shapes if shape), default=0)
        for event in record.events()
        if event.name in ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")
    ]
    # Weights may be put into another order; anything of the size of the activations may not.
    assert max(copied, default=0) <= plan.params


def test_the_profiler_would_see_a_copy():
    plan = make_plan(el.btt(rank=2), 256, 256)
    x, *factors = inputs(plan, 512, torch.float32)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        multiply(plan, x, factors, "einsum")
    copies = [event for event in record.events() if event.name == "aten::copy_"]
    assert max(int(np.prod(event.input_shapes[0])) for event in copies) > plan.params


@pytest.mark.parametrize("variant", FAST)
@pytest.mark.parametrize("name", STRUCTURES)
def test_torch_counts_the_flops_of_the_plan(name, variant):
    plan = make_plan(STRUCTURES[name], 64, 64)
    x, *factors = inputs(plan, 10)
    with FlopCounterMode(display=False) as counter:
        y = multiply(plan, x, factors, variant)
    assert counter.get_total_flops() == 2 * 10 * plan.macs
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(y, [x, *factors], torch.ones_like(y))
    again = plan.macs - plan.steps[-1].macs
    assert counter.get_total_flops() == 2 * 10 * (2 * plan.macs + again)


def test_einsum_counts_the_same():
    for s in STRUCTURES.values():
        plan = make_plan(s, 64, 64)
        x, *factors = inputs(plan, 10)
        with FlopCounterMode(display=False) as counter:
            multiply(plan, x, factors, "einsum")
        # Steps without a sum are elementwise products, which torch does not count.
        counted = sum(step.macs for step in plan.steps if step.fan_in > 1)
        assert counter.get_total_flops() in (2 * 10 * plan.macs, 2 * 10 * counted)


@pytest.mark.parametrize(("name", "widths"), [(n, w) for n in STRUCTURES for w in WIDTHS])
def test_a_variant_is_chosen_for_everything(name, widths):
    plan = make_plan(STRUCTURES[name], *widths)
    for num_tokens in (0, 1, 8, 2048):
        assert choose_variant(plan, num_tokens, "cpu", torch.float32) in VARIANTS
        assert choose_variant(plan, num_tokens, "cpu", torch.float16) in VARIANTS[:3]
        assert choose_variant(plan, num_tokens, "cuda", torch.float32) in ("einsum", "dense")


@pytest.mark.parametrize("has_engine", [True, False])
def test_what_is_chosen(has_engine, monkeypatch):
    monkeypatch.setattr(compiled, "IS_AVAILABLE", has_engine)

    def chosen(structure, width, num_tokens, has_backward=True):
        plan = make_plan(structure, width, width)
        return choose_variant(plan, num_tokens, "cpu", torch.float32, has_backward=has_backward)

    assert chosen(el.monarch(), 1024, 2048) == ("engine" if has_engine else "strided")
    assert chosen(el.monarch(), 1024, 1, False) == ("engine" if has_engine else "einsum")
    assert chosen(el.btt(rank=4), 4096, 1) == ("engine" if has_engine else "einsum")
    assert chosen(el.btt(rank=8), 64, 8192) == "dense"
    if not has_engine:
        assert chosen(el.low_rank(), 1024, 2048) == "einsum"


def test_an_unknown_variant():
    plan = make_plan(el.btt(), 16, 16)
    with pytest.raises(EinlinearError, match="no variant 'magic'"):
        multiply(plan, *[inputs(plan, 2)[0], inputs(plan, 2)[1:]], "magic")


@pytest.mark.no_cover
@pytest.mark.parametrize("variant", FAST)
def test_the_operators_pass_torchs_own_checks(variant):
    plan = make_plan(el.btt(rank=2), 16, 16)
    x, *factors = (tensor.detach() for tensor in inputs(plan, 5))
    bias = torch.ones(16, dtype=torch.float64)
    where = (variant, plan.text, 16, 16)
    torch.library.opcheck(operators.multiply_op, (x, factors, bias, *where))
    y = operators.multiply_op(x, factors, None, *where)
    for wanted in ([True] * 4, [False, False, True, False]):
        torch.library.opcheck(operators.gradients_op, (x, factors, y, wanted, *where))


@pytest.mark.parametrize("batched", ["x", "factor", "grad"])
def test_vmap_over_the_operator_of_gradients(batched):
    plan = make_plan(el.btt(rank=2), 16, 12)
    x, *factors = (tensor.detach() for tensor in inputs(plan, 5))
    tensors = {"x": x, "factor": factors[1], "grad": torch.randn(5, 12, dtype=torch.float64)}

    def gradients_of(tensor):
        own = {**tensors, batched: tensor}
        given = own["x"], [factors[0], own["factor"]], own["grad"]
        return operators.gradients_op(*given, [True] * 4, "strided", plan.text, 16, 12)

    many = torch.stack([tensors[batched], 2 * tensors[batched], -tensors[batched]], dim=1)
    found = torch.vmap(gradients_of, in_dims=1)(many)
    for i, tensor in enumerate(many.unbind(1)):
        for got, wanted in zip(found, gradients_of(tensor), strict=True):
            torch.testing.assert_close(got[i], wanted)


def test_a_plan_that_nobody_handed_over_is_parsed_once(monkeypatch):
    """As in a process that loads an exported program."""
    plan = make_plan(el.btt(rank=3), 24, 16)
    monkeypatch.setattr(opaque, "_plans", {})
    key = opaque.hand_over(plan)
    assert opaque.plan_of(*key) is plan
    opaque._plans.clear()
    assert opaque.plan_of(*key) == plan
    monkeypatch.setattr(opaque, "parse_structure", None)
    assert opaque.plan_of(*key) == plan


def test_a_fit_finds_the_costs_that_times_were_made_of():
    """Times of the model itself; the cost per call and per step only together: steps are two."""
    rows = []
    for structure, width, tokens, both in bench_grid.cases():
        plan = make_plan(el.parse(structure), width, width)
        times = {
            variant: 1e-9 * cost.nanoseconds(plan, tokens, variant, both, has_engine=True)
            for variant in bench_grid.VARIANTS
        }
        rows.append({"case": (structure, width, tokens, both), "seconds": times})
    fitted = bench_grid.fit(rows)
    assert len(fitted) == 10
    for (table, variant), (numbers, _, error) in fitted.items():
        known = getattr(cost, table)
        assert error < 1e-6
        if variant == "dense":
            assert numbers == pytest.approx(known[: len(numbers)], rel=1e-4)
        else:
            call, step, *others = known[variant]
            assert numbers[0] + 2 * numbers[1] == pytest.approx(call + 2 * step, rel=1e-4)
            assert numbers[2:5] == pytest.approx(others[:3], rel=1e-4)
