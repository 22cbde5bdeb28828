"""Weights that look trained are not replaced by random ones unless that is asked for."""

import copy

import pytest
import torch
from torch import nn

import einlinear as el

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def hf():
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def config(hf):
    return hf.GPT2Config(vocab_size=41, n_positions=32, n_embd=32, n_layer=2, n_head=4)


@pytest.fixture(scope="module")
def folder(hf, config, tmp_path_factory):
    """A tiny model, saved as Hugging Face does."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    hf.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def refusal(model, rules="btt", **options):
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(el.EinlinearError) as error:
        el.convert_(model, rules, **options)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    return error.value


def test_a_loaded_model_is_refused(hf, folder):
    model = hf.GPT2LMHeadModel.from_pretrained(folder)
    error = refusal(model)
    assert error.what == (
        "trained weights would be lost: transformer.h.{0..1}.attn.c_attn, "
        "transformer.h.{0..1}.attn.c_proj, transformer.h.{0..1}.mlp.c_fc and "
        f"transformer.h.{{0..1}}.mlp.c_proj (loaded from {str(folder)!r})"
    )
    assert error.rule == (
        "without init, new layers start at random, and what these have learned is lost"
    )
    assert 'give init="project"' in error.fix
    assert 'init="fresh"' in error.fix
    assert len(el.convert_(model, "btt", init="fresh").swaps) == 8


@pytest.mark.parametrize("change", [lambda model: model, copy.deepcopy])
def test_init_does_not_overwrite_a_loaded_model(hf, folder, change):
    model = change(hf.GPT2LMHeadModel.from_pretrained(folder))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(el.EinlinearError) as error:
        el.init_(model)
    assert error.value.what == (
        "trained weights would be lost: transformer.wte.weight, transformer.wpe.weight, "
        f"transformer.h.0.ln_1.weight and 25 more (loaded from {str(folder)!r})"
    )
    assert "overwrite=True" in error.value.fix
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    el.init_(model, overwrite=True)
    wte = model.transformer.wte.weight
    assert not torch.equal(before["transformer.wte.weight"], wte)
    el.init_(hf.GPT2LMHeadModel(hf.GPT2Config.from_pretrained(folder)))


def test_planning_says_what_would_be_lost(hf, folder):
    model = hf.GPT2LMHeadModel.from_pretrained(folder)
    plan = el.plan_conversion(model, {"*.mlp.*": "btt"})
    assert {lost.names for lost in plan.lost} == {
        (f"transformer.h.{i}.mlp.{name}",) for i in (0, 1) for name in ("c_fc", "c_proj")
    }
    assert "weights: randomly initialised, biases 0" in str(plan)
    words = " ".join(str(plan).split())
    assert f"trained weights that are lost: all (loaded from {str(folder)!r})" in words
    assert max(map(len, str(plan).replace(str(folder), "folder").splitlines())) <= 80
    assert plan == el.convert_(model, {"*.mlp.*": "btt"}, init="fresh")


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda model: model.double(),
        lambda model: nn.ModuleDict({"encoder": model.transformer}),
        lambda model: nn.Sequential(copy.deepcopy(model)),
    ],
)
def test_copies_casts_and_parts_of_a_loaded_model_are_refused(hf, folder, change):
    model = change(hf.GPT2LMHeadModel.from_pretrained(folder))
    assert f"(loaded from {str(folder)!r})" in refusal(model).what


def test_a_model_of_a_config_is_converted(hf, config, folder, tmp_path):
    saved = hf.GPT2LMHeadModel(config)
    saved.save_pretrained(tmp_path)
    for model in (
        saved,
        hf.GPT2LMHeadModel(hf.GPT2Config.from_pretrained(folder)),
        hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder)),
    ):
        report = el.convert_(model, "btt")
        assert not report.lost
        assert "lost" not in str(report)
    assert report.unmarked_source == repr(str(folder))
    assert "cannot tell" not in str(el.plan_conversion(hf.GPT2Model(config), "btt"))


def test_a_copy_of_a_part_is_said_to_be_unknown(hf, folder):
    """Nothing in it differs from a model that was built from the same config."""
    part = copy.deepcopy(hf.GPT2LMHeadModel.from_pretrained(folder).transformer)
    words = " ".join(str(el.plan_conversion(part, "btt")).split())
    assert f"cannot tell whether weights were loaded from {str(folder)!r}" in words


def test_layers_that_the_checkpoint_lacks_are_fresh(hf, folder):
    model = hf.GPT2ForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)
    assert el.convert_(model, {"score": "btt"}).swaps
    assert "loaded from" in refusal(model, {"*.c_fc": "btt"}).what


def test_frozen_layers_are_refused():
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"})
    model["a"].requires_grad_(False)
    model["b"].bias.requires_grad_(False)
    error = refusal(model)
    assert error.what == "trained weights would be lost: a (frozen: requires_grad is False)"
    words = "trained weights that are lost: a (frozen: requires_grad is False)"
    assert words in str(el.plan_conversion(model, "btt"))
    assert len(el.convert_(model, {"a": None, "*": "btt"}).swaps) == 2
    assert len(el.convert_(model, "btt", init="fresh").swaps) == 1
    assert isinstance(model["a"], el.EinsumLinear)


def test_a_frozen_attention_is_refused():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2)}).requires_grad_(False)
    assert "a.q_proj, a.k_proj, a.v_proj and a.out_proj (frozen" in refusal(model).what


def test_how_weights_start_is_checked_first():
    model = nn.ModuleDict({"a": nn.Linear(16, 16)}).requires_grad_(False)
    assert refusal(model, init="zeros").what == "init is 'zeros'"


def test_parameters_outside_linear_layers_are_named_with_their_share(hf):
    config = hf.MixtralConfig(
        vocab_size=41, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    experts = 2 * 8 * (3 * 32 * 64)
    report = el.convert_(model, "btt")
    found = {unseen.name: (unseen.kind, unseen.params) for unseen in report.unseen}
    assert found["model.layers.1.mlp.experts"] == ("MixtralExperts", experts // 2)
    assert found["model.embed_tokens"] == ("Embedding", 41 * 32)
    linear = 41 * 32 + report.params_before
    assert sum(params for _, params in found.values()) == total - linear
    words = " ".join(str(report).split())
    assert experts / total == pytest.approx(0.912, abs=5e-4)
    assert (
        "left alone: model.layers.{0..1}.mlp.experts (MixtralExperts, not a linear layer: 91 % of "
        "all parameters)" in words
    )
    assert "the rest (MixtralTopKRouter, MixtralRMSNorm: 0.6 % of all parameters)" in words
    assert max(map(len, str(report).splitlines())) <= 80
