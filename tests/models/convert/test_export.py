"""Whole converted models in ONNX, by plain torch.onnx.export."""

import pytest
import torch
from torch import nn

import einlinear as el
from kit.exported import OnnxModel
from kit.twins import shake_

BATCH, LENGTH = torch.export.Dim("batch"), torch.export.Dim("length", max=16)


def assert_exported(model, rules, inputs):
    """The program and the model agree on inputs of every batch size and length."""
    assert el.convert_(model, rules).swaps
    shake_(model)
    model.eval()
    program = OnnxModel(model, (inputs[0],), ({0: BATCH, 1: LENGTH},))
    for x in inputs:
        torch.testing.assert_close(program(x), model(x).detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_gpt(positions):
    torch.manual_seed(0)
    model = el.GPT(11, context=16, width=32, depth=1, num_heads=4, positions=positions)
    inputs = [torch.randint(11, shape) for shape in [(2, 9), (1, 16), (5, 2)]]
    assert_exported(model, {"blocks.*.attention.*": el.heads(), "*": "btt(rank=2)"}, inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_encoder_layer():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True)
    inputs = [torch.randn(*shape, 32) for shape in [(2, 9), (1, 16), (5, 2)]]
    assert_exported(model, "btt(num_factors=3)", inputs)
