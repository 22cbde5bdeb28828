"""The gate on the engine, compared with the same steps by operations of torch in float64."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from einlinear.errors import EinlinearError
from einlinear.layers.engine import binding
from einlinear.layers.moe import gated
from einlinear.layers.moe.assignment import assign
from einlinear.layers.moe.gated import gate_gradient, route_tokens
from einlinear.layers.moe.routing import choose_experts
from kit.grouped_cases import TOL

pytestmark = pytest.mark.skipif(not binding.is_available(), reason=binding.status())


@pytest.fixture(autouse=True)
def _restored():
    """The number of threads and the target are put back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if binding.is_available():
        binding.set_target()


def draw(num_tokens, width, num_experts, dtype=torch.float32, gap=0):
    """Rows with a gap between them, and a gate."""
    x_td = torch.randn(num_tokens, width + gap, dtype=dtype)[:, :width]
    return x_td, torch.randn(num_experts, width, dtype=dtype) * width**-0.5


def both(x_td, gate_ed, num_active, g_p, g_logits_te):
    """All results of the engine."""
    route = route_tokens(x_td, gate_ed, num_active)
    own = route.assignment
    g_x = torch.ones_like(x_td)
    g_gate = gate_gradient(x_td, gate_ed, own, g_p, g_logits_te, g_x=g_x, wants_gate=True)
    table = own.tokens_p, own.ends_e, route.order_p, route.experts_tk
    return table, (route.logits_te, own.w_p, g_x, g_gate)


def right(x_td, gate_ed, num_active, g_p, g_logits_te):
    """The same by autograd in float64, for the pairs in the order of `assign`."""
    x, gate = (t.double().detach().requires_grad_() for t in (x_td, gate_ed))
    logits_te = x @ gate.t()
    experts_tk = logits_te.topk(num_active, -1).indices
    weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
    own, order_p = assign(experts_tk, weights_tk, gate.shape[0])
    loss = own.w_p @ g_p.double()
    if g_logits_te is not None:
        loss = loss + (logits_te * g_logits_te.double()).sum()
    g_x, g_gate = torch.autograd.grad(loss, [x, gate])
    table = own.tokens_p, own.ends_e, order_p, experts_tk
    return table, (logits_te.detach(), own.w_p.detach(), g_x + 1, g_gate)


def assert_near(got, expected, tolerance):
    for one, other in zip(got, expected, strict=True):
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


@given(
    num_tokens=st.integers(0, 70),
    width=st.sampled_from([1, 7, 64, 600, 1100]),
    num_experts=st.integers(1, 80),
    part=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    has_logits=st.booleans(),
    gap=st.integers(0, 3),
    threads=st.integers(1, 3),
    target=st.sampled_from(binding.supported_targets() if binding.is_available() else ["generic"]),
)
def test_routing_and_gradients(
    num_tokens, width, num_experts, part, dtype, has_logits, gap, threads, target
):
    torch.set_num_threads(threads)
    binding.set_target(target)
    num_active = 1 + int(part * (num_experts - 1))
    x_td, gate_ed = draw(num_tokens, width, num_experts, dtype, gap)
    g_p = torch.randn(num_tokens * num_active, dtype=dtype)
    g_logits_te = torch.randn(num_tokens, num_experts, dtype=dtype) if has_logits else None
    expected, numbers = right(x_td, gate_ed, num_active, g_p, g_logits_te)
    top = numbers[0].sort(-1, descending=True).values[:, : num_active + 1]
    gaps = top[:, :-1] - top[:, 1:]
    assume(not gaps.numel() or float(gaps.min()) > TOL[dtype])  # else rounding may reorder them
    table, got = both(x_td, gate_ed, num_active, g_p, g_logits_te)
    assert all(torch.equal(a, b) for a, b in zip(table, expected, strict=True))
    assert_near(got, numbers, TOL[dtype])


