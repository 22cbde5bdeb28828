"""Dense execution of narrow layers: right, and never with a matrix of other weights."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import einlinear as el
from cases import STRUCTURES, structures
from einlinear import EinsumLinear
from einlinear.layers import dense
from einlinear.layers.engine import compiled

pytestmark = pytest.mark.skipif(not compiled.IS_AVAILABLE, reason="the engine is not built")


def make(structure="btt(rank=2)", d_in=24, d_out=16, dtype=torch.float64, **options):
    """A layer whose factors are in part shrunk by normalisation, always executed densely."""
    torch.manual_seed(0)
    layer = EinsumLinear(d_in, d_out, structure=structure, dtype=dtype, **options)
    with torch.no_grad():
        layer.get_parameter(layer.plan.steps[0].factor).mul_(3)
        if layer.bias is not None:
            layer.bias.normal_()
    name = str(dtype).removeprefix("torch.")
    layer.choices = {
        f"cpu {name} up to {1 << n} tokens{passes}": "dense"
        for passes in ("", ", forward")
        for n in range(9)
    }
    return layer


def expected(layer, x):
    return nn.functional.linear(x, layer.to_dense(), layer.bias)


@settings(max_examples=50)
@given(
    s=structures(),
    d_in=st.integers(1, 24),
    d_out=st.integers(1, 24),
    shape=st.lists(st.integers(0, 4), max_size=2),
    has_bias=st.booleans(),
    weight_norm=st.booleans(),
)
def test_output_and_gradients(s, d_in, d_out, shape, has_bias, weight_norm):
    layer = make(s, d_in, d_out, bias=has_bias, weight_norm=weight_norm)
    x = torch.randn(*shape, d_in, dtype=torch.float64, requires_grad=True)
    tensors = [x, *layer.parameters()]
    y, reference = layer(x), expected(layer, x)
    assert "_Dense" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, reference)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(reference, tensors, grad)
    torch.testing.assert_close(torch.autograd.grad(y, tensors, grad), wanted)
    with torch.no_grad():
        for _ in range(2):  # makes the matrix, and uses it
            torch.testing.assert_close(layer(x), reference.detach())


@pytest.mark.parametrize("name", ["btt(rank=2)", "low_rank", "btt(num_factors=3)"])
def test_second_derivatives(name):
    layer = make(STRUCTURES[name], 6, 4)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    tensors = list(layer.parameters())

    def run(x, *_):
        return layer(x)

    assert gradcheck(run, [x, *tensors])
    assert gradgradcheck(run, [x, *tensors])


@pytest.mark.parametrize("frozen", ["A", "B", "bias", "x", "factors"])
def test_what_is_frozen_has_no_gradient(frozen):
    layer = make()
    x = torch.randn(5, 24, dtype=torch.float64, requires_grad=frozen != "x")
    for name in {"x": "", "factors": "AB"}.get(frozen, [frozen]):
        layer.get_parameter(name).requires_grad_(False)
    tensors = [t for t in (x, *layer.parameters()) if t.requires_grad]
    grad = torch.randn(5, 16, dtype=torch.float64)
    got = torch.autograd.grad(layer(x), tensors, grad)
    torch.testing.assert_close(got, torch.autograd.grad(expected(layer, x), tensors, grad))


def step(layer):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(4, layer.in_features, dtype=layer.A.dtype)
    with torch.enable_grad():
        layer(x).square().sum().backward()
    optimizer.step()


def changed(layer, how):
    """A layer that was changed after its matrix was kept."""
    if how == "in place":
        layer.A.mul_(0.1)
    elif how == "data":
        layer.B.data.mul_(0.1)  # torch counts no version
    elif how == "numpy":
        layer.B.detach().numpy()[...] *= 2
    elif how == "bias":
        layer.bias.data.add_(1)
    elif how == "step":
        step(layer)
    elif how == "new data":
        layer.A.data = torch.randn_like(layer.A)
    elif how == "not contiguous":
        layer.A.data = layer.A.data.transpose(0, 1).contiguous().transpose(0, 1)
    elif how == "other strides":
        layer.A.data = layer.A.data.flip(0)
    elif how == "parameter":
        layer.A = nn.Parameter(torch.randn_like(layer.A))
    elif how == "no bias":
        layer.bias = None
    elif how == "loaded":
        layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})
    elif how == "assigned":
        state = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    elif how == "dtype":
        layer.float().double()
    elif how == "norm":
        layer.weight_norm = False
    elif how == "parametrised":
        nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())
    elif how == "copy":
        layer = copy.deepcopy(layer)
        layer.A.mul_(0.1)
    elif how == "pickled":
        layer = pickle.loads(pickle.dumps(layer))
        layer.A.mul_(0.1)
    return layer


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "how",
    [
        "in place", "data", "numpy", "bias", "step", "new data", "not contiguous", "other strides",
        "parameter", "no bias", "loaded", "assigned", "dtype", "norm", "parametrised", "copy",
        "pickled",
    ],
)  # fmt: skip
def test_the_matrix_follows_the_layer(how, mode):
    layer = make()
    x = torch.randn(3, 24, dtype=torch.float64)
    with mode():
        before = layer(x)
        assert layer._dense is not None
    if how == "step":
        layer = changed(layer, how)
    else:
        with torch.no_grad():
            layer = changed(layer, how)
    with mode():
        found = layer(x)
        torch.testing.assert_close(found, expected(layer, x))
        assert how in ("not contiguous", "dtype") or not torch.allclose(found, before)


def test_a_stale_matrix_would_be_seen(monkeypatch):
    """The twin of the test above: without the comparison, the layer is wrong."""
    monkeypatch.setattr(compiled.LayerCall, "comparison", lambda self: lambda: 1)
    layer = make()
    x = torch.randn(3, 24, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        layer.A.data.mul_(0.1)
        assert not torch.allclose(layer(x), expected(layer, x))


@torch.no_grad()
def test_a_layer_that_stays_makes_its_matrix_once(monkeypatch):
    layer, made = make(), []
    kind = dense.DenseWeight
    monkeypatch.setattr(
        "einlinear.layers.linear.DenseWeight", lambda *given: made.append(1) or kind(*given)
    )
    for tokens in (3, 3, 8, 1):
        layer(torch.randn(tokens, 24, dtype=torch.float64))
    assert len(made) == 1


@torch.no_grad()
def test_what_is_kept_is_small_and_not_saved():
    layer = make()
    size = len(pickle.dumps(layer))
    layer(torch.randn(3, 24, dtype=torch.float64))
    assert len(pickle.dumps(layer)) == size
    assert set(layer.state_dict()) == {"A", "B", "bias"}
    file = io.BytesIO()
    torch.save(layer, file)
    wide = make("btt", 256, 256, torch.float32)
    wide(torch.randn(3, 256))
    assert wide._dense is None
    assert dense.can_be_dense(layer.plan, torch.float32)
    assert not dense.can_be_dense(layer.plan, torch.bfloat16)  # its matrix would be rounded


@torch.no_grad()
def test_modes_transforms_and_autocast_see_the_layer():
    layer = make(dtype=torch.float32)
    x = torch.randn(5, 24)
    y = layer(x)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() > 0
    torch.testing.assert_close(torch.vmap(layer)(x[None])[0], y, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    for bad in (x[:, :-1], x.double()):
        with pytest.raises(el.EinlinearError, match="the input has shape"):
            layer(bad)
    settings_before = dict(layer.choices)
    layer.choices = dict.fromkeys(settings_before, "engine")
    torch.testing.assert_close(layer(x), y, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_threads_share_a_layer():
    layer = make()
    inputs = [torch.randn(n % 7, 24, dtype=torch.float64) for n in range(64)]
    with ThreadPoolExecutor(4) as pool:
        for x, y in zip(inputs, pool.map(layer, inputs), strict=True):
            torch.testing.assert_close(y, expected(layer, x))
