"""save_pretrained and from_pretrained of Hugging Face: tiny, random, offline."""

import copy
import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import einlinear as el
from kit.twins import shake_

hf = pytest.importorskip("transformers")

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]  # fmt: skip

TOKENS = torch.arange(18).reshape(2, 9)
LINE = "add the line `import einlinear` to load it"


def gpt2():
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=41, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                      bos_token_id=0, eos_token_id=0)
    )  # fmt: skip


def llama():
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=41, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip


def bert():
    return hf.BertForMaskedLM(
        hf.BertConfig(vocab_size=41, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                      num_attention_heads=4)
    )  # fmt: skip


def vit():
    return hf.ViTForImageClassification(
        hf.ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, image_size=16, patch_size=8, num_labels=5)
    )  # fmt: skip


def t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=41, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4,
                    decoder_start_token_id=0)
    )  # fmt: skip


MODELS = [gpt2, llama, bert, vit, t5]
ATTENTION = {gpt2: "*.attn.*", llama: "*self_attn*", bert: "*.attention.self.*"}


def converted(make=gpt2, rules="btt(rank=2)", **options):
    model = make()
    el.convert_(model, rules, **options)
    shake_(model)
    return model.eval()


def outputs(model):
    torch.manual_seed(0)
    if isinstance(model, hf.ViTPreTrainedModel):
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=model.dtype)}
    else:
        inputs = {"input_ids": TOKENS}
    if isinstance(model, hf.T5PreTrainedModel):
        inputs["decoder_input_ids"] = TOKENS
    with torch.no_grad():
        found = model(**inputs)
    return found[0]


def assert_same(model, loaded):
    assert [str(m) for m in model.modules()] == [str(m) for m in loaded.modules()]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert torch.equal(outputs(model), outputs(loaded))


@pytest.mark.parametrize("make", MODELS)
def test_a_model_is_loaded_bit_for_bit(make, tmp_path):
    model = converted(make)
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert_same(model, loaded)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("make", ATTENTION)
def test_heads_and_experts_of_an_auto_class(make, tmp_path):
    rules = {ATTENTION[make]: el.heads(), "*": el.moe("btt", 4, expert_gain=True)}
    model = converted(make, rules, factor_init="fan_in")
    model.save_pretrained(tmp_path)
    auto = hf.AutoModelForMaskedLM if make is bert else hf.AutoModelForCausalLM
    assert_same(model, auto.from_pretrained(tmp_path))


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_the_body_is_loaded_without_its_head_and_back(make, tmp_path):
    model = converted(make)
    model.save_pretrained(tmp_path / "model")
    body = hf.AutoModel.from_pretrained(tmp_path / "model")
    own = model.base_model
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, body.state_dict()[name]), name
    body.save_pretrained(tmp_path / "body")
    again, report = type(model).from_pretrained(tmp_path / "body", output_loading_info=True)
    assert torch.equal(outputs(again.base_model), outputs(body))
    assert all(key.startswith("pooler") for key in report["unexpected_keys"])


def test_the_inner_model_is_saved_under_its_own_names(tmp_path):
    model = converted()
    model.transformer.save_pretrained(tmp_path / "inner")
    loaded = hf.GPT2Model.from_pretrained(tmp_path / "inner")
    assert torch.equal(outputs(loaded), outputs(model.transformer))
    model.save_pretrained(tmp_path / "outer")
    assert_same(model, hf.GPT2LMHeadModel.from_pretrained(tmp_path / "outer"))


def test_a_part_that_was_converted_alone(tmp_path):
    model = gpt2()
    el.convert_(model.transformer, "btt(rank=2)")
    shake_(model)
    model.eval().save_pretrained(tmp_path)
    assert_same(model, hf.GPT2LMHeadModel.from_pretrained(tmp_path))


def test_many_files_and_a_device_map(tmp_path):
    model = converted(llama)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    assert_same(model, loaded)


def test_another_dtype(tmp_path):
    model = converted(gpt2)
    model.save_pretrained(tmp_path)
    half = copy.deepcopy(model).to(torch.bfloat16)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(half, loaded)
    assert loaded.float().dtype == torch.float32  # an error for models that are quantized
    half.save_pretrained(tmp_path / "half")
    assert_same(half, hf.AutoModelForCausalLM.from_pretrained(tmp_path / "half"))


def test_a_loaded_model_is_saved_copied_and_generates(tmp_path):
    model = converted(llama)
    model.save_pretrained(tmp_path / "first")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    copy.deepcopy(loaded).save_pretrained(tmp_path / "second")
    second = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert_same(model, second)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **options), second.generate(TOKENS, **options))
    file = io.BytesIO()
    torch.save(second, file)
    file.seek(0)
    assert_same(model, torch.load(file, weights_only=False))