def test_a_wrong_weight_is_noticed():
    x_td, gate_ed = draw(40, 30, 6)
    g_p = torch.randn(80)
    _, got = both(x_td, gate_ed * 1.01, 2, g_p, None)
    _, numbers = right(x_td, gate_ed, 2, g_p, None)
    with pytest.raises(AssertionError):
        assert_near(got, numbers, TOL[torch.float32])


@pytest.mark.parametrize("has_logits", [False, True])
@pytest.mark.parametrize("num_experts", [5, 33, 64])
def test_threads_and_neighbours_change_no_bits(num_experts, has_logits):
    x_td, gate_ed = draw(300, 520, num_experts)
    g_p = torch.randn(600)
    g_logits_te = torch.randn(300, num_experts) if has_logits else None
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([*both(x_td, gate_ed, 2, g_p, g_logits_te)])
    for table, numbers in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(table, found[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(numbers, found[0][1], strict=True))
    alone = route_tokens(x_td[17:18], gate_ed, 2)
    assert torch.equal(alone.logits_te[0], found[0][1][0][17])


def test_pairs_of_an_expert_are_in_the_order_of_tokens():
    route = route_tokens(*draw(200, 16, 4), 2)
    own = route.assignment
    for expert, (start, end) in enumerate(pairwise([0, *own.ends_e.tolist()])):
        assert own.tokens_p[start:end].diff().gt(0).all()
        assert (route.experts_tk.flatten()[route.order_p[start:end]] == expert).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spoil", ["zero gate", "equal rows", "nearly equal", "no number", "all"])
def test_equal_logits_are_left_to_the_hash(dtype, spoil, monkeypatch):
    """One tie is enough: then torch chooses for all tokens, as without the engine."""
    x_td, gate_ed = draw(50, 12, 6, dtype)
    num_active = 6 if spoil == "all" else 2
    if spoil in ("zero gate", "all"):
        gate_ed.zero_()
    elif spoil == "equal rows":
        gate_ed[4] = gate_ed[1]
    elif spoil == "nearly equal":
        gate_ed[4] = gate_ed[1] * (1 + 2 * torch.finfo(dtype).eps)
    else:
        x_td[3, 2] = float("nan")
    asked = []

    def watched(*arguments):
        asked.append(1)
        return choose_experts(*arguments)

    monkeypatch.setattr(gated, "choose_experts", watched)
    route = route_tokens(x_td, gate_ed, num_active)
    logits_te = route.logits_te
    assert bool(asked) or spoil == "nearly equal"
    experts_tk = choose_experts(logits_te, x_td, num_active)
    assert torch.equal(route.experts_tk, experts_tk)
    weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
    torch.testing.assert_close(
        route.assignment.w_p, weights_tk.flatten()[route.order_p], equal_nan=True
    )


def test_bad_calls_are_refused():
    x_td, gate_ed = draw(4, 8, 3)
    for num_active in (0, 4):
        with pytest.raises(EinlinearError, match="active experts"):
            route_tokens(x_td, gate_ed, num_active)
    with pytest.raises(EinlinearError, match=r"\(3, 7\)"):
        route_tokens(x_td, gate_ed[:, :7], 2)


@pytest.mark.parametrize("num_experts", [3, 12])
def test_tables_that_do_not_fit_are_refused(num_experts):
    x_td, gate_ed = draw(4, 8, num_experts)
    own = route_tokens(x_td, gate_ed, 2).assignment
    bad = [(own.tokens_p + 4, own.ends_e), (own.tokens_p - 4, own.ends_e)]
    bad += [(own.tokens_p, own.ends_e.flip(0)), (own.tokens_p, own.ends_e - 1)]
    if num_experts == 12:  # sums over pairs: no token has more than its experts
        bad += [(torch.zeros_like(own.tokens_p), own.ends_e)]
    for tokens_p, ends_e in bad:
        spoiled = replace(own, tokens_p=tokens_p, ends_e=ends_e)
        with pytest.raises(EinlinearError, match="pairs"):
            gate_gradient(
                x_td, gate_ed, spoiled, torch.ones(8), None, g_x=torch.ones(4, 8), wants_gate=True
            )
