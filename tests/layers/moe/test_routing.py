"""Which experts tokens go to, and how their balance is measured."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import einlinear as el
from einlinear.layers.measure import peak_memory
from einlinear.layers.moe.routing import Routing, choose_experts
from kit.pair import run_two
from kit.two_processes import compare_moe_gradients, moe_and_input, moe_loss


def fresh(width=32, num_experts=16, **options):
    return el.MoELinear(width, width, structure="btt", num_experts=num_experts, **options)


@pytest.mark.parametrize("num_active", [1, 2, 5])
@pytest.mark.parametrize("kind", ["normal", "bfloat16", "one-hot", "after relu", "far from zero"])
def test_a_fresh_gate_is_balanced(kind, num_active):
    torch.manual_seed(0)
    x = torch.randn(32768, 32)
    if kind == "one-hot":  # as many different tokens as numbers
        x = torch.eye(4096)
    elif kind == "far from zero":
        x = x + 100
    elif kind == "after relu":
        x = x.relu()
    x = x.bfloat16() if kind == "bfloat16" else x
    experts = choose_experts(torch.zeros(len(x), 16), x, num_active)
    load = experts.flatten().bincount(minlength=16) * 16 / experts.numel()
    # A fair draw has a deviation of sqrt(16 / (tokens * num_active)): 2.2 % of the load at most for
    # 32768 tokens, 6.3 % for 4096. Four deviations.
    most = 4 * math.sqrt(16 / (len(x) * num_active))
    assert float((load - 1).abs().max()) < most
    pairs = {tuple(sorted(row)) for row in experts.tolist()}
    assert len(pairs) > 0.99 * min(math.comb(16, num_active), len(x) / 10)


def test_ties_among_equal_logits_that_are_not_zero():
    x = torch.randn(8192, 8)
    logits = torch.full((8192, 6), -1.7)
    logits[:, 2] = -1.8  # less than the others: never
    experts = choose_experts(logits, x, 2)
    counts = experts.flatten().bincount(minlength=6)
    assert counts[2] == 0
    assert float((counts[[0, 1, 3, 4, 5]] / 8192 * 5 / 2 - 1).abs().max()) < 0.1


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 7), st.sampled_from([torch.float32, torch.float64])
)
def test_the_largest_logits_win(seed, num_active, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, 7, generator=generator, dtype=dtype)
    logits[::3] = logits[::3].round()  # with ties
    experts = choose_experts(logits, torch.randn(20, 5, generator=generator), num_active)
    for row, chosen in zip(logits.tolist(), experts.tolist(), strict=True):
        assert len(set(chosen)) == num_active
        best = sorted(row, reverse=True)[:num_active]
        assert sorted((row[e] for e in chosen), reverse=True) == pytest.approx(best)


@pytest.mark.parametrize("num_active", [1, 2, 3])
def test_experts_that_are_shut_out_are_not_chosen(num_active):
    """A logit of -inf is below all others, also where ties among the others must be broken."""
    logits = torch.randn(64, 6)
    logits[:, [0, 4]] = -torch.inf
    logits[5:9, [1, 2, 3, 5]] = 0.5
    logits[7, 3] = torch.inf
    experts = choose_experts(logits, torch.randn(64, 8), num_active)
    assert not {0, 4} & set(experts.flatten().tolist())
    assert 3 in experts[7]


def test_what_is_not_a_number_still_goes_somewhere():
    logits = torch.randn(8, 5)
    logits[3], logits[4, 2] = torch.nan, torch.nan
    experts = choose_experts(logits, torch.randn(8, 4), 2)
    assert all(len({*row} & {*range(5)}) == 2 for row in experts.tolist())
    assert torch.equal(experts[[0, 1, 2]], choose_experts(logits[:3], torch.randn(3, 4), 2))


def test_nearly_equal_logits_do_not_look_at_other_tokens():
    logits = torch.ones(400, 4, dtype=torch.float64)
    logits[:, 1] += 1e-13
    x = torch.randn(400, 3, dtype=torch.float64)
    both = choose_experts(torch.cat([logits, torch.zeros(1, 4)]), torch.cat([x, x[:1]]), 1)
    assert torch.equal(choose_experts(logits, x, 1), both[:400])


def test_where_a_token_goes_depends_on_nothing_else():
    layer, x = fresh(), torch.randn(64, 32)
    layer(x)
    together = layer.last_routing.experts
    order = torch.randperm(64)
    for i in order.tolist():
        layer(x[i])
        assert torch.equal(layer.last_routing.experts[0], together[i])
    layer(x[order])
    assert torch.equal(layer.last_routing.experts, together[order])


def test_ties_change_neither_weights_nor_gradients():
    layer, x = fresh(num_experts=4), torch.randn(10, 32)
    _, weights = layer.route(x)
    assert torch.equal(weights, torch.full((10, 2), 0.5))
    assert not layer.last_routing.logits.any()


def test_statistics_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0], [0.0, math.log(3.0)]])
    routing = Routing(logits, torch.tensor([[1], [0], [1]]))
    assert routing.load == pytest.approx((1 / 3, 2 / 3))
    assert routing.probability == pytest.approx((1 / 3, 2 / 3))
    entropy = -(math.log2(1 / 3) / 3 + 2 * math.log2(2 / 3) / 3)
    assert routing.entropy == pytest.approx(entropy)
    other = Routing(logits, torch.tensor([[1], [1], [1]]))
    assert routing.changed_since(other) == pytest.approx(1 / 3)
    two = Routing(torch.zeros(1, 3), torch.tensor([[2, 0]]))
    assert two.changed_since(Routing(torch.zeros(1, 3), torch.tensor([[0, 2]]))) == 0
    with pytest.raises(el.EinlinearError, match=r"shapes \(3, 1\) and \(1, 2\)"):
        routing.changed_since(two)


def test_balance_loss_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(fresh(8, 4), nn.ReLU(), el.MoEFeedForward(8, 8, num_experts=3))
    for index in (0, 2):
        nn.init.normal_(model[index].gate.weight)
    x = torch.randn(20, 8)
    inputs = [x, model[:2](x)]
    model(x)
    wanted = 0.0
    for layer, rows in zip((model[0], model[2]), inputs, strict=True):
        logits = (rows @ layer.gate.weight.t()).tolist()
        mean, load, squares = [0.0] * len(logits[0]), [0.0] * len(logits[0]), 0.0
        for row in logits:
            total = sum(map(math.exp, row))
            squares += math.log(total) ** 2 / 20
            mean = [m + math.exp(v) / total / 20 for m, v in zip(mean, row, strict=True)]
            for expert in sorted(range(len(row)), key=lambda e: -row[e])[:2]:
                load[expert] += 1 / 40
        wanted += len(load) * sum(m * f for m, f in zip(mean, load, strict=True)) + 0.3 * squares
    assert el.balance_loss(model, z_loss=0.3).item() == pytest.approx(wanted, rel=1e-5)


def test_the_balance_of_a_fresh_layer_is_one():
    layer = fresh(32, 4)
    layer(torch.randn(100, 32))
    assert el.balance_loss(layer, z_loss=0).item() == pytest.approx(1)
    layer(torch.randn(0, 32))
    assert el.balance_loss(layer).item() == 0
    assert layer.last_routing.load == (0, 0, 0, 0)


def test_training_the_balance_evens_the_load():
    torch.manual_seed(0)
    layer, x = fresh(16, 4, num_active=1), torch.randn(1000, 16)
    nn.init.normal_(layer.gate.weight)
    with torch.no_grad():
        layer.gate.weight[0] *= 6
    optimizer = torch.optim.SGD([layer.gate.weight], 0.3)
    most = []
    for _ in range(100):
        layer(x)
        most.append(max(layer.last_routing.load))
        optimizer.zero_grad()
        el.balance_loss(layer).backward()
        optimizer.step()
    assert most[0] > 0.4
    assert most[-1] < 0.3


def test_what_the_balance_needs():
    layer, x = fresh(), torch.randn(4, 32)
    with pytest.raises(el.EinlinearError, match="Linear has no layer with a gate"):
        el.balance_loss(nn.Linear(2, 2))
    with pytest.raises(el.EinlinearError, match="'0' has not run yet"):
        el.balance_loss(nn.Sequential(layer))
    x.requires_grad_()
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(el.EinlinearError, match="use_reentrant=False"):
        el.balance_loss(layer)
    with torch.no_grad():
        assert el.balance_loss(layer) > 0


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_processes_give_the_gradients_of_one(kind):
    model, x = moe_and_input()
    moe_loss(model, x).backward()
    run_two(compare_moe_gradients, kind, [parameter.grad for parameter in model.parameters()])


def test_whoever_watches_or_changes_the_gate_is_heard():
    """Gate and experts can be one step of autograd, which must not go past anybody."""
    x, calls = torch.randn(6, 32), []

    def listen(module, *_):
        calls.append(type(module).__name__)

    layer = fresh()
    handle = nn.modules.module.register_module_forward_hook(listen)
    layer(x)
    handle.remove()
    assert calls == ["Gate", "MoELinear"]
    layer.gate.forward = lambda x: x[:, :16] * 0 + torch.arange(16.0)
    layer(x)
    assert set(layer.last_routing.experts.flatten().tolist()) == {14, 15}


def test_a_route_of_ones_own():
    class OnTheFirst(el.MoELinear):
        def route(self, x_td):
            super().route(x_td)
            experts = torch.arange(self.num_active).expand(len(x_td), -1)
            return experts, torch.full(experts.shape, 1 / self.num_active)

    layer, x = OnTheFirst(32, 32, structure="btt", num_experts=4), torch.randn(6, 32)
    wanted = layer.to_dense()[:2].mean(0)
    torch.testing.assert_close(layer(x), x @ wanted.t())


@pytest.mark.parametrize("kind", [el.MoELinear, el.MoEFeedForward])
def test_shapes_alone(kind):
    options = {"structure": "btt"} if kind is el.MoELinear else {}
    layer = kind(32, 32, num_experts=4, device="meta", **options)
    assert layer(torch.empty(2, 3, 32, device="meta")).shape == (2, 3, 32)


@pytest.mark.parametrize("kind", ["linear", "feed forward"])
def test_checkpointing_keeps_its_memory_low(kind):
    """Blocks made again during backward are let go: a block costs its input and little more."""

    def block():
        layers = [fresh(64, 4) for _ in range(2)]
        if kind == "feed forward":
            layers = [el.MoEFeedForward(64, 128, num_experts=4) for _ in range(2)]
        return nn.Sequential(nn.LayerNorm(64), layers[0], nn.GELU(), layers[1], nn.GELU())

    def peak(num_blocks):
        blocks, x = nn.ModuleList(block() for _ in range(num_blocks)), torch.randn(1024, 64)

        def step():
            y = x
            for each in blocks:
                y = checkpoint(each, y, use_reentrant=False)
            (y.square().mean() + el.balance_loss(blocks)).backward()

        step()  # gradients of parameters stay
        return peak_memory(step)

    rows = 1024 * 64 * 4
    assert peak(10) - peak(4) < 6 * 2 * rows


def test_a_pass_made_again_is_the_same_pass():
    layer, x = fresh(), torch.randn(4, 32, requires_grad=True)
    block = nn.Sequential(layer, nn.GELU(), nn.Linear(32, 32))  # it is made again up to the last
    y = checkpoint(block, x, use_reentrant=False)
    logits = layer.last_routing.logits
    y.sum().backward()
    assert layer.last_routing.logits is logits
