"""Mixtures of experts against an oracle that computes every expert densely and masks."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import einlinear as el
from cases import STRUCTURES, structures
from einlinear.layers.engine import compiled
from einlinear.layers.measure import peak_memory
from einlinear.layers.moe import fused, operators
from einlinear.layers.moe.assignment import assign

HOWS = ["matrix", "engine", "strided", "einsum"]
PAPER = {"expert_norm": "together", "expert_gain": True}  # the experts of the paper's code


def make(structure="btt(rank=2)", d_in=24, d_out=36, num_experts=5, num_active=2, **options):
    """A layer whose gate, bias and normalisation all matter."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64} | options
    layer = el.MoELinear(
        d_in, d_out, structure=structure, num_experts=num_experts, num_active=num_active, **options
    )
    stds = {name: scaling.init_std or 1.0 for name, scaling in layer.param_scaling().items()}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(std=stds.get(name, 1.0))
            if parameter.dim() > 2:  # factors of some experts are above their deviation
                sizes = torch.linspace(0.3, 2.0, num_experts, dtype=parameter.dtype)
                parameter.mul_(sizes.view(-1, *[1] * (parameter.dim() - 1)))
    return layer


def weights_by_hand(layer):
    """Every expert's matrix, by one einsum of its normalised factors with the identity."""
    plan, stds = layer.plan, {n: s.init_std for n, s in layer.param_scaling().items()}
    eye = torch.eye(plan.d_in, plan.d_in_padded, dtype=layer.gate.weight.dtype).view(
        -1, *plan.x_shape
    )
    matrices = []
    for expert in range(layer.num_experts):
        factors = []
        for i, name in enumerate(plan.factor_shapes):
            factor = getattr(layer, name)[expert]
            over = getattr(layer, name) if layer.expert_norm == "together" else factor
            rms = over.square().mean().sqrt()
            too_large = layer.weight_norm and rms > stds[name]
            factor = factor / rms * stds[name] if too_large else factor
            factors.append(factor if layer.gain is None else factor * layer.gain[i])
        columns = torch.einsum(plan.equation, eye, *factors).flatten(1)[:, : plan.d_out]
        matrices.append(columns.t())
    return torch.stack(matrices)


def masked(logits, num_active):
    """Weights of all experts: a softmax in which only the largest logits take part."""
    least = logits.sort(-1, descending=True).values[:, num_active - 1 : num_active]
    return logits.masked_fill(logits < least, -torch.inf).softmax(-1)


def oracle(layer, x):
    flat = x.reshape(-1, layer.in_features)
    weights = masked(flat @ layer.gate.weight.t(), layer.num_active)
    every = torch.einsum("eoi,ti->teo", weights_by_hand(layer), flat)
    y = torch.einsum("te,teo->to", weights, every)
    y = y if layer.bias is None else y + layer.bias
    return y.reshape(*x.shape[:-1], layer.out_features)


def with_gradients(function, layer, x, **options):
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], weights, **options)]


def assert_same(got, wanted, tolerance=1e-10):
    for a, b in zip(got, wanted, strict=True):
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=0)


def assert_right(layer, x, tolerance=1e-10):
    got = with_gradients(layer, layer, x)
    assert_same(got, with_gradients(lambda x: oracle(layer, x), layer, x), tolerance)


