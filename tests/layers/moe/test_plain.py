"""Mixtures of experts in exported programs and in ONNX."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import einlinear as el
from einlinear.layers.moe import assignment, plain
from kit.exported import OnnxModel, our_operators

ANY_BATCH = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
LAYERS = {
    "btt": lambda: el.MoELinear(24, 37, structure="btt(rank=2)", num_experts=3),
    "no bias, all active": lambda: el.MoELinear(
        24, 24, bias=False, structure="low_rank", num_experts=3, num_active=3
    ),
    "as in the paper": lambda: el.MoELinear(
        24, 24, structure="btt", num_experts=4, expert_norm="together", expert_gain=True
    ),
    "ffn": lambda: el.MoEFeedForward(24, 40, num_experts=4),
}


def make(name):
    """A layer whose gate is trained, and whose biases and normalisation matter."""
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        layer.gate.weight.normal_()
    return layer


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_pairs_are_sorted_alike(num_tokens):
    torch.manual_seed(0)
    experts_tk = torch.rand(num_tokens, 7).argsort(-1)[:, :3]
    wanted = assignment._sorted(experts_tk, 6)  # an expert too many, of another rank
    for got, want in zip(assignment._sorted_plainly(experts_tk, 6), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "btt")) for name in LAYERS],
)
def test_exported_and_onnx(name):
    layer = make(name)
    x = torch.randn(3, 5, 24)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=ANY_BATCH)
        assert not our_operators(program)
        onnx = OnnxModel(layer, (x,), ANY_BATCH)
        assert "Split" in onnx.kinds  # every expert has only the rows of its own tokens
        for shape in [(3, 5), (1, 1), (7, 33)]:
            x = torch.randn(*shape, 24)
            wanted = layer(x)
            for got in (program.module()(x), onnx(x)):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_program_computes_only_active_experts():
    layer, x = make("btt"), torch.randn(30, 24)
    with torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
        with FlopCounterMode(display=False) as counter:
            program(x)
    rows = 30 * layer.num_active + plain._FILLING * layer.num_experts
    gate = 30 * layer.in_features * layer.num_experts
    assert counter.get_total_flops() == 2 * (rows * layer.plan.macs + gate)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_warning_says_that_ties_are_decided_otherwise():
    layer = make("btt")
    with pytest.warns(UserWarning, match="where logits of a gate are equal"):
        torch.export.export(layer, (torch.randn(5, 24),))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_mixture_in_a_model_is_exported_strictly():
    model = nn.Sequential(make("btt"), nn.ReLU(), nn.Linear(37, 3))
    x = torch.randn(9, 24)
    program = torch.export.export(model, (x,), strict=True)
    torch.testing.assert_close(program.module()(x), model(x), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_sharded_experts_are_refused():
    layer = make("btt")
    layer.shard = SimpleNamespace(count=1)
    with pytest.raises(el.EinlinearError, match="only 1 of 3 experts") as caught:
        torch.export.export(layer, (torch.randn(5, 24),))
    assert "el.full_state_dict(model)" in str(caught.value)
