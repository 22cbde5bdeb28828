"""Structures in line with attention heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import einlinear as el
from cases import structures
from einlinear.models.convert.heads import align

SHARED = ["btt()", "btt(rank=2)", "btt(rank_exponent=1/4)", "btt(num_factors=3)", "monarch()"]
ALIGNED = [*SHARED, "kronecker()", "tensor_train(rank=3)", "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)"]
WIDTHS = [(64, 64, 4), (64, 192, 12), (128, 32, 2), (96, 96, 6), (97, 96, 8), (64, 64, 64)]


def head_axis(plan, side):
    """The outermost axis, the widths before and after padding."""
    if side == "output":
        return plan.y_edges, plan.d_out, plan.d_out_padded
    return plan.x_edges, plan.d_in, plan.d_in_padded


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("text", ALIGNED)
def test_the_outermost_axis_is_the_head(text, widths, side):
    *widths, num_heads = widths
    widths = widths if side == "output" else widths[::-1]
    structure = el.parse(text)
    plan = el.make_plan(align(structure, *widths, num_heads, side), *widths)
    edges, width, padded = head_axis(plan, side)
    assert plan.sizes[edges[0]] == num_heads
    assert padded == width
    before = el.make_plan(structure, *widths)
    assert 2 * plan.rank >= before.rank
    if text in SHARED or 97 not in widths:
        assert plan.rank >= before.rank
    if text in SHARED:
        assert len(edges[0]) == 1 + plan.structure.num_factors, "every factor knows the head"


def test_the_sizes_of_the_paper():
    out = el.make_plan(align(el.btt(), 1024, 1024, 16, "output"), 1024, 1024)
    assert out.sizes == {"XA": 16, "XAB": 64, "YAB": 16, "YB": 64}
    assert out.y_edges == ("YAB", "YB")
    assert out.rank == 1024
    back = el.make_plan(align(el.btt(), 1024, 1024, 16, "input"), 1024, 1024)
    assert back.sizes == {"XA": 64, "XAB": 16, "YAB": 64, "YB": 16}
    assert back.x_edges == ("XAB", "XA")
    assert back.rank == 1024


def test_the_sizes_with_the_head_on_the_own_axis_of_a_factor():
    """The head is epsilon of queries, keys and values, alpha of the output projection."""
    out = el.make_plan(align(el.btt(), 1024, 1024, 16, "output", "own"), 1024, 1024)
    assert out.sizes == {"XA": 32, "XAB": 32, "YB": 16, "YAB": 64}
    assert out.y_edges == ("YAB", "YB")
    back = el.make_plan(align(el.btt(), 1024, 1024, 16, "input", "own"), 1024, 1024)
    assert back.sizes == {"XA": 16, "XAB": 64, "YB": 32, "YAB": 32}
    assert back.x_edges == ("XAB", "XA")
    assert out.rank == back.rank == 1024


@pytest.mark.parametrize("text", SHARED)
def test_the_own_axis_gives_one_factor_weights_for_every_head(text):
    """Head h has the outputs h, 4 + h, 8 + h, ...; the first factor has the same for all heads."""
    structure = align(el.parse(text), 64, 64, 4, "output", "own")
    layer = el.EinsumLinear(64, 64, structure=structure, dtype=torch.float64, weight_norm=False)
    head = layer.plan.y_edges[-1]
    first, last = layer.plan.steps[0], layer.plan.steps[-1]
    assert head in last.edges
    assert not any(head in step.edges for step in layer.plan.steps[:-1])

    def changed_rows(factor, axis, place):
        before = layer.to_dense().detach().clone()
        with torch.no_grad():
            getattr(layer, factor).select(axis, place).add_(1.0)
        return ((layer.to_dense() - before).abs().amax(dim=1) > 0).nonzero().flatten().tolist()

    assert changed_rows(last.factor, last.edges.index(head), 2) == list(range(2, 64, 4))
    found = changed_rows(first.factor, first.edges.index(layer.plan.y_edges[0]), 1)
    assert len(found) < 64  # a slice of the first factor
    assert [sum(row % 4 == h for row in found) for h in range(4)] == [len(found) // 4] * 4


@pytest.mark.parametrize("text", SHARED)
def test_the_output_projection_reads_every_head_by_weights_of_its_own(text):
    structure = align(el.parse(text), 64, 64, 4, "input", "own")
    layer = el.EinsumLinear(64, 64, structure=structure, dtype=torch.float64, weight_norm=False)
    step, head = layer.plan.steps[0], layer.plan.x_edges[-1]
    assert not any(head in other.edges for other in layer.plan.steps[1:])
    before = layer.to_dense().detach().clone()
    with torch.no_grad():
        getattr(layer, step.factor).select(step.edges.index(head), 1).add_(1.0)
    changed = (layer.to_dense() - before).abs().amax(dim=0) > 0
    assert changed.tolist() == [column % 4 == 1 for column in range(64)]


def test_an_own_axis_needs_a_model_with_its_heads_innermost():
    options = {"context": 8, "width": 64, "depth": 1, "head_size": 16}
    inner, outer = (el.GPT(8, heads_inner=flag, **options) for flag in (True, False))
    with pytest.raises(el.EinlinearError, match=r'"own", and the model lays out .* outermost'):
        el.convert_(outer, {"*.q_proj": el.heads(axis="own")})
    with pytest.raises(el.EinlinearError, match=r'"shared", and the model .* innermost'):
        el.convert_(inner, {"*.q_proj": el.heads()})
    conversion = el.convert_(
        inner, {"*.q_proj": el.heads(axis="own"), "*.o_proj": el.heads(axis="own")}
    )
    query, output = inner.blocks[0].attention.q_proj, inner.blocks[0].attention.o_proj
    assert query.plan.sizes == {"XA": 8, "XAB": 8, "YB": 4, "YAB": 16}
    assert output.plan.sizes == {"XA": 4, "XAB": 16, "YB": 8, "YAB": 8}
    assert "heads(axis=own)" in str(conversion)
    with pytest.raises(el.EinlinearError, match="no axis at Y that can be 4 heads"):
        align(el.low_rank(), 64, 64, 4, "output", "own")
    with pytest.raises(el.EinlinearError, match="axis is 'head'"):
        el.heads(axis="head")


def test_the_rank_of_the_structure_is_kept_as_given():
    plan = el.make_plan(align(el.btt(rank=4), 1024, 1024, 16, "output"), 1024, 1024)
    assert (plan.sizes["AB"], plan.sizes["XAB"]) == (4, 32)


def is_separate(structure, letter):
    """Whether some factor meets only one side of the layer and no other factor.

    The cheapest order then starts with whichever axis is smaller, so the head may never be first.
    """
    edges = [set(edge) for edge, _ in structure.edges]
    factors = set().union(*edges) - {"X", "Y"}
    return any(all(edge <= {f, letter} for edge in edges if f in edge) for f in factors)


def test_a_separate_factor_is_refused():
    with pytest.raises(el.EinlinearError, match="no axis at Y that can be 3 heads"):
        align(el.parse("XA^1 YA^1/2 YB^1/2"), 1, 6, 3, "output")


@given(
    structures(max_factors=3),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 24),
    st.integers(1, 200),
    st.sampled_from(["output", "input"]),
)
def test_aligned_or_refused(structure, num_heads, head_width, other, side):
    width = num_heads * head_width
    d_in, d_out = (other, width) if side == "output" else (width, other)
    try:
        before = el.make_plan(structure, d_in, d_out)
        plan = el.make_plan(align(structure, d_in, d_out, num_heads, side), d_in, d_out)
    except el.EinlinearError:
        letter = "Y" if side == "output" else "X"
        at_side = [v for e, v in structure.edges if letter in e]
        is_simple = len(at_side) > 1 and not any(isinstance(v, int) for v in at_side)
        assert not is_simple or structure.num_factors > 2 or is_separate(structure, letter)
        return
    if num_heads == 1:
        assert plan == before
        return
    edges, width, padded = head_axis(plan, side)
    assert (plan.sizes[edges[0]], padded) == (num_heads, width)


@pytest.mark.parametrize("text", SHARED)
def test_factors_work_within_heads(text):
    """A change of one head's slice of the last factor changes the rows of that head only."""
    structure = align(el.parse(text), 64, 64, 4, "output")
    layer = el.EinsumLinear(64, 64, structure=structure, dtype=torch.float64, weight_norm=False)
    edges = layer.plan.steps[-1].edges
    last, axis = getattr(layer, layer.plan.steps[-1].factor), edges.index(layer.plan.y_edges[0])
    before = layer.to_dense().detach().clone()
    with torch.no_grad():
        last.select(axis, 2).add_(1.0)
    changed = (layer.to_dense() - before).abs().amax(dim=1) > 0
    assert changed.tolist() == [32 <= row < 48 for row in range(64)]