@settings(max_examples=60)
@given(
    structure=structures(max_factors=3),
    widths=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    experts=st.integers(1, 6).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
    num_tokens=st.integers(0, 40),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_outputs_and_gradients(structure, widths, experts, num_tokens, flags):
    norm = "together" if flags[2] else "each"
    options = {"weight_norm": flags[1], "expert_norm": norm, "expert_gain": flags[3]}
    options["factor_init"] = "fan_in" if flags[4] else "spectral"
    layer = make(structure, *widths, *experts, bias=flags[0], **options)
    assert_right(layer, torch.randn(num_tokens, widths[0], dtype=torch.float64))


def test_mixtures_for_which_there_is_no_memory():
    with pytest.raises(el.EinlinearError) as told:
        el.MoELinear(64, 64, structure=el.btt(), num_experts=10**9, num_active=2)
    assert told.value.what == (
        "a mixture of 1000000000 experts from 64 to 64 has 1,088,000,000,000 weights, for which "
        "there is no memory"
    )
    with pytest.raises(el.EinlinearError, match=r"from 10000000 to 10000000 has .* no memory"):
        el.MoELinear(10**7, 10**7, structure="dense", num_experts=4)
    with pytest.raises(el.EinlinearError, match=r"has 128,064,000,000,000 weights"):
        el.MoEFeedForward(64, 1000, num_experts=10**9)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["dense", "btt(rank=2)", "generic", "btt(num_factors=3)"])
@pytest.mark.parametrize("options", [{}, PAPER], ids=["plain", "paper"])
def test_every_way_to_multiply(name, how, options, monkeypatch):
    if (how == "matrix") != (name == "dense") and (how == "matrix" or name != "dense"):
        pytest.skip("only a dense expert is a matrix")
    if how == "engine" and not compiled.IS_AVAILABLE:
        pytest.skip("no engine here")
    for module in (fused, operators):
        monkeypatch.setattr(module, "expert_variant", lambda *_: how)
    layer = make(STRUCTURES[name], **options)
    assert_right(layer, torch.randn(3, 20, 24, dtype=torch.float64))


def test_the_oracle_sees_a_changed_factor():
    layer, x = make(), torch.randn(40, 24, dtype=torch.float64)
    y = layer(x)
    with torch.no_grad():
        layer.B[0] *= 1.01
    with pytest.raises(AssertionError):
        torch.testing.assert_close(y, oracle(layer, x))


@pytest.mark.parametrize("options", [{}, PAPER], ids=["plain", "paper"])
def test_the_dense_weights(options):
    layer = make(**options)
    torch.testing.assert_close(layer.to_dense(), weights_by_hand(layer))


def test_the_oracle_sees_another_norm_and_a_gain():
    layer, x = make(**PAPER), torch.randn(40, 24, dtype=torch.float64)
    y = layer(x)
    layer.expert_norm = "each"
    with pytest.raises(AssertionError):
        torch.testing.assert_close(y, oracle(layer, x))
    layer.expert_norm = "together"
    torch.testing.assert_close(y, oracle(layer, x))
    with torch.no_grad():
        layer.gain[1] *= 1.01
    with pytest.raises(AssertionError):
        torch.testing.assert_close(y, oracle(layer, x))


def test_fresh_gains_are_one_and_a_fresh_layer_is_that_without_gains():
    plain, paper = (
        el.MoELinear(24, 36, structure="btt", num_experts=4, dtype=torch.float64, **options)
        for options in ({}, PAPER)
    )
    assert paper.gain.tolist() == [1.0, 1.0]
    assert set(paper.state_dict()) == {"A", "B", "bias", "gate.weight", "gain"}
    assert set(plain.state_dict()) == {"A", "B", "bias", "gate.weight"}
    paper.load_state_dict(plain.state_dict() | {"gain": torch.ones(2)})
    with torch.no_grad():  # experts of equal rms: one scale is that of each
        for layer in (plain, paper):
            for factor in (layer.A, layer.B):
                factor.div_(factor.square().mean((1, 2, 3), keepdim=True).sqrt())
    x = torch.randn(50, 24, dtype=torch.float64)
    torch.testing.assert_close(paper(x), plain(x))


def test_gains_learn_with_the_rate_of_vectors():
    model = nn.Sequential(el.MoELinear(256, 256, structure="btt", num_experts=4, **PAPER))
    groups = el.param_groups(model, 1e-2, base_width=64, weight_decay=0.1)
    [group] = [g for g in groups if any(p is model[0].gain for p in g["params"])]
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0)
    with torch.no_grad():
        model[0].gain.fill_(3.0)
    el.init_(model)
    assert model[0].gain.tolist() == [1.0, 1.0]


