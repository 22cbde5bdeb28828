"""Conversion of whole models: what is replaced, what is left, and that outputs are right."""

import copy
import re
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import einlinear as el
from einlinear.models.attention import ProjectedAttention
from einlinear.models.convert.apply import apply_swaps_
from kit.twins import assert_same_gradients, copy_into_, shake_, structured

TOL = 1e-9  # float64


class GPT(nn.Module):
    """A small GPT by hand, with a head that may be tied."""

    def __init__(self, width=32, heads=4, layers=2, symbols=11, is_tied=False):
        super().__init__()
        self.n_head = heads
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.lm_head = nn.Linear(width, symbols, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}
        )
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.attn["qkv"](self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm(x))


def mlp(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def assert_twin(model, make_twin, call):
    """The converted model computes, and learns, what its dense twin does."""
    shake_(model)
    twin = make_twin()
    copy_into_(twin, model)
    outputs = [call(model), call(twin)]
    torch.testing.assert_close(*outputs, atol=TOL, rtol=TOL)
    for output in outputs:
        output.sin().sum().backward()
    assert_same_gradients(model, twin, TOL)


def names_of(swaps):
    return [swap.name for swap in swaps]


def test_a_plain_mlp():
    torch.manual_seed(0)
    model = mlp(16, 64, 48, 10).double()
    original = copy.deepcopy(model)
    report = el.convert_(model, "btt(rank=2)")
    assert [type(m) for m in model] == [el.EinsumLinear, el.EinsumLinear, nn.Linear]
    assert names_of(report.swaps) == ["0", "1"]
    assert [(left.names, left.reason) for left in report.left] == [(("2",), "output head")]
    assert model[0].structure == el.btt(rank=2)
    assert (model[0].bias == 0).all()
    x = torch.randn(5, 16, dtype=torch.float64)
    assert_twin(model, lambda: original, lambda m: m(x))


def test_nested_containers():
    torch.manual_seed(0)
    inner = nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})
    model = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()), inner])
    report = el.convert_(model, el.btt())
    assert names_of(report.swaps) == ["0.0", "1.up", "1.down"]
    assert all(isinstance(m, el.EinsumLinear) for m in (model[0][0], inner["up"], inner["down"]))


def test_the_hand_written_gpt():
    torch.manual_seed(0)
    model = GPT().double()
    original = copy.deepcopy(model)
    report = el.convert_(model, {"*.attn.*": el.heads(), "*.mlp.*": "btt(rank=2)"})
    assert model.blocks[0].attn["qkv"].plan.sizes["YAB"] == 12
    assert model.blocks[0].attn["c_proj"].plan.sizes["XAB"] == 4
    assert [left.names for left in report.left] == [("lm_head",)]
    tokens = torch.randint(11, (3, 8))
    assert_twin(model, lambda: original, lambda m: m(tokens))


def test_the_head_is_what_the_model_declares():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(64, 64)
            self.body = nn.Linear(64, 64)

        def layer_roles(self):
            return {"last": "head"}

    report = el.convert_(Model(), "btt()")
    assert [swap.name for swap in report.swaps] == ["body"]
    assert [(left.names, left.reason) for left in report.left] == [(("last",), "output head")]
    outer = nn.Sequential(Model(), nn.ReLU(), Model())
    assert [swap.name for swap in el.convert_(outer, "btt()").swaps] == ["0.body", "2.body"]


