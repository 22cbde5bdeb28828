"""Parameters of modules without a rule: what names and shapes tell, and code for the others."""

import importlib
import re
import sys

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.models.mup.init import plan_init

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def hf():
    return pytest.importorskip("transformers")


class RMSNorm(nn.Module):
    """As people write it, with the gain under any of its names."""

    def __init__(self, width=24, name="weight", start=1.0, bias=None):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.full((width,), start)))
        if bias:
            self.register_parameter(bias, nn.Parameter(torch.zeros(width)))


class Stretch(nn.Module):
    """One vector; what it is for its class does not say."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def table(model, optimizer="sgd"):
    rows = el.scaling_table(model, 0.01, base_width=32, optimizer=optimizer)
    return {row.name: (row.kind, row.fan_in, row.fan_out) for row in rows}


def starts(model):
    return {start.name: (start.mean, start.std) for start in plan_init(model)}


def test_hand_written_norms():
    model = nn.Sequential(
        nn.Linear(24, 24), RMSNorm(), RMSNorm(name="gain"), RMSNorm(name="gamma", bias="beta")
    )
    assert table(model)["1.weight"] == table(model)["2.gain"] == ("vector", 1, 24)
    assert table(model)["3.beta"] == ("vector", 1, 24)
    planned = starts(model)
    assert planned["1.weight"] == planned["2.gain"] == planned["3.gamma"] == (1.0, 0.0)
    assert planned["3.beta"] == (0.0, 0.0)
    el.init_(model)
    assert (model[3].gamma == 1).all()
    rates = {group["lr"] for group in el.param_groups(model, 0.01, base_width=24)}
    assert rates == {0.01}


def test_a_scale_keeps_its_own_constant():
    model = RMSNorm(name="scale", start=1e-5)
    assert starts(model)["scale"] == pytest.approx((1e-5, 0.0))


@pytest.mark.parametrize("gain", [torch.zeros(24), torch.linspace(0.5, 2, 24)])
def test_the_start_of_a_gain_is_not_guessed(gain):
    """Zeros are right where a norm multiplies by 1 + gain, and else memory never filled."""
    model = nn.ModuleDict({"norm": RMSNorm()})
    model["norm"].weight.data.copy_(gain)
    assert table(model) == {"norm.weight": ("vector", 1, 24)}  # rates do not depend on it
    with pytest.raises(el.EinlinearError, match="weight of norm is unknown: RMSNorm"):
        el.init_(model)
    assert torch.equal(model["norm"].weight, gain)
    model["norm"].requires_grad_(False)
    el.init_(model)
    assert torch.equal(model["norm"].weight, gain)


def test_a_vector_that_may_be_a_matrix_is_refused():
    for weight in (torch.randn(24), torch.zeros(24), torch.full((24,), 1 / 24), torch.ones(24)):
        with pytest.raises(
            el.EinlinearError, match=r"known for weight \(24,\) of the model itself"
        ):
            table(Stretch(weight))


def named(name, **parameters):
    """A module of a class of that name, with these parameters."""
    module = type(name, (nn.Module,), {"__module__": "__main__"})()
    for key, value in parameters.items():
        setattr(module, key, nn.Parameter(value))
    return module


@pytest.mark.parametrize("name", ["ValueHead", "NormalHead", "ScaledReadout", "LayerNorm"])
def test_a_linear_layer_with_one_output_is_no_norm(name):
    """Started at zero it looks like a gain; its rate is that of nn.Linear(d, 1)."""
    head = named(name, weight=torch.zeros(24), bias=torch.zeros(1))
    with pytest.raises(el.EinlinearError, match=r"known for weight \(24,\), bias") as caught:
        table(head)
    assert "        # next to a bias of one number: a linear layer with one output\n" in (
        caught.value.fix
    )
    assert '"weight": el.matrix_scaling(fan_in=module.weight.numel(), fan_out=1),' in (
        caught.value.fix
    )
    both = nn.ParameterDict({"weight": torch.zeros(24), "bias": torch.zeros(1)})
    with pytest.raises(el.EinlinearError, match=r"known for bias \(1,\), weight") as caught:
        table(both)
    assert "el.matrix_scaling(d, 1)" in caught.value.fix


@pytest.mark.parametrize(
    "name", ["Norm", "RMS", "MyRMSNorm", "rmsnorm", "LayerNorm2d", "LayerNormFp32", "RMSNormGated"]
)
def test_a_norm_is_known_by_its_class(name):
    assert table(named(name, weight=torch.randn(24))) == {"weight": ("vector", 1, 24)}


def test_rates_do_not_depend_on_values():
    """A trained model, and one without memory, has the rates of a fresh one."""
    for values in (torch.ones(24), torch.randn(24), torch.ones(24, device="meta")):
        for key in ("g", "gain", "gamma", "scale"):
            assert table(named("Stretch", **{key: values})) == {key: ("vector", 1, 24)}


@pytest.mark.parametrize(
    ("name", "shape", "is_known"),
    [
        ("pos_emb", (1, 16, 24), True),
        ("position_embedding", (16, 24), True),
        ("register_tokens", (4, 24), True),
        ("cls_token", (1, 1, 24), True),
        ("class_embedding", (24,), True),
        ("class_embeddings", (10, 24), False),
        ("cls_embeddings", (10, 24), False),
        ("position_embedding", (3, 24, 24), False),
        ("cls_token", (1, 1, 1, 24), False),
    ],
)
def test_tokens_have_the_shape_of_vectors(name, shape, is_known):
    module = named("Model", **{name: torch.zeros(shape)})
    if is_known:
        assert table(module) == {name: ("embedding", 1, 24)}
    else:
        with pytest.raises(el.EinlinearError, match=f"known for {name}"):
            table(module)


class TopRouter(nn.Module):
    def __init__(self, num_experts, shape):
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.zeros(shape))


def test_routers_by_shape_and_name():
    assert table(TopRouter(8, (8, 24))) == {"weight": ("matrix", 24, 8)}
    for odd in (TopRouter(8, (24, 8)), TopRouter(8, (8, 8)), TopRouter(8, (8,))):
        odd.weight.data.normal_()
        with pytest.raises(el.EinlinearError, match="no learning rate is known for weight"):
            table(odd)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_fused_experts_in_both_layouts(is_transposed):
    model = nn.Module()
    first, last = torch.zeros(4, 2 * 40, 24), torch.zeros(4, 24, 40)
    if is_transposed:
        first, last = first.transpose(1, 2), last.transpose(1, 2)
    model.gate_up_proj, model.down_proj = nn.Parameter(first), nn.Parameter(last)
    model.down_proj_bias = nn.Parameter(torch.zeros(4, 24))
    assert table(model) == {
        "gate_up_proj": ("matrix", 24, 40),
        "down_proj": ("matrix", 40, 24),
        "down_proj_bias": ("vector", 1, 24),
    }


def covers(model):
    """Every parameter is in one group, and all are drawn."""
    groups = el.param_groups(model, lr=1e-3, base_width=32)
    found = [id(p) for group in groups for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    el.init_(model)
    assert all(p.isfinite().all() for p in model.parameters())


def test_vit(hf):
    config = hf.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        image_size=8, patch_size=4,
    )  # fmt: skip
    model = hf.ViTModel(config, use_mask_token=True)
    el.convert_(model, "btt")
    found = table(model)
    for name in ("cls_token", "mask_token", "position_embeddings"):
        assert found[f"embeddings.{name}"] == ("embedding", 1, 32)
    covers(model)
    assert model.embeddings.position_embeddings.std().item() == pytest.approx(0.02, rel=0.2)
    with torch.no_grad():
        fixed = model.embeddings.position_embeddings.requires_grad_(False).fill_(7)
    el.init_(model)
    assert (fixed == 7).all()  # such as a table of sines


def test_mixtral(hf):
    config = hf.MixtralConfig(
        vocab_size=41, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
    )  # fmt: skip
    model = hf.MixtralForCausalLM(config)
    el.convert_(model, "btt")
    found = table(model)
    assert found["model.layers.0.mlp.gate.weight"] == ("matrix", 32, 8)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] == ("matrix", 32, 64)
    assert found["model.layers.0.mlp.experts.down_proj"] == ("matrix", 64, 32)
    assert found["model.norm.weight"] == ("vector", 1, 32)
    covers(model)
    tokens = torch.randint(41, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_norms_around_zero(hf):
    norm = importlib.import_module("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(16)
    norm.weight.data.normal_()
    el.init_(norm)
    assert (norm.weight == 0).all()


# The code in the error, pasted.

MODULE = """
import torch
from torch import nn


