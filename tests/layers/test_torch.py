"""The layer under the machinery of torch: compile, export, autocast, vmap, many processes."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import STRUCTURES
from einlinear import EinsumLinear
from kit.pair import run_two
from kit.two_processes import compare_gradients, model_and_input

CASES = ["btt(rank=2)", "kronecker", "generic", "btt(num_factors=3)", "low_rank"]


def make(name="btt(rank=2)", width=64, **options):
    torch.manual_seed(0)
    return EinsumLinear(width, width, structure=STRUCTURES[name], **options)


def with_gradients(function, layer, x):
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], weights)]


def assert_same(got, wanted, tolerance=1e-5):
    for a, b in zip(got, wanted, strict=True):
        scale = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=0)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_tokens", [4, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [n if n == CASES[0] else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def test_compile_without_breaks(name, num_tokens):
    torch._dynamo.reset()
    layer = make(name)
    x = torch.randn(num_tokens, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, layer, x), with_gradients(layer, layer, x))


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["no_grad", "inference_mode", "frozen", "only the bias"])
def test_compile_without_all_gradients(kind):
    torch._dynamo.reset()
    layer = make(width=256)
    x = torch.randn(300, 256)
    expected = layer(x).detach()
    if kind in ("frozen", "only the bias"):
        layer.requires_grad_(False)
        layer.bias.requires_grad_(kind != "frozen")
    mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with mode.get(kind, torch.enable_grad)():
        y = compiled(x)
    torch.testing.assert_close(y.detach().clone(), expected, atol=1e-5, rtol=1e-4)
    if kind == "only the bias":
        y.sum().backward()
        torch.testing.assert_close(layer.bias.grad, torch.full((256,), 300.0))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
def test_compile_with_any_number_of_tokens():
    torch._dynamo.reset()
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for num_tokens in (300, 301, 555, 2100):
        x = torch.randn(num_tokens, 64)
        assert_same(with_gradients(compiled, layer, x), with_gradients(layer, layer, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_tokens", [4, 300])
def test_export(num_tokens):
    layer = make().eval()
    x = torch.randn(num_tokens, 64)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("num_tokens", [4, 300])
@pytest.mark.parametrize("name", CASES)
def test_autocast(name, num_tokens):
    layer = make(name)
    x = torch.randn(num_tokens, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.A.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x), atol=0.05, rtol=0.05)


def test_autocast_leaves_float64_alone():
    layer = make(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(300, 64, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own use of torch.jit
@pytest.mark.parametrize("num_tokens", [4, 300])
def test_forward_mode(num_tokens):
    layer = make(dtype=torch.float64)
    x, tangent = torch.randn(2, num_tokens, 64, dtype=torch.float64)
    _, got = torch.func.jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(got, tangent @ layer.to_dense().t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    layer = make(dtype=dtype)
    y = layer(torch.randn(300, 64, dtype=dtype))
    assert y.dtype == dtype
    assert layer.to(torch.float32)(torch.randn(300, 64)).dtype == torch.float32


@pytest.mark.parametrize("num_tokens", [4, 300])
def test_checkpointing(num_tokens):
    layer = make()
    x = torch.randn(num_tokens, 64)
    again = with_gradients(lambda x: checkpoint(layer, x, use_reentrant=False), layer, x)
    assert_same(again, with_gradients(layer, layer, x))


@pytest.mark.parametrize("num_tokens", [4, 300])
@pytest.mark.parametrize("name", CASES)
def test_vmap_over_parameters(name, num_tokens):
    layers = [make(name) for _ in range(3)]
    for i, layer in enumerate(layers):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1 + 0.1 * i)
    stacked, _ = torch.func.stack_module_state(layers)
    x = torch.randn(num_tokens, 64)

    def loss(parameters, x):
        return torch.func.functional_call(layers[0], parameters, x).square().mean()

    values = torch.vmap(loss, in_dims=(0, None))(stacked, x)
    grads = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(stacked, x)
    for i, layer in enumerate(layers):
        one = layer(x).square().mean()
        torch.testing.assert_close(values[i], one)
        wanted = torch.autograd.grad(one, list(layer.parameters()))
        for (key, _), grad in zip(layer.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(grads[key][i], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_give_the_gradients_of_one(kind):
    model, x = model_and_input()
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    run_two(compare_gradients, kind, expected)


def test_two_threads_at_once():
    layer = make(width=256)
    inputs = [torch.randn(600, 256) for _ in range(8)]
    alone = [with_gradients(layer, layer, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: with_gradients(copy.copy(layer), layer, x), inputs))
    for got, wanted in zip(together, alone, strict=True):
        assert_same(got, wanted)