def test_more_tokens(tmp_path):
    model = converted()
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path)
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same(model, loaded)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    loaded.resize_token_embeddings(60)
    assert loaded.config.vocab_size == 60


def test_a_second_conversion_is_saved_too(tmp_path):
    model = converted(llama, {"*self_attn*": "btt"})
    el.convert_(model, {"*.mlp.*": "low_rank(rank=4)"})
    model.eval().save_pretrained(tmp_path)
    assert_same(model, hf.LlamaForCausalLM.from_pretrained(tmp_path))


def test_layers_that_are_replaced_by_hand_are_saved_as_they_are(tmp_path):
    model = converted(llama)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 80, bias=False)
    model.save_pretrained(tmp_path)
    assert_same(model, hf.LlamaForCausalLM.from_pretrained(tmp_path))


@pytest.mark.slow
def test_the_trainer_trains_saves_and_resumes(tmp_path):
    model = converted(llama)
    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    groups = el.param_groups(model, lr=1e-2, base_width=16)
    optimizer = torch.optim.AdamW(groups)
    start = outputs(model)

    def trainer(steps, optimizer):
        options = hf.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=2, per_device_train_batch_size=4,
            report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return hf.Trainer(model, options, train_dataset=data, optimizers=(optimizer, constant))

    trainer(2, optimizer).train()
    trained = outputs(model.eval())
    assert not torch.equal(start, trained)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(outputs(loaded), trained)
    trainer(3, torch.optim.AdamW(groups)).train(resume_from_checkpoint=True)
    assert not torch.equal(outputs(model.eval()), trained)


def test_the_file_fits_the_converted_model(tmp_path):
    """Placeholders for others do not stand in the way of load_state_dict."""
    from safetensors.torch import load_file

    rules = {"*.attn.*": el.moe("btt", 4), "*": "btt"}
    model = converted(gpt2, rules)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["transformer.h.0.mlp.c_fc.weight"].shape == (1,)
    again = converted(gpt2, rules)
    again.load_state_dict({**stored, "lm_head.weight": stored["transformer.wte.weight"]})
    assert_same(model, again)
    with pytest.raises(RuntimeError, match=r"mismatch for transformer\.h\.0\.attn\.c_attn\.weight"):
        gpt2().load_state_dict(stored, strict=False)


FRESH = """
import sys, transformers as hf

def refused(load, **options):
    try:
        load(**options)
    except Exception as error:
        return print(type(error).__name__, error)
    print("loaded")

for kind in (hf.AutoModelForCausalLM, hf.GPT2LMHeadModel, hf.AutoModel):
    refused(kind.from_pretrained, pretrained_model_name_or_path=sys.argv[1])
for path in sys.argv[2:]:
    refused(hf.GPT2LMHeadModel.from_pretrained, pretrained_model_name_or_path=path)
assert "einlinear" not in sys.modules
import einlinear
model = hf.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.transformer.h[0].mlp.c_fc).__name__)
"""


