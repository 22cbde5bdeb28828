"""GPT: against its formulas, its counts, and everything that is done to models."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

import einlinear as el
from einlinear.models.sites import find_sites

POSITIONS = ("learned", "rotary", "alibi")


def drawn(model, std=0.3):
    """All parameters drawn, so that no zero hides a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=std)
    return model


def small(positions="learned", **options):
    sizes = {"context": 24, "width": 32, "depth": 2, "head_size": 8} | options
    return el.GPT(17, positions=positions, **sizes)


def tokens(batch=3, length=19, vocab_size=17):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def by_hand(model, text):
    """The model's formulas for one sequence, in loops over heads and pairs of tokens."""
    w = {name: p.detach() for name, p in model.named_parameters()}
    width, heads, size = model.width, model.num_heads, model.width // model.num_heads

    def norm(x, name):
        return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], eps=1e-5)

    def turned(x, place):
        if model.positions != "rotary":
            return x
        pairs = torch.complex(x[: size // 2], x[size // 2 :])
        angles = place * 10000.0 ** (-2 * torch.arange(size // 2).double() / size)
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag])

    x = w["embedding.weight"][text]
    if model.positions == "learned":
        x = x + w["places.weight"][: len(text)]
    for n in range(model.depth):
        at = f"blocks.{n}.attention"
        y = norm(x, f"blocks.{n}.attention_norm")
        q, k, v = ((y @ w[f"{at}.{c}_proj.weight"].T).split(size, 1) for c in "qkv")
        mixed = torch.zeros(len(text), width, dtype=x.dtype)
        for h in range(heads):
            for i in range(len(text)):
                query = turned(norm(q[h][i], f"{at}.q_norm"), i)
                keys = [turned(norm(k[h][j], f"{at}.k_norm"), j) for j in range(i + 1)]
                scores = torch.stack([8 * query @ key / size for key in keys])
                if model.positions == "alibi":
                    back = torch.arange(i, -1, -1)
                    scores = scores - 2 ** (-8 * (h + 1) / heads) * back
                mixed[i, h * size : (h + 1) * size] = scores.softmax(0) @ v[h][: i + 1]
        x = x + sqrt(3 / model.depth) * mixed @ w[f"{at}.o_proj.weight"].T
        y = norm(x, f"blocks.{n}.mlp_norm") @ w[f"blocks.{n}.mlp.up.weight"].T
        x = x + sqrt(3 / model.depth) * gelu(y) @ w[f"blocks.{n}.mlp.down.weight"].T
    if model.tied:
        return norm(x, "norm") @ w["embedding.weight"].T * 64 / width
    return norm(x, "norm") @ w["head.weight"].T


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_model_is_what_its_formulas_say(positions, tied):
    model = drawn(small(positions, tied=tied, dtype=torch.float64))
    text = tokens()
    torch.testing.assert_close(model(text)[1], by_hand(model, text[1]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positions", POSITIONS)
def test_no_token_sees_later_ones(positions):
    model = drawn(small(positions, dtype=torch.float64))
    text = tokens()
    changed = text.clone()
    changed[:, 11] = (text[:, 11] + 1) % 17
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :11], after[:, :11])
    assert (before[:, 11:] - after[:, 11:]).abs().amin(-1).max() > 0


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters(positions):
    model = drawn(small(positions, dtype=torch.float64))
    text = torch.tensor([[3, 5, 7, 2]])
    swapped = torch.tensor([[5, 3, 7, 2]])
    assert (model(text)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-3


def linear_macs(model):
    return sum(site.d_in * site.d_out for site in find_sites(model))


def test_the_dense_reference_of_the_paper():
    model = el.GPT(96, context=128, width=256, depth=3, device="meta")
    linear = 3 * 12 * 256**2 + 256 * 96
    assert linear_macs(model) == linear
    assert model.attention_macs() == 3 * 2 * 128 * 256
    assert model.norm_macs() == 5 * 256 * 13
    assert linear + model.attention_macs() + model.norm_macs() == 2_597_120


@pytest.mark.parametrize("positions", POSITIONS)
def test_counts_are_those_of_torch(positions):
    sizes = {"context": 128, "width": 256, "depth": 3, "positions": positions}
    model = el.GPT(96, device="meta", **sizes)
    for length in (128, 32):
        text = torch.empty(4, length, dtype=torch.int64, device="meta")
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(text)
        macs = linear_macs(model) + model.attention_macs(length)
        assert counter.get_total_flops() == 2 * 4 * length * macs


def test_norms_are_all_that_read_the_width_otherwise():
    model = small()
    read = []
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda m, x, y: read.append(x[0].numel()))
    model(tokens(1, 1))
    assert 5 * sum(read) == model.norm_macs()
