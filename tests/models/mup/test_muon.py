"""Muon: its steps against singular value decompositions, torch's own Muon and AdamW."""

import copy
import io
import pickle
from math import prod, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import einlinear as el
from cases import STRUCTURES, WIDTHS, structures
from einlinear import EinlinearError, EinsumLinear, MatrixAxes, MoELinear, Muon
from einlinear.layers.scaling import ADAM_SHARE, Scaling, infer_axes, muon_rate
from einlinear.models.mup.groups import plain_groups
from einlinear.models.mup.muon import QUINTIC, orthogonalised
from kit.pair import run_two
from kit.small_models import Perceptron, Transformer, tokens, vectors
from kit.two_processes import compare_muon, muon_model, train_with_muon

LR = 0.02
# Converges to singular values of 1: the orthogonal factor of the polar decomposition.
EXACT = {"ns_coefficients": (1.875, -1.25, 0.375), "ns_steps": 60}
TOLERANCE = 1e-8


def groups_of(model, **options):
    return el.param_groups(model, LR, optimizer="muon", base_width=32, **options)


def polar(matrix):
    """U V' of the singular value decomposition, over all that are not zero."""
    u, s, v = np.linalg.svd(np.asarray(matrix), full_matrices=False)
    kept = s > 1e-9 * max(s.max(initial=0), 1e-300)
    return u[:, kept] @ v[kept]


def step_matrix(step, sizes, factor):
    """The matrix by which a step multiplies the whole tensor before it, from its equation alone.

    Up to the order of rows and columns it consists of the matrices of the factor, each as often as
    the factor is repeated; its polar factor consists of theirs.
    """
    before, rest = step.equation.replace("...", "").split(",")
    operand, after = rest.split("->")
    shape = dict(zip(operand, factor.shape, strict=True)) | sizes
    size = prod(shape[letter] for letter in before)
    basis = np.eye(size).reshape(size, *(shape[letter] for letter in before))
    return np.einsum(f"Z{before},{operand}->Z{after}", basis, factor).reshape(size, -1)


def letter_sizes(plan):
    """The size of every letter of the equation."""
    before = plan.steps[0].equation.replace("...", "").split(",")[0]
    return dict(zip(before, plan.x_shape, strict=True)) | {
        letter: size
        for step in plan.steps
        for letter, size in zip(
            step.equation.split(",")[1].split("->")[0], plan.factor_shapes[step.factor], strict=True
        )
    }


def check_factors(plan, changes, gradients):
    """Each change must be the polar factor of its gradient, at the rate of the rule."""
    sizes = letter_sizes(plan)
    for step in plan.steps:
        before, rest = step.equation.replace("...", "").split(",")
        operand, after = rest.split("->")
        fan_in = prod(sizes[letter] for letter in operand if letter not in after)
        fan_out = prod(sizes[letter] for letter in operand if letter not in before)
        rate = LR * sqrt(fan_out / fan_in) / len(plan.steps)
        got = step_matrix(step, sizes, changes[step.factor]) / rate
        wanted = polar(step_matrix(step, sizes, gradients[step.factor]))
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
        assert np.linalg.norm(changes[step.factor].reshape(-1)) > 0
        assert np.linalg.norm(got, 2) == pytest.approx(1, abs=TOLERANCE)


def changes_of(model, seed=0, **options):
    """The gradients, random, and the change of every parameter in one step without momentum."""
    options = {"momentum": 0.0} | EXACT | options
    optimizer = Muon(groups_of(model), **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=g)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return gradients, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def small(plan):
    sizes = [prod(plan.sizes[edge] for edge in layout) for layout in plan.layouts]
    return max(sizes) <= 600


CASES = [
    (name, widths)
    for name in STRUCTURES
    for widths in WIDTHS
    if small(el.make_plan(STRUCTURES[name], *widths))
]


def test_every_structure_is_among_the_cases():
    assert {name for name, _ in CASES} == set(STRUCTURES)


