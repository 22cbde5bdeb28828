"""Weight normalisation inside the engine, and calls that are prepared once."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import einlinear as el
from cases import STRUCTURES
from einlinear import EinsumLinear
from einlinear.layers.engine import compiled
from einlinear.layers.variants import multiply

pytestmark = pytest.mark.skipif(not compiled.IS_AVAILABLE, reason="the engine is not built")


def make(structure="btt(rank=2)", d_in=48, d_out=80, **options):
    """A layer that uses the engine, with factors above, at and below their deviation."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64} | options
    layer = EinsumLinear(d_in, d_out, structure=structure, **options)
    with torch.no_grad():
        for i, (name, std) in enumerate(zip(layer._names, layer._stds, strict=True)):
            factor = getattr(layer, name)
            factor.normal_(std=std * (1.7, 0.6, 1.3, 0.8)[i % 4])
        if layer.bias is not None:
            layer.bias.normal_()
    layer.choices = {
        f"cpu {dtype} up to {1 << n} tokens{passes}": "engine"
        for passes in ("", ", forward")
        for dtype in ("float32", "float64", "bfloat16")
        for n in range(12)
    }
    return layer


def reference(layer, x):
    """The layer by plain operations of torch."""
    factors = []
    for name, std in zip(layer._names, layer._stds, strict=True):
        weight = getattr(layer, name)
        rms = weight.square().mean().sqrt()
        factors.append(weight / torch.maximum(rms / std, torch.ones_like(rms)))
    return multiply(layer.plan, x, factors, "einsum", layer.bias)


def is_inside(y):
    return y.grad_fn.name() == "_EagerBackward"