@pytest.mark.no_cover
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("rules", ["btt", "attention", "feed-forward", "parts", "heads"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoder_of_torch(batch_first, norm_first, rules):
    rules = {
        "btt": "btt()",
        "attention": {"*.self_attn.*": "btt(rank=2)"},
        "feed-forward": {"*.linear?": "btt(rank=2)"},
        "parts": {"layers.0.self_attn.[kv]_proj": "btt()", "layers.1.self_attn.out_proj": "btt()"},
        "heads": {"*.self_attn.*": el.heads(), "*": "kronecker()"},
    }[rules]
    model, original = (encoder(batch_first, norm_first) for _ in range(2))
    original.load_state_dict(model.state_dict())
    report = el.convert_(model, rules)
    assert sorted(names_of(report.swaps)) == sorted(structured(model))
    shake_(model)
    copy_into_(original, model)
    x = torch.randn(3, 6, 32, dtype=torch.float64)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
    mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
    x = x if batch_first else x.transpose(0, 1)
    for options in ({}, {"mask": mask}, {"mask": mask, "is_causal": True},
                    {"src_key_padding_mask": padding}):  # fmt: skip
        for is_training in (True, False):
            for has_grad in (True, False):
                model.train(is_training), original.train(is_training)
                with torch.set_grad_enabled(has_grad):
                    got, wanted = (m(x, **options) for m in (model, original))
                got, wanted = (y if batch_first else y.transpose(0, 1) for y in (got, wanted))
                # The fast path of torch gives zeros where all is padding.
                known = ~padding if "src_key_padding_mask" in options else ...
                torch.testing.assert_close(got[known], wanted[known], atol=TOL, rtol=TOL)
    for m in (model.train(), original.train()):
        m(x, mask=mask).sin().sum().backward()
    assert_same_gradients(model, original, TOL)


def encoder(batch_first=True, norm_first=False, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64,
        **options,
    )  # fmt: skip
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("rules", ["btt()", {"*.linear1": "btt()"}, {"*.out_proj": "btt()"}])
def test_inference_of_an_encoder_calls_the_layers(rules):
    """torch's fused inference would read dense weights: right, but at the dense cost."""
    model = encoder().eval()
    el.convert_(model, rules)
    reads = []
    for layer in structured(model).values():
        layer.to_dense = lambda: reads.append("a dense weight was made")
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        model(x), model(x, src_key_padding_mask=padding)
    assert not reads


def test_a_converted_layer_can_be_stacked_again():
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    el.convert_(layer, "btt()")
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        assert model(torch.randn(2, 5, 32), src_key_padding_mask=padding).shape == (2, 5, 32)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_converted_encoder_compiles_and_exports():
    torch._dynamo.reset()
    model = encoder().layers[0]
    el.convert_(model, "btt()")
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(model.eval(), (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


def test_a_converted_encoder_is_copied_and_loaded():
    model, other = encoder(), encoder()
    el.convert_(model, "btt()"), el.convert_(other, "btt()")
    shake_(model)
    twin = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for m in (twin, other):
        torch.testing.assert_close(m(x), model(x))
        with torch.no_grad():
            got, wanted = (k.eval()(x, src_key_padding_mask=padding) for k in (m, model))
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_decoder_of_torch(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerDecoder(layer, 2)
    original = copy.deepcopy(model)
    report = el.convert_(model, {"*multihead_attn*": "btt(rank=2)", "*": "btt()"})
    assert len(report.swaps) == 2 * (4 + 4 + 2)
    x, memory = torch.randn(2, 5, 5, 32, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def call(m):
        return m(x, memory, tgt_mask=mask, tgt_is_causal=True)

    assert_twin(model, lambda: original, call)
    model.eval(), original.eval()
    torch.testing.assert_close(call(model), call(original), atol=TOL, rtol=TOL)


def test_the_whole_transformer_of_torch():
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True, dtype=torch.float64)
    original = copy.deepcopy(model)
    el.convert_(model, "btt()")
    x, y = torch.randn(2, 2, 5, 32, dtype=torch.float64)
    assert_twin(model, lambda: original, lambda m: m(x, y))


def test_attention_in_parts_keeps_the_other_weights():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.MultiheadAttention(32, 4, kdim=16, vdim=8, batch_first=True)})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = el.convert_(model, {"a.v_proj": "btt()"})
    assert type(model["a"]) is ProjectedAttention
    assert [left.names for left in report.left] == [("a.q_proj",), ("a.k_proj",), ("a.out_proj",)]
    torch.testing.assert_close(model["a"].k_proj.weight, before["a.k_proj_weight"])
    torch.testing.assert_close(model["a"].k_proj.bias, before["a.in_proj_bias"][32:64])
    torch.testing.assert_close(model["a"].out_proj.weight, before["a.out_proj.weight"])
    assert (model["a"].v_proj.in_features, model["a"].v_proj.out_features) == (8, 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn")],
)
def test_attention_that_is_refused(options, words):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(32, 4, **options), "b": nn.Linear(32, 32)})
    with pytest.raises(el.EinlinearError, match=rf"'a\.q_proj' cannot be replaced.*{words}"):
        el.convert_(model, "btt()")
    assert type(model["b"]) is nn.Linear
    el.convert_(model, {"b": "btt()"})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: parametrizations.weight_norm(a, "in_proj_weight"), "parametrization: _Weight"),
        (lambda a: weight_norm(a, "in_proj_weight"), "forward pre-hook, WeightNorm"),
        (lambda a: parametrizations.weight_norm(a.out_proj), "parametrization: _Weight"),
        (lambda a: a.register_forward_hook(print), "forward hook, print"),
    ],
)
def test_attention_with_attachments_is_refused(change, words):
    attention = nn.MultiheadAttention(32, 4)
    change(attention)
    with pytest.raises(el.EinlinearError, match=words):
        el.convert_(nn.ModuleList([attention]), {"0.k_proj": "btt()"})