@pytest.mark.parametrize(("name", "widths"), CASES)
def test_each_matrix_of_a_factor_is_orthogonalised(name, widths):
    layer = EinsumLinear(*widths, structure=STRUCTURES[name], dtype=torch.float64)
    gradients, changes = changes_of(layer)
    changes, gradients = ({k: v.numpy() for k, v in d.items()} for d in (changes, gradients))
    check_factors(layer.plan, changes, gradients)


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_matrix_of_each_expert_is_orthogonalised(name):
    layer = MoELinear(
        16, 32, structure=STRUCTURES[name], num_experts=3, dtype=torch.float64, bias=False
    )
    gradients, changes = changes_of(layer)
    for expert in range(3):
        own = [{k: v[expert].numpy() for k, v in d.items()} for d in (changes, gradients)]
        check_factors(layer.plan, *own)
    gate = polar(gradients["gate.weight"]) * LR * sqrt(3 / 16)
    np.testing.assert_allclose(changes["gate.weight"], gate, atol=TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(structures(max_factors=3), st.integers(2, 9), st.integers(2, 9))
def test_random_structures(structure, d_in, d_out):
    plan = el.make_plan(structure, 4 * d_in, 4 * d_out)
    if not small(plan):
        return
    layer = EinsumLinear(4 * d_in, 4 * d_out, structure=structure, dtype=torch.float64)
    gradients, changes = changes_of(layer)
    changes, gradients = ({k: v.numpy() for k, v in d.items()} for d in (changes, gradients))
    check_factors(layer.plan, changes, gradients)


@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 6), st.integers(0, 10**6))
def test_singular_values_follow_the_polynomial(count, rows, more, seed):
    """The singular vectors stay, and each singular value goes through the polynomial five times."""
    matrices = torch.randn(
        count, rows, rows + more, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    got = orthogonalised(matrices)
    u, s, v = np.linalg.svd(matrices.numpy(), full_matrices=False)
    s = s / np.sqrt((s**2).sum(-1, keepdims=True))
    a, b, c = QUINTIC
    t = s
    for _ in range(5):
        t = a * t + b * t**3 + c * t**5
    np.testing.assert_allclose(got, (u * t[:, None]) @ v, atol=1e-10)
    assert (t[s > 0.002] > 0.68).all()
    assert t.max() < 1.21


@pytest.mark.parametrize("shape", [(5, 1, 7), (5, 1, 1), (1, 1, 3)])
def test_a_single_row_is_normalised_exactly(shape):
    row = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(orthogonalised(row), row / row.norm(dim=(1, 2), keepdim=True))


def test_gradients_of_any_size_make_the_same_step():
    matrices = torch.randn(3, 4, 6)
    wanted = orthogonalised(matrices)
    for size in (1e-8, 1e-4, 1e10):
        torch.testing.assert_close(orthogonalised(matrices * size), wanted, atol=1e-4, rtol=0)
    matrices[1] = 0
    got = orthogonalised(matrices)
    assert not got[1].any()
    torch.testing.assert_close(got[0], wanted[0])


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 1, 6)])
def test_squares_of_gradients_neither_overflow_nor_vanish(shape):
    matrices = torch.randn(shape)
    matrices[2] = 0
    wanted = orthogonalised(matrices)
    for size in (2.0**83, 2.0**126, 2.0**-30, 2.0**-110):  # the first is about 1e25
        assert torch.equal(orthogonalised(matrices * size, eps=0 if size < 1 else 1e-12)[:2],
                           wanted[:2])  # fmt: skip
    mixed = matrices * torch.tensor([1e25, 1e-30, 1.0])[:, None, None]  # each on its own
    torch.testing.assert_close(orthogonalised(mixed, eps=1e-37), wanted)
    tiny = orthogonalised(torch.full((1, 1, 4), 1e-30))  # smaller than eps: a smaller step
    torch.testing.assert_close(tiny, torch.full((1, 1, 4), 1e-18), atol=0, rtol=1e-5)
    huge = orthogonalised(matrices.double() * 1e200)
    torch.testing.assert_close(huge, orthogonalised(matrices.double()))


def test_muon_steps_as_far_with_huge_gradients():
    model = nn.Linear(6, 4, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = 1e25 * torch.randn(4, 6)
    el.Muon(el.param_groups(model, LR, optimizer="muon", base_width=6)).step()
    assert (model.weight.detach() - before).norm() > 0.5 * LR


def test_precisions():
    matrices = torch.randn(3, 8, 16)
    exact = orthogonalised(matrices.double())
    assert orthogonalised(matrices).dtype == torch.float32
    torch.testing.assert_close(orthogonalised(matrices).double(), exact, atol=1e-4, rtol=0)
    half = orthogonalised(matrices, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), exact, atol=5e-2, rtol=0)
    assert orthogonalised(matrices.double(), dtype="bfloat16").dtype == torch.float64
    assert orthogonalised(matrices.bfloat16()).dtype == torch.float32


