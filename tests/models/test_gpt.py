"""GPT: against its formulas, its counts, and everything that is done to models."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

import einlinear as el
from einlinear.models.survey.sites import find_sites
from kit.gpts import POSITIONS, drawn, small, tokens


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
def test_heads_that_are_innermost_are_the_same_in_another_order(positions):
    """Feature d of head h is row 4 d + h instead of 8 h + d."""
    options = {"context": 12, "width": 32, "depth": 2, "num_heads": 4, "positions": positions}
    plain, inner = (el.GPT(11, heads_inner=flag, **options).double() for flag in (False, True))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    rows = [8 * h + d for d in range(8) for h in range(4)]
    state = plain.state_dict()
    for name, weight in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name] = weight[rows]
        elif name.endswith("o_proj.weight"):
            state[name] = weight[:, rows]
    inner.load_state_dict(state)
    tokens = torch.randint(0, 11, (2, 12))
    torch.testing.assert_close(inner(tokens), plain(tokens), atol=1e-10, rtol=0)
    assert "heads_inner=True" in repr(inner)


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


def test_a_new_model_starts_as_the_paper_says():
    model = el.GPT(96, context=128, width=256, depth=3, embedding_std=0.5)
    assert not model(tokens(vocab_size=96)).any()
    zeros = {name for name, parameter in model.named_parameters() if not parameter.any()}
    ends = {
        f"blocks.{n}.{end}.weight" for n in range(3) for end in ("attention.o_proj", "mlp.down")
    }
    assert zeros == {"head.weight", *ends}
    # The deviation of n normal numbers is off by 1 / sqrt(2 n) at one sigma; five are allowed.
    for table in (model.embedding.weight, model.places.weight):
        assert abs(table.std().item() / 0.5 - 1) < 5 / sqrt(2 * table.numel())
    up = model.blocks[1].mlp.up.weight
    assert abs(up.std().item() * 16 - 1) < 5 / sqrt(2 * up.numel())
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


def test_the_setting_of_embeddings_outlives_convert_and_init():
    model = el.GPT(96, context=128, width=256, depth=1, embedding_std=1.0)
    el.convert_(model, "btt")
    el.init_(model, generator=torch.Generator().manual_seed(0))
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.05)
    el.init_(model, embedding_std=0.02)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_tied_head_starts_as_it_says():
    for width in (64, 256):
        model = el.GPT(96, context=8, width=width, depth=2, embedding_std=0.02, tied=True)
        torch.nn.init.zeros_(model.places.weight)
        own = model(tokens(length=8, vocab_size=96)).gather(
            2, tokens(length=8, vocab_size=96)[..., None]
        )
        # Of the mean of width squares, over 24 tokens; half of them may be the same.
        assert own.mean().item() == pytest.approx(64 * 0.02, rel=5 * sqrt(2 / width / 12))


def test_positions_change_the_parameters_only_by_the_table():
    counts = {p: sum(w.numel() for w in small(p).parameters()) for p in POSITIONS}
    assert counts["learned"] - 24 * 32 == counts["rotary"] == counts["alibi"]
    tied = sum(w.numel() for w in small(tied=True).parameters())
    assert counts["learned"] - 17 * 32 == tied


def test_heads_by_number_or_size():
    sizes = {"context": 8, "width": 128, "depth": 1, "device": "meta"}
    assert el.GPT(9, **sizes).num_heads == 2
    assert el.GPT(9, num_heads=8, **sizes).head_size == 16
    assert el.GPT(9, head_size=32, **sizes).num_heads == 4


def test_all_layers_but_the_head_are_converted_or_the_head_too():
    model = small()
    conversion = el.convert_(model, "btt")
    assert len(conversion.swaps) == 2 * 6
    assert [(left.names, left.reason) for left in conversion.left] == [(("head",), "output head")]
    inner = el.plan_conversion(small(), {"blocks.*": "btt"})
    assert inner.swaps == conversion.swaps
    with_head = el.convert_(small(), {"head": "btt", "*": "btt"})
    assert len(with_head.swaps) == 2 * 6 + 1
    with pytest.raises(el.EinlinearError, match="'head' cannot be replaced"):
        el.convert_(small(tied=True), {"head": "btt"})


@pytest.mark.parametrize("head", [False, True])
def test_only_the_last_factor_starts_at_zero(head):
    model = small()
    el.convert_(model, {"head": "btt", "*": "btt"} if head else "btt")
    assert model(tokens()).any() == head
    el.init_(model)
    assert not model(tokens()).any()
    zeros = {name for name, parameter in model.named_parameters() if not parameter.any()}
    ends = {f"blocks.{n}.{end}.B" for n in range(2) for end in ("attention.o_proj", "mlp.down")}
    assert zeros == {"head.B" if head else "head.weight", *ends}


def test_rates_by_hand():
    model = el.GPT(96, context=128, width=256, depth=1)
    el.convert_(model, {"*.mlp.*": "btt"})
    rates = {row.name: row.rate for row in el.scaling_table(model, 0.1, base_width=64)}
    assert rates["embedding.weight"] == rates["places.weight"] == rates["norm.weight"] == 0.1
    assert rates["blocks.0.attention.q_proj.weight"] == rates["head.weight"] == 0.1 * 64 / 256
    assert rates["blocks.0.attention.q_norm.weight"] == 0.1
    up = model.blocks[0].mlp.up.plan
    assert rates["blocks.0.mlp.up.A"] == 0.1 * 64 / (2 * up.fan_in["A"])
    groups = el.param_groups(model, 0.1, base_width=64)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    sgd = el.scaling_table(model, 0.1, base_width=64, optimizer="sgd")
    assert [row.name for row in sgd if row.kind == "head"] == ["head.weight"]


@pytest.mark.parametrize(
    ("structure", "options"),
    [
        ("dense", {}),
        ("btt(rank=2)", {"positions": "alibi"}),
        ("kronecker", {"positions": "rotary"}),
        ("dense", {"tied": True, "embedding_std": 0.02}),
    ],
)
def test_every_layer_moves_alike_at_every_width(structure, options):
    def make(width):
        sizes = {"context": 16, "width": width, "depth": 2, "head_size": 16}
        model = el.GPT(17, **sizes | {"embedding_std": 1.0} | options)
        if structure != "dense":
            el.convert_(model, structure, weight_norm=False)
        return model

    text = tokens(batch=8, length=17)
    batch = (text[:, :-1], text[:, 1:])
    result = el.coordinate_check(make, [64, 256], batch=batch, lr=3e-3, steps=4, seeds=2)
    assert result.passed, str(result)


def test_heads_are_read_from_the_model():
    model = el.GPT(96, context=8, width=256, depth=1, head_size=32)
    el.convert_(model, {"*.attention.*": el.heads()})
    attention = model.blocks[0].attention
    assert attention.q_proj.plan.y_edges[0] == "YAB"
    assert attention.q_proj.plan.sizes["YAB"] == attention.o_proj.plan.sizes["XAB"] == 8
    assert attention.o_proj.plan.x_edges[0] == "XAB"


def test_mixtures_of_experts():
    model = small()
    el.convert_(model, {"*.mlp.*": el.moe("btt", 4), "*": el.moe(el.heads(), 4)})
    model.blocks[1].mlp = el.MoEFeedForward(32, 128, num_experts=4, bias=False)
    el.init_(model)
    assert not model(tokens()).any()
    optimizer = torch.optim.AdamW(el.param_groups(model, 0.01, base_width=32))
    first, last = (train(model, optimizer) for _ in range(2))
    assert last < first
    assert el.balance_loss(model).isfinite()


def train(model, optimizer, steps=10):
    """The mean loss of a few steps on one text."""
    text = tokens(length=20)
    losses = []
    for _ in range(steps):
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / steps


@pytest.mark.no_cover
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("structure", ["dense", "btt"])
def test_it_learns_a_text(positions, structure):
    model = small(positions, embedding_std=0.5)
    el.convert_(model, structure)
    el.init_(model, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(el.param_groups(model, 0.02, base_width=32))
    train(model, optimizer, 40)
    assert train(model, optimizer, 10) < 0.5  # log(17) = 2.83 at the start


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "positions",
    [n if n == "rotary" else pytest.param(n, marks=pytest.mark.slow) for n in POSITIONS],
)
def test_compiled(positions):
    model = drawn(small(positions))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens()), model(tokens()), rtol=1e-4, atol=1e-4)
    compiled(tokens()).sum().backward()
    assert model.blocks[0].attention.q_proj.weight.grad.any()


@pytest.mark.no_cover
@pytest.mark.slow
def test_compiled_for_any_number_of_tokens():
    model = drawn(small("learned"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (4, 3, 1):
        few = tokens()[:, :count]
        torch.testing.assert_close(compiled(few), model(few), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
def test_half_precision(positions):
    model = drawn(small(positions), std=0.1)
    exact = model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
        logits.sum().backward()
    assert logits.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    scale = exact.abs().max()
    assert (logits - exact).abs().max() < 0.05 * scale
    assert (model.to(torch.bfloat16)(tokens()) - exact).abs().max() < 0.05 * scale


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_saved_and_loaded(tied, tmp_path):
    model = drawn(small("alibi", tied=tied))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(state) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    other = small("alibi", tied=tied)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(tokens()), model(tokens()))
    with torch.device("meta"):
        empty = small("alibi", tied=tied)
    empty.load_state_dict(state, strict=True, assign=True)
    assert torch.equal(empty(tokens()), model(tokens()))


def test_a_model_made_without_memory_is_filled_later():
    model = el.GPT(17, context=24, width=32, depth=2, head_size=8, device="meta")
    model.to_empty(device="cpu")
    el.init_(model)
    assert not model(tokens()).any()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"width": 100}, "width is 100 and head_size is 64\n.*\n.*head_size=50"),
        ({"width": 96, "num_heads": 5}, "num_heads is 5\n.*\n.*num_heads=4"),
        ({"num_heads": 2, "head_size": 32}, "head_size is 32 and num_heads is 2"),
        ({"positions": "rope"}, "positions is 'rope'\n.*'learned', 'rotary', 'alibi'"),
        ({"positions": "rotary", "head_size": 1}, "head_size is 1\n.*pairs"),
        ({"embedding_std": -1.0}, "embedding_std is -1.0"),
        ({"depth": 0}, "depth is 0"),
        ({"context": 1.5}, "context is 1.5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_bad_settings(given, match):
    settings = {"vocab_size": 96, "context": 8, "width": 64, "depth": 1} | given
    with pytest.raises(el.EinlinearError, match=match):
        el.GPT(**settings)


@pytest.mark.parametrize(
    "text", [tokens(length=25), tokens()[0], torch.randn(2, 3), tokens(length=0)]
)
def test_bad_tokens(text):
    with pytest.raises(el.EinlinearError, match=r"tokens have shape.*\n.*\n.*tokens\[:, -24:\]"):
        small()(text)


def test_a_full_cache():
    model = small()
    caches = model.new_caches()
    model(tokens(length=20), caches)
    with pytest.raises(el.EinlinearError, match="after 20 tokens in the cache"):
        model(tokens(length=5), caches)
    assert caches[0].length == 20
    assert model(tokens(length=4), caches).shape == (3, 4, 17)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"width": 10**8}, "width or depth"),
        ({"context": 10**12}, "context or width"),
        ({"vocab_size": 10**12}, "vocab_size or width"),
    ],
    ids=str,
)
def test_weights_for_which_there_is_no_memory(settings, fix):
    given = {"vocab_size": 96, "context": 16, "width": 64, "depth": 2, "head_size": 8} | settings
    with pytest.raises(el.EinlinearError) as caught:
        el.GPT(**given)
    assert caught.value.what.startswith(f"a GPT of vocab_size={given['vocab_size']}, ")
    assert f"{next(iter(settings))}={next(iter(settings.values()))}" in caught.value.what
    assert caught.value.fix == f"give a smaller {fix}, or another device or dtype"


def test_a_model_of_too_many_blocks():
    with pytest.raises(el.EinlinearError, match="depth is 1000000000"):
        el.GPT(96, context=16, width=64, depth=10**9)