def test_a_tie_inside_an_attention_is_not_broken():
    attention = nn.MultiheadAttention(32, 4, kdim=16, vdim=16)
    attention.v_proj_weight = attention.k_proj_weight
    model = nn.ModuleDict({"a": attention})
    words = r"a\.k_proj_weight is a\.v_proj_weight"
    with pytest.raises(el.EinlinearError, match=words):
        el.convert_(model, {"a.q_proj": "btt()"})


def test_an_output_projection_with_a_place_of_its_own_is_refused():
    attention = nn.MultiheadAttention(32, 4)
    model = nn.ModuleDict({"a": attention, "b": attention.out_proj})
    with pytest.raises(el.EinlinearError, match=r"several places: a\.out_proj, b"):
        el.convert_(model, "btt()")


class OwnForward(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


def test_attention_with_a_forward_of_its_own_is_refused():
    with pytest.raises(el.EinlinearError, match="OwnForward, which overrides forward"):
        el.convert_(nn.ModuleList([OwnForward(32, 4)]), "btt()")


# What is kept, and what may not be lost.


def test_device_dtype_flags_and_bias_are_kept():
    model = nn.ModuleDict(
        {
            "a": nn.Linear(16, 32, bias=False, dtype=torch.bfloat16),
            "b": nn.Linear(32, 16, device="meta").eval(),
        }
    )
    model["a"].weight.requires_grad_(False)
    model["b"].bias.requires_grad_(False)
    el.convert_(model, el.btt(), init="fresh", weight_norm=False)
    a, b = model["a"], model["b"]
    assert (a.bias, a.A.dtype, a.A.requires_grad, a.training) == (None, torch.bfloat16, False, True)
    assert (b.A.device.type, b.A.requires_grad, b.training) == ("meta", True, False)
    assert (b.bias.requires_grad, b.weight_norm) == (False, False)


def test_an_attention_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    el.convert_(model, {"*.[qv]_proj": "btt()", "*linear?": "btt()"})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_shared_modules_stay_shared():
    shared = nn.Linear(16, 16)
    block = nn.ModuleDict({"inner": nn.Linear(16, 16)})
    model = nn.ModuleDict({"a": shared, "b": shared, "c": block, "d": block})
    report = el.convert_(model, el.btt())
    assert [swap.names for swap in report.swaps] == [("a", "b"), ("c.inner", "d.inner")]
    assert model["a"] is model["b"]
    assert isinstance(model["a"], el.EinsumLinear)
    assert model["c"]["inner"] is model["d"]["inner"]
    assert "a = b" in str(report)
    assert report.params_before == 2 * (16 * 16 + 16)


def test_a_shared_attention_stays_shared():
    attention = nn.MultiheadAttention(16, 2)
    model = nn.ModuleDict({"a": attention, "b": attention})
    report = el.convert_(model, {"b.q_proj": el.btt()})
    assert report.swaps[0].names == ("a.q_proj", "b.q_proj")
    assert model["a"] is model["b"]
    assert type(model["a"]) is ProjectedAttention


def test_tied_weights_are_refused_and_both_named():
    model = GPT(is_tied=True)
    assert len(el.plan_conversion(model, "btt()").swaps) == 8
    with pytest.raises(el.EinlinearError, match=r"embed\.weight is lm_head\.weight"):
        el.convert_(model, {"lm_head": "btt()"})
    model = mlp(16, 16, 16)
    model[1].weight = model[0].weight
    with pytest.raises(el.EinlinearError, match=r"0\.weight is 1\.weight; neither can 1"):
        el.convert_(model, "btt()")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A subclass that computes the same."""


def with_hook(layer):
    layer.register_forward_hook(print)
    return layer


def with_patch(layer):
    layer.forward = lambda x: x
    return layer


def with_buffer(layer):
    layer.register_buffer("scale", torch.ones(1))
    return layer


def quantised(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return layer


class Special(torch.Tensor):
    """A subclass of tensor, like sharded and quantised ones."""


def special(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Special))
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_hook, "forward hook, print"),
        (with_patch, "its forward was replaced"),
        (with_buffer, "it also holds scale"),
        (quantised, "its weight has dtype torch.int8"),
        (special, "its weight is a Special, not a plain nn.Parameter"),
        (weight_norm, "forward pre-hook, WeightNorm"),
        (parametrizations.weight_norm, "a parametrization: _WeightNorm"),
        (parametrizations.orthogonal, "a parametrization: _Orthogonal"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "forward pre-hook, L1Unstr"),
        (lambda layer: Doubled(16, 16), "Doubled, which overrides forward"),
        (lambda layer: nn.LazyLinear(16), "it is lazy"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(change, words):
    layer = change(nn.Linear(16, 16))
    model = nn.ModuleDict({"first": nn.Linear(16, 16), "odd": layer})
    with pytest.raises(el.EinlinearError, match=re.escape(words)) as error:
        el.convert_(model, "btt()")
    assert "'odd' cannot be replaced" in str(error.value)
    assert (type(model["first"]), model["odd"]) == (nn.Linear, layer)
    el.convert_(model, {"odd": None, "*": "btt()"})
    assert isinstance(model["first"], el.EinsumLinear)
    assert model["odd"] is layer


def test_a_subclass_that_computes_the_same_is_converted():
    model = nn.ModuleList([Named(16, 16)])
    el.convert_(model, "btt()")
    assert isinstance(model[0], el.EinsumLinear)


def test_a_failure_leaves_the_model_untouched():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(65, 64)})
    before = dict(model.named_modules())
    with pytest.raises(el.EinlinearError, match="layer 'b', 65 -> 64: the width 65 at X") as error:
        el.convert_(model, "XA:4 XAB^1 YB^1/2 YAB^1/2")
    assert "65" in error.value.fix
    with pytest.raises(el.EinlinearError, match="init is 'zeros'"):
        el.convert_(model, "btt()", init="zeros")
    assert dict(model.named_modules()) == before


def test_swaps_of_another_model_are_refused():
    swaps = el.plan_conversion(mlp(16, 16, 16), "btt()").swaps
    with pytest.raises(el.EinlinearError, match="no linear layer '0', 16 -> 16"):
        apply_swaps_(mlp(32, 16, 16), swaps)


def test_planning_changes_nothing():
    model = mlp(16, 16, 16)
    before = list(model)
    report = el.plan_conversion(model, "btt()")
    assert list(model) == before
    assert report == el.convert_(model, "btt()")


# Rules.


def test_the_first_match_decides():
    model = GPT()
    rules = {
        "blocks.0.attn.*": None,
        re.compile(r"blocks\.\d\.mlp\.\d"): "low_rank(rank=3)",
        "*": el.btt(),
    }
    swaps = el.plan_conversion(model, rules).swaps
    assert {swap.name: swap.structure for swap in swaps} == {
        "blocks.0.mlp.0": el.low_rank(3),
        "blocks.0.mlp.2": el.low_rank(3),
        "blocks.1.attn.qkv": el.btt(),
        "blocks.1.attn.c_proj": el.btt(),
        "blocks.1.mlp.0": el.low_rank(3),
        "blocks.1.mlp.2": el.low_rank(3),
    }


@given(st.lists(st.sampled_from("*.attn.* *.mlp.* blocks.0.* *.0 *qkv *".split()), unique=True))
def test_the_first_match_decides_in_any_order(patterns):
    """The same as going through the patterns by hand, with fnmatch; refused if one is idle."""
    model = GPT()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    rules = {pattern: el.low_rank(2 + i) for i, pattern in enumerate(patterns)}
    wanted = {}
    for name in names:
        hits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if hits:
            wanted[name] = hits[0]
    if not patterns:
        return
    if set(wanted.values()) != set(patterns):
        with pytest.raises(el.EinlinearError, match="never decides"):
            el.plan_conversion(model, rules)
    else:
        swaps = el.plan_conversion(model, rules).swaps
        assert {s.name: s.structure for s in swaps} == {n: rules[p] for n, p in wanted.items()}


def test_factors_of_new_layers_start_as_asked():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 10))
    rules = {"0": "low_rank(rank=8)", "1": el.moe("low_rank(rank=8)", 4)}
    el.convert_(model, rules, factor_init="fan_in")
    for layer in model[:2]:
        assert layer.factor_init == "fan_in"
        assert layer.A.std().item() == pytest.approx(1 / 16, rel=5 / (2 * 2048) ** 0.5)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    with pytest.raises(el.EinlinearError, match="factor_init is 'usual'"):
        el.convert_(plain, "btt", factor_init="usual")
    assert isinstance(plain[0], nn.Linear)


def test_where_filters():
    seen = []

    def is_large(module, name):
        seen.append((type(module), name))
        return module.in_features > 32

    report = el.plan_conversion(GPT(), "btt()", where=is_large)
    assert names_of(report.swaps) == ["blocks.0.mlp.2", "blocks.1.mlp.2"]
    assert (nn.Linear, "blocks.0.attn.qkv") in seen
    assert {left.reason for left in report.left} == {"excluded by `where`", "output head"}


@pytest.mark.parametrize(
    ("rules", "is_converted"),
    [
        ("btt()", False),
        ({"*": "btt()"}, False),
        ({"*": "btt()", "lm_head": "btt()"}, True),
        ({"lm_head": "btt()"}, True),
        ({"*lm_head": "btt()"}, True),
        ({re.compile("lm_.*"): "btt()"}, True),
        ({"*.attn.*": "btt()"}, False),
        ({re.compile(".*"): "btt()"}, False),
    ],
)
def test_the_head_is_left_alone_unless_named(rules, is_converted):
    names = names_of(el.plan_conversion(GPT(), rules).swaps)
    assert ("lm_head" in names) == is_converted


class Declared(nn.Module):
    """A model that declares its head, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.to_words = nn.Linear(16, 16)
        self.body = nn.Linear(16, 16)

    def get_output_embeddings(self):
        return self.to_words


class Undeclared(nn.Sequential):
    """A model that asks a part for its head, as wrappers do; the part has none."""

    def get_output_embeddings(self):
        return self[0].get_output_embeddings()


def test_what_the_head_is():
    def head(model):
        [left] = el.plan_conversion(model, "btt()").left
        return left.names

    assert head(Declared()) == ("to_words",)
    assert head(nn.ModuleDict({"model": Declared()})) == ("model.to_words",)
    assert head(nn.ModuleDict({"classifier": nn.Linear(9, 9), "x": nn.Linear(9, 9)})) == (
        "classifier",
    )
    assert head(mlp(16, 16, 10)) == ("1",)
    tied = nn.ModuleDict(
        {"e": nn.Embedding(9, 16), "words": nn.Linear(16, 9, bias=False), "z": nn.Linear(16, 16)}
    )
    tied["words"].weight = tied["e"].weight
    assert head(tied) == ("words",)
    assert not el.plan_conversion(mlp(16, 32, 16), "btt()").left
    assert not el.plan_conversion(mlp(16, 10), "btt()").left
    assert not el.plan_conversion(Undeclared(nn.Linear(16, 10)), "btt()").left
    blocks = [nn.ModuleDict({"fc_in": nn.Linear(8, 16), "fc_out": nn.Linear(16, 8)})]
    assert head(nn.ModuleList(blocks)) == ("0.fc_out",)
    assert not el.plan_conversion(nn.ModuleList(blocks + copy.deepcopy(blocks)), "btt()").left


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"blocks.0": "btt()"}, 'fix:  write "blocks.0.*" for the layers inside blocks.0'),
        ({"*.qvk": "btt()"}, "did you mean 'blocks.0.attn.qkv'"),
        ({re.compile("blocks"): "btt()"}, "the pattern 're:blocks' matches no linear layer"),
        ({"nothing": "btt()"}, "the linear layers are blocks.{0..1}.attn.qkv, blocks.{0..1}"),
        ({"*": "btt()", "*.qkv": "btt()"}, "'*.qkv' never decides: every layer it matches"),
        ({}, "the rules are given as {}"),
        (None, "there are neither rules nor a budget"),
        ({3: "btt()"}, "the rules are given as {3: 'btt()'}"),
        (3, "a structure is given as 3"),
        ("bttt", "bttt"),
        ({"*": None}, "no layer would be replaced: blocks.{0..1}.attn.qkv (its rule is None)"),
        ({"*mlp*": el.heads()}, "layer 'blocks.0.mlp.0', 32 -> 128: the name does not tell"),
        ({"*qkv": el.heads(5)}, "the output width 96 is not a multiple of 15 heads"),
        ({"*qkv": el.heads(4, "low_rank()")}, "no axis at Y that can be 12 heads"),
    ],
)
def test_rules_that_are_refused(rules, words):
    with pytest.raises(el.EinlinearError, match=re.escape(words)):
        el.convert_(GPT(), rules)