def pieces(model, name, cut):
    """The matrices of one parameter, cut by hand, and how much each changed."""
    gradients, changes = changes_of(model.double())
    return [[m.numpy() for m in cut(d[name])] for d in (gradients, changes)]


LAYERS = {
    "linear": (lambda: nn.Linear(6, 8), "weight", lambda w: [w]),
    "one output": (lambda: nn.Linear(6, 1), "weight", lambda w: [w]),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), "weight", lambda w: [w.reshape(5, 12)]),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", lambda w: w.chunk(3)),
    "attention, keys": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
        "k_proj_weight",
        lambda w: [w],
    ),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), "weight", lambda w: [w.reshape(6, 36)]),
    "convolution in groups": (
        lambda: nn.Conv1d(4, 6, 3, groups=2),
        "weight",
        lambda w: [w[:3].reshape(3, 6), w[3:].reshape(3, 6)],
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
        "weight",
        lambda w: [w[i : i + 2].transpose(0, 1).reshape(3, 6) for i in (0, 2)],
    ),
    "recurrent": (lambda: nn.LSTM(5, 7), "weight_ih_l0", lambda w: w.chunk(4)),
    "recurrent, projected": (lambda: nn.LSTM(5, 7, proj_size=3), "weight_hr_l0", lambda w: [w]),
    "feed-forward experts": (
        lambda: el.MoEFeedForward(6, 8, num_experts=3),
        "up",
        lambda w: list(w),
    ),
}


class Fused(nn.Module):
    """Experts as Hugging Face stores them: (out, in), or (in, out)."""

    def __init__(self, is_transposed):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 10, 8))
        self.down_proj = nn.Parameter(torch.randn(3, 8, 5))
        if is_transposed:
            for p in self.parameters():
                p.data = p.data.transpose(1, 2).contiguous()


LAYERS |= {
    "fused experts": (
        lambda: Fused(False),
        "gate_up_proj",
        lambda w: [half for expert in w for half in expert.chunk(2)],
    ),
    "fused experts, transposed": (
        lambda: Fused(True),
        "gate_up_proj",
        lambda w: [half for expert in w for half in expert.chunk(2, 1)],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name):
    make, parameter, cut = LAYERS[name]
    model = nn.ModuleDict({"layer": make(), "head": nn.Linear(4, 4)})
    model["head"].requires_grad_(False)
    for gradient, change in zip(*pieces(model, f"layer.{parameter}", cut), strict=True):
        size = np.linalg.norm(change, 2)
        np.testing.assert_allclose(change / size, polar(gradient), atol=1e-7)


def test_rates_by_hand():
    model = nn.ModuleDict(
        {
            "square": nn.Linear(48, 48),
            "up": nn.Linear(16, 64),
            "down": nn.Linear(64, 16),
            "packed": nn.MultiheadAttention(16, 2),
            "btt": EinsumLinear(64, 64, structure="btt(rank=2)"),  # 8 -> 16, 16 -> 8
            "low": EinsumLinear(64, 16, structure="low_rank(rank=4)"),
            "embedding": nn.Embedding(11, 24),
            "norm": nn.LayerNorm(24),
            "head": nn.Linear(64, 10),
        }
    )
    table = el.scaling_table(model, LR, optimizer="muon", base_width=32, head="head")
    got = {row.name: row.rate / LR for row in table if row.axes is not None}
    assert got == pytest.approx(
        {
            "square.weight": 1,
            "up.weight": 2,
            "down.weight": 1 / 2,
            "packed.in_proj_weight": 1,
            "packed.out_proj.weight": 1,
            "btt.A": sqrt(2) / 2,
            "btt.B": sqrt(1 / 2) / 2,
            "low.A": sqrt(4 / 64) / 2,
            "low.B": sqrt(16 / 4) / 2,
        },
        rel=1e-12,
    )
    adam = {row.name: row.rate for row in table if row.axes is None}
    assert adam.pop("head.weight") == pytest.approx(LR * ADAM_SHARE * 32 / 64)
    assert set(adam.values()) == {LR * ADAM_SHARE}
    assert {"embedding.weight", "norm.weight", "head.bias", "btt.bias"} <= adam.keys()
    assert table.adam_lr == LR * ADAM_SHARE
    own = el.scaling_table(model, LR, optimizer="muon", base_width=32, head="head", adam_lr=0.003)
    assert {r.name: r.rate for r in own if r.axes is None}["norm.bias"] == 0.003
    assert {r.name: r.rate for r in own if r.axes is not None}["square.weight"] == LR
    first, *lines = str(table).splitlines()
    assert first == "muon, lr 0.02 at base width 32; adamw, lr 0.01"
    assert [line.split()[-1] for line in lines if line.startswith(("btt.A", "head.weight"))] == [
        "muon",
        "adamw",
    ]


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4))
def test_rates_keep_their_product(fan_in, fan_out, num_factors):
    """Transposed matrices have inverse rates, and a square one exactly lr / num_factors."""
    there = Scaling(fan_in, fan_out, 0.0, num_factors)
    back = Scaling(fan_out, fan_in, 0.0, num_factors)
    product = muon_rate(there, LR) * muon_rate(back, LR)
    assert product == pytest.approx((LR / num_factors) ** 2)
    assert muon_rate(Scaling(fan_in, fan_in, 0.0), LR) == LR


