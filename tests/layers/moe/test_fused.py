"""Gate and experts as one step of autograd, compared with separate steps.

A hook at the gate forces separate steps, which test_layers.py compares with an oracle.
"""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import einlinear as el
from cases import STRUCTURES
from einlinear.layers.engine import binding
from einlinear.layers.moe import fused, routing
from einlinear.layers.moe import layers as moe
from layers.moe.test_layers import assert_same, make

pytestmark = pytest.mark.skipif(not binding.is_available(), reason=binding.status())
X = torch.randn(31, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Watch(TorchDispatchMode):
    """Sees every operator, changes none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def hooked(layer):
    handle = layer.gate.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


WATCHERS = {"dispatch mode": lambda _: Watch(), "hook": hooked}


@pytest.fixture
def mixed(monkeypatch):
    """How often the one step was taken."""
    calls = []

    def watched(*arguments, **options):
        calls.append(1)
        return fused.gate_and_experts(*arguments, **options)

    monkeypatch.setattr(moe, "gate_and_experts", watched)
    return calls


def loss_of(layer, x, parts):
    """Some of: a loss of the output, the balance, and both."""
    y = layer(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    terms = {"y": lambda: (y * weights).sum(), "balance": lambda: el.balance_loss(layer)}
    return sum(terms[part]() for part in parts)


def gradients(layer, x, parts=("y", "balance"), wanted=None, **options):
    """The loss, then gradients of the input and of the parameters that are wanted (all)."""
    tensors = dict(layer.named_parameters()) | {"x": x.clone()}
    wanted = wanted or list(tensors)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    loss = loss_of(layer, tensors["x"], parts)
    asked = [tensors[name] for name in wanted]
    grads = torch.autograd.grad(loss, asked, allow_unused=True, **options)
    return [loss, *grads]


def assert_equal_ways(layer, x, mixed, watcher="hook", **options):
    mixed.clear()
    got = gradients(layer, x, **options)
    assert mixed, "the one step was not taken"
    mixed.clear()
    with WATCHERS[watcher](layer):
        right = gradients(layer, x, **options)
    assert not mixed
    assert [g is None for g in got] == [g is None for g in right]
    assert_same(*([g for g in found if g is not None] for found in (got, right)))


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("parts", [("y",), ("balance",), ("y", "balance")])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"weight_norm": False}])
@pytest.mark.parametrize("num_active", [1, 2, 5])
def test_outputs_and_gradients(watcher, parts, options, num_active, mixed):
    assert_equal_ways(
        make(num_active=num_active, **options), X, mixed, watcher=watcher, parts=parts
    )


@pytest.mark.parametrize("name", ["dense", "low_rank", "generic", "btt(num_factors=3)"])
def test_structures(name, mixed):
    assert_equal_ways(make(STRUCTURES[name]), X, mixed)


@pytest.mark.parametrize("parts", [("y",), ("y", "balance")])
@pytest.mark.parametrize(
    "wanted",
    [["x"], ["gate.weight"], ["bias"], ["A"], ["B"], ["A", "B", "bias"], ["x", "gate.weight"],
     ["gate.weight", "A", "B", "bias"], ["x", "A", "B", "bias"], ["gate.weight", "B"]],
)  # fmt: skip
@pytest.mark.parametrize("create_graph", [False, True])
def test_some_gradients_only(wanted, parts, create_graph, mixed):
    """A frozen gate, frozen experts, an input without gradient."""
    layer = make()
    assert_equal_ways(layer, X, mixed, wanted=wanted, parts=parts, create_graph=create_graph)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("wanted", [["x"], ["gate.weight"], ["x", "gate.weight", "A"]])
def test_the_balance_alone(wanted, create_graph, mixed):
    options = {"wanted": wanted, "parts": ("balance",), "create_graph": create_graph}
    assert_equal_ways(make(), X, mixed, **options)


@pytest.mark.parametrize("watched", [False, True])
def test_the_balance_of_a_frozen_gate_is_a_number(watched, mixed):
    layer = make()
    layer.gate.requires_grad_(False)
    with hooked(layer) if watched else nullcontext():
        y = layer(X)
    assert bool(mixed) != watched
    assert y.requires_grad
    assert not layer.last_routing.logits.requires_grad
    assert not el.balance_loss(layer).requires_grad


@pytest.mark.parametrize("shape", [(24,), (0, 24), (1, 24), (2, 3, 24)])
def test_shapes(shape, mixed):
    assert_equal_ways(make(), torch.randn(shape, dtype=torch.float64), mixed)


def test_rows_and_gradients_in_any_layout(mixed):
    layer = make()
    assert_equal_ways(layer, X.t().contiguous().t(), mixed)
    x = X.clone().requires_grad_()
    grad_y = torch.randn(1, 1, dtype=torch.float64).expand(31, 36)
    found = []
    for watcher in (nullcontext(), hooked(layer)):
        with watcher:
            y = layer(x)
        logits = layer.last_routing.logits
        grads = [grad_y, torch.ones(5, 31, dtype=torch.float64).t() * 0.3]
        found.append(torch.autograd.grad([y, logits], [x, *layer.parameters()], grads))
    assert_same(*found)
    assert len(mixed) == 1


def test_backward_changes_nothing_it_was_given():
    layer, x = make(), X.clone().requires_grad_()
    y = layer(x)
    grads = [torch.randn_like(y), torch.randn_like(layer.last_routing.logits)]
    before = [g.clone() for g in grads]
    asked = [x, *layer.parameters()]
    outputs = [y, layer.last_routing.logits]
    first = torch.autograd.grad(outputs, asked, grads, retain_graph=True)
    second = torch.autograd.grad(outputs, asked, grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.no_cover
def test_second_derivatives(mixed):
    layer = make(d_in=6, d_out=4, num_experts=3)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    parameters = list(layer.parameters())

    def function(x, *_):
        return layer(x), layer.last_routing.logits

    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, *parameters))
    assert mixed


@pytest.mark.parametrize("wanted", [["x", "A"], ["gate.weight"], ["A", "B", "bias"]])
def test_gradients_of_a_penalty_on_gradients(wanted, mixed):
    layer, found = make(), []
    for watcher in (nullcontext(), hooked(layer)):
        with watcher:
            _, *grads = gradients(layer, X, wanted=wanted, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        trained = [p for p in layer.parameters() if p.requires_grad]
        more = torch.autograd.grad(penalty, trained, allow_unused=True) if trained else []
        found.append([penalty, *[torch.zeros(()) if g is None else g for g in more]])
    assert len(mixed) == 1
    assert_same(*found)


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_input_that_is_made_from_the_gate(create_graph, mixed):
    """What goes through the input to the gate is counted once."""
    layer, found = make(), []
    for watcher in (nullcontext(), hooked(layer)):
        with watcher:
            loss = loss_of(layer, X + layer.gate.weight.sum(0).tanh(), ("y", "balance"))
        parameters = list(layer.parameters())
        found.append(torch.autograd.grad(loss, parameters, create_graph=create_graph))
    assert len(mixed) == 1
    assert_same(*found)


class Nothing(torch.autograd.Function):
    """Passes its input on and has no gradient for it."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("create_graph", [False, True])
def test_no_gradients_arrive(create_graph, mixed):
    layer, x = make(), X.clone().requires_grad_()
    loss = Nothing.apply(layer(x)).sum()
    options = {"create_graph": create_graph, "allow_unused": True}
    assert torch.autograd.grad(loss, [x, layer.A], **options) == (None, None)
    assert mixed


def test_hooks_of_the_gate_are_called(mixed):
    layer, x = make(), X.clone().requires_grad_()
    seen = []
    gate = layer.gate
    handles = [
        lambda: gate.register_forward_hook(lambda *_: seen.append("forward")),
        lambda: gate.register_forward_pre_hook(lambda *_: seen.append("before")),
        lambda: gate.register_full_backward_hook(lambda *_: seen.append("backward")),
        lambda: gate.register_full_backward_pre_hook(lambda *_: seen.append("before backward")),
        lambda: register_module_forward_hook(
            lambda m, *_: seen.append("global") if m is gate else None
        ),
    ]
    for register in handles:
        handle = register()
        layer(x).sum().backward()
        handle.remove()
    assert seen == ["forward", "before", "backward", "before backward", "global"]
    assert not mixed
    layer(x).sum().backward()
    assert len(seen) == 5
    assert mixed


def test_what_a_hook_returns_is_used(mixed):
    layer = make()
    plain = layer(X)
    layer.gate.register_forward_hook(lambda _, __, logits: -logits)
    assert len(mixed) == 1
    changed = layer(X)
    assert len(mixed) == 1
    assert not torch.allclose(plain, changed)


def test_another_gate_or_router_is_used(mixed):
    layer, seen = make(), []
    forward = layer.gate.forward
    layer.gate.forward = lambda x: seen.append("patched") or forward(x)
    layer(X)
    del layer.gate.forward

    class Gate(routing.Gate):
        def forward(self, x):
            seen.append("gate")
            return super().forward(x)

    class Layer(el.MoELinear):
        def route(self, x_td):
            seen.append("route")
            return super().route(x_td)

    layer.gate = Gate(24, 5, dtype=torch.float64)
    layer(X)
    Layer(24, 36, structure="btt", num_experts=5, dtype=torch.float64)(X)
    assert seen == ["patched", "gate", "route"]
    assert not mixed


def test_hooks_of_tensors_are_called(mixed):
    layer, seen = make(), []
    layer.gate.weight.register_hook(lambda grad: seen.append(grad))
    layer(X).sum().backward()
    assert mixed
    assert torch.equal(seen[0], layer.gate.weight.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, mixed):
    layer = make()
    wanted = layer(X)
    with mode():
        y = layer(X)
        assert torch.isfinite(el.balance_loss(layer))
    assert len(mixed) == 2
    assert not y.requires_grad
    assert not layer.last_routing.logits.requires_grad
    assert torch.equal(y, wanted)


def test_what_is_not_for_one_step(mixed):
    layer = make(dtype=torch.float32)
    x = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    layer.bfloat16()(x.bfloat16())
    assert not mixed
    layer.float()
    torch.func.grad(lambda x: layer(x).sum())(x)
    assert not mixed


def test_routing_is_remembered_with_the_graph(mixed):
    layer = make()
    layer(X)
    assert mixed
    routing = layer.last_routing
    torch.testing.assert_close(routing.logits, X @ layer.gate.weight.t())
    right = routing.logits.topk(2).indices.sort(-1).values
    assert torch.equal(routing.experts.sort(-1).values, right)
    assert routing.logits.requires_grad
    assert not routing.experts.requires_grad


def test_copies(mixed):
    layer = make()
    layer(X)
    twin = copy.deepcopy(layer)
    assert twin.last_routing is None
    assert_same(gradients(twin, X), gradients(layer, X))
    assert len(mixed) == 3


def test_gradients_of_many_outputs_at_once():
    """Autograd's batched gradients cannot be had, and it says so."""
    layer, x = make(), X.clone().requires_grad_()
    y = layer(x)
    grads = torch.randn(3, *y.shape, dtype=y.dtype)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for einlinear::experts"):
        torch.autograd.grad(y, [x, layer.A], grads, is_grads_batched=True)


@pytest.fixture
def process_group(tmp_path):
    options = {"rank": 0, "world_size": 1, "init_method": f"file://{tmp_path}/store"}
    dist.init_process_group("gloo", **options)
    yield
    dist.destroy_process_group()


def test_in_ddp(process_group, mixed):
    layer = make()
    alone = copy.deepcopy(layer)
    wrapped = DistributedDataParallel(layer)
    (wrapped(X).square().mean() + el.balance_loss(wrapped)).backward()
    (alone(X).square().mean() + el.balance_loss(alone)).backward()
    assert len(mixed) == 2
    assert_same([p.grad for p in layer.parameters()], [p.grad for p in alone.parameters()])
