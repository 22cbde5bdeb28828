"""adapt_, merge_ and the folder of adapters, against dense sums in float64."""

import copy
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import einlinear as el

KINDS = ["low_rank(rank=3)", "btt(rank=2)", "kronecker", "monarch", "tensor_train(rank=2)", "dense"]


def mlp():
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 16), nn.Linear(16, 5)).double()


def shake_updates_(model, seed=0):
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, el.AdaptedLinear):
                for parameter in module.update.parameters():
                    noise = torch.randn(parameter.shape, generator=make, dtype=torch.float64)
                    parameter.add_(noise.to(parameter.dtype), alpha=0.3)


def adapted(rules="btt(rank=2)", **options):
    model = mlp()
    el.adapt_(model, rules, **options)
    shake_updates_(model)
    return model


def refused(what, rule, fix):
    return pytest.raises(el.EinlinearError, match=f"(?s){what}.*rule: .*{rule}.*fix:  .*{fix}")


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_starts_at_zero_and_learns(kind):
    model, x = mlp(), torch.randn(7, 12, dtype=torch.float64)
    expected = model(x)
    report = el.adapt_(model, kind)
    assert torch.equal(model(x), expected)
    model(x).square().sum().backward()
    last = model[0].update.plan.steps[-1].factor
    assert model[0].update.get_parameter(last).grad.abs().max() > 0
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in dict(model.named_parameters()) if ".update." in name}
    assert (
        report.trained_params
        == report.params
        == sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    assert all(p.grad is None for name, p in model.named_parameters() if ".update." not in name)


@given(kind=st.sampled_from(KINDS), d_in=st.integers(1, 17), d_out=st.integers(1, 17))
@settings(max_examples=25, deadline=None)
def test_merging_adds_the_dense_matrix(kind, d_in, d_out):
    model = nn.Sequential(nn.Linear(d_in, d_out).double())
    weight = model[0].weight.detach().clone()
    el.adapt_(model, kind)
    shake_updates_(model)
    update = model[0].update.to_dense().detach()
    x = torch.randn(3, d_in, dtype=torch.float64)
    expected = x @ (weight + update).T + model[0].bias
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)
    assert el.merge_(model) == ("0",)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model[0].weight, weight + update, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)


def test_removing_restores_every_bit():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    el.adapt_(model, "btt")
    shake_updates_(model)
    assert el.remove_adapters_(model) == ("0", "2")
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear, nn.Linear]
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_attention_is_packed_again():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    x, names = torch.randn(2, 5, 32, dtype=torch.float64), list(model.state_dict())
    start = model(x)
    report = el.adapt_(model, "low_rank(rank=2)", where=["*.q_proj", re.compile(r".*linear\d")])
    assert len(report.adapted) == 6
    torch.testing.assert_close(model(x), start, atol=1e-10, rtol=1e-10)
    shake_updates_(model)
    expected = model(x)
    assert torch.dist(expected, start) > 0.1
    el.merge_(model)
    assert list(model.state_dict()) == names
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)


def test_conv1d_of_hugging_face():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(24, 12), conv1d(12, 24), nn.Linear(12, 3)).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    start = model(x)
    el.adapt_(model, "btt")
    torch.testing.assert_close(model(x), start, atol=1e-10, rtol=1e-10)
    shake_updates_(model)
    expected = model(x)
    el.merge_(model)
    assert type(model[0]) is conv1d
    assert model[0].weight.shape == (12, 24)
    torch.testing.assert_close(model(x), expected, atol=1e-10, rtol=1e-10)


def test_shared_and_tied_layers():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 3))
    assert [swap.names for swap in el.adapt_(model, "btt").adapted] == [("0", "2")]
    assert model[0] is model[2]
    el.merge_(model)
    assert model[0] is model[2]
    gpt = el.GPT(41, context=8, width=32, depth=1, head_size=8, tied=True)
    assert "output head" in str(el.adapt_(gpt, "btt"))
    el.merge_(gpt)
    assert gpt.head.weight is gpt.embedding.weight


def test_half_precision_with_wider_updates():
    model = mlp().bfloat16()
    el.adapt_(model, "btt", dtype=torch.float32)
    shake_updates_(model)
    assert model[0].update_dtype == torch.float32
    y = model(torch.randn(3, 12).bfloat16())
    assert y.dtype == torch.bfloat16
    expected = model[0].to_dense().bfloat16()
    el.merge_(model)
    assert torch.equal(model[0].weight, expected)


def test_copies_and_states():
    model, x = adapted(), torch.randn(3, 12, dtype=torch.float64)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.any()
    other = mlp()
    el.adapt_(other, "btt(rank=2)")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    missing, unexpected = other.load_state_dict(mlp().state_dict(), strict=False)
    assert unexpected == []
    assert all(".update." in name for name in missing)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # in torch
def test_compiling():
    model, x = adapted(), torch.randn(3, 12, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-10, rtol=1e-10)
    compiled(x).sum().backward()
    assert model[0].update.A.grad.any()