def test_wrong_norms():
    with pytest.raises(el.EinlinearError, match="expert_norm"):
        make(expert_norm="all")
    with pytest.raises(el.EinlinearError, match="expert_norm"):
        el.moe("btt", 4, expert_norm="all")


def test_converted_layers_have_the_norm_and_the_gains_of_the_rule():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    rules = {"0": el.moe("btt", 4, **PAPER), "1": el.moe("btt", 4)}
    conversion = el.convert_(model, rules)
    assert [layer.expert_norm for layer in model] == ["together", "each"]
    assert [layer.gain is None for layer in model] == [False, True]
    assert conversion.params_after == sum(p.numel() for p in model.parameters())


def all_on(layer, *experts):
    """A gate that sends every positive token to these experts."""
    with torch.no_grad():
        layer.gate.weight.zero_()
        for i, expert in enumerate(experts):
            layer.gate.weight[expert] = 1.0 + i


@pytest.mark.parametrize("num_active", [1, 2])
def test_all_tokens_on_the_same_experts(num_active):
    layer = make(num_active=num_active)
    all_on(layer, 3, 1)
    x = torch.rand(300, 24, dtype=torch.float64) + 0.1
    assert_right(layer, x)
    layer(x).sum().backward()
    used = {1} if num_active == 1 else {1, 3}
    assert {e for e in range(5) if layer.last_routing.load[e] > 0} == used
    assert {e for e in range(5) if layer.A.grad[e].abs().sum() > 0} == used


def test_one_expert_is_an_einsum_linear():
    layer = make(num_experts=1, num_active=1)
    alone = el.EinsumLinear(24, 36, structure="btt(rank=2)", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.copy_(getattr(layer, name).view(parameter.shape))
    x = torch.randn(7, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), alone(x))


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 0, 24), (1, 24), (2, 3, 4, 24)])
def test_shapes(shape):
    layer = make()
    x = torch.randn(shape, dtype=torch.float64)
    assert layer(x).shape == (*shape[:-1], 36)
    assert_right(layer, x)


def test_rows_that_do_not_lie_side_by_side():
    x = torch.randn(24, 50, dtype=torch.float64).t()
    assert_right(make(), x)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), PAPER],
    ids=["plain", "paper"],
)
def test_gradients_by_differences(options):
    layer = make(d_in=6, d_out=4, num_experts=3, **options)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    parameters = [p for _, p in layer.named_parameters()]

    def function(x, *_):
        y = layer(x)
        return y, el.balance_loss(layer)

    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), (x, *parameters))


def test_gradients_to_be_differentiated_again():
    layer, x = make(), torch.randn(30, 24, dtype=torch.float64)
    got = with_gradients(layer, layer, x, create_graph=True)
    assert_same(got, with_gradients(lambda x: oracle(layer, x), layer, x))


@pytest.mark.parametrize("trained", ["x", "gate", "bias", "A", "none"])
def test_some_gradients_only(trained):
    layer = make()
    x = torch.randn(30, 24, dtype=torch.float64)
    wanted = with_gradients(lambda x: oracle(layer, x), layer, x)
    names = ["x", *dict(layer.named_parameters())]
    layer.requires_grad_(False)
    tensors = dict(zip(names, [x, *layer.parameters()], strict=True))
    name = "gate.weight" if trained == "gate" else trained
    if trained == "none":
        assert not layer(x).requires_grad
        return
    tensors[name].requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    (grad,) = torch.autograd.grad(y, tensors[name], weights)
    assert_same([grad], [wanted[1 + names.index(name)]])