def without(path, to, *fields):
    """Copy a saved model without fields of its config, as other versions see it."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text())
    for name in fields:
        del config[name]
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.slow
def test_without_the_line_nothing_is_loaded(tmp_path):
    """Versions that know no fusions refuse because of the shapes."""
    whole = tmp_path / "whole"
    converted().save_pretrained(whole)
    older = without(whole, tmp_path / "older", "fusion_config")
    edited = without(whole, tmp_path / "edited", "fusion_config", "quantization_config")
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", FRESH, whole, older, edited]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    line = f"ValueError Unknown fusion type: none. This model has layers of einlinear: {LINE}"
    assert lines[:3] == [line] * 3, result.stderr
    assert [line.split()[0] for line in lines[3:5]] == ["RuntimeError"] * 2
    assert "MISMATCH" in result.stderr
    assert lines[5:] == ["EinsumLinear"]


def test_a_version_without_quantizers_gets_a_warning(monkeypatch):
    from einlinear.models.saving import hook

    monkeypatch.setattr(hook, "_OURS", "einlinear.models.saving.nothing")
    with pytest.warns(RuntimeWarning, match="from_pretrained cannot load .* No module named"):
        hook._register()


def test_in_such_a_version_models_are_still_converted(monkeypatch):
    monkeypatch.setitem(sys.modules, "einlinear.models.saving.quantizer", None)
    model = gpt2()
    el.convert_(model, "btt")
    assert not hasattr(model.config, "quantization_config")


def refused(what, rule, fix):
    """Expect an error of these three parts; each is a regular expression."""
    return pytest.raises(el.EinlinearError, match=f"(?s){what}.*rule: .*{rule}.*fix:  .*{fix}")


def rewritten(path, **fields):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= fields
    (path / "config.json").write_text(json.dumps(config))


def test_a_config_that_was_changed(tmp_path):
    converted().save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["groups"]
    rewritten(tmp_path, schema=7)
    with refused("schema 7, written by einlinear", "reads schema 1", "install the version"):
        hf.AutoModel.from_pretrained(tmp_path)
    rewritten(tmp_path, schema=1)
    group = good[0]
    for bad, why in [
        (3, "groups is 3, not a list of objects"),
        ([{**group, "modules": 3}], "modules is 3, not a list"),
        ([{**group, "kind": "os"}], r"layers\[0\]\.kind is 'os', not 'EinsumLinear' or"),
        ([{**group, "modules": [[]]}], "a layer without a name"),
    ]:
        rewritten(tmp_path, groups=bad)
        with refused(f"cannot read the quantization_config.*: .*{why}", "as it was", "save the"):
            hf.AutoModel.from_pretrained(tmp_path)
    rewritten(tmp_path, groups=[{**group, "modules": [["transformer.h.9.mlp.c_fc"]]}])
    with refused("GPT2Model has no layer 'h.9.mlp.c_fc'", "same layers", "before it was conv"):
        hf.AutoModel.from_pretrained(tmp_path)
    sizes = {**group["sizes"], "XA": 1}
    rewritten(tmp_path, groups=[{**group, "sizes": sizes}])
    with refused(r"layer 'h\.0.*was saved with the sizes .*XA 1,", "trained with", "version of"):
        hf.AutoModel.from_pretrained(tmp_path)


def test_a_file_without_the_weights_of_a_layer(tmp_path):
    model = converted()
    model.save_pretrained(tmp_path / "model")
    gpt2().save_pretrained(tmp_path / "plain")
    config = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "plain" / "config.json").write_text(config)
    with refused(r"files of the model lack transformer\.h\.0\.attn\.c_attn\.A, .* and 11 more",
                 "none is drawn at random", "save the converted model again"):  # fmt: skip
        hf.GPT2LMHeadModel.from_pretrained(tmp_path / "plain")


def test_weights_of_another_shape(tmp_path):
    converted(vit).save_pretrained(tmp_path)
    with refused(r"'classifier.weight' has the shape \(7, 32\) .* saved with \(5, 32\)",
                 "has the shapes", "the config that it was saved with"):  # fmt: skip
        hf.ViTForImageClassification.from_pretrained(tmp_path, num_labels=7)


def test_a_plain_model_is_converted_after_it_is_loaded(tmp_path):
    from einlinear.models.saving.quantizer import EinlinearConfig

    gpt2().save_pretrained(tmp_path)
    with refused("given an EinlinearConfig for a plain model", "after a model is", "then call el"):
        hf.GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=EinlinearConfig([]))


def test_the_settings_of_the_user_are_kept(tmp_path):
    model = gpt2()
    model.config.fusion_config = {"mine": False}
    el.convert_(model, "btt")
    assert next(iter(model.config.fusion_config)) == "mine"
    from einlinear.models.saving.pretrained import forget_line_

    forget_line_(model.config)
    assert model.config.fusion_config == {"mine": False}


def test_a_model_of_another_quantizer_is_not_loaded_with_random_weights(tmp_path):
    model = gpt2()
    model.hf_quantizer = others = object()
    el.convert_(model, "btt")
    assert model.hf_quantizer is others
    assert not hasattr(model.config, "quantization_config")
    model.hf_quantizer = None
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers of einlinear and is quantized: it cannot be load"):
        hf.GPT2LMHeadModel.from_pretrained(tmp_path)


def test_layers_with_the_same_settings_share_an_entry(tmp_path):
    converted(llama).save_pretrained(tmp_path)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["groups"]
    assert sum(len(group["modules"]) for group in groups) == 14
    assert len(groups) == 4  # queries and outputs, keys and values, up and gate, down


def test_weights_on_several_processes_are_refused(tmp_path):
    model = converted()
    model.transformer.wte.weight.ds_id = 0  # as DeepSpeed marks its parts
    parts = ("'transformer.wte.weight' is spread", "of one process", r"el\.full_state_dict")
    with refused(*parts):
        model.save_pretrained(tmp_path / "first")
    with refused(*parts):
        el.save(model, tmp_path / "second")
    assert not list(tmp_path.glob("*/*"))


def test_el_save_takes_models_of_hugging_face_too(tmp_path):
    model = converted()
    el.save(model, tmp_path)
    assert_same(model, el.load(tmp_path, gpt2).eval())


@pytest.mark.parametrize("make", MODELS)
def test_a_model_with_the_same_config_stays_plain(make, tmp_path):
    model = make()
    config = model.config
    other = type(model)(config).eval()
    before = config.to_dict()
    el.convert_(model, "btt(rank=2)")
    assert other.config is config
    assert config.to_dict() == before
    other.save_pretrained(tmp_path / "other")
    assert "einlinear" not in (tmp_path / "other" / "config.json").read_text()
    assert_same(other, type(model).from_pretrained(tmp_path / "other"))
    held = [value for module in model.modules() for value in vars(module).values()]
    assert not any(value is config for value in held)
    model.eval().save_pretrained(tmp_path / "model")
    assert_same(model, type(model).from_pretrained(tmp_path / "model"))


def test_parts_of_a_converted_model_share_its_config():
    model = converted(llama)
    assert model.model.config is model.config
    assert model.model.layers[0].self_attn.config is model.config
    own = model.config
    el.convert_(model, {"lm_head": "btt"})
    assert model.config is own


def test_a_teacher_next_to_its_student_stays_plain(tmp_path):
    student = gpt2()
    both = nn.ModuleDict({"student": student, "teacher": hf.GPT2LMHeadModel(student.config)})
    el.convert_(both, {"student.transformer.*": "btt"})
    teacher = both["teacher"].eval()
    teacher.save_pretrained(tmp_path)
    assert "einlinear" not in (tmp_path / "config.json").read_text()
    assert_same(teacher, hf.GPT2LMHeadModel.from_pretrained(tmp_path))


def test_a_plain_model_with_the_config_of_a_converted_one(tmp_path):
    """Nothing of ours sees it being saved; loading tells what to do."""
    converted().save_pretrained(tmp_path / "model")
    plain = hf.GPT2LMHeadModel(hf.AutoConfig.from_pretrained(tmp_path / "model")).eval()
    plain.save_pretrained(tmp_path / "plain")
    with refused("files of the model lack", "at random", "plain model .* remove quantization_c"):
        hf.GPT2LMHeadModel.from_pretrained(tmp_path / "plain")
    fields = "quantization_config", "fusion_config"
    mended = without(tmp_path / "plain", tmp_path / "mended", *fields)
    assert_same(plain, hf.GPT2LMHeadModel.from_pretrained(mended))
    el.convert_(plain, "low_rank(rank=3)")
    plain.save_pretrained(tmp_path / "again")
    assert_same(plain, hf.GPT2LMHeadModel.from_pretrained(tmp_path / "again"))


def test_layers_of_other_classes_are_refused_when_saved(tmp_path):
    class Doubled(el.EinsumLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = llama()
    model.model.layers[0].mlp.up_proj = Doubled(32, 80, bias=False, structure="btt")
    el.convert_(model, {"*self_attn*": "btt"})
    with refused("'model.layers.0.mlp.up_proj' is of the class Doubled", "exactly", "state_dict"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*"))


def test_a_kronecker_product_of_cola(tmp_path):
    ops = pytest.importorskip("cola").ops
    model = converted(llama, {"*self_attn*": "btt"})
    factors = ops.Dense(torch.randn(8, 4)), ops.Dense(torch.randn(10, 8))
    model.model.layers[0].mlp.up_proj = el.from_cola(ops.Kronecker(*factors))
    model.save_pretrained(tmp_path)
    assert_same(model, hf.LlamaForCausalLM.from_pretrained(tmp_path))


def test_a_model_of_el_load_is_saved_like_a_converted_one(tmp_path):
    model = converted()
    el.save(model, tmp_path / "own")
    el.load(tmp_path / "own", gpt2).save_pretrained(tmp_path / "hf")
    assert_same(model, hf.GPT2LMHeadModel.from_pretrained(tmp_path / "hf"))


@pytest.mark.parametrize("is_converted", [False, True])
def test_adapters_are_not_left_out_in_silence(is_converted, tmp_path):
    model = llama()
    if is_converted:
        el.convert_(model, {"*.mlp.*": "low_rank(rank=4) + btt"})
    el.adapt_(model, "low_rank(rank=2)", where="*.self_attn.*")
    shake_(model)
    model.save_pretrained(tmp_path / "adapted")
    with pytest.raises(ValueError, match=r"saved with adapters of einlinear.*el\.merge_"):
        hf.LlamaForCausalLM.from_pretrained(tmp_path / "adapted")
    el.merge_(model)
    model.save_pretrained(tmp_path / "merged")
    assert_same(model, hf.LlamaForCausalLM.from_pretrained(tmp_path / "merged"))
    assert type(model.config).from_pretrained(tmp_path / "merged")