def test_a_folder_of_adapters(tmp_path):
    model, x = mlp(), torch.randn(3, 12, dtype=torch.float64)
    plain = copy.deepcopy(model)
    el.adapt_(model, "btt(rank=2)", trainable="3")
    shake_updates_(model)
    with torch.no_grad():
        model[3].weight.add_(1)
    assert el.save_adapters(model, tmp_path / "a") == tmp_path / "a"
    assert el.load_adapters_(plain, tmp_path / "a") == ("0", "2")
    assert torch.equal(plain(x), model(x))
    assert [p.requires_grad for p in plain.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    values = json.loads((tmp_path / "a/adapters.json").read_text())
    assert values["trained"] == ["3.weight", "3.bias"]


def test_a_folder_that_does_not_fit(tmp_path):
    el.save_adapters(adapted(), tmp_path)
    with refused("has no linear layer 0", "under the same names", "before it has adapters"):
        el.load_adapters_(nn.ModuleDict({"a": nn.Linear(3, 3)}), tmp_path)
    narrow = nn.Sequential(nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 16), nn.Linear(16, 5))
    with refused("'0' is 12 -> 4 .* saved as 12 -> 20", "the widths", "that was adapted"):
        el.load_adapters_(narrow, tmp_path)
    model = adapted()
    before = list(model.state_dict())
    with refused("'0' cannot be adapted: it has an adapter", "plain linear", "before it has"):
        el.load_adapters_(model, tmp_path)
    assert list(model.state_dict()) == before
    with refused("model is given as 3", "an nn.Module", "the model first"):
        el.load_adapters_(3, tmp_path)
    raw = (tmp_path / "adapters.safetensors").read_bytes()
    (tmp_path / "adapters.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with refused("checksum of adapters.safetensors", "as it was written", "save the adapters"):
        el.load_adapters_(mlp(), tmp_path)


def test_what_cannot_be_adapted(tmp_path):
    with refused("experts as adapters: 0", "one structured matrix", "give a structure"):
        el.adapt_(mlp(), {"0": el.moe("btt", 4)})
    with refused("and the rules are a mapping", "in one place", "into the rules"):
        el.adapt_(mlp(), {"0": "btt"}, where="2")
    with refused("where is given as 7", "a pattern on layer names", "where="):
        el.adapt_(mlp(), "btt", where=7)
    with refused("trainable is given as 7", "a glob", "trainable="):
        el.adapt_(mlp(), "btt", trainable=7)
    with refused("the pattern 'haed' matches no layer", "full name", "the layers are"):
        el.adapt_(mlp(), "btt", trainable="haed")
    with refused("dtype of adapters is given as 'f4'", "floating-point", "torch.float32"):
        el.adapt_(mlp(), "btt", dtype="f4")
    with refused("'0' cannot be replaced: it has an adapter", "only plain", "leave"):
        el.adapt_(adapted(), "btt")
    with refused("'0' cannot be replaced: it has an adapter", "only plain", "leave"):
        el.convert_(adapted(), "btt", init="fresh")
    with refused("Sequential has no adapter", "to merge", "el.adapt_"):
        el.merge_(mlp())
    with refused("model is given as 3", "an nn.Module", "that has adapters"):
        el.remove_adapters_(3)
    with refused("layer '0' has an adapter", "without adapters", "el.merge_"):
        el.save(adapted(), tmp_path)
    tied = adapted()
    tied[1] = nn.Linear(12, 20)
    tied[1].weight = tied[0].weight
    with refused("'0' is tied to another", "one layer", "weight of its own"):
        el.merge_(tied)


def test_the_report():
    report = el.adapt_(mlp(), {"0": "btt", "2": None}, trainable="3.bias")
    assert report.share == report.trained_params / report.model_params
    text = str(report)
    assert "left alone: 2 (its rule is None)" in text
    assert "trained besides: 3.bias" in text
    assert report.summary in text.replace("\n  ", " ")


def test_a_second_call_keeps_what_the_first_one_trains():
    model = mlp()
    el.adapt_(model, "low_rank(rank=2)", where="0", trainable="3")
    report = el.adapt_(model, "low_rank(rank=2)", where="2")
    assert model[3].weight.requires_grad
    assert not model[0].weight.requires_grad
    assert report.trainable == ("3.weight", "3.bias")


def test_running_statistics_are_saved_with_adapters(tmp_path):
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)).double()
    plain = copy.deepcopy(model).eval()
    el.adapt_(model, "low_rank(rank=2)", where="0")
    shake_updates_(model)
    for _ in range(5):
        model(3 * torch.randn(32, 12, dtype=torch.float64))
    el.save_adapters(model.eval(), tmp_path)
    el.load_adapters_(plain, tmp_path)
    x = torch.randn(7, 12, dtype=torch.float64)
    assert torch.equal(plain(x), model(x))
    assert not plain[1].weight.requires_grad


def test_structured_layers_are_not_adapted():
    model = mlp()
    el.convert_(model, "btt")
    with refused("structured already", "each of them once", "el.lora"):
        el.adapt_(model, "low_rank(rank=2)")