def test_bfloat16_and_autocast():
    layer = make(dtype=torch.float32)
    x = torch.randn(60, 24).bfloat16().float()
    wanted = layer(x)
    experts = layer.last_routing.experts
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert layer.last_routing.logits.dtype == torch.float32
    assert torch.equal(layer.last_routing.experts, experts)  # the gate is not rounded
    scale = float(wanted.detach().abs().max())
    torch.testing.assert_close(y.float(), wanted.detach(), atol=0.03 * scale, rtol=0)
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    half = layer.bfloat16()
    y = half(x.bfloat16())
    assert (y.dtype, half.last_routing.logits.dtype) == (torch.bfloat16, torch.float32)
    y.float().square().mean().backward()


def test_checkpointing():
    layer, x = make(), torch.randn(40, 24, dtype=torch.float64)

    def loss(function, x):
        return function(x).square().mean() + el.balance_loss(layer)

    def again(x):
        return checkpoint(layer, x, use_reentrant=False)

    got, wanted = (
        torch.autograd.grad(loss(function, x), list(layer.parameters()))
        for function in (again, layer)
    )
    assert_same(got, wanted)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("kind", ["linear", pytest.param("feed forward", marks=pytest.mark.slow)])
def test_compile_without_breaks(kind, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = make(dtype=torch.float32, d_out=24)
    if kind != "linear":
        layer = el.MoEFeedForward(24, 48, num_experts=4)
        nn.init.normal_(layer.gate.weight)
    x = torch.randn(50, 24)
    fast = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        assert_same(with_gradients(fast, layer, x), with_gradients(layer, layer, x), 1e-5)
    got, wanted = (
        torch.autograd.grad(f(x).square().mean() + el.balance_loss(layer), layer.gate.weight)
        for f in (fast, layer)
    )
    assert_same(got, wanted, 1e-5)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
def test_compile_with_any_number_of_tokens():
    torch._dynamo.reset()
    layer = make(dtype=torch.float32)
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for num_tokens in (50, 51, 300):
        x = torch.randn(num_tokens, 24)
        assert_same(with_gradients(fast, layer, x), with_gradients(layer, layer, x), 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_export():
    layer, x = make(dtype=torch.float32).eval(), torch.randn(50, 24)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


def test_state_and_copies():
    layer, x = make(), torch.randn(30, 24, dtype=torch.float64)
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.last_routing is None
    torch.testing.assert_close(twin(x), y)
    other = make()
    nn.init.zeros_(other.A)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), y)
    assert sorted(layer.state_dict()) == ["A", "B", "bias", "gate.weight"]


@pytest.mark.parametrize("name", ["dense", "btt(rank=2)", "low_rank"])
def test_counted_flops(name):
    layer = make(STRUCTURES[name], 64, 64, 8, dtype=torch.float32)
    x = torch.randn(200, 64)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    assert counter.get_total_flops() == 2 * 200 * layer.macs
    assert layer.macs == 2 * el.make_plan(STRUCTURES[name], 64, 64).macs + 64 * 8
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() >= 2 * 200 * 2 * layer.num_active * layer.plan.macs


def feed_forward_oracle(layer, x):
    weights = masked(x @ layer.gate.weight.t(), layer.num_active)
    hidden = torch.einsum("td,edh->teh", x, layer.up)
    hidden = hidden if layer.up_bias is None else hidden + layer.up_bias
    hidden = {"relu": torch.relu, "gelu": nn.GELU(), "silu": nn.SiLU()}[layer.activation](hidden)
    every = torch.einsum("teh,ehd->ted", hidden, layer.down)
    every = every if layer.down_bias is None else every + layer.down_bias
    return torch.einsum("te,ted->td", weights, every)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_active", [1, 2, 4])
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_feed_forward(activation, num_active, bias):
    torch.manual_seed(0)
    layer = el.MoEFeedForward(
        12, 30, num_experts=4, num_active=num_active, activation=activation, bias=bias
    ).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for num_tokens in (0, 1, 50):
        x = torch.randn(num_tokens, 12, dtype=torch.float64)
        got = with_gradients(layer, layer, x)
        assert_same(got, with_gradients(lambda x: feed_forward_oracle(layer, x), layer, x))
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 50 * layer.macs
    assert layer.macs == num_active * 2 * 12 * 30 + 12 * 4


