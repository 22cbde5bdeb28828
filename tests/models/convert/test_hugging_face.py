"""Conversion of models of Hugging Face: tiny, random, offline."""

import copy
import subprocess
import sys

import pytest
import torch

import einlinear as el
from kit.twins import assert_same_gradients, copy_into_, shake_, structured

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]  # fmt: skip

TOL = 1e-9  # float64


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def gpt2(hf):
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=41, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def llama(hf):
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=41, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip


def bert(hf):
    return hf.BertForMaskedLM(
        hf.BertConfig(vocab_size=41, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                      num_attention_heads=4, hidden_dropout_prob=0.0,
                      attention_probs_dropout_prob=0.0)
    )  # fmt: skip


ATTENTION = {gpt2: "*.attn.*", llama: "*self_attn*", bert: "*.attention.*"}
HEAD = {gpt2: "lm_head", llama: "lm_head", bert: "cls.predictions.decoder"}
LAYERS = {gpt2: 2 * 4, llama: 2 * 7, bert: 2 * 6 + 1}


@pytest.mark.no_cover
@pytest.mark.parametrize("has_heads", [True, False])
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_output_and_gradients_are_those_of_the_dense_twin(transformers, make, has_heads):
    torch.manual_seed(0)
    model = make(transformers).double()
    twin = copy.deepcopy(model)
    rules = {ATTENTION[make]: el.heads(), "*": "btt(rank=2)"} if has_heads else "btt(rank=2)"
    report = el.convert_(model, rules)
    assert len(report.swaps) == LAYERS[make]
    assert [(left.names, left.reason) for left in report.left] == [((HEAD[make],), "output head")]
    shake_(model, 0.05)
    copy_into_(twin, model)
    tokens = torch.randint(41, (2, 9))
    padding = torch.ones_like(tokens)
    padding[1, 6:] = 0
    outputs = [m(tokens, attention_mask=padding, labels=tokens) for m in (model, twin)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=TOL, rtol=TOL)
    for output in outputs:
        output.loss.backward()
    assert_same_gradients(model, twin, TOL)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_heads_of_grouped_queries(transformers):
    model = llama(transformers)
    el.convert_(model, {"*self_attn*": el.heads()})
    attention = model.model.layers[0].self_attn
    sizes = {name: getattr(attention, f"{name}_proj").plan.sizes for name in "qkvo"}
    assert {name: s["XAB" if name == "o" else "YAB"] for name, s in sizes.items()} == {
        "q": 4, "k": 2, "v": 2, "o": 4,
    }  # fmt: skip


def test_heads_of_a_fused_layer(transformers):
    model = gpt2(transformers)
    el.convert_(model, {"*.attn.*": el.heads()})
    attention = model.transformer.h[1].attn
    assert attention.c_attn.plan.sizes["YAB"] == 12
    assert attention.c_proj.plan.sizes["XAB"] == 4
    with pytest.raises(el.EinlinearError, match=r"h\.0\.mlp\.c_proj', 128 -> 32: the name does"):
        el.convert_(model, {"*.mlp.c_proj": el.heads()})


def test_tied_heads(transformers):
    model = gpt2(transformers)
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(el.EinlinearError, match=r"transformer\.wte\.weight is lm_head\.weight"):
        el.convert_(model, {"lm_head": "btt()"})
    el.convert_(model, "btt()")
    assert model.lm_head.weight is model.transformer.wte.weight
    model = llama(transformers)
    el.convert_(model, {"lm_head": "btt()"})
    assert isinstance(model.get_output_embeddings(), el.EinsumLinear)


def test_models_with_a_classifier(transformers):
    config = transformers.BertConfig(
        vocab_size=41, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    report = el.convert_(model, "btt()")
    assert [left.names for left in report.left] == [("classifier",)]
    model(torch.randint(41, (2, 9)), labels=torch.tensor([0, 2])).loss.backward()
    assert all(m.A.grad is not None for m in structured(model).values())


def test_a_model_without_a_head(transformers):
    model = gpt2(transformers).transformer
    assert len(el.convert_(model, "btt()").swaps) == 8


def test_generation_with_a_cache(transformers):
    torch.manual_seed(0)
    model = gpt2(transformers).double().eval()
    twin = copy.deepcopy(model)
    el.convert_(model, "btt(rank=2)")
    shake_(model)
    copy_into_(twin, model)
    tokens = torch.randint(41, (2, 4))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = [
        m.generate(tokens, attention_mask=torch.ones_like(tokens), use_cache=cache, **options)
        for m, cache in ((model, True), (model, False), (twin, True))
    ]
    assert made[0].shape == (2, 12)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_t5_reads_the_weight_of_a_layer(transformers):
    config = transformers.T5Config(
        vocab_size=41, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    el.convert_(model, {"*Attention.*": el.heads(), "*": "btt()"})
    tokens = torch.randint(41, (2, 6))
    model(tokens, labels=tokens).loss.backward()
    assert all(m.A.grad is not None for m in structured(model).values())


def test_a_subclass_of_conv1d_with_a_forward_of_its_own(transformers):
    class Doubled(transformers.pytorch_utils.Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(el.EinlinearError, match="Doubled, which overrides forward"):
        el.convert_(torch.nn.ModuleList([Doubled(8, 16)]), "btt()")


def test_a_parametrized_conv1d(transformers):
    layer = transformers.pytorch_utils.Conv1D(8, 16)
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(el.EinlinearError, match="a parametrization: _WeightNorm"):
        el.convert_(torch.nn.ModuleList([layer]), "btt()")


@pytest.mark.slow
def test_neither_transformers_nor_the_compiler_is_loaded_by_itself():
    code = (
        "import sys, torch, einlinear as el, einlinear.training.train\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8))\n"
        "el.convert_(model, 'btt()')\n"
        "print({'transformers', 'torch._dynamo'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_rates_of_converted_models(transformers, make, optimizer):
    model = make(transformers)
    el.convert_(model, "btt(rank=2)")
    el.init_(model)
    groups = el.param_groups(model, lr=1e-3, base_width=32, optimizer=optimizer)
    found = [id(p) for group in groups for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    tokens = torch.randint(41, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_the_trainer_takes_the_groups(transformers, tmp_path):
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = gpt2(transformers)
    el.convert_(model, {"*.attn.*": el.heads(), "*": "btt(rank=2)"})
    el.init_(model)
    optimizer = torch.optim.AdamW(el.param_groups(model, lr=1e-2, base_width=32, weight_decay=0.1))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert len(set(rates)) > 2
    tokens = torch.arange(16) % 4
    data = [{"input_ids": tokens, "labels": tokens}] * 64
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=24, per_device_train_batch_size=4, report_to=[],
        logging_steps=8, save_strategy="no", disable_tqdm=True, use_cpu=True,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
    assert [group["lr"] for group in optimizer.param_groups] == rates
