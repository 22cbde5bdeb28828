"""Feed-forward nets in one pass: against the same layers one after the other, in float64."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

import einlinear as el
from cases import STRUCTURES, structures
from einlinear.layers.engine import binding, compiled
from einlinear.layers.engine import feedforward as engine
from einlinear.layers.engine.abi import Activation
from einlinear.models.fusing.feedforward import FUNCTIONS, feed_forward

pytestmark = pytest.mark.skipif(not compiled.IS_AVAILABLE, reason="the engine is not built")

TOL = {torch.float64: 1e-10, torch.float32: 1e-5}
TOKENS = 70
ENGINE = {
    f"cpu {dtype} up to {1 << n} tokens{passes}": "engine"
    for passes in ("", ", forward")
    for dtype in ("float32", "float64", "bfloat16")
    for n in range(12)
}


def make(structure="btt(rank=2)", d=32, hidden=72, *, gated=False, dtype=torch.float64, **options):
    torch.manual_seed(0)
    shapes = [(d, hidden)] * (1 + gated) + [(hidden, d)]
    layers = [el.EinsumLinear(*s, structure=structure, dtype=dtype, **options) for s in shapes]
    for layer in layers:
        layer.choices = ENGINE
        with torch.no_grad():  # so that normalisation has an effect
            for number, parameter in enumerate(layer.parameters()):
                parameter.add_(0.5 * parameter.std(correction=0) + 0.1 * (number == 0))
    return layers


def by_layer(layers, activation, x):
    a = FUNCTIONS[activation](layers[0](x))
    return layers[-1](a * layers[1](x) if len(layers) > 2 else a)


def parameters(layers):
    return [parameter for layer in layers for parameter in layer.parameters()]


def results(function, layers, activation, x):
    """The output and the gradients of input and parameters, in float64."""
    x = x.detach().clone().requires_grad_()
    y = function(layers, activation, x)
    assert y is not None
    weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    return [
        t.double() for t in (y, *torch.autograd.grad((y * weights).sum(), [x, *parameters(layers)]))
    ]


def assert_near(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * (1e-30 + other.norm())


@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_and_gradients_are_those_of_the_layers(name, activation, gated, dtype):
    layers = make(STRUCTURES[name], gated=gated, dtype=dtype)
    x = torch.randn(TOKENS, 32, dtype=dtype)
    found = results(feed_forward, layers, activation, x)
    for layer in layers:
        layer.double()
    assert_near(found, results(by_layer, layers, activation, x.double()), TOL[dtype])


def test_the_comparison_sees_a_changed_factor():
    layers = make()
    x = torch.randn(TOKENS, 32, dtype=torch.float64)
    found = results(feed_forward, layers, Activation.GELU, x)
    with torch.no_grad():
        layers[1].A[0] *= 1.001
    with pytest.raises(AssertionError):
        assert_near(found, results(by_layer, layers, Activation.GELU, x), TOL[torch.float64])


@settings(max_examples=40, deadline=None)
@given(
    structures(max_factors=3),
    structures(max_factors=3),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(32, 130),
    st.sampled_from(list(Activation)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_structures_and_widths(up, down, d, hidden, tokens, activation, gated, bias, norm):
    layers = make(up, d, hidden, gated=gated, bias=bias, weight_norm=norm)
    layers[-1] = make(down, hidden, d, bias=bias, weight_norm=norm)[0]
    x = torch.randn(tokens, d, dtype=torch.float64)
    found = results(feed_forward, layers, activation, x)
    assert_near(found, results(by_layer, layers, activation, x), TOL[torch.float64])


@pytest.mark.parametrize("gated", [False, True])
def test_bfloat16_is_no_less_exact_than_layer_by_layer(gated):
    layers = make(gated=gated, dtype=torch.bfloat16)
    x = torch.randn(TOKENS, 32).bfloat16()
    fused = results(feed_forward, layers, Activation.GELU, x)
    plain = results(by_layer, layers, Activation.GELU, x)
    exact = results(by_layer, [copy.deepcopy(layer).double() for layer in layers],
                    Activation.GELU, x.double())  # fmt: skip
    for one, other, true in zip(fused, plain, exact, strict=True):
        assert (one - true).norm() <= 1.2 * (other - true).norm() + 4e-3 * true.norm()


@pytest.mark.parametrize("target", binding.TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", Activation)
def test_activations_are_those_of_torch(activation, dtype, target):
    """Up and down are the identity; every number goes through each lane and each kernel."""
    if target not in binding.supported_targets():
        pytest.skip("this processor cannot run it")
    layers = [el.EinsumLinear(16, 16, False, structure="dense", weight_norm=False, dtype=dtype)
              for _ in range(2)]  # fmt: skip
    for layer in layers:
        layer.choices = ENGINE
        layer.A.data.copy_(torch.eye(16).view_as(layer.A))
    x = torch.cat([torch.linspace(-14, 14, 4001), torch.logspace(-30, 1, 95)]).to(dtype)
    x = x.view(-1, 1).expand(-1, 16).contiguous().requires_grad_()
    binding.set_target(target)
    try:
        y = feed_forward(layers, activation, x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    finally:
        binding.set_target()
    exact = x.detach().double().requires_grad_()
    expected = FUNCTIONS[activation](exact)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    tolerance = 1e-14 if dtype == torch.float64 else 6e-7
    assert (y - expected).abs().max() < tolerance * 14
    assert ((y - expected).abs() <= tolerance * (1 + expected.abs())).all()
    assert (slope - expected_slope).abs().max() < 2 * tolerance


@pytest.mark.parametrize("activation", Activation)
def test_what_is_not_finite(activation):
    layers = [el.EinsumLinear(1, 1, False, structure="dense", weight_norm=False) for _ in range(2)]
    for layer in layers:
        layer.choices = ENGINE
        layer.A.data.fill_(1)
    x = torch.tensor([torch.nan, torch.inf, 1e38, -1e38, 0.0]).repeat(7)[:, None]
    y = feed_forward(layers, activation, x)[:5, 0]
    assert torch.isnan(y[0])
    assert torch.equal(y[1:], torch.tensor([torch.inf, 1e38, 0.0, 0.0]))


def test_outputs_have_the_same_bits_for_any_number_of_threads():
    layers = make("btt", 96, 384, dtype=torch.float32)
    x = torch.randn(300, 96)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(results(feed_forward, layers, Activation.GELU, x))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0])
        assert torch.equal(found[0][1], other[1])
        assert_near(other, found[0], TOL[torch.float32])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kept", ["x", "up bias", "up factor", "down bias", "down factor"])
def test_only_what_is_wanted_is_computed(kept, gated):
    layers = make(gated=gated)
    inputs = {"x": torch.randn(TOKENS, 32, dtype=torch.float64)}
    inputs |= {"up bias": layers[0].bias, "up factor": layers[0].B}
    inputs |= {"down bias": layers[-1].bias, "down factor": layers[-1].A}
    for tensor in parameters(layers):
        tensor.requires_grad_(False)
    inputs[kept].requires_grad_()
    made = []
    for function in (feed_forward, by_layer):
        y = function(layers, Activation.SILU, inputs["x"])
        made.append(torch.autograd.grad(y.square().sum(), inputs[kept]))
    torch.testing.assert_close(*made, atol=1e-10, rtol=1e-10)


def test_only_the_input_is_saved():
    layers = make("btt", 64, 256, dtype=torch.float32)
    x = torch.randn(100, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        feed_forward(layers, Activation.GELU, x)
    assert saved
    assert {t.data_ptr() for t in saved} <= {t.data_ptr() for t in (x, *parameters(layers))}


@pytest.mark.parametrize("x", [
    torch.randn(40, 64)[:, ::2], torch.randn(2, 4, 5, 32), torch.randn(32, 50).t(),
    torch.randn(1, 32).expand(40, 32), torch.randn(40, 64)[:, :32],
], ids=["strided", "many axes", "transposed", "expanded", "gaps"])  # fmt: skip
def test_any_layout(x):
    layers, x = make(), x.double()
    found = results(feed_forward, layers, Activation.GELU, x)
    assert_near(found, results(by_layer, layers, Activation.GELU, x), TOL[torch.float64])


def test_second_derivatives_and_batched_gradients():
    layers = make("btt", 4, 6, gated=True)
    x = torch.randn(32, 4, dtype=torch.float64, requires_grad=True)

    def second(function):
        y = function(layers, Activation.GELU_TANH, x)
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *parameters(layers)])

    assert_near(second(feed_forward), second(by_layer), 1e-9)
    y = feed_forward(layers, Activation.SILU, x)
    directions = torch.randn(3, *y.shape, dtype=torch.float64)
    (batched,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in directions]
    torch.testing.assert_close(batched, torch.stack(each))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's forward mode uses torch.jit
def test_what_it_cannot_do_is_left_to_the_layers():
    layers = make(dtype=torch.float32)
    x = torch.randn(TOKENS, 32)

    def net(x):
        return feed_forward(layers, Activation.GELU, x)

    assert net(x) is not None
    assert net(x[:31]) is None
    assert net(x.double()) is None
    assert net(x[:, :31]) is None
    assert net(torch.tensor(1.0)) is None
    assert net(x.to("meta")) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(x) is None
    with forward_ad.dual_level():
        assert net(forward_ad.make_dual(x, x)) is None
    seen = []
    torch.vmap(lambda t: (seen.append(net(t)), t)[1])(x.expand(2, -1, -1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(lambda t: (seen.append(net(t)), t + 1)[1], x, check_trace=False)
    torch.compile(lambda t: (t + 1, seen.append(net(t)))[0], backend="eager")(x)
    assert set(seen) == {None}
    handle = layers[1].register_forward_hook(lambda *_: None)
    assert net(x) is None
    handle.remove()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers[0], "choices", {})
        patch.setattr(el.EinsumLinear, "_variant", lambda *_: "einsum")
        assert net(x) is None
    assert feed_forward([layers[0], nn.Linear(72, 32)], Activation.GELU, x) is None
    assert net(x) is not None


def test_the_engine_refuses_what_is_not_a_net():
    up, down = (engine.NetLayer(layer.plan, layer.factors(), None, None) for layer in make())
    x = torch.randn(TOKENS, 32, dtype=torch.float64)
    y, _ = engine.net_forward([up, down], Activation.RELU, x)
    assert y.shape == x.shape
    wrong = [([up], 0), ([up, down, down], 0), ([up, up, up, down], 0), ([up, down], 9)]
    for layers, activation in [*wrong, ([down, down], 0), ([up, down], -1)]:
        with pytest.raises(el.EinlinearError, match="do not form a feed-forward net"):
            engine.net_forward(layers, activation, x)


def test_no_tokens():
    layers = [engine.NetLayer(layer.plan, layer.factors(), layer.bias, None) for layer in make()]
    x = torch.zeros(0, 32, dtype=torch.float64)
    y, _ = engine.net_forward(layers, Activation.RELU, x)
    assert y.shape == (0, 32)
    count = 1 + len(engine.net_tensors(layers))
    grads = engine.net_backward(layers, Activation.RELU, x, x, [True] * count, [None, None])
    assert all(not grad.any() for grad in grads)