@pytest.mark.parametrize("text", SHARED)
def test_the_output_projection_reads_within_heads(text):
    """A change of one head's slice of the first factor changes the columns of that head only."""
    structure = align(el.parse(text), 64, 64, 4, "input")
    layer = el.EinsumLinear(64, 64, structure=structure, dtype=torch.float64, weight_norm=False)
    edges = layer.plan.steps[0].edges
    first, axis = getattr(layer, layer.plan.steps[0].factor), edges.index(layer.plan.x_edges[0])
    before = layer.to_dense().detach().clone()
    with torch.no_grad():
        first.select(axis, 1).add_(1.0)
    changed = (layer.to_dense() - before).abs().amax(dim=0) > 0
    assert changed.tolist() == [16 <= column < 32 for column in range(64)]


def test_without_alignment_heads_are_mixed():
    """What the two tests above see in btt() as it is: rows of two heads change."""
    layer = el.EinsumLinear(64, 64, structure="btt()", dtype=torch.float64, weight_norm=False)
    before = layer.to_dense().detach().clone()
    with torch.no_grad():
        layer.A.select(layer.plan.steps[0].edges.index("XAB"), 1).add_(1.0)
    changed = (layer.to_dense() - before).abs().amax(dim=0) > 0
    assert changed.sum() == 8


