"""fuse_: which nets it finds, and that a fused model computes and is what it was."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, relu

import einlinear as el
from einlinear.layers.engine import compiled
from einlinear.models.fusing import feedforward
from kit.twins import shake_

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]  # fmt: skip

TOL = 1e-9  # float64
needs_engine = pytest.mark.skipif(not compiled.IS_AVAILABLE, reason="the engine is not built")


@pytest.fixture
def calls(monkeypatch):
    """The activations of the nets that the engine runs, one per call."""
    found = []
    run = feedforward.net_forward

    def counted(layers, activation, x):
        found.append(activation.name)
        return run(layers, activation, x)

    monkeypatch.setattr(feedforward, "net_forward", counted)
    monkeypatch.setattr(el.EinsumLinear, "_variant", lambda *_: "engine" if compiled.IS_AVAILABLE
                        else "strided")  # fmt: skip
    return found


def gpt(**options):
    torch.manual_seed(0)
    model = el.GPT(
        vocab_size=16, width=32, head_size=16, depth=2, context=32, dtype=torch.float64, **options
    )
    el.convert_(model, "btt")
    shake_(model)
    return model


def sequential(*layers):
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    el.convert_(model, {"*": "btt"})
    return model


def assert_same(model, fused, *inputs, **named):
    """The same outputs and gradients, in float64."""
    made = []
    for one in (model, fused):
        y = one(*inputs, **named)
        y = getattr(y, "logits", y)
        names, parameters = zip(*((n, p) for n, p in one.named_parameters()), strict=True)
        weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
        grads = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
        made.append((y, dict(zip(names, grads, strict=True))))
    torch.testing.assert_close(made[0], made[1], atol=TOL, rtol=TOL)


TOKENS = torch.arange(64).view(2, 32) % 16


@needs_engine
def test_a_fused_gpt_is_the_same_model(calls):
    model = gpt()
    fused = copy.deepcopy(model)
    fusion = el.fuse_(fused)
    assert [net.names for net in fusion.nets] == [("blocks.0.mlp",), ("blocks.1.mlp",)]
    assert fusion.nets[0].layers == ("blocks.0.mlp.up", "blocks.0.mlp.down")
    assert fusion.nets[0].widths == (32, 128, 32)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert [type(m).__name__ for m in fused.modules()] == [
        type(m).__name__ for m in model.modules()
    ]
    assert_same(model, fused, TOKENS)
    assert calls == ["GELU"] * 2


@needs_engine
def test_the_table():
    assert str(el.fuse_(gpt())).splitlines() == [
        "module               in -> hidden -> out  activation",
        "----------------------------------------------------",
        "monarch()",
        "  blocks.{0..1}.mlp  32 -> 128 -> 32      gelu",
        "----------------------------------------------------",
        "2 nets",
        "left alone: blocks.{0..1}.attention.q_proj, blocks.{0..1}.attention.k_proj,",
        "  blocks.{0..1}.attention.v_proj and blocks.{0..1}.attention.o_proj (in no",
        "  feed-forward net)",
        "2 feed-forward nets run in one pass",
    ]


@needs_engine
def test_undone(calls):
    model = gpt()
    kinds = [type(module) for module in model.modules()]
    el.fuse_(model)
    el.fuse_(model)  # again changes nothing
    assert el.unfuse_(model) == ("blocks.0.mlp", "blocks.1.mlp")
    assert [type(module) for module in model.modules()] == kinds
    assert not [name for m in model.modules() for name in vars(m) if "recipe" in name]
    model(TOKENS)
    assert not calls
    with pytest.raises(el.EinlinearError, match="no fused feed-forward net"):
        el.unfuse_(model)


@needs_engine
@pytest.mark.parametrize("duplicate", [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: torch.load(_written(model), weights_only=False),
], ids=["copy", "pickle", "torch.save"])  # fmt: skip
def test_copies_are_fused_and_independent(duplicate, calls):
    model = gpt()
    el.fuse_(model)
    other = duplicate(model)
    expected = model(TOKENS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls.clear()
    torch.testing.assert_close(other(TOKENS), expected)
    assert calls == ["GELU"] * 2


def _written(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_saved_and_loaded(tmp_path):
    model = gpt()
    el.fuse_(model)
    el.save(model, tmp_path / "model")

    def make():
        return el.GPT(
            vocab_size=16, width=32, head_size=16, depth=2, context=32, dtype=torch.float64
        )

    torch.testing.assert_close(el.load(tmp_path / "model", make)(TOKENS), model(TOKENS))


def test_learning_rates_and_scalings_stay():
    model = gpt()
    before = el.param_groups(model, 1e-3, base_width=32)
    el.fuse_(model)
    after = el.param_groups(model, 1e-3, base_width=32)
    assert [(g["lr"], len(g["params"])) for g in after] == [
        (g["lr"], len(g["params"])) for g in before
    ]


class Gated(nn.Module):
    def __init__(self, activation=nn.SiLU, width=16, hidden=40):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width)
        self.act = activation()

    def forward(self, x):
        return x + self.down(self.up(x) * self.act(self.gate(x)))


class WithFlag(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)
        self.twice = False

    def forward(self, x):
        y = self.down(relu(self.up(x)))
        return self.down(relu(self.up(y))) if self.twice else y


class Noisy(WithFlag):
    def forward(self, x):
        a = gelu(self.up(x))
        return self.down(a + torch.randn_like(a) if self.training else a)


class Bent(WithFlag):
    def forward(self, x):
        return self.down(gelu(self.up(x)) * 1.1)


class Shown(WithFlag):
    def forward(self, x):
        self.hidden = gelu(self.up(x))
        return self.down(self.hidden)


class Reused(WithFlag):
    def forward(self, x):
        a = gelu(self.up(x))
        return self.down(a) + a.mean(-1, keepdim=True)


class Unused(WithFlag):
    def forward(self, x):
        self.down(x @ torch.ones(16, 40, dtype=x.dtype))
        return self.down(gelu(self.up(x)))


class Second(WithFlag):
    def forward(self, y, x=None):
        return self.down(gelu(self.up(x)))


class Branching(WithFlag):
    def forward(self, x):
        return self.down(gelu(self.up(x))) if x.sum() > 0 else x


def norm_first(activation):
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 40), activation, nn.Linear(40, 16))


@needs_engine
@pytest.mark.parametrize(("model", "activation"), [
    (Gated(), "SILU"),
    (Gated(lambda: nn.GELU("tanh")), "GELU_TANH"),
    (WithFlag(), "RELU"),
    (norm_first(nn.GELU()), "GELU"),
    (norm_first(nn.ReLU(inplace=True)), "RELU"),
    (nn.TransformerEncoderLayer(16, 2, 40, 0.0, "gelu", batch_first=True), "GELU"),
    (nn.TransformerEncoderLayer(16, 2, 40, 0.0, nn.SiLU(), batch_first=True), "SILU"),
], ids=["gated", "gated tanh", "own", "norm", "in place", "encoder", "encoder silu"])  # fmt: skip
def test_nets_of_any_modules(model, activation, calls):
    torch.manual_seed(0)
    model = copy.deepcopy(model).double()
    el.convert_(model, "btt", where=lambda _, name: "attn" not in name)
    fused = copy.deepcopy(model)
    el.fuse_(fused)
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    assert_same(model, fused, x)
    assert calls == [activation]
    fused.eval(), model.eval()
    assert_same(model, fused, x)


@needs_engine
def test_a_decoder_layer(calls):
    model = nn.TransformerDecoderLayer(16, 2, 40, 0.0, "relu", batch_first=True).double()
    el.convert_(model, {"linear*": "btt"})
    fused = copy.deepcopy(model)
    el.fuse_(fused)
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    assert_same(model, fused, x, x.cos())
    assert calls == ["RELU"]


@pytest.mark.parametrize("kind", [Noisy, Bent, Shown, Reused, Unused, Second, Branching])
def test_what_computes_something_else_is_left_alone(kind):
    model = kind().double()
    before = dict(vars(model))
    el.convert_(model, {"*": "btt"})
    with pytest.raises(el.EinlinearError, match="no feed-forward net that can be fused"):
        el.fuse_(model)
    assert vars(model).keys() == before.keys()
    assert type(model) is kind
    assert model.training


@pytest.mark.parametrize(("change", "reason"), [
    (lambda m: el.convert_(m, {"0": "btt"}), "a dense layer"),
    (lambda m: el.convert_(m, {"0": "btt", "2": "low_rank(rank=2) + btt"}), "a sum of structures"),
    (lambda m: el.convert_(m, {"0": "btt", "2": el.moe("btt", num_experts=2)}), "experts"),
    (lambda m: (el.convert_(m, {"0": "btt"}), el.adapt_(m, "btt", where="2")), "an adapter"),
    (lambda m: (el.convert_(m, {"*": "btt"}), m[0].register_forward_hook(print)), "a hook"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_layers_that_cannot_be_fused_are_named(change, reason):
    model = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
    change(model)
    with pytest.raises(el.EinlinearError, match=f"0: its net has {reason}"):
        el.fuse_(model)
    both = nn.Sequential(model, sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)))
    fusion = el.fuse_(both)
    assert [net.names for net in fusion.nets] == [("1",)]
    assert {note.reason for note in fusion.left} == {f"its net has {reason}"}


@needs_engine
def test_changes_after_fusing_are_seen(calls):
    model = WithFlag().double()
    el.convert_(model, {"*": "btt"})
    x = torch.randn(40, 16, dtype=torch.float64)
    el.fuse_(model)
    model(x)
    assert calls.pop() == "RELU"
    seen = []
    with model.down.register_forward_hook(lambda *_: seen.append(1)):
        model(x)
    assert seen
    assert not calls
    down, model.down = model.down, nn.Linear(40, 16).double()
    model(x)
    assert not calls
    model.down = down
    model(x)
    assert calls.pop() == "RELU"
    plain = copy.deepcopy(model)
    el.unfuse_(plain)
    model.twice = plain.twice = True
    torch.testing.assert_close(model(x), plain(x), atol=TOL, rtol=TOL)
    assert not calls


@needs_engine
def test_dropout_inside_a_net(calls):
    model = sequential(nn.Linear(16, 40), nn.GELU(), nn.Dropout(0.5), nn.Linear(40, 16))
    el.fuse_(model)
    x = torch.randn(40, 16, dtype=torch.float64)
    assert not torch.equal(model(x), model(x))
    assert not calls
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()[2].p = 0.0
    model(x)
    assert len(calls) == 3


@needs_engine
def test_compiled_exported_and_transformed(calls):
    model = sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))
    x = torch.randn(40, 16, dtype=torch.float64)
    expected = model(x)
    el.fuse_(model)
    parameters = dict(model.named_parameters())
    for y in (
        torch.compile(model, backend="eager", fullgraph=True)(x),
        torch.export.export(model, (x,)).module()(x),
        torch.vmap(model)(x.view(2, 20, 16)).view(40, 16),
        torch.func.functional_call(model, parameters, x),
        torch.func.jvp(model, (x,), (x,))[0],
    ):
        torch.testing.assert_close(y, expected, atol=TOL, rtol=TOL)
    assert len(calls) == 1  # functional_call only changes the parameters
    assert "einlinear" not in repr(model)


HF = {"gpt2": ("GELU_TANH", 2), "llama": ("SILU", 2), "bert": ("GELU", 2)}


def hugging_face(name):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        rates = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
        config = hf.GPT2Config(
            vocab_size=41, n_positions=64, n_embd=32, n_layer=2, n_head=4, **rates
        )
        return hf.GPT2LMHeadModel(config).double()
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=80)).double()
    rates = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=64, **rates)).double()


@needs_engine
@pytest.mark.no_cover
@pytest.mark.parametrize("name", HF)
def test_models_of_hugging_face(name, calls, tmp_path):
    model = hugging_face(name)
    el.convert_(model, "btt", init="fresh")
    fused = copy.deepcopy(model)
    fusion = el.fuse_(fused)
    tokens = torch.arange(80).view(2, 40) % 41
    assert_same(model, fused, input_ids=tokens)
    assert (calls[0], len(calls)) == HF[name]
    assert len(fusion.nets) == 2
    fused.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_nothing_to_fuse():
    with pytest.raises(el.EinlinearError, match="has no feed-forward net"):
        el.fuse_(nn.Linear(3, 4))
    with pytest.raises(el.EinlinearError, match="is given as"):
        el.fuse_("model")
