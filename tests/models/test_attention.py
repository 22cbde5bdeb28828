"""ProjectedAttention against nn.MultiheadAttention, which is the oracle."""

import copy

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.models.attention import PROJECTIONS, ProjectedAttention
from kit.twins import shake_

WIDTH, HEADS, BATCH, LONG, SHORT = 24, 4, 3, 7, 5
CAUSAL = nn.Transformer.generate_square_subsequent_mask(SHORT, dtype=torch.float64)


def make(**options):
    torch.manual_seed(0)
    source = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    shake_(source)
    return source, ProjectedAttention(copy.deepcopy(source), {})


def batch(length, width=WIDTH, is_first=False):
    shape = (BATCH, length, width) if is_first else (length, BATCH, width)
    return torch.randn(shape, dtype=torch.float64)


def assert_same(source, attention, inputs, **options):
    """The same output, weights and gradients of the input."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = [module(*inputs, **options) for module in (source, attention)]
    for wanted, got in zip(*outputs, strict=True):
        assert (wanted is None) == (got is None)
        if wanted is not None:
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(out.sin().sum(), inputs) for out, _ in outputs]
    torch.testing.assert_close(*grads)


def bool_mask(*shape):
    """A random mask that forbids some, never all, keys of a query."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention(need_weights, average, batch_first, bias):
    source, attention = make(batch_first=batch_first, bias=bias)
    inputs = [batch(n, is_first=batch_first) for n in (SHORT, LONG, LONG)]
    assert_same(source, attention, inputs, need_weights=need_weights, average_attn_weights=average)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("attn", [None, "all heads", "per head"])
@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("is_bool", [True, False])
def test_masks(need_weights, attn, has_padding, is_bool):
    source, attention = make(batch_first=True)
    inputs = [batch(n, is_first=True) for n in (SHORT, LONG, LONG)]
    masks = {}
    shapes = {"all heads": (SHORT, LONG), "per head": (BATCH * HEADS, SHORT, LONG)}
    if attn:
        masks["attn_mask"] = bool_mask(*shapes[attn])
    if has_padding:
        masks["key_padding_mask"] = bool_mask(BATCH, LONG)
    if not is_bool:
        masks = {name: torch.randn(mask.shape).double() for name, mask in masks.items()}
    assert_same(source, attention, inputs, need_weights=need_weights, **masks)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("is_padded", [True, False])
def test_the_causal_hint(need_weights, is_padded):
    source, attention = make(batch_first=True)
    x = batch(SHORT, is_first=True)
    padding = torch.zeros(BATCH, SHORT, dtype=torch.float64)
    padding[1, 3:] = float("-inf")
    options = {"key_padding_mask": padding} if is_padded else {}
    assert_same(
        source, attention, [x, x, x], attn_mask=CAUSAL, is_causal=True,
        need_weights=need_weights, **options,
    )  # fmt: skip


@pytest.mark.parametrize("need_weights", [True, False])
def test_without_a_batch(need_weights):
    source, attention = make()
    inputs = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (SHORT, LONG, LONG)]
    mask = bool_mask(LONG)
    assert_same(source, attention, inputs, need_weights=need_weights, key_padding_mask=mask)


def test_keys_and_values_of_other_widths():
    source, attention = make(kdim=10, vdim=17)
    assert_same(source, attention, [batch(SHORT), batch(LONG, 10), batch(LONG, 17)])


def test_dropout_only_in_training():
    source, attention = make(dropout=0.5, batch_first=True)
    x = batch(SHORT, is_first=True)
    one, two = attention(x, x, x)[0], attention(x, x, x)[0]
    assert not torch.equal(one, two)
    _, weights = attention(x, x, x, average_attn_weights=False)
    assert (weights == 0).any()
    source.eval(), attention.eval()
    assert_same(source, attention, [x, x, x])


def test_projections_that_are_given_are_used():
    source, _ = make(batch_first=True)
    structured = el.EinsumLinear(WIDTH, WIDTH, structure=el.btt(), dtype=torch.float64)
    attention = ProjectedAttention(source, {"v_proj": structured})
    assert attention.v_proj is structured
    assert "embed_dim=24, num_heads=4, dropout=0.0, batch_first=True" in repr(attention)
    x = batch(SHORT, is_first=True)
    with torch.no_grad():
        source.in_proj_weight[2 * WIDTH :].copy_(structured.to_dense())
        source.in_proj_bias[2 * WIDTH :].zero_()
    assert_same(source, attention, [x, x, x])


def test_copied_projections_keep_their_flags():
    source, _ = make()
    source.in_proj_weight.requires_grad_(False)
    attention = ProjectedAttention(source.eval(), {})
    assert not attention.training
    for name in PROJECTIONS[:3]:
        layer = getattr(attention, name)
        assert (layer.training, layer.weight.requires_grad) == (False, False)
        assert layer.bias.requires_grad
        assert layer.weight.data_ptr() != source.in_proj_weight.data_ptr()
    assert attention.out_proj is source.out_proj


def test_autocast():
    source, attention = make(batch_first=True)
    x = batch(SHORT, is_first=True).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for need_weights in (True, False):
            mask = bool_mask(BATCH, SHORT)
            got, wanted = (
                module.float()(x, x, x, key_padding_mask=mask, need_weights=need_weights)[0]
                for module in (attention, source)
            )
            torch.testing.assert_close(got.float(), wanted.float(), atol=0.05, rtol=0.05)


def test_refusals():
    _, attention = make(batch_first=True)
    x = batch(SHORT, is_first=True)
    with pytest.raises(el.EinlinearError, match="is_causal is given without attn_mask"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(el.EinlinearError, match=r"are \(3, 5, 24\), \(3, 5, 24\), \(5, 24\)"):
        attention(x, x, x[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    _, attention = make(batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(2, WIDTH), torch.randn(3, WIDTH)])
    with pytest.raises(el.EinlinearError, match="are nested, nested, nested"):
        attention(x, x, x)
