import copy
import functools
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import einlinear as el
from cases import STRUCTURES, WIDTHS
from einlinear import EinlinearError, EinsumLinear
from einlinear.layers.scaling import init_std
from einlinear.models.mup.groups import scaling_table

ALL = [(name, *widths) for name in STRUCTURES for widths in WIDTHS]


def make(name="btt(rank=2)", d_in=64, d_out=48, **options):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "structure": STRUCTURES[name]} | options
    return EinsumLinear(d_in, d_out, **options)


@pytest.mark.parametrize(("name", "d_in", "d_out"), ALL)
def test_the_layer_is_its_dense_matrix(name, d_in, d_out):
    layer = make(name, d_in, d_out)
    nn.init.normal_(layer.bias)
    weight = layer.to_dense()
    assert weight.shape == (d_out, d_in)
    x = torch.randn(3, 5, d_in, dtype=torch.float64)
    expected = nn.functional.linear(x, weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (4, 1, 2), (300,)])
def test_any_leading_shape(shape):
    layer = make()
    x = torch.randn(*shape, 64, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape, 48)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_the_output_is_contiguous_though_padded(bias):
    layer = make("monarch", 61, 67, bias=bias)
    assert layer.plan.d_out_padded > 67
    assert layer(torch.randn(5, 61, dtype=torch.float64)).is_contiguous()