class Outer(nn.Module):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.zeros(24, 40))
            self.stack = nn.Parameter(torch.zeros(3, 5, 7))
            self.prompt = nn.Parameter(torch.zeros(1, 4, 24))
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.gain = nn.Parameter(torch.ones(24))
            self.out_bias = nn.Parameter(torch.zeros(24))
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 24))

    def __init__(self):
        super().__init__()
        self.inner = Outer.Mixer()
        self.tokens = nn.ParameterList([torch.zeros(24), torch.zeros(5, 6)])


class SomeNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24))


def make():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.zeros(24, 40))

    return nn.Sequential(nn.Linear(24, 24), Local())
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of a user's, in a file; rules that tests register go away again."""
    (tmp_path / "mine_for_free.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("einlinear.models.survey.scalings._RULES", {**_rules()})
    yield importlib.import_module("mine_for_free")
    del sys.modules["mine_for_free"]


def _rules():
    return importlib.import_module("einlinear.models.survey.scalings")._RULES


PASTE = "paste this once, before the call, and check it:\n\n"


def paste(error, path, model):
    """Run the code of a fix as a module, next to the model."""
    assert error.fix.startswith(PASTE)
    path.write_text(error.fix.removeprefix(PASTE))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    module.model = model
    spec.loader.exec_module(module)
    return path.read_text()


def test_the_fix_is_complete_code(mine, tmp_path):
    model = mine.Outer()
    with pytest.raises(el.EinlinearError) as caught:
        table(model)
    code = paste(caught.value, tmp_path / "first.py", model)
    assert code == FIX.lstrip()
    with pytest.raises(el.EinlinearError, match=r"of tokens, a torch.*\.ParameterList") as caught:
        table(model)
    paste(caught.value, tmp_path / "second.py", model)
    assert table(model) == {
        "inner.mix": ("matrix", 40, 24),
        "inner.stack": ("matrix", 7, 5),
        "inner.prompt": ("embedding", 1, 24),
        "inner.temperature": ("vector", 1, 1),
        "inner.gain": ("vector", 1, 24),
        "inner.out_bias": ("vector", 1, 24),
        "inner.cls_token": ("embedding", 1, 24),
        "tokens.0": ("vector", 1, 24),
        "tokens.1": ("matrix", 6, 5),
    }
    el.init_(model)
    assert (model.inner.gain == 1).all()
    assert model.inner.temperature == 0.5
    assert model.inner.mix.std() > 0


FIX = """
import einlinear as el
from mine_for_free import Outer


@el.register_scaling(Outer.Mixer)
def mixer_scaling(module):
    return {
        # (24, 40): if the last axis is not the input, swap the two
        # if it is a table of vectors: el.embedding_scaling(module.mix.shape[-1])
        "mix": el.matrix_scaling(fan_in=module.mix.shape[-1], fan_out=module.mix.shape[-2]),
        # a stack of matrices (3, 5, 7): if the last axis is not the input, swap the two
        "stack": el.matrix_scaling(fan_in=module.stack.shape[-1], fan_out=module.stack.shape[-2]),
        "prompt": el.embedding_scaling(module.prompt.shape[-1]),
        "temperature": el.vector_scaling(module.temperature.numel(), init_mean=0.5),
        # init_mean: 1.0 for y * gain, 0.0 for y * (1 + gain)
        "gain": el.vector_scaling(module.gain.numel(), init_mean=1.0),
        "out_bias": el.vector_scaling(module.out_bias.numel(), init_mean=0.0),
        "cls_token": el.embedding_scaling(module.cls_token.shape[-1]),
    }
"""


def test_the_fix_of_a_local_class_and_of_a_trained_norm(mine, tmp_path):
    model = mine.make()
    with pytest.raises(el.EinlinearError) as caught:
        table(model)
    assert (
        "# Replace `model` by the name of your model.\n"
        '@el.register_scaling(type(model.get_submodule("1")))'
    ) in caught.value.fix
    paste(caught.value, tmp_path / "local.py", model)
    assert table(model)["1.mix"] == ("matrix", 40, 24)

    norm = mine.SomeNorm()
    with pytest.raises(el.EinlinearError) as caught:
        el.init_(norm)
    paste(caught.value, tmp_path / "norm.py", norm)
    el.init_(norm)
    assert (norm.weight == 1).all()


def test_the_fix_pasted_as_it_is_does_not_change_where_the_model_starts(mine, tmp_path):
    """Values that were set on purpose stay: broadcast gains, decays, biases that differ."""
    decay = torch.arange(1.0, 5).log()
    given = {
        "gamma": torch.ones(1, 1, 24),
        "beta": torch.zeros(1, 1, 24),
        "A_log": decay.repeat(24, 1),
        "D_log": decay,
        "time_mix": torch.rand(1, 1, 24),
        "dt_bias": torch.randn(24),
    }
    drawn = {"masked_spec_embed": torch.rand(24) + 1, "latents": torch.randn(8, 24)}
    mamba = named("Mamba", **{name: value.clone() for name, value in (given | drawn).items()})
    type(mamba).__module__ = "nowhere"
    model = nn.Sequential(mamba)
    with pytest.raises(el.EinlinearError) as caught:
        el.init_(model)
    code = paste(caught.value, tmp_path / "mamba.py", model)
    el.init_(model)
    for name, value in given.items():
        assert torch.equal(model[0].get_parameter(name), value), name
    assert 0 < model[0].masked_spec_embed.abs().max() < 0.2  # as any embedding
    assert table(model)["0.masked_spec_embed"] == ("embedding", 1, 24)
    assert table(model)["0.gamma"] == ("vector", 1, 24)
    assert "# if it is a table of vectors: el.embedding_scaling(module.latents.shape[-1])" in code
    assert "# init_ resamples it; dataclasses.replace(..., init_mean=None) keeps it" in code


def test_a_class_of_the_script_itself_is_not_imported(monkeypatch):
    kind = type("Script", (nn.Module,), {"__module__": "__main__"})
    module = kind()
    module.mix = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(el.EinlinearError) as caught:
        table(module)
    assert "@el.register_scaling(Script)\n" in caught.value.fix
    assert "from " not in caught.value.fix


def test_a_rule_that_forgets_a_parameter_gets_the_missing_line():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.mix = nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(3, 5))

        def param_scaling(self):
            return {"gain": el.vector_scaling(24)}

    with pytest.raises(el.EinlinearError) as caught:
        table(Forgetful())
    assert re.search(
        r'what its rule returns; .*\n\n.*\n.*\n +"mix": el.matrix_scaling\(fan_in=module\.',
        caught.value.fix,
    )
    assert '"gain"' not in caught.value.fix