def test_fresh_weights_have_the_deviation_of_one_expert():
    layer = el.MoELinear(256, 256, structure="btt", num_experts=8)
    for name, scaling in el.EinsumLinear(256, 256, structure="btt").param_scaling().items():
        assert layer.param_scaling()[name] == scaling
        # 8 * 16**3 numbers: the deviation of a factor is known to 1 / sqrt(2 n) = 0.4 %.
        assert getattr(layer, name).std().item() == pytest.approx(scaling.init_std, rel=0.02)
    assert not layer.gate.weight.any()


def test_assignment():
    experts = torch.tensor([[2, 0], [0, 3], [2, 3]])
    weights = torch.arange(6.0).reshape(3, 2)
    assignment, order = assign(experts, weights, 5)
    assert assignment.tokens_p.tolist() == [0, 1, 0, 2, 1, 2]
    assert assignment.ends_e.tolist() == [2, 2, 4, 6, 6]
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert assignment.w_p.tolist() == order.tolist()
    assert assignment.spread(torch.arange(5)).tolist() == [0, 0, 2, 2, 3, 3]
    assert (assignment.num_tokens, assignment.num_pairs, assignment.num_experts) == (3, 6, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 2, "num_active": 3}, "num_active is 3\n.*from 1 to 2"),
        ({"num_experts": 0}, "num_experts is 0\n.*1 or more"),
        ({"num_experts": 2, "num_active": 0}, "num_active is 0\n.*from 1 to 2"),
        ({"num_experts": 2.5}, r"num_experts is 2\.5"),
        ({"num_experts": 4, "structure": "bttt"}, "bttt"),
        ({"num_experts": 4, "structure": 3}, "3"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(el.EinlinearError, match=message):
        el.MoELinear(8, 8, **{"structure": "btt"} | options)


def test_bad_inputs_and_activations():
    with pytest.raises(el.EinlinearError, match=r"shape \(3, 7\)"):
        make()(torch.randn(3, 7, dtype=torch.float64))
    with pytest.raises(el.EinlinearError, match=r"takes torch\.float64"):
        make()(torch.randn(3, 24))
    layer = make(dtype=torch.float32)
    for x in (torch.ones(3, 24, dtype=torch.int64), torch.randn(3, 24, dtype=torch.float64)):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(el.EinlinearError, match=r"takes torch\.float32"),
        ):
            layer(x)
    with pytest.raises(el.EinlinearError, match="the activation is 'tanh'"):
        el.MoEFeedForward(8, 8, num_experts=2, activation="tanh")


def test_memory_follows_the_active_experts():
    def peak(num_experts):
        layer = make("btt", 128, 128, num_experts, dtype=torch.float32)
        x = torch.randn(512, 128, requires_grad=True)
        weights = sum(p.numel() for p in layer.parameters()) * 4
        return peak_memory(lambda: layer(x).sum().backward()) - weights  # their gradients

    rows = 512 * 128 * 4
    few, many = peak(4), peak(64)
    assert few < 16 * rows
    assert many < few + 2 * rows  # 64 experts for all tokens would be 64 * rows


def test_it_learns():
    """Two kinds of tokens, each with its own matrix: one matrix cannot, two experts can."""
    torch.manual_seed(0)
    kinds = torch.randint(0, 2, (512,))
    x = torch.randn(512, 16) + 3.0 * nn.functional.one_hot(kinds, 16)
    matrices = torch.randn(2, 16, 16) / 4
    target = torch.einsum("toi,ti->to", matrices[kinds], x)

    def final(layer):
        optimizer = torch.optim.Adam(layer.parameters(), 0.03)
        for _ in range(150):
            optimizer.zero_grad()
            loss = (layer(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    mixed = el.MoELinear(16, 16, structure="dense", num_experts=4, weight_norm=False)
    assert final(mixed) < 0.5 * final(nn.Linear(16, 16))