def test_drop_in_for_linear():
    model = nn.Sequential(make(d_in=64, d_out=64), nn.GELU(), make(d_in=64, d_out=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(512, 64, dtype=torch.float64)
    target = torch.randn(512, 8, dtype=torch.float64)
    losses = []
    for _ in range(30):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_copies_and_files():
    layer = make()
    x = torch.randn(7, 64, dtype=torch.float64)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    other = EinsumLinear(64, 48, structure="btt(rank=2)", dtype=torch.float64)
    other.load_state_dict(torch.load(saved))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(again(x), layer(x))
    assert sorted(layer.state_dict()) == ["A", "B", "bias"]
    assert sorted(make("btt(num_factors=3)", bias=False).state_dict()) == ["A", "B", "C"]


def test_meta_device():
    layer = EinsumLinear(1024, 4096, structure=el.btt(rank=4), device="meta")
    assert layer.A.is_meta
    assert layer(torch.empty(3, 1024, device="meta")).shape == (3, 4096)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(3, 1024)).isfinite().all()


@pytest.mark.parametrize("name", STRUCTURES)
def test_initial_weights_have_the_planned_deviation(name):
    layer = make(name, 256, 256)
    for step in layer.plan.steps:
        weight = layer.get_parameter(step.factor)
        std = init_std(step.fan_in, step.fan_out)
        # The deviation of n normal numbers is off by 1 / sqrt(2 n) at one sigma; five are allowed.
        assert abs(weight.std().item() / std - 1) < 5 / math.sqrt(2 * weight.numel()) + 1e-12
    assert layer.bias.abs().max() == 0


# Deviations, spectral and by fan-in: of a factor from 256 to 8 and one back, and from 256 to 64.
BY_FAN_IN = [
    ("low_rank(rank=8)", 256, {"A": (math.sqrt(8) / 256, 1 / 16), "B": (1 / math.sqrt(8),) * 2}),
    ("dense()", 64, {"A": (1 / 32, 1 / 16)}),
]


@pytest.mark.parametrize(("structure", "d_out", "stds"), BY_FAN_IN)
@pytest.mark.parametrize("num_experts", [0, 64])
def test_factors_that_narrow_start_larger_by_their_fan_in(structure, d_out, stds, num_experts):
    """Rates are those of the same fan-in and fan-out."""
    found = {}
    for place, kind in enumerate(("spectral", "fan_in")):
        torch.manual_seed(0)
        own = {"structure": structure, "factor_init": kind}
        make_layer = functools.partial(el.MoELinear, num_experts=num_experts)
        layer = (make_layer if num_experts else EinsumLinear)(256, d_out, **own)
        found[kind] = [row.rate for row in scaling_table(layer, 1.0, base_width=64)]
        for name, pair in stds.items():
            weight = layer.get_parameter(name)
            assert layer.param_scaling()[name].init_std == pytest.approx(pair[place], rel=1e-12)
            # As above, five sigma.
            error = 5 / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(pair[place], rel=error)
    assert found["spectral"] == found["fan_in"]


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_norm_has_the_deviation_of_the_start_as_its_limit(is_trained):
    layer = make(structure="low_rank(rank=8)", d_in=256, d_out=256, factor_init="fan_in")
    with torch.no_grad():
        layer.A.mul_(3)  # far above 1/16
        layer.B.mul_(0.5)
    x = torch.randn(5, 256, dtype=torch.float64)
    a = layer.A.detach().reshape(256, 8) * (1 / 16) / layer.A.detach().square().mean().sqrt()
    wanted = x @ a @ layer.B.detach().reshape(8, 256)
    with torch.set_grad_enabled(is_trained):
        torch.testing.assert_close(layer(x).detach(), wanted, atol=1e-10, rtol=0)
    assert layer.factors()[0].square().mean().sqrt().item() == pytest.approx(1 / 16)
    assert "factor_init='fan_in'" in repr(layer)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.factor_init == "fan_in"
        assert torch.equal(again(x), layer(x))
        again.reset_parameters()
        assert again.A.std().item() == pytest.approx(1 / 16, rel=5 / math.sqrt(2 * 2048))


def test_scaling_is_declared():
    scaling = make().param_scaling()
    assert sorted(scaling) == ["A", "B", "bias"]
    assert scaling["A"].num_factors == 2
    assert scaling["A"].fan_in == make().plan.fan_in["A"]


def test_weight_norm_lets_weights_shrink_but_not_grow():
    layer, free = make(), make(weight_norm=False)
    with torch.no_grad():
        for step in layer.plan.steps:
            layer.get_parameter(step.factor).mul_(100)
    std = layer.param_scaling()["A"].init_std
    assert layer.factors()[0].square().mean().sqrt().item() == pytest.approx(std)
    with torch.no_grad():
        layer.A.mul_(1e-6)
    assert torch.equal(layer.factors()[0], layer.A)
    assert free.factors()[0] is free.A
    assert "weight_norm=False" in repr(free)


def test_weight_norm_of_a_zero_factor():
    layer = make()
    nn.init.zeros_(layer.B)
    x = torch.randn(4, 64, dtype=torch.float64)
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert torch.equal(layer(x), torch.zeros(4, 48, dtype=torch.float64))


def test_the_gradient_flows_through_the_norm():
    layer = make()
    with torch.no_grad():
        layer.A.mul_(3)
    x = torch.randn(2, 64, dtype=torch.float64)
    parameters = {name: p.detach().requires_grad_() for name, p in layer.named_parameters()}

    def loss(a):
        return torch.func.functional_call(layer, parameters | {"A": a}, x).square().sum()

    assert torch.autograd.gradcheck(loss, parameters["A"])


def test_repr_shows_the_structure():
    assert repr(make("monarch", bias=False)) == (
        "EinsumLinear(in_features=64, out_features=48, bias=False, "
        "structure='XA^1/2 XAB^1/2 YB^1/2 YAB^1/2')"
    )
    assert make().structure == el.btt(rank=2)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 63, dtype=torch.float64),
        torch.randn(3, 64),
        torch.ones(3, 64, dtype=torch.long),
        torch.ones(()),
    ],
)
def test_bad_input(x):
    with pytest.raises(EinlinearError, match=r"takes torch.float64, with a last axis of 64"):
        make()(x)


def test_what_reads_the_weight_of_a_linear_works():
    layer = make(d_in=64, d_out=64)
    assert torch.equal(layer.weight, layer.to_dense())
    block = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dtype=torch.float64).eval()
    block.linear1 = layer
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    with torch.no_grad():  # torch's fast path, which takes the weights of linear1 and linear2
        fast = block(x)
    torch.testing.assert_close(fast, block(x))


