"""Many experts on the engine, against torch's autograd in float64 on rows that are gathered."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import einlinear as el
from cases import STRUCTURES, structures
from einlinear.layers.engine import binding
from einlinear.layers.moe import grouped
from einlinear.layers.moe.assignment import Assignment
from kit.grouped_cases import (
    TOL,
    assert_near,
    assert_right,
    make,
    oracle,
    spread,
    take_few_tokens,
)

pytestmark = pytest.mark.skipif(not binding.is_available(), reason=binding.status())

TARGETS = binding.supported_targets() if binding.is_available() else ()
SHORT_RUN = 8  # pairs: a thread does not begin or end so near to the border of an expert
BTT = el.make_plan(STRUCTURES["btt(rank=2)"], 20, 28)


@pytest.fixture(autouse=True)
def _engine_as_it_was():
    """Numbers of threads, targets and programs are put back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    binding.set_target()
    binding._prepared.clear()


@st.composite
def tables(draw):
    """How many experts there are, and those of each token: none, one, up to 12, often the same."""
    num_experts = draw(st.integers(1, 6))
    each = st.lists(st.integers(0, num_experts - 1), max_size=draw(st.sampled_from([2, 4, 12])))
    some = draw(st.lists(each, max_size=10))
    times = draw(st.sampled_from([1, 1, 3, 8]))
    if draw(st.integers(0, 4)) == 0:  # all on one
        some = [[num_experts - 1] * len(own) for own in some]
    return num_experts, some * times


@pytest.mark.no_cover
@settings(max_examples=100)
@given(
    structure=structures(max_factors=3),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    table=tables(),
    dtype=st.sampled_from(list(TOL)),
    target=st.sampled_from(TARGETS or [""]),
    flags=st.lists(st.booleans(), min_size=5, max_size=5),
    wanted=st.one_of(st.none(), st.lists(st.booleans(), min_size=6, max_size=6)),
    threads=st.integers(1, 3),
)
def test_outputs_and_gradients(structure, widths, table, dtype, target, flags, wanted, threads):
    plan = el.make_plan(structure, *widths)
    x_by_token, y_by_token, weighted, norm, has_bias = flags
    case = make(
        plan, table[1], table[0], dtype=dtype,
        x_by_token=x_by_token, y_by_token=y_by_token, weighted=weighted, norm=norm,
    )  # fmt: skip
    binding.set_target(target)
    take_few_tokens(plan)
    torch.set_num_threads(threads)
    try:
        assert_right(case, has_bias, wanted and wanted[: 3 + len(plan.steps)])
    finally:
        del binding._prepared[id(plan)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("x_by_token", [True, False])
@pytest.mark.parametrize("y_by_token", [True, False])
def test_threads_do_not_change_bits(dtype, target, x_by_token, y_by_token):
    case = make(BTT, spread(50, 6, 3), 6, dtype=dtype, x_by_token=x_by_token, y_by_token=y_by_token)
    binding.set_target(target)
    take_few_tokens(BTT)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y, scales = case.forward()
        found.append([y, scales, *case.backward(scales)])
    for other in found[1:]:
        for i in range(4):  # output, scales, gradients of x and of weights
            assert torch.equal(found[0][i], other[i]), i
        for a, b in zip(found[0][4:], other[4:], strict=True):
            assert_near(a, b.double(), dtype, "gradient")


@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_expert_with_all_pairs(dtype, threads):
    take_few_tokens(BTT)
    torch.set_num_threads(threads)
    assert_right(make(BTT, [[2, 2]] * 60, 4, dtype=dtype))


def test_blocks_as_they_are_chosen():
    """Without a hand in how many tokens are taken at a time."""
    plan = el.make_plan(STRUCTURES["btt(rank=2)"], 64, 96)
    torch.set_num_threads(2)
    assert_right(make(plan, spread(200, 5, 2), 5))
    assert_right(make(plan, [[1]] * 300, 3, dtype=torch.float32))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("dtype", TOL)
def test_any_number_of_pairs_of_a_token(count, dtype):
    assert_right(make(BTT, [list(range(count)), [], [count - 1]], 40, dtype=dtype))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 9, 12, 27])