def test_a_long_list_of_names_is_shortened():
    model = nn.ModuleDict({f"layer_{chr(97 + i)}": nn.Linear(4, 4) for i in range(26)})
    with pytest.raises(el.EinlinearError, match="and 14 more") as error:
        el.convert_(model, {"layer_zz": "btt()"})
    assert "are layer_z, " in error.value.rule


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.MultiheadAttention(4, 2)])
def test_the_model_itself_is_a_layer(model):
    with pytest.raises(el.EinlinearError, match=f"the model itself is a {type(model).__name__}"):
        el.convert_(model, "btt()")


def test_models_without_linear_layers():
    with pytest.raises(el.EinlinearError, match="Sequential has no linear layer to replace"):
        el.convert_(nn.Sequential(nn.ReLU()), "btt()")
    with pytest.raises(el.EinlinearError, match="the model is given as 'btt"):
        el.convert_("btt()", mlp(4, 4))


def test_structured_layers_are_left_alone():
    model = GPT()
    el.convert_(model, {"*.mlp.*": "btt()"})
    kept = model.blocks[0].mlp[0]
    report = el.convert_(model, {"*.mlp.*": "kronecker()", "*": "btt(rank=2)"})
    assert model.blocks[0].mlp[0] is kept
    assert (("blocks.0.mlp.0",), "structured already") in [(x.names, x.reason) for x in report.left]
    with pytest.raises(el.EinlinearError, match="all but output heads are structured already"):
        el.convert_(model, "btt()")