WRITES = {
    "zeros_": nn.init.zeros_,
    "normal_": nn.init.normal_,
    "orthogonal_": nn.init.orthogonal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "data": lambda w: w.data.normal_(0, 0.02),
    "data of data": lambda w: w.data.data.zero_(),
    "chunk": lambda w: [nn.init.zeros_(part) for part in w.chunk(3)],
    "split": lambda w: w.split([16, 32])[1].zero_(),
    "rows": lambda w: [row.zero_() for row in w],
    "foreach": lambda w: torch._foreach_mul_([torch.ones(3), w], 0),
    "out of several": lambda w: torch.max(
        torch.ones(48, 64), 1, out=(w[:, 0], torch.zeros(48, dtype=torch.long))
    ),
    "part": lambda w: w[3:].unsqueeze(0).fill_(1),
    "transpose": lambda w: w.T.copy_(torch.ones(64, 48)),
    "item": lambda w: w.__setitem__(slice(None), 0),
    "add": lambda w: w.data.__iadd__(1),
    "out": lambda w: torch.neg(torch.ones(48, 64), out=w),
    "set data": lambda w: setattr(w, "data", torch.ones(48, 64)),
    "freeze": lambda w: w.requires_grad_(False),
}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_to_the_weight_is_an_error(write, is_trained):
    layer = make(dtype=torch.float32).requires_grad_(is_trained)
    before = layer.to_dense().detach().clone()
    with torch.no_grad(), pytest.raises(EinlinearError, match="the weight of a structured layer"):
        write(layer.weight)
    assert torch.equal(layer.to_dense(), before)