@pytest.mark.parametrize("text", ["low_rank()", "dense()"])
def test_structures_without_a_head_axis(text):
    with pytest.raises(el.EinlinearError, match="no axis at Y that can be 4 heads"):
        align(el.parse(text), 64, 64, 4, "output")


def test_widths_that_are_no_multiple():
    with pytest.raises(el.EinlinearError, match="output width 64 is not a multiple of 6 heads"):
        align(el.btt(), 64, 64, 6, "output")


def test_a_fixed_size_is_not_taken_for_the_head():
    structure = el.parse("XA^1/2 XAB^1/2 YA^1/2 YB^1/2 YAB:8")
    plan = el.make_plan(align(structure, 1024, 1024, 16, "output"), 1024, 1024)
    assert (plan.sizes["YAB"], plan.sizes[plan.y_edges[0]]) == (8, 16)
    assert plan.y_edges[0] != "YAB"


class Attention(nn.Module):
    def __init__(self, names, **attributes):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in names.items()})
        for key, value in attributes.items():
            setattr(self, key, value)


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("name", "shape", "attributes", "side", "count"),
    [
        ("q_proj", (64, 64), {"num_heads": 4}, "output", 4),
        ("query", (64, 64), {"num_attention_heads": 4}, "output", 4),
        ("wv", (64, 64), {"n_heads": 8}, "output", 8),
        ("o_proj", (64, 64), {"n_head": 8}, "input", 8),
        ("qkv", (64, 192), {"num_heads": 4}, "output", 12),
        ("c_attn", (64, 192), {"n_head": 4, "head_dim": 16}, "output", 12),
        ("k_proj", (64, 32), {"config": Config(num_attention_heads=4, num_key_value_heads=2)},
         "output", 2),
        ("qkv_proj", (64, 128), {"config": Config(num_attention_heads=4, num_key_value_heads=2)},
         "output", 8),
        ("o_proj", (64, 64), {"config": Config(num_attention_heads=4, num_key_value_heads=2)},
         "input", 4),
        ("q_proj", (64, 64), {"num_heads": 4, "config": Config(num_attention_heads=2)},
         "output", 4),
    ],
)  # fmt: skip
def test_heads_are_read_from_the_model(name, shape, attributes, side, count):
    model = Attention({name: shape}, **attributes)
    structure = el.heads().structure_for(model, f"layers.{name}", *shape)
    assert structure == align(el.btt(), *shape, count, side)


@pytest.mark.parametrize(
    ("name", "side"),
    [("attn.c_proj", "input"), ("mlp.c_proj", None), ("attention.output.dense", "input"),
     ("output.dense", None), ("SelfAttention.o", "input"), ("DenseReluDense.wo", None),
     ("attn.to_out.0", "input"), ("fc1", None), ("SelfAttention.q", "output"),
     ("pattern.proj", None), ("self_attn.proj", "input"), ("encoder_attention.out", "input")],
)  # fmt: skip
def test_the_name_says_the_side(name, side):
    model = nn.Module()
    for part in range(len(name.split("."))):
        prefix = name.split(".")[:part]
        model.get_submodule(".".join(prefix)).add_module(name.split(".")[part], nn.Module())
    rule = el.heads(4)
    if side is None:
        with pytest.raises(el.EinlinearError, match="does not tell where the heads are"):
            rule.structure_for(model, name, 64, 64)
        rule = el.heads(4, side="input")
    wanted = align(el.btt(), 64, 64, 4, side or "input")
    assert rule.structure_for(model, name, 64, 64) == wanted


def test_an_unknown_number_of_heads():
    with pytest.raises(el.EinlinearError, match=r"fix:  give it: el\.heads\(16\)"):
        el.heads().structure_for(Attention({"q_proj": (64, 64)}), "layers.q_proj", 64, 64)


def test_a_width_that_is_not_heads_times_head_width():
    model = Attention({"q_proj": (64, 64)}, num_heads=4, head_dim=8)
    with pytest.raises(el.EinlinearError, match="the width is 64, but the model has 4 heads of 8"):
        el.heads().structure_for(model, "layers.q_proj", 64, 64)


def test_wrong_rules():
    with pytest.raises(el.EinlinearError, match="side of the heads is given as 'left'"):
        el.heads(4, side="left")
    with pytest.raises(el.EinlinearError, match="number of heads is 'btt"):
        el.heads("btt()")
    with pytest.raises(el.EinlinearError, match="a structure is given as 3"):
        el.heads(4, 3)