# The report.


def test_counts_are_those_of_the_model():
    model = GPT()
    before = sum(p.numel() for p in model.parameters())
    report = el.convert_(model, "btt(rank=2)")
    after = sum(p.numel() for p in model.parameters())
    assert (report.model_params_before, report.model_params_after) == (before, after)
    layers = structured(model).values()
    assert report.params_after == sum(p.numel() for m in layers for p in m.parameters())
    assert report.macs_before == 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)
    assert report.macs_after == sum(layer.plan.macs for layer in layers)


def test_the_table():
    widths = [(64, 64)] * 4 + [(13, 64), (64, 7)]
    shared = nn.Linear(64, 64)
    layers = nn.ModuleList(nn.Linear(*shape) for shape in widths)
    model = nn.ModuleDict({"layers": layers, "a": shared, "b": shared, "head": nn.Linear(64, 9)})
    report = el.convert_(model, {"*.5": "btt(rank=2)", "*.2": None, "*": "btt()"})
    assert str(report).splitlines() == TABLE.strip().splitlines()
    assert repr(report) == str(report)  # what a prompt shows


TABLE = """
layer              in -> out  parameters        FLOPs per token   notes
-------------------------------------------------------------------------------
btt()
  layers.{0..1,3}  64 -> 64   4.16 k -> 1.09 k  8.19 k -> 2.05 k
  layers.4         13 -> 64   896 -> 376        1.66 k -> 624     in +2
  a = b            64 -> 64   4.16 k -> 1.09 k  8.19 k -> 2.05 k
btt(rank=2)
  layers.5         64 -> 7    455 -> 535        896 -> 1.06 k     grows, out +2
-------------------------------------------------------------------------------
6 layers                      18.0 k -> 5.26 k  35.3 k -> 9.87 k
whole model                   22.7 k -> 10.0 k
left alone: layers.2 (its rule is None)
left alone: head (output head)
weights: randomly initialised, biases 0
6 layers replaced: 3.6 x fewer FLOPs, 3.4 x fewer parameters; 1 layer grows
"""


