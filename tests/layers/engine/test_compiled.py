"""What the engine is handed: only tensors that are what they seem."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from cases import STRUCTURES
from einlinear import EinlinearError, EinsumLinear
from einlinear.layers.engine import binding, compiled
from kit.exported import as_torch_2_6

pytestmark = pytest.mark.skipif(not compiled.IS_AVAILABLE, reason="the engine is not built")


def make(name="btt(rank=2)", width=64, **options):
    torch.manual_seed(0)
    layer = EinsumLinear(width, width, structure=STRUCTURES[name], **options)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    layer.choices = {
        f"cpu {dtype} up to {1 << n} tokens{passes}": "engine"
        for passes in ("", ", forward")
        for dtype in ("float32", "float64", "bfloat16")
        for n in range(12)
    }
    return layer


@pytest.fixture
def calls(monkeypatch):
    """For every forward call of the engine whether normalisation was left to it.

    Only a layer that goes past torch's operators does that.
    """
    found = []
    run = binding.run_engine

    def counted(name, arguments):
        if name == "forward":
            found.append(bool(arguments.stds))
        run(name, arguments)

    monkeypatch.setattr(binding, "run_engine", counted)
    return found


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (300,)])
def test_inference_is_what_training_computes(shape, dtype, bias, weight_norm, calls):
    layer = make(bias=bias, weight_norm=weight_norm, dtype=dtype)
    with torch.no_grad():
        layer.A.mul_(3)
        x = torch.randn(*shape, 64).to(dtype)
        y = layer(x)
    assert calls == [weight_norm]
    expected = layer.double()(x.double())
    assert y.dtype == dtype
    assert y.shape == expected.shape
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


def test_what_is_not_contiguous():
    layer = make()
    x = torch.randn(5, 128)
    with torch.no_grad():
        layer.A.data = layer.A.data.transpose(0, 1).contiguous().transpose(0, 1)
        assert not layer.A.is_contiguous()
        for view in (x[:, ::2], x[:, :64], x[:1, :64].expand(4, 64), torch.randn(64, 5).t()):
            with torch.enable_grad():
                expected = layer(view)
            torch.testing.assert_close(layer(view), expected)


@torch.no_grad()
def test_a_negated_view_is_read_as_what_it_is():
    layer = make()
    x = torch._neg_view(torch.randn(4, 64))  # as torch.imag of a conjugate, but contiguous
    assert x.is_neg()
    torch.testing.assert_close(layer(x), layer(x.clone()))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_what_has_no_strides_is_not_read(to):
    plain = torch.randn(4, 64)
    assert compiled.is_direct(plain, [plain])
    other = getattr(plain, to)()
    assert not compiled.is_direct(other, ())
    assert not compiled.is_direct(plain, [plain, other])


CHANGES = {
    "replaced": lambda own: own.update(B=torch.nn.Parameter(own["B"].data)),
    "moved": lambda own: setattr(own["B"], "data", own["B"].data.clone()),
    "smaller": lambda own: setattr(own["B"], "data", own["B"].data[:1]),
    "of another dtype": lambda own: setattr(own["B"], "data", own["B"].data.view(torch.complex64)),
    "laid out in another way": lambda own: setattr(own["B"], "data", own["B"].data.mT),
    "bias moved": lambda own: setattr(own["bias"], "data", own["bias"].data.clone()),
    "no bias": lambda own: own.pop("bias"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_prepared_call_sees_every_change_of_a_parameter(change):
    layer = make()
    layer(torch.randn(2, 64))
    own, stds = dict(layer.named_parameters()), layer._stds
    call = layer._call
    given = [own[name] for name in (*layer.factor_names, "bias")]
    assert call.is_current(given, stds)
    assert not call.is_current(given, [*stds])
    old = own["B"].data  # in memory that must not be used again at once
    change(own)
    given = [own[name] for name in (*layer.factor_names, "bias") if name in own]
    assert not call.is_current(given, stds)
    del old


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's forward mode uses torch.jit
@torch.no_grad()
def test_transforms_see_the_layer(calls):
    layer = make()
    x = torch.randn(3, 5, 64)
    one = layer(x[0])
    calls.clear()
    stacked = torch.vmap(layer)(x)
    torch.testing.assert_close(stacked[0], one)
    _, tangent = torch.func.jvp(layer, (x[0],), (x[0],))
    torch.testing.assert_close(tangent, one - layer.bias, atol=1e-5, rtol=1e-4)
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x[0], x[0]))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)
    assert not any(calls)  # whatever the engine did for them, it was not told to normalise


@torch.no_grad()
def test_modes_see_the_layer():
    layer = make()
    x = torch.randn(5, 64)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 5 * layer.plan.macs
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.randn(5, 64)).shape == (5, 64)


@torch.no_grad()
def test_tracing_sees_the_layer():
    layer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, torch.randn(5, 64))
        x = torch.randn(7, 64)
        torch.testing.assert_close(traced(x), layer(x))


@torch.no_grad()
def test_autocast_casts():
    layer = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(5, 64)).dtype == torch.bfloat16


def test_a_step_of_training_is_seen_by_inference():
    layer = make(weight_norm=False)
    x = torch.randn(5, 64)
    with torch.no_grad():
        before = layer(x)
        layer.A.data.mul_(0.5)
        torch.testing.assert_close(layer(x) - layer.bias, (before - layer.bias) / 2)


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_bias_of_any_layout_is_read_as_it_is(has_grad):
    layer = make()
    x = torch.randn(5, 64)
    for bias in (torch.randn(64, 2)[:, 0], torch.randn(1).expand(64)):
        layer.bias = nn.Parameter(torch.zeros(64))
        layer.bias.data = bias
        with torch.set_grad_enabled(has_grad):
            expected = nn.functional.linear(x, layer.to_dense(), bias)
            torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize(
    "changed",
    [
        {"A": torch.randn(1)},
        {"B": torch.randn(3, 3).double()},
        {"bias": torch.randn(1)},
        {"bias": torch.randn(64).double()},
        {"A": torch.empty(8, 8, 16, device="meta")},
    ],
    ids=["shape", "dtype", "bias shape", "bias dtype", "device"],
)
def test_what_does_not_fit_is_refused(changed, has_grad):
    layer = make()
    with torch.set_grad_enabled(has_grad), pytest.raises((EinlinearError, RuntimeError)):
        torch.func.functional_call(layer, changed, torch.randn(5, 64))


def test_a_weight_without_memory_is_refused():
    layer = make(weight_norm=False)
    layer.A.untyped_storage().resize_(0)
    with torch.no_grad(), pytest.raises(EinlinearError, match="no memory"):
        layer(torch.randn(5, 64))


@torch.no_grad()
def test_a_default_device_does_not_slow_it_down(calls):
    layer = make()
    with torch.device("cpu"):
        layer(torch.randn(5, 64))
    assert calls == [True]


def test_an_exported_program_runs_without_the_engine(monkeypatch):
    as_torch_2_6(monkeypatch)
    layer = make().eval()
    x = torch.randn(5, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(layer, (x,)).module()
    assert "engine" in program.code
    expected = layer(x)
    monkeypatch.setattr(compiled, "IS_AVAILABLE", False)
    torch.testing.assert_close(program(x), expected)