def test_results_of_a_token_are_added_in_the_order_of_experts(count, threads):
    """In float32 1 is lost beside 2**30: the sum tells in what order it was made."""
    plan = el.make_plan(el.dense(), 1, 1)
    take_few_tokens(plan, (1, 1))
    torch.set_num_threads(threads)
    num_tokens = 30
    case = make(
        plan, [range(count)] * num_tokens, count,
        dtype=torch.float32, weighted=False, norm=False,
    )  # fmt: skip
    values = torch.ones(count)
    values[0], values[count // 2] = 2.0**30, -(2.0**30)
    ones = torch.ones(num_tokens, 1)
    factor = values.view(count, *plan.factor_shapes["A"])
    case = replace(case, x=ones, grad=ones, factors=[factor])
    after = count - count // 2 - 1
    y, scales = case.forward(has_bias=False)
    assert y.flatten().tolist() == [after] * num_tokens
    grad_x = case.backward(scales)[0]
    assert grad_x.flatten().tolist() == [after] * num_tokens


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_comes_of_idle_experts_and_tokens(has_bias, threads):
    take_few_tokens(BTT)
    torch.set_num_threads(threads)
    case = make(BTT, [[1, 4], [], [4, 1], []] * 12, 6, dtype=torch.float32)
    y, scales = case.forward(has_bias)
    idle = torch.tensor([1, 3] * 12) + torch.arange(12).repeat_interleave(2) * 4
    assert torch.equal(y[idle], (case.bias if has_bias else 0 * case.bias).expand(24, -1))
    assert torch.equal(scales, replace(case, bias=None).forward()[1])
    grad_x, _, grad_bias, *grads = case.backward(scales)
    assert not grad_x[idle].any()
    torch.testing.assert_close(grad_bias, case.grad.sum(0))  # of all tokens
    for grad in grads:
        assert not grad[[0, 2, 3, 5]].any()
        assert grad[[1, 4]].abs().flatten(1).max(1).values.min() > 0


@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_no_pairs_at_all(dtype, num_tokens):
    case = make(BTT, [[]] * num_tokens, 3, dtype=dtype)
    y, scales = case.forward()
    assert torch.equal(y, case.bias.expand(num_tokens, -1))
    assert scales.shape == (2, 3)
    assert_right(case)


@pytest.mark.parametrize("side", ["begin", "end"])
@pytest.mark.parametrize("distance", [SHORT_RUN - 1, SHORT_RUN])
def test_no_thread_has_a_short_run_of_an_expert(side, distance):
    """A border near the middle of all pairs is where two threads part: sums have the same bits."""
    half = 40
    first = half - distance if side == "begin" else half + distance
    case = make(BTT, [[0]] * first + [[1]] * (2 * half - first), 2, dtype=torch.float32)
    take_few_tokens(BTT)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        _, scales = case.forward()
        found.append(case.backward(scales)[3:])
    is_same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert is_same == (distance < SHORT_RUN)


def test_rows_and_factors_in_any_layout():
    case = make(BTT, spread(9, 4, 2), 4)
    wide = torch.full((9, 3 * BTT.d_in), torch.nan, dtype=torch.float64)
    wide[:, 5 : 5 + BTT.d_in] = case.x
    assert_right(replace(case, x=wide[:, 5 : 5 + BTT.d_in]))
    assert_right(replace(case, x=case.x.t().contiguous().t()))
    assert_right(replace(case, x=case.x[:1].expand(9, -1), grad=case.grad[:1].expand(9, -1)))
    assert_right(replace(case, grad=case.grad[:1, :1].expand(9, BTT.d_out)))
    assert_right(replace(case, factors=[f.transpose(0, 1).contiguous().transpose(0, 1)
                                        for f in case.factors]))  # fmt: skip
    double = case.assignment.w_p.repeat_interleave(2)[::2]
    assert_right(replace(case, assignment=replace(case.assignment, w_p=double)))


@pytest.mark.parametrize("dtype", TOL)
def test_no_number_stays_with_its_expert(dtype):
    case = make(BTT, [[0], [1], [0, 1], [2]], 3, dtype=dtype)
    case.factors[0][1].view(-1)[0] = torch.nan
    y, scales = case.forward()
    assert scales.isnan().tolist() == [[False, True, False], [False] * 3]
    assert y.isnan().all(1).tolist() == [False, True, True, False]
    grad_x, grad_w, grad_bias, *grads = case.backward(scales)
    assert grad_x.isnan().all(1).tolist() == [False, True, True, False]
    assert grad_w.isnan().tolist() == [False, False, True, True, False]  # by expert, then token
    assert not grad_bias.isnan().any()
    for grad in grads:
        assert grad.flatten(1).isnan().all(1).tolist() == [False, True, False]


def test_the_oracle_sees_small_changes():
    case = make(BTT, spread(9, 4, 2), 4)
    right_y, _, right = oracle(case)
    y, scales = case.forward()
    grads = case.backward(scales)
    y[3, 2] += 1e-8
    with pytest.raises(AssertionError, match="output"):
        assert_near(y, right_y, torch.float64, "output")
    for got, exact in zip(grads, right, strict=True):
        got.view(-1)[-1] += 1e-8
        with pytest.raises(AssertionError):
            assert_near(got, exact, torch.float64, "gradient")


BAD_TABLES = {
    "a token too large": ([0, 1, 2, 3], [2, 4]),
    "a token below 0": ([0, 1, -1, 2], [2, 4]),
    "ends out of order": ([0, 1, 2, 0], [5, 4]),
    "an end below 0": ([0, 1, 2, 0], [-1, 4]),
    "too few pairs": ([0, 1, 2, 0], [2, 3]),
    "too many pairs": ([0, 1, 2, 0], [2, 5]),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables(name):
    case = make(BTT, [[0, 1], [0], [1]], 2)
    _, scales = case.forward()
    tokens, ends = (torch.tensor(numbers) for numbers in BAD_TABLES[name])
    bad = replace(case, assignment=replace(case.assignment, tokens_p=tokens, ends_e=ends))
    for call in (bad.forward, lambda: bad.backward(scales)):
        with pytest.raises(el.EinlinearError, match=r"given (ends|pairs) .* out of range"):
            call()


def test_tokens_are_not_read_where_rows_are_pairs():
    case = make(BTT, [[0, 1], [0], [1]], 2, x_by_token=False, y_by_token=False)
    strange = replace(case.assignment, tokens_p=case.assignment.tokens_p + 1000)
    assert torch.equal(replace(case, assignment=strange).forward()[0], case.forward()[0])


def test_bad_tensors():
    case = make(BTT, [[0, 1], [0], [1]], 2)
    assignment, (first, second) = case.assignment, case.factors
    _, scales = case.forward()
    bad = [
        (r"\(3, 19\)(.|\n)*\(3, 20\)", {"x": case.x[:, :-1]}),
        (r"\(2, 20\)(.|\n)*\(3, 20\)", {"x": case.x[:2]}),
        ("float32", {"factors": [first.float(), second]}),
        ("here it takes", {"factors": [first[:1], second]}),
        (r"\(27,\)", {"bias": case.bias[1:]}),
        ("int32", {"assignment": replace(assignment, tokens_p=assignment.tokens_p.int())}),
        ("int32", {"assignment": replace(assignment, ends_e=assignment.ends_e.int())}),
        (r"\(3,\)", {"assignment": replace(assignment, w_p=assignment.w_p[1:])}),
    ]
    for message, changes in bad:
        with pytest.raises(el.EinlinearError, match=message):
            replace(case, **changes).forward()
    with pytest.raises(el.EinlinearError, match=r"\(2, 28\)(.|\n)*\(3, 28\)"):
        replace(case, grad=case.grad[:2]).backward(scales)
    with pytest.raises(el.EinlinearError, match=r"\(1, 2\)(.|\n)*\(2, 2\)"):
        case.backward(scales[:1])
    with pytest.raises(el.EinlinearError, match="float32"):
        case.backward(scales.float())


def test_room_for_the_results_of_very_many_tokens_is_given_back():
    """Each token's result is that of a call with fewer tokens, bit by bit."""
    plan, tokens, width = el.make_plan(el.low_rank(rank=1), 2048, 2048), 17_000, 2048
    x = torch.randn(tokens, width)
    factors = [torch.randn(2, *plan.factor_shapes[step.factor]) for step in plan.steps]
    every = torch.arange(tokens)

    def both_experts(rows):
        count = rows.shape[0]
        pairs = torch.cat([every[:count], every[:count]])
        ends = torch.tensor([count, 2 * count])
        assignment = Assignment(pairs, ends, torch.full((2 * count,), 0.5), count)
        return grouped.grouped_forward(plan, rows, factors, None, assignment)[0]

    binding.release_workspace()
    few = both_experts(x[-1000:])
    assert 1000 * 2 * width * 4 < binding.workspace_bytes() < 2**28
    many = both_experts(x)
    assert binding.workspace_bytes() == 0
    assert torch.equal(many[-1000:], few)