class Long(nn.Module):
    """A model with the long names of Hugging Face, and parameters outside linear layers."""

    def __init__(self):
        super().__init__()
        attention = {f"{name}_proj": nn.Linear(4096, 4096, device="meta") for name in "qo"}
        inner = nn.ModuleDict({"encoder_decoder_attention": nn.ModuleDict(attention)})
        self.pretrained_decoder_model = nn.ModuleDict({"layers": nn.ModuleList([inner])})
        self.experts = nn.Parameter(torch.empty(8, 4096, 1024, device="meta"))
        self.norms = nn.ModuleList(nn.LayerNorm(64, device="meta") for _ in range(2))
        self.head = nn.Linear(4096, 64, device="meta")


def test_a_table_of_long_names_fits():
    edges = "XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:4096"
    lines = str(el.plan_conversion(Long(), {"*.q_proj": edges, "*": "btt(rank=4)"})).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == LONG_TABLE.strip().splitlines()


LONG_TABLE = """
layer        in -> out     parameters        FLOPs per token   notes
--------------------------------------------------------------------
XA^1/2 XAB^1/2 YB^1/2 YAB^1/2 AB:4096
  pretrained_decoder_model.layers.0.encoder_decoder_attention
    q_proj   4096 -> 4096  16.8 M -> 2.15 G  33.6 M -> 4.29 G  grows
btt(rank=4)
  pretrained_decoder_model.layers.0.encoder_decoder_attention
    o_proj   4096 -> 4096  16.8 M -> 2.10 M  33.6 M -> 4.19 M
--------------------------------------------------------------------
2 layers                   33.6 M -> 2.15 G  67.1 M -> 4.30 G
whole model                67.4 M -> 2.18 G
left alone: head (output head)
left alone: the model itself (Long, not a linear layer: 50 % of all parameters)
left alone: the rest (LayerNorm: 0.0 % of all parameters)
weights: randomly initialised, biases 0
2 layers replaced: 64.1 x more FLOPs, 64.0 x more parameters; 1 layer grows
"""