@pytest.mark.parametrize("structure", [*STRUCTURES.values(), "btt(num_factors=3)"], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_through_normalisation(structure, threads):
    layer = make(structure)
    x = torch.randn(67, 48, dtype=torch.float64, requires_grad=True)
    grad_y = torch.randn(67, 80, dtype=torch.float64)
    operands = [x, *layer.parameters()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = layer(x)
        found = torch.autograd.grad(y, operands, grad_y)
    finally:
        torch.set_num_threads(before)
    assert is_inside(y)
    expected = reference(layer, x)
    torch.testing.assert_close(y, expected, atol=1e-11, rtol=1e-11)
    wanted = torch.autograd.grad(expected, operands, grad_y)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_normalisation_is_felt():
    """The oracle of the tests above tells gradients with normalisation from those without."""
    layer = make()
    x = torch.randn(5, 48, dtype=torch.float64)
    y = reference(layer, x)
    plain = multiply(layer.plan, x, [layer.A, layer.B], "einsum", layer.bias)
    through, without = (torch.autograd.grad(out.square().sum(), layer.A)[0] for out in (y, plain))
    assert not torch.allclose(through, without, rtol=0.05)


@pytest.mark.parametrize("frozen", [("A",), ("B",), ("A", "B"), ("A", "B", "bias"), ("bias",)])
@pytest.mark.parametrize("needs_x", [True, False])
def test_only_what_is_wanted(frozen, needs_x):
    layer = make()
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = torch.randn(9, 48, dtype=torch.float64, requires_grad=needs_x)
    operands = [t for t in (x, *layer.parameters()) if t.requires_grad]
    if not operands:
        assert not layer(x).requires_grad
        return
    y, expected = layer(x), reference(layer, x)
    assert is_inside(y)
    found = torch.autograd.grad(y.square().sum(), operands)
    wanted = torch.autograd.grad(expected.square().sum(), operands)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_derivatives_by_differences_once_and_twice():
    layer = make(d_in=6, d_out=4, structure="btt")
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert is_inside(layer(x))
    operands = x, *layer.parameters()

    def apply(x, *parameters):
        return layer(x)  # gradcheck moves the very tensors

    assert torch.autograd.gradcheck(apply, operands)
    assert torch.autograd.gradgradcheck(apply, operands)


def test_a_zero_factor_and_no_tokens():
    layer = make()
    nn.init.zeros_(layer.B)
    x = torch.randn(4, 48, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert is_inside(layer(x))
    assert layer.B.grad.abs().max() > 0
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    layer(x[:0]).sum().backward()


def test_a_gradient_that_torch_watches():
    """A mode during the backward pass only: it takes the way through torch's operations."""
    layer = make()
    x = torch.randn(4, 48, dtype=torch.float64, requires_grad=True)
    y = layer(x)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Watch():
        found = torch.autograd.grad(y.sum(), [x, layer.A])
    wanted = torch.autograd.grad(reference(layer, x).sum(), [x, layer.A])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_is_normalised_before():
    half, plain = make(dtype=torch.bfloat16), make(dtype=torch.bfloat16, weight_norm=False)
    x = torch.randn(4, 48, dtype=torch.bfloat16)
    assert not is_inside(half(x))
    assert is_inside(plain(x))


# ---- the prepared call ----


def changed(layer, name):
    """Change a layer in one of the ways people do; what then holds its parameters."""
    if name == "in place":
        layer.A.data.mul_(0.5)
    elif name == "data":
        layer.A.data = torch.randn_like(layer.A)
    elif name == "parameter":
        layer.B = nn.Parameter(torch.randn_like(layer.B))
    elif name == "not contiguous":
        layer.A.data = layer.A.data.transpose(0, 1).contiguous().transpose(0, 1)
    elif name == "bias data":
        layer.bias.data = torch.randn_like(layer.bias)
    elif name == "no bias":
        layer.bias = None
    elif name == "loaded":
        layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})
    elif name == "assigned":
        state = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    elif name == "parametrised":
        nn.utils.parametrize.register_parametrization(layer, "A", nn.Tanh())
    elif name == "copy":
        return copy.deepcopy(layer)
    elif name == "saved":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    return layer


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "in place", "data", "parameter", "not contiguous", "bias data", "no bias", "loaded",
        "assigned", "parametrised", "copy", "saved",
    ],
)  # fmt: skip
def test_a_prepared_call_follows_the_layer(name, has_norm):
    layer = make(weight_norm=has_norm)
    x = torch.randn(3, 48, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        assert layer._call is not None
        layer = changed(layer, name)
        if not has_norm:
            layer.A.data.mul_(3)
        found = layer(x)
        bias = 0 if layer.bias is None else layer.bias
        torch.testing.assert_close(found, x @ layer.to_dense().t() + bias)


def test_a_prepared_call_follows_settings():
    layer = make()
    x = torch.randn(3, 48, dtype=torch.float64)
    with torch.no_grad():
        normal = layer(x)
        layer.weight_norm = False
        without = layer(x)
        torch.testing.assert_close(without, x @ layer.to_dense().t() + layer.bias)
        assert not torch.allclose(normal, without)
        call = layer._call
        layer.choices = dict.fromkeys(layer.choices, "dense")
        layer(x)
        assert call.variants[0] == {3: "dense"}
        layer.choices["cpu float64 up to 4 tokens, forward"] = "engine"
        layer(x)
        assert call.variants[0] == {3: "engine"}


def test_a_wrong_shape_is_refused_before_memory_is_read():
    layer = make()
    x = torch.randn(3, 48, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        layer.A.data = torch.zeros(1, dtype=torch.float64)
        with pytest.raises(el.EinlinearError, match=r"given \(1,\)"):
            layer(x)
        layer = make()
        for bad in (x[:, :-1], x.float(), torch.tensor(1.0, dtype=torch.float64)):
            with pytest.raises(el.EinlinearError, match="the input has shape"):
                layer(bad)


def test_a_prepared_call_does_not_outlive_its_dtype():
    """The allocator may hand the old address to weights of another dtype."""
    for _ in range(50):
        layer = EinsumLinear(16, 16, bias=False, structure="dense")
        with torch.no_grad():
            layer(torch.randn(4, 16))
            layer.half().bfloat16()
            x = torch.randn(4, 16).bfloat16()
            torch.testing.assert_close(layer(x), x @ layer.to_dense().t(), atol=0.1, rtol=0.1)


def test_a_prepared_call_sees_strides():
    layer = make("btt", 64, 64, bias=False)
    x = torch.randn(4, 64, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        layer.A.data = layer.A.data.transpose(0, 1)  # the same address
        torch.testing.assert_close(layer(x), x @ layer.to_dense().t())


def test_a_prepared_call_lets_parameters_go():
    layer = make()
    x = torch.randn(4, 48, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
    old = weakref.ref(layer.A)
    state = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    gc.collect()
    assert old() is None


def test_compiling_after_a_prepared_call():
    layer = make(dtype=torch.float32)
    x = torch.randn(32, 48)
    with torch.no_grad():
        expected = layer(x)
        compiled_layer = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled_layer(x), expected)


def test_a_batch_of_biases_after_a_prepared_call():
    layer = make()
    x, biases = torch.randn(5, 48, dtype=torch.float64), torch.randn(3, 80, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        many = torch.func.vmap(lambda b: torch.func.functional_call(layer, {"bias": b}, (x,)))(
            biases
        )
        torch.testing.assert_close(many, x @ layer.to_dense().t() + biases[:, None])


@pytest.mark.parametrize("variant", ["engine", "strided"])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_gradients(variant, has_norm):
    layer = make(d_in=6, d_out=4, structure="btt", weight_norm=has_norm)
    layer.choices = dict.fromkeys(layer.choices, variant)
    x = torch.randn(2, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian
    found = jacobian(lambda z: layer(z).sum(0), x, vectorize=True)
    expected = jacobian(lambda z: layer(z).sum(0), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("has_norm", [True, False])
def test_frozen_layers_do_not_keep_their_input(has_norm):
    layer = make(weight_norm=has_norm)
    leaf = torch.randn(4, 48, dtype=torch.float64, requires_grad=True)
    layer.bias.requires_grad_(False)
    expected = torch.autograd.grad(layer(leaf).square().sum(), leaf)[0]
    layer.requires_grad_(False)
    x = leaf * 1
    y = layer(x)
    x.add_(1)  # as nn.Linear allows
    found = torch.autograd.grad(y.square().sum(), leaf)[0]
    torch.testing.assert_close(found, expected)
    gone = weakref.ref(x)
    del x
    assert gone() is None
    twice = torch.autograd.grad(layer(leaf).square().sum(), leaf, create_graph=True)[0]
    torch.autograd.grad(twice.sum(), leaf)