def test_all_parameters_are_in_one_group_each():
    model = nn.Sequential(
        Perceptron(64, "btt(rank=2)"), MoELinear(8, 8, structure="btt", num_experts=2)
    )
    groups = groups_of(model, weight_decay=0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    for group in groups:
        decay = group["lr"] * group["weight_decay"]
        if group["axes"] is not None:
            assert decay == pytest.approx(LR * 0.1)
        elif "head" in group["name"]:
            assert decay == pytest.approx(LR * ADAM_SHARE * 0.1)
        else:
            assert decay == 0


def test_groups_without_mup():
    model = Perceptron(64, "btt(rank=2)")
    groups = plain_groups(model, LR, optimizer="muon", weight_decay=0.3)
    assert {(g["axes"] is None, g["lr"], g["weight_decay"]) for g in groups} == {
        (False, LR, 0.3),
        (True, LR * ADAM_SHARE, 0.3),
    }
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    [group] = plain_groups(model, 0.01, optimizer="adam")
    assert group == {"params": list(model.parameters()), "lr": 0.01}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("widths", [(24, 24), (12, 30)])
def test_linear_layers_train_as_with_torchs_muon(monkeypatch, widths, nesterov):
    """Layers that do not narrow have its rates; torch always rounds to bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*widths, bias=False), nn.Linear(8, 8)).double()
    other = copy.deepcopy(model)
    options = {"momentum": 0.9, "nesterov": nesterov}
    ours = Muon(groups_of(model, weight_decay=0.1), **options)
    theirs = torch.optim.Muon([other[0].weight], lr=LR, weight_decay=0.1, **options)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        gradient = torch.randn(model[0].weight.shape, dtype=torch.float64, generator=g)
        model[0].weight.grad, other[0].weight.grad = gradient, gradient.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(model[0].weight, other[0].weight, atol=1e-10, rtol=0)


def test_everything_else_trains_as_with_adamw():
    torch.manual_seed(0)
    model = Transformer(32, "dense")
    groups = groups_of(model, weight_decay=0.1)
    ours = Muon(groups, betas=(0.8, 0.9), adam_eps=1e-6)
    other = copy.deepcopy(model)
    twins = dict(zip(map(id, model.parameters()), other.parameters(), strict=True))
    adam = [
        {"params": [twins[id(p)] for p in g["params"]]} | {k: g[k] for k in ("lr", "weight_decay")}
        for g in groups
        if g["axes"] is None
    ]
    theirs = torch.optim.AdamW(adam, betas=(0.8, 0.9), eps=1e-6, fused=True)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            twins[id(p)].grad = p.grad.clone()
        ours.step()
        theirs.step()
    names = {name for name, p in model.named_parameters() if torch.equal(p, twins[id(p)])}
    by_adam = {row.name for row in el.scaling_table(model, LR, optimizer="muon", base_width=32)
               if row.axes is None}  # fmt: skip
    assert names == by_adam
    assert {"embedding.weight", "head.weight", "norm.bias"} <= names


def mixed():
    torch.manual_seed(0)
    return nn.Sequential(
        EinsumLinear(16, 16, structure="btt(rank=2)"),
        nn.ReLU(),
        nn.Linear(16, 32),
        MoELinear(32, 8, structure="low_rank(rank=2)", num_experts=3),
    )


def train(model, optimizer, seeds):
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(20, 16, generator=g)).square().mean().backward()
        optimizer.step()


def test_it_trains():
    model = mixed()
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    before = float(model(x).square().mean().detach())
    train(model, Muon(groups_of(model)), range(20))
    assert float(model(x).square().mean().detach()) < 0.8 * before


def test_zero_and_missing_gradients_change_nothing():
    model = mixed()
    optimizer = Muon(groups_of(model))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not optimizer.state
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert float(optimizer.step(lambda: 3.0)) == 3.0


def test_a_saved_state_continues_exactly():
    model = mixed()
    optimizer = Muon(groups_of(model, weight_decay=0.1), momentum=0.8)
    train(model, optimizer, range(3))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    again = mixed()
    restored = Muon(groups_of(again))
    restored.load_state_dict(state["optimizer"])
    again.load_state_dict(state["model"])
    pickled, copied = (
        pickle.loads(pickle.dumps((model, optimizer))),
        copy.deepcopy((model, optimizer)),
    )
    train(model, optimizer, range(3, 6))
    for other, of_other in ((again, restored), pickled, copied):
        train(other, of_other, range(3, 6))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_schedulers_scale_every_group():
    optimizer = Muon(groups_of(mixed()))
    before = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 2 for lr in before]


def test_many_matrices_of_one_shape_are_independent(monkeypatch):
    """Batches of many parameters, of one, and cut in the middle give the same weights."""
    results = []
    for largest in (2**22, 1, 300):
        monkeypatch.setattr("einlinear.models.mup.muon._LARGEST_BATCH", largest)
        torch.manual_seed(0)
        model = nn.Sequential(*(EinsumLinear(16, 16, structure="btt(rank=2)") for _ in range(3)))
        train(model, Muon(groups_of(model)), range(2))
        results.append([p.detach() for p in model.parameters()])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_shapes_tell_axes():
    def inferred(shape, fan_in, fan_out):
        return infer_axes(el.matrix_scaling(fan_in, fan_out), shape)

    assert inferred((8, 5), 5, 8) == MatrixAxes((-1,), (-2,))
    assert inferred((5, 8), 5, 8) == MatrixAxes((-2,), (-1,))
    assert inferred((7, 8, 5), 5, 8) == MatrixAxes((-1,), (-2,))
    assert inferred((24, 5), 5, 8) == MatrixAxes((-1,), (-2,), (-2, 3))
    assert inferred((5, 24), 5, 8) == MatrixAxes((-2,), (-1,), (-1, 3))
    assert inferred((8, 5, 3), 15, 8) == MatrixAxes((-2, -1), (-3,))
    assert inferred((9,), 9, 1) == MatrixAxes((-1,), ())
    assert inferred((9,), 1, 9) == MatrixAxes((), (-1,))
    assert inferred((8, 7), 5, 8) is None
    assert inferred((), 1, 1) is None


class Odd(nn.Module):
    def __init__(self, axes=None):
        super().__init__()
        self.axes = axes
        self.weight = nn.Parameter(torch.randn(3, 4, 5, 2))

    def param_scaling(self):
        return {"weight": el.matrix_scaling(10, 4, self.axes)}


def test_a_layout_that_nothing_tells():
    with pytest.raises(
        EinlinearError, match=r"weight has the shape \(3, 4, 5, 2\), a fan-in of 10"
    ):
        groups_of(Odd())
    gradients, changes = changes_of(Odd(MatrixAxes((-2, -1), (-3,))).double())
    for gradient, change in zip(gradients["weight"], changes["weight"], strict=True):
        wanted = polar(gradient.reshape(4, 10)) * LR * sqrt(4 / 10)
        np.testing.assert_allclose(change.reshape(4, 10), wanted, atol=TOLERANCE)
    for wrong in ({"inputs": (0,), "outputs": (-1,)}, {"inputs": (-1,), "outputs": (-1,)}):
        with pytest.raises(EinlinearError, match="axes are counted from the end"):
            MatrixAxes(**wrong)
    with pytest.raises(EinlinearError, match="the stacked axis is one of them"):
        MatrixAxes((-1,), (-2,), (-3, 2))


def test_wrong_groups():
    model = nn.Linear(8, 8)
    for groups in (model.parameters(), el.param_groups(model, LR, base_width=8)):
        with pytest.raises(EinlinearError, match="a parameter group for Muon has no axes"):
            Muon(groups)
    for wrong, words in (
        ({"lr": -1.0}, "lr is -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"ns_dtype": "float16"}, "ns_dtype is 'float16'"),
        ({"axes": {"inputs": (-3,), "outputs": (-2,), "stack": (-1, 1)}}, r"the shape \(8, 8\)"),
    ):
        axes = {"inputs": (-1,), "outputs": (-2,), "stack": (-1, 1)}
        with pytest.raises(EinlinearError, match=words):
            Muon([{"params": [model.weight], "axes": axes} | wrong])
    with pytest.raises(EinlinearError, match=r"adam_lr is 0\.1, and the optimizer sgd"):
        el.param_groups(model, LR, base_width=8, optimizer="sgd", adam_lr=0.1)
    embedding = nn.Embedding(4, 8, sparse=True)
    optimizer = Muon(groups_of(embedding))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(EinlinearError, match="a gradient is sparse"):
        optimizer.step()


@pytest.mark.no_cover
@pytest.mark.parametrize("structure", ["dense", "btt(rank=2)", "low_rank", "kronecker"])
def test_the_coordinate_check_passes(structure):
    options = {"batch": vectors(), "optimizer": "muon", "lr": 0.05}
    widths = (64, 256, 1024) if structure != "dense" else (64, 128, 256)
    mup = el.coordinate_check(lambda w: Perceptron(w, structure), widths, **options)
    assert mup.passed, mup
    naive = el.coordinate_check(
        lambda w: Perceptron(w, structure), widths, parametrization="naive", seeds=1, **options
    )
    assert not naive.passed


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "structure", [pytest.param("dense", marks=pytest.mark.slow), "btt(rank=2)"]
)
def test_the_coordinate_check_of_a_transformer(structure):
    result = el.coordinate_check(
        lambda width: Transformer(width, structure),
        (64, 256),
        batch=tokens(),
        optimizer="muon",
        lr=0.02,
        steps=3,
    )
    assert result.passed, result


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(kind):
    run_two(compare_muon, kind, train_with_muon(*muon_model()))


BAD_GROUPS = [
    ({"axes": {"inputs": (0,), "outputs": (1,)}}, "axes are counted from the end"),
    ({"axes": {"inputs": (-1,), "outputs": (-2,), "stack": (-2, 4)}}, "that have all axes"),
    ({"axes": 3}, "the axes of a parameter group are 3"),
    ({"axes": {"rows": (-1,)}}, "the axes of a parameter group are"),
    ({"axes": None, "betas": (1.5, 0.9)}, r"a beta is 1\.5"),
    ({"axes": None, "betas": (0.9,)}, "betas holds 2 numbers"),
    ({"axes": None, "ns_coefficients": (1.0, 2.0)}, "ns_coefficients holds 3 numbers"),
    ({"axes": None, "eps": 0.0}, "eps is above 0"),
    ({"axes": None, "lr": float("inf")}, "lr is inf"),
    ({"axes": None, "lr": "a"}, "lr is 'a'"),
]


@pytest.mark.parametrize(("settings", "words"), BAD_GROUPS, ids=str)
def test_bad_groups_are_refused_when_they_are_added(settings, words):
    with pytest.raises(EinlinearError, match=words):
        el.Muon([{"params": [nn.Parameter(torch.ones(6, 4))], "lr": 0.1} | settings])


def test_axes_of_own_groups_are_plain_in_the_state():
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = el.Muon([{"params": [weight], "axes": el.MatrixAxes((-1,), (-2,), (-2, 3))}])
    weight.grad = torch.randn(6, 4)
    optimizer.step()
    held = optimizer.state_dict()["param_groups"][0]["axes"]
    assert held == {"inputs": (-1,), "outputs": (-2,), "stack": (-2, 3)}


def test_a_loaded_step_is_where_its_parameter_is(monkeypatch):
    """Loading a state leaves the number of steps on the CPU, wherever the parameter is."""
    monkeypatch.setattr("einlinear.models.mup.muon._FUSED", ("meta",))
    bias = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = el.Muon([{"params": [bias], "axes": None}])
    state = {"step": torch.ones(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    held = optimizer.state_dict() | {"state": {0: state}}
    optimizer.load_state_dict(held)
    assert optimizer.state[bias]["step"].device.type == "cpu"
    bias.grad = torch.ones(3, device="meta")
    optimizer.step()
    assert optimizer.state[bias]["step"].device.type == "meta"