def test_the_fix_covers_every_layer_that_cannot_be_replaced():
    blocks = [
        nn.ModuleDict(
            {
                "mlp": nn.ModuleDict({"fc": nn.Linear(16, 16), "router": Doubled(16, 16)}),
                "router_fc": nn.ModuleDict({"fc": Doubled(16, 16)}),
            }
        )
        for _ in range(2)
    ]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "fc": nn.Linear(16, 16)})
    with pytest.raises(el.EinlinearError) as error:
        el.convert_(model, "btt")
    rules = "'*.router': None, 'blocks.*.router_fc.fc': None"
    assert error.value.fix.endswith(f"them alone by putting this first in the rules: {rules}")
    fixed = {"*.router": None, "blocks.*.router_fc.fc": None, "*": "btt"}
    assert len(el.convert_(model, fixed).swaps) == 3


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        (" BTT( rank = 2 )", "BTT( rank = 2 )"),
        ("theta(1/2,0,1/2,0,1/2,1/2,0)", "theta(1/2,0,1/2,0,1/2,1/2,0)"),
        (el.btt(rank=2), "btt(rank=2)"),
        (el.monarch(), "monarch()"),
        (el.monarch(num_factors=3), "monarch(num_factors=3)"),
        (el.low_rank(rank_exponent="1/3"), "low_rank(rank_exponent=1/3)"),
        (el.kronecker(num_factors=3), "kronecker(num_factors=3)"),
        (el.heads(4, "btt(rank=2)", side="output"), "heads(4, btt(rank=2), side=output)"),
        (el.heads(4, side="output"), "heads(4, side=output)"),
        (el.moe("low_rank", 4), "moe(low_rank(), num_experts=4, num_active=2)"),
        (el.parse("XA:4 XAB^1 YB^1/2 YAB^1/2"), "XA:4 XAB^1 YB^1/2 YAB^1/2"),
    ],
)
def test_structures_are_shown_as_they_were_typed(rule, shown):
    report = el.plan_conversion(mlp(64, 64, 10), rule)
    assert str(report).splitlines()[2] == shown


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("dense", "as many FLOPs, as many parameters"),
        ("low_rank(rank=31)", "about as many FLOPs, about as many parameters"),
        ("low_rank(rank=64)", "2.0 x more FLOPs, 2.0 x more parameters; 1 layer grows"),
        ("low_rank(rank=1)", "32.0 x fewer FLOPs, 21.7 x fewer parameters"),
    ],
)
def test_a_table_ends_in_one_sentence(rule, words):
    report = el.convert_(mlp(64, 64, 10), rule)
    assert str(report).splitlines()[-1] == f"1 layer replaced: {words}"
