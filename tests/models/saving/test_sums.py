"""Models with sums of structures on disk: the same numbers, bit for bit."""

import json

import pytest
import torch
from torch import nn

import einlinear as el
from kit.twins import shake_

SUM = "low_rank(rank=2) + btt(rank=2)"


def make():
    return nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 5))


def saved(tmp_path, **options):
    model = make()
    el.convert_(model, {"0": SUM, "2": "btt"}, **options)
    shake_(model)
    el.save(model, tmp_path / "model")
    return model, tmp_path / "model"


@pytest.mark.parametrize("options", [{}, {"weight_norm": False}, {"factor_init": "fan_in"}])
def test_bit_for_bit(tmp_path, options):
    model, folder = saved(tmp_path, **options)
    again = el.load(folder, make)
    x = torch.randn(4, 24)
    assert isinstance(again[0], el.SumLinear)
    assert again[0].structure == el.parse(SUM)
    assert str(again) == str(model)
    assert torch.equal(again(x), model(x))


def test_a_model_that_creates_the_layer_itself(tmp_path):
    model, folder = saved(tmp_path)

    def structured():
        new = make()
        new[0] = el.SumLinear(24, 32, structure=SUM)
        return new

    assert torch.equal(el.load(folder, structured)[0].to_dense(), model[0].to_dense())


def test_other_sizes_are_refused(tmp_path):
    _, folder = saved(tmp_path)
    described = json.loads((folder / "einlinear.json").read_text())
    layer = next(each for each in described["layers"] if each["kind"] == "SumLinear")
    assert len(described["layers"]) == 2
    assert layer["sizes"]["0.AB"] == 2
    assert layer["axes"]["1.A"] == list(model_axes())


def model_axes():
    return el.make_plan(el.btt(rank=2), 24, 32).factor_edges["A"]


def test_the_card_names_the_sum(tmp_path):
    model, _ = saved(tmp_path)
    assert "`low_rank(rank=2) + btt(rank=2)`" in el.model_card(model)


def test_pretrained(tmp_path):
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(vocab_size=41, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                           bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = hf.GPT2LMHeadModel(config).eval()
    el.convert_(model, {"*.c_fc": SUM, "*.c_proj": "btt"})
    shake_(model)
    model.save_pretrained(tmp_path)
    again = hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(18).reshape(2, 9)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert isinstance(again.transformer.h[0].mlp.c_fc, el.SumLinear)
