"""Adapters of peft: layers inside of them are not replaced, and structured layers can have them."""

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.models.survey.obstacles import ADAPTER


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(width, 64)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.down = nn.Linear(64, width)
        self.other = nn.Linear(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        y = torch.relu(self.up(x))
        y = self.attention(y, y, y)[0] if type(self.attention) is nn.MultiheadAttention else y
        return self.head(self.other(self.down(y)))


def adapted(peft, **options):
    torch.manual_seed(0)
    options = {"target_modules": ["up", "down"], "r": 2} | options
    return peft.get_peft_model(Net(), peft.LoraConfig(**options))


def test_layers_of_an_adapter_are_refused(peft):
    model = adapted(peft, modules_to_save=["head"])
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(el.EinlinearError) as error:
        el.convert_(model, "btt")
    assert error.value.what.startswith(
        "trained weights would be lost: base_model.model.up.base_layer, "
        "base_model.model.up.lora_A.default and base_model.model.up.lora_B.default "
        "(part of a PEFT adapter, base_model.model.up (peft.tuners.lora.layer.Linear)); "
    )
    assert error.value.fix.startswith(
        'convert the model before you add adapters, or merge them and give init="project": what '
        'they have learned is lost with the weights; or give init="fresh"'
    )
    with pytest.raises(el.EinlinearError, match="inside adapters") as error:
        el.convert_(model, "btt", init="project")
    assert error.value.fix.startswith("merge the adapters")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "pattern", ["*.up.base_layer", "*.lora_A.default", "*.head.modules_to_save.default"]
)
def test_parts_of_an_adapter_are_replaced_only_if_asked_for(peft, pattern):
    model = adapted(peft, modules_to_save=["head"])
    with pytest.raises(el.EinlinearError, match=ADAPTER):
        el.convert_(model, {pattern: "btt"})
    el.convert_(model, {pattern: "btt"}, init="fresh")
    model(torch.randn(3, 4, 16)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_init_does_not_overwrite_an_adapter(peft):
    model = adapted(peft)
    with pytest.raises(el.EinlinearError, match=rf"up\.lora_A\.default\.weight.*\({ADAPTER}"):
        el.init_(model)
    assert (model.base_model.model.up.lora_B["default"].weight == 0).all()
    el.init_(model, overwrite=True)


def test_an_attention_in_an_adapter_is_refused(peft):
    model = adapted(peft, target_modules=["attention"])
    with pytest.raises(el.EinlinearError, match=rf"{ADAPTER}.*lora.layer.MultiheadAttention"):
        el.convert_(model, {"*.k_proj": "btt"}, init="fresh")


def test_layers_next_to_an_adapter_are_frozen(peft):
    model = adapted(peft)
    rules = {"*.other": "btt"}
    with pytest.raises(el.EinlinearError, match=r"lost: base_model\.model\.other \(frozen"):
        el.convert_(model, rules)
    el.convert_(model, rules, init="fresh")
    assert isinstance(model.base_model.model.other, el.EinsumLinear)
    assert not model.base_model.model.other.A.requires_grad


def test_a_merged_model_is_converted(peft):
    model = adapted(peft).merge_and_unload()
    assert len(el.convert_(model, {"up": "btt", "down": "btt"}, init="fresh").swaps) == 2


def structured(peft, config):
    torch.manual_seed(0)
    model = Net()
    el.convert_(model, {"up": "btt(rank=2)", "down": el.moe("btt", 4)})
    return peft.get_peft_model(model, config)


def test_lora_on_structured_layers(peft, tmp_path):
    config = peft.LoraConfig(target_modules=["up", "down"], r=2, lora_alpha=6)
    with_lora = structured(peft, el.lora(config))
    x = torch.randn(3, 4, 16)
    base = with_lora.base_model.model.up.base_layer
    assert isinstance(base, el.EinsumLinear)
    assert config._custom_modules is None  # the config that was given stays as it was
    trained = [name for name, p in with_lora.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)
    groups = el.param_groups(with_lora, lr=0.1, base_width=16)
    assert sum(len(group["params"]) for group in groups) == 4

    optimizer = torch.optim.AdamW(groups)
    before = with_lora(x).detach()
    for _ in range(2):
        optimizer.zero_grad()
        with_lora(x).square().sum().backward()
        optimizer.step()
    lora = with_lora.base_model.model.up
    delta = 3.0 * lora.lora_B["default"].weight @ lora.lora_A["default"].weight
    torch.testing.assert_close(lora(x), base(x) + x @ delta.T)
    assert not torch.allclose(with_lora(x), before)
    with with_lora.disable_adapter():
        torch.testing.assert_close(with_lora(x), before)

    with_lora.save_pretrained(tmp_path)
    again = el.lora(peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(with_lora.unload(), tmp_path, config=again)
    torch.testing.assert_close(loaded.base_model.model.up(x), lora(x))


def test_an_adapted_model_is_saved_whole(peft, tmp_path):
    model = structured(peft, el.lora(peft.LoraConfig(target_modules=["up", "down"], r=2)))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.randn(3, 4, 16)
    torch.testing.assert_close(loaded(x), model(x))


def test_merging_into_a_structured_layer_is_refused(peft):
    model = structured(peft, el.lora(peft.LoraConfig(target_modules=["up", "down"], r=2)))
    with pytest.raises(el.EinlinearError, match="merged into EinsumLinear"):
        model.merge_and_unload()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "asks for use_dora"),
        ({"init_lora_weights": "pissa"}, "asks for init_lora_weights='pissa'"),
        ({"target_modules": "all-linear"}, 'target_modules is "all-linear"'),
    ],
)
def test_lora_that_needs_a_matrix_is_refused(peft, options, words):
    with pytest.raises(el.EinlinearError, match=words):
        el.lora(peft.LoraConfig(**({"target_modules": ["up"]} | options)))


def test_other_methods_are_refused(peft):
    with pytest.raises(el.EinlinearError, match="a config for LoRA is given as IA3Config"):
        el.lora(peft.IA3Config(target_modules=["up"]))
    with pytest.raises(el.EinlinearError, match="a config for LoRA is given as AdaLoraConfig"):
        el.lora(peft.AdaLoraConfig(target_modules=["up"], total_step=10))