def test_the_weight_is_an_ordinary_tensor_to_readers():
    layer, x = make(), torch.randn(3, 64, dtype=torch.float64)
    y = nn.functional.linear(x, layer.weight)
    assert type(y) is type(layer.weight.sum()) is type(layer.weight + 1) is torch.Tensor
    torch.testing.assert_close(y, x @ layer.to_dense().T)
    y.sum().backward()
    assert layer.A.grad is not None
    dense = nn.Linear(64, 48, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(layer.weight)
    assert torch.equal(dense.weight, layer.to_dense())
    copied = layer.weight.detach().clone()
    assert type(copied.zero_()) is torch.Tensor
    file = io.BytesIO()
    torch.save({"weight": layer.weight.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, layer.to_dense())
    assert "dtype=torch.float64" in repr(layer.weight)
    parameters = dict(layer.named_parameters())
    gradients = torch.func.grad(
        lambda p: torch.func.functional_call(Reader(layer), {f"layer.{k}": p[k] for k in p}).sum()
    )(parameters)
    assert gradients["A"].shape == layer.A.shape


TAKES = {
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.detach().clone(),
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "deepcopy of data": lambda w: copy.deepcopy(w.data),
    "cpu": lambda w: w.data.cpu(),
    "to": lambda w: w.data.to(torch.float64),
    "pickle": lambda w: pickle.loads(pickle.dumps(w.data)),
    "share": lambda w: w.data.share_memory_(),
    "sparse": lambda w: w.detach().to_sparse().to_dense(),
}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_copies_of_the_weight_are_plain_tensors(take):
    layer = make()
    taken = take(layer.weight)
    assert type(taken) is torch.Tensor
    assert torch.equal(taken, layer.to_dense())
    assert not taken.zero_().any()


@pytest.mark.parametrize(
    "take", [lambda w: w, lambda w: w.data, lambda w: w.detach()], ids=["weight", "data", "detach"]
)
def test_a_parameter_made_of_the_weight_is_as_any_other(take):
    layer, dense = make(bias=False), nn.Linear(64, 48, bias=False, dtype=torch.float64)
    dense.weight = nn.Parameter(take(layer.weight))
    x = torch.randn(3, 64, dtype=torch.float64)
    torch.testing.assert_close(dense(x), layer(x))
    dense(x).sum().backward()
    torch.optim.AdamW(dense.parameters(), lr=0.1).step()
    for module in (dense, copy.deepcopy(dense), pickle.loads(pickle.dumps(dense))):
        assert type(module.weight) is nn.Parameter
        assert not torch.equal(module.weight, layer.to_dense())
        nn.init.zeros_(module.weight)
        assert module.weight.is_leaf
        assert not module(x).any()


class Teacher(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.register_buffer("start", layer.weight.detach())


def test_the_weight_at_the_start_is_a_buffer_as_any_other():
    teacher = Teacher(make())
    copied = copy.deepcopy(teacher)
    nn.init.zeros_(copied.start)
    assert teacher.start.any()
    teacher.load_state_dict(copied.state_dict())
    assert not teacher.start.any()


@pytest.mark.parametrize(
    "freeze",
    [lambda w: setattr(w, "requires_grad", False), lambda w: w.requires_grad_(False)],
    ids=["attribute", "method"],
)
def test_freezing_the_weight_is_an_error_that_says_how(freeze):
    with pytest.raises(EinlinearError, match=r"requires_grad(.|\n)*layer.requires_grad_\(False\)"):
        freeze(make().weight)


def test_attributes_of_the_weight_that_may_be_set():
    weight = make().weight
    weight.grad = None
    weight.retain_grad()
    weight.sum().backward()
    assert weight.grad.shape == (48, 64)


@pytest.mark.parametrize(
    "value", [None, torch.ones(48, 64), nn.Parameter(torch.ones(48, 64))], ids=lambda v: type(v)
)
def test_the_weight_cannot_be_replaced(value):
    with pytest.raises(EinlinearError, match=r"cannot be replaced(.|\n)*nn.Linear"):
        make().weight = value


@pytest.mark.parametrize("settings", [{}, {"pre_dispatch": True}], ids=["", "pre_dispatch"])
def test_the_weight_is_read_in_traced_code(settings):
    layer, x = make(), torch.randn(3, 64, dtype=torch.float64)
    traced = make_fx(lambda x: nn.functional.linear(x, layer.weight), **settings)(x)
    torch.testing.assert_close(traced(x), x @ layer.to_dense().T)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert nn.functional.linear(x, layer.weight).shape == (3, 48)


class Reader(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self):
        return self.layer.weight


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
def test_the_weight_is_read_in_compiled_and_exported_code():
    reader = Reader(make())
    wanted = reader().detach()
    compiled = torch.compile(reader, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled().detach(), wanted)
    torch.testing.assert_close(torch.export.export(reader, ()).module()().detach(), wanted)
    twice = torch.compile(lambda weight: 2 * weight, fullgraph=True, backend="eager")
    for weight in (reader(), reader().data):
        torch.testing.assert_close(twice(weight).detach(), 2 * wanted)


def test_an_input_elsewhere():
    layer = EinsumLinear(64, 64, structure="btt", device="meta")
    with pytest.raises(EinlinearError, match=r"on cpu\n  rule: .* on meta"):
        layer(torch.randn(3, 64))


def test_bad_arguments():
    with pytest.raises(EinlinearError, match="not a multiple"):
        EinsumLinear(64, 64, structure="XA^1 XAB:7 YB^1")
    with pytest.raises(EinlinearError, match="whole number"):
        EinsumLinear(0, 64, structure="btt")
    with pytest.raises(EinlinearError, match="a structure is given as 7"):
        EinsumLinear(64, 64, structure=7)
    with pytest.raises(EinlinearError, match="factor_init is 'fan_out'"):
        EinsumLinear(64, 64, structure="btt", factor_init="fan_out")


def test_nothing_in_forward_waits_for_a_value():
    layer = make(dtype=torch.float32)
    x = torch.randn(300, 64)
    with torch.profiler.profile() as record:
        layer(x)
    assert not [event.name for event in record.events() if event.name == "aten::item"]


def test_weights_for_which_there_is_no_memory():
    with pytest.raises(EinlinearError) as told:
        EinsumLinear(10**6, 64, structure="low_rank(rank=1000000000)")
    assert "from 1000000 to 64 has 1,000,064,000,000,000 weights" in told.value.what
    with pytest.raises(RuntimeError, match="device"):
        EinsumLinear(4, 4, structure="btt", device="nowhere")
