"""The card of a converted model."""

import pytest
from torch import nn

import einlinear as el


def test_a_card_names_structures_counts_and_how_to_load():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    el.convert_(model, {"0": "btt(rank=2)", "1": el.moe("low_rank(rank=4)", 4)})
    card = el.model_card(model)
    assert card.startswith("# Sequential with structured linear layers")
    # btt: 2 factors of 8³ x 2, and a bias; experts: 4 x 2 x 64 x 4, a gate of 4 x 64, and a bias
    assert "| `btt(rank=2)` | 64 → 64 | `0` | 2.11 k | 4.16 k |" in card
    assert "| `low_rank(rank=4)`, 4 experts, 2 active | 64 → 64 | `1` | 2.37 k | 4.16 k |" in card
    assert "They have 4.48 k parameters; dense layers in their places would have 8.32 k." in card
    assert 'el.load("this folder", lambda: Sequential(...))' in card


def test_layers_of_one_kind_share_a_row():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 10))
    el.convert_(model, "btt")
    model[5] = el.MoEFeedForward(64, 32, num_experts=4)
    card = el.model_card(model)
    assert "| `0`, `1` and 3 more |" in card
    assert "| MoEFeedForward, 4 experts, 2 active | 64 → 32 | `5` |" in card


def test_a_card_for_the_hub_has_the_line_to_add():
    hf = pytest.importorskip("transformers")
    model = hf.ViTForImageClassification(
        hf.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=4, image_size=16, patch_size=8)
    )  # fmt: skip
    el.convert_(model, "btt")
    card = el.model_card(model)
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- einlinear\n---\n")
    assert "import einlinear  # the line to add" in card
    assert 'model = ViTForImageClassification.from_pretrained("this folder")' in card


def test_a_plain_model_has_no_card():
    with pytest.raises(el.EinlinearError, match=r"(?s)Sequential has no .*rule: .*fix:  convert"):
        el.model_card(nn.Sequential(nn.Linear(3, 3)))
