"""el.save and el.load: the same model, or an error that says why not."""

import json
import re
from functools import partial

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.files.seals import sealed
from einlinear.layers.linear import EinsumLinear
from einlinear.models.saving import sealed_folder as room
from kit.twins import shake_


def mlp(width=32, *, bias=True):
    return nn.Sequential(
        nn.Linear(16, width, bias=bias), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10)
    )


def gpt():
    return el.GPT(41, context=8, width=32, depth=2, head_size=8, tied=True)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Shared(nn.Module):
    """A layer under two names, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.head = nn.Linear(16, 3)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("ones", torch.ones(16), persistent=False)

    def forward(self, x):
        return self.head(self.again(self.first(x - self.mean)) * self.ones)


EXPERTS = el.moe("btt(rank=2)", 4, expert_norm="together", expert_gain=True)
TOKENS = partial(torch.randint, 41, (2, 8))
CASES = {
    "mlp": (mlp, "btt(rank=2)", {}, partial(torch.randn, 4, 16)),
    "no norm": (mlp, "low_rank(rank=d/4)", {"weight_norm": False}, partial(torch.randn, 4, 16)),
    "fan-in": (mlp, "kronecker", {"factor_init": "fan_in"}, partial(torch.randn, 4, 16)),
    "experts": (mlp, EXPERTS, {}, partial(torch.randn, 4, 16)),
    "tied": (gpt, {"*.attention.*": el.heads(), "*": "btt"}, {}, TOKENS),
    "attention": (encoder, {"*.q_proj": el.heads(), "*.linear1": "btt"}, {},
                  partial(torch.randn, 2, 5, 32)),
    "shared": (Shared, "btt", {}, partial(torch.randn, 4, 16)),
}  # fmt: skip


def assert_same(model, loaded, inputs):
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    with torch.no_grad():
        assert torch.equal(model(inputs), loaded(inputs))


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_loaded_bit_for_bit(case, tmp_path):
    make, rules, options, inputs = CASES[case]
    model = make()
    el.convert_(model, rules, **options)
    shake_(model)
    assert el.save(model, tmp_path / "model") == tmp_path / "model"
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "model.safetensors",
        "einlinear.json",
    }
    loaded = el.load(tmp_path / "model", make)
    assert_same(model.eval(), loaded.eval(), inputs())
    assert [str(m) for m in model.modules()] == [str(m) for m in loaded.modules()]


def test_a_shake_of_one_number_is_seen(tmp_path):
    model = converted()
    el.save(model, tmp_path)
    loaded = el.load(tmp_path, mlp)
    with torch.no_grad():
        loaded[0].A.view(-1)[0] += 1e-6
    with pytest.raises(AssertionError, match=r"0\.A"):
        assert_same(model, loaded, torch.randn(4, 16))


def converted(make=mlp, rules="btt(rank=2)"):
    model = make()
    el.convert_(model, rules)
    shake_(model)
    return model


def test_tied_weights_stay_tied(tmp_path):
    el.save(converted(gpt), tmp_path)
    loaded = el.load(tmp_path, gpt)
    assert loaded.head.weight is loaded.embedding.weight
    stored = json.loads((tmp_path / "einlinear.json").read_text())["tied"]
    assert stored == {"head.weight": "embedding.weight"}


def test_weights_that_were_tied_later_and_untied_are_as_they_were(tmp_path):
    model = converted()
    model[2].bias = model[0].bias
    el.save(model, tmp_path / "tied")
    loaded = el.load(tmp_path / "tied", mlp)
    assert loaded[2].bias is loaded[0].bias
    untied = converted(gpt)
    untied.head.weight = nn.Parameter(untied.head.weight + 1)
    el.save(untied, tmp_path / "untied")
    assert_same(untied, el.load(tmp_path / "untied", gpt), TOKENS())


def test_a_model_on_the_meta_device_is_enough(tmp_path):
    model = converted(gpt)
    el.save(model, tmp_path)

    def on_meta():
        with torch.device("meta"):
            return gpt()

    loaded = el.load(tmp_path, on_meta)
    assert_same(model, loaded, TOKENS())
    assert loaded.head.weight is loaded.embedding.weight


def test_another_dtype_and_device(tmp_path):
    model = converted(Shared, "btt")
    el.save(model, tmp_path)
    loaded = el.load(tmp_path, Shared, device="cpu", dtype=torch.bfloat16)
    assert {t.dtype for t in [*loaded.parameters(), *loaded.buffers()]} == {torch.bfloat16}
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].bfloat16())
    on_meta = el.load(tmp_path, Shared, device="meta")
    assert all(parameter.is_meta for parameter in on_meta.parameters())


def test_the_dtype_is_that_of_the_saved_model(tmp_path):
    model = converted().bfloat16()
    el.save(model, tmp_path)
    assert_same(model, el.load(tmp_path, mlp), torch.randn(4, 16, dtype=torch.bfloat16))


def test_layers_that_the_model_creates_itself_stay(tmp_path):
    def make():
        hidden = el.EinsumLinear(16, 16, structure="btt", weight_norm=False)
        experts = el.MoEFeedForward(16, 32, num_experts=4, activation="silu")
        return nn.Sequential(hidden, experts, nn.Linear(16, 3))

    model = make()
    shake_(model)
    el.save(model, tmp_path)
    assert_same(model, el.load(tmp_path, make), torch.randn(4, 16))


def test_a_feed_forward_network_replaces_whatever_was_there(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.ReLU()))

    model = make()
    model[1] = el.MoEFeedForward(16, 32, num_experts=4, bias=False)
    shake_(model)
    el.save(model, tmp_path)
    assert_same(model, el.load(tmp_path, make), torch.randn(4, 16))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_saved_as_the_model_in_it(tmp_path):
    model = converted()
    el.save(torch.compile(model), tmp_path)
    assert_same(model, el.load(tmp_path, mlp), torch.randn(4, 16))


def test_frozen_layers_and_modes_are_those_of_make_model(tmp_path):
    el.save(converted(), tmp_path)
    loaded = el.load(tmp_path, lambda: mlp().requires_grad_(False).eval())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded[0].training


def test_loading_draws_no_random_numbers_for_layers(tmp_path):
    el.save(converted(), tmp_path)
    torch.manual_seed(0)
    mlp()
    after = torch.rand(1)
    torch.manual_seed(0)
    el.load(tmp_path, mlp)
    assert torch.equal(torch.rand(1), after)


def test_a_saved_model_is_replaced_and_other_files_stay(tmp_path):
    el.save(converted(), tmp_path)
    (tmp_path / "README.md").write_text("mine")
    model = converted()
    el.save(model, tmp_path)
    assert_same(model, el.load(tmp_path, mlp), torch.randn(4, 16))
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("at", ["weights", "description"])
def test_a_save_that_fails_leaves_the_earlier_model(at, tmp_path, monkeypatch):
    model = converted()
    el.save(model, tmp_path)

    def fail(*_):
        raise OSError("no room")

    name = {"weights": "write_tensors", "description": "write_whole"}[at]
    with monkeypatch.context() as patch:
        patch.setattr(room, name, fail)
        with pytest.raises(OSError, match="no room"):
            el.save(converted(), tmp_path)
    assert_same(model, el.load(tmp_path, mlp), torch.randn(4, 16))


def test_a_save_that_is_killed_before_its_last_step_counts(tmp_path, monkeypatch):
    el.save(converted(), tmp_path)
    model = converted()
    with monkeypatch.context() as patch:
        patch.setattr(room.Path, "replace", fail_for_weights(room.Path.replace))
        with pytest.raises(el.EinlinearError, match=r"cannot write .*model\.safetensors: killed"):
            el.save(model, tmp_path)
    assert_same(model, el.load(tmp_path, mlp), torch.randn(4, 16))
    el.save(model, tmp_path)
    assert not (tmp_path / "model.safetensors.next").exists()


def fail_for_weights(replace):
    def failing(self, target):
        if self.name == "model.safetensors.next":
            raise OSError("killed")
        return replace(self, target)

    return failing


def refused(what, rule, fix):
    """Expect an error of these three parts; each is a regular expression."""
    return pytest.raises(el.EinlinearError, match=f"(?s){what}.*rule: .*{rule}.*fix:  .*{fix}")


def test_what_cannot_be_saved(tmp_path):
    with refused("model is given as 3", "an nn.Module", r"el\.save\(model, path\)"):
        el.save(3, tmp_path)
    with refused("Sequential has no structured layer", "for models with Eins", "convert the model"):
        el.save(mlp(), tmp_path)
    with refused("path of the model is given as 7", "a path is", "in quotes"):
        el.save(converted(), 7)
    with torch.device("meta"):
        empty = mlp()
    el.convert_(empty, "btt")
    with refused("'0.A' is on the meta device", "has weights", "create the model on the CPU"):
        el.save(empty, tmp_path)
    model = converted(Shared, "btt")
    model.mean = torch.zeros(3, dtype=torch.complex64)
    with refused("'mean' has the layout .*complex64", "real numbers", "persistent=False"):
        el.save(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_module_with_extra_state(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"step": 3}

    model = nn.Sequential(el.EinsumLinear(16, 16, structure="btt"), Odd(16, 3))
    with refused("has '1._extra_state', which is dict", "consists of tensors", "get_extra_state"):
        el.save(model, tmp_path)


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with refused(
        f"{tmp_path} holds other files: model.safetensors", "new or empty folder", "a new folder"
    ):
        el.save(converted(), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"
    (tmp_path / "einlinear.json").write_text('{"format": "notes"}')
    with refused("holds other files: einlinear.json", "new or empty folder", "a new folder"):
        el.save(converted(), tmp_path)
    file = tmp_path / "file"
    file.write_text("mine")
    with refused(f"cannot write {file}", "folder that can be written", "another path"):
        el.save(converted(), file)


def test_what_is_not_a_saved_model(tmp_path):
    with refused("is not a saved model: it has no einlinear.json", "el.save wrote", "the folder"):
        el.load(tmp_path, mlp)
    (tmp_path / "config.json").write_text("{}")
    with refused("is not a saved model", "el.save wrote", "from_pretrained"):
        el.load(tmp_path, mlp)
    (tmp_path / "einlinear.json").write_text('{"format": "notes"}')
    with refused("has the format 'notes'", '"einlinear model"', "the folder that you gave"):
        el.load(tmp_path, mlp)
    with refused("path of the model is given as None", "a path is", "in quotes"):
        el.load(None, mlp)


def rewritten(path, **fields):
    values = json.loads((path / "einlinear.json").read_text())
    del values["seal"]
    (path / "einlinear.json").write_bytes(sealed({**values, **fields}))


def test_an_unknown_schema_names_the_version_that_wrote_it(tmp_path):
    el.save(converted(), tmp_path)
    rewritten(tmp_path, schema=7, einlinear="3.1.4")
    with refused("schema 7, written by einlinear '3.1.4'", "reads schema 1", "install the version"):
        el.load(tmp_path, mlp)


def test_damage_is_found(tmp_path):
    el.save(converted(), tmp_path)
    weights, text = tmp_path / "model.safetensors", tmp_path / "einlinear.json"
    good, raw = text.read_text(), weights.read_bytes()
    again = "save the model again"
    for bad in (good[:-9], "[]", good.replace('"bias": true', '"bias": false', 1)):
        text.write_text(bad)
        with refused(r"cannot read .*einlinear\.json: ", "as it was written", again):
            el.load(tmp_path, mlp)
    text.write_text(good)
    for bad in (raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1])):
        weights.write_bytes(bad)
        with refused("the checksum of model.safetensors is wrong", "as it was written", again):
            el.load(tmp_path, mlp)
    weights.unlink()
    with refused(r"cannot read .*model\.safetensors: No such file", "as it was written", again):
        el.load(tmp_path, mlp)


def layer_with(path, **fields):
    values = json.loads((path / "einlinear.json").read_text())["layers"]
    values[0] |= fields
    rewritten(path, layers=values)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "os.system", r"layers\[0\]\.kind is 'os\.system', not 'EinsumLinear' or"),
        ("in_features", -1, r"layers\[0\]\.in_features is -1, not a whole number"),
        ("names", [], "layers has a layer without a name"),
        ("dtype", "nn", "layers has the dtype 'nn'"),
        ("more", 1, r"layers\[0\] has a field 'more'"),
    ],
)
def test_fields_of_another_type(field, value, message, tmp_path):
    el.save(converted(), tmp_path)
    layer_with(tmp_path, **{field: value})
    with refused(rf"cannot read .*: {message}", "as it was written", "save the model again"):
        el.load(tmp_path, mlp)


def test_a_plan_of_another_version_is_refused(tmp_path):
    el.save(converted(), tmp_path)
    sizes = {"XA": 2, "XAB": 8, "YB": 4, "YAB": 8, "AB": 2}
    layer_with(tmp_path, sizes=sizes)
    with refused(
        r"layer '0': .* was saved with the sizes XA 2, XAB 8, .* plans the sizes XA 4, XAB 4",
        "sizes that it was trained with",
        "version of einlinear that saved it",
    ):
        el.load(tmp_path, mlp)


def test_a_structure_that_is_none(tmp_path):
    el.save(converted(), tmp_path)
    layer_with(tmp_path, structure="__import__('os')")
    with refused("layer '0': ", "", ""):
        el.load(tmp_path, mlp)


def test_make_model_that_makes_no_model(tmp_path):
    el.save(converted(), tmp_path)
    with refused("make_model returned None", "an nn.Module", r"lambda: MyModel"):
        el.load(tmp_path, lambda: None)
    for wrong in (mlp(), 3):
        with refused("make_model is given as", "function without arguments", "lambda: MyModel"):
            el.load(tmp_path, wrong)


def test_dtypes_of_no_weights(tmp_path):
    el.save(converted(), tmp_path)
    for wrong in (torch.int8, "bfloat16"):
        with refused(f"dtype is given as '?{wrong}", "floating-point", "dtype=torch.float32"):
            el.load(tmp_path, mlp, dtype=wrong)


SAME = "make the model as it was before it was converted"


def test_another_model(tmp_path):
    el.save(converted(), tmp_path)
    with refused("layer '0' is 16 -> 64 with bias in the new .* saved as 16 -> 32 with bias",
                 "has the shapes", "same widths"):  # fmt: skip
        el.load(tmp_path, lambda: mlp(64))
    with refused("layer '0' is 16 -> 32 without bias", "has the shapes", "biases in the same"):
        el.load(tmp_path, lambda: mlp(bias=False))
    with refused("GPT has no layer '0', which was saved as EinsumLinear", "same layers", SAME):
        el.load(tmp_path, gpt)
    with refused("'3.bias' has the shape .4,. in the new model, and was saved with .10,.",
                 "has the shapes", "same widths"):  # fmt: skip
        el.load(tmp_path, lambda: mlp()[:3].append(nn.Linear(32, 4)))
    with refused("4.bias and 4.weight of the new model were not saved", "same weights", SAME):
        el.load(tmp_path, lambda: mlp().append(nn.Linear(10, 4)))
    with refused("3.bias and 3.weight were saved and have no place", "same weights", SAME):
        el.load(tmp_path, lambda: mlp()[:3])


def test_a_layer_in_two_places_is_not_two_layers(tmp_path):
    class Apart(Shared):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(16, 16)

    el.save(converted(Shared, "btt"), tmp_path)
    with refused("Apart has no layer 'first', shared by first and again", "same layers", SAME):
        el.load(tmp_path, Apart)


def test_structured_layers_that_were_not_saved_or_are_others(tmp_path):
    el.save(converted(), tmp_path)

    def other():
        model = mlp()
        model[0] = EinsumLinear(16, 32, structure="low_rank")
        return model

    def more():
        model = mlp()
        model[3] = EinsumLinear(32, 10, structure="btt")
        return model

    with refused(r"layer '0' of the new model is EinsumLinear\(.*, and another was saved",
                 "settings of the one that was saved", "plain linear layers"):  # fmt: skip
        el.load(tmp_path, other)
    with refused("layer '3' of the new model is structured, and was not saved", "is plain", SAME):
        el.load(tmp_path, more)


def test_a_layer_with_an_obstacle(tmp_path):
    def hooked():
        model = mlp()
        model[0].register_forward_hook(lambda *_: None)
        return model

    el.save(converted(), tmp_path)
    with refused("layer '0' cannot be replaced: .*hook", "own their weights", SAME):
        el.load(tmp_path, hooked)


def test_buffers_that_are_lost_on_the_meta_device(tmp_path):
    el.save(converted(Shared, "btt"), tmp_path)

    def on_meta():
        with torch.device("meta"):
            return Shared()

    with refused("the values of ones are unknown", "may only create what was saved", "on the CPU"):
        el.load(tmp_path, on_meta)


def test_the_files_hold_no_pickle(tmp_path):
    el.save(converted(), tmp_path)
    json.loads((tmp_path / "einlinear.json").read_text())
    header = (tmp_path / "model.safetensors").read_bytes()[8:]
    assert re.match(rb'\{"0\.A":\{"dtype":"F32"', header)


@pytest.mark.parametrize("base", [el.EinsumLinear, el.MoELinear, el.MoEFeedForward])
def test_layers_of_other_classes_are_refused(base, tmp_path):
    class Doubled(base):
        def forward(self, x):
            return 2 * super().forward(x)

    options = {} if base is el.MoEFeedForward else {"structure": "btt"}
    if base is not el.EinsumLinear:
        options |= {"num_experts": 4}
    model = nn.Sequential(nn.ReLU(), Doubled(16, 16, **options))
    with pytest.raises(el.EinlinearError, match=r"(?s)layer '1' is of the class Doubled.*rule: .*"
                       r"exactly EinsumLinear, KroneckerLinear, .*fix: .*state_dict"):  # fmt: skip
        el.save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_class_that_fsdp_puts_in_front_is_no_other_class():
    from torch.distributed.fsdp import FSDPModule

    from einlinear.models.saving.saved_layer import describe_layers

    model = converted()
    wanted = describe_layers(model)
    model[0].__class__ = type("FSDPEinsumLinear", (FSDPModule, el.EinsumLinear), {})
    assert describe_layers(model) == wanted
