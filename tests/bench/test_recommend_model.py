import json
import sys
from math import isclose

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear.bench import recommend as bench
from einlinear.bench.factory import build_model
from einlinear.bench.recommend_model import recommend_model
from einlinear.bench.rows import LINEAR
from einlinear.cli.main import main
from einlinear.errors import EinlinearError


@pytest.fixture
def clock(monkeypatch):
    """A dense layer takes as many ms as its input is wide; btt half of that, from width 64 on."""

    def times(actions, repeats, **_):
        held = [cell.cell_contents for cell in actions[LINEAR].__closure__]
        width = next(call.forward.args[0].shape[1] for call in held if hasattr(call, "forward"))
        fast = {"btt": 2 if width >= 64 else 0.5}
        return {name: [width / 1e3 / fast.get(name, 1)] * repeats for name in actions}

    monkeypatch.setattr(bench, "interleaved", times)
    monkeypatch.setattr(bench, "peak_memory", lambda action: 0)


def gpt():
    return el.GPT(20, context=8, width=64, depth=2, num_heads=2)


def test_times_add_up_over_all_layers(clock):
    model = gpt()
    found = recommend_model(model, tokens=4, repeats=2)
    shapes = [(g.count, g.recommendation.d_in, g.recommendation.d_out) for g in found.groups]
    assert shapes == [(8, 64, 64), (2, 64, 256), (2, 256, 64), (1, 64, 20)]
    assert [g.reason for g in found.groups] == ["", "", "", "output head"]
    assert [g.chosen and g.chosen.structure for g in found.groups] == ["btt", "btt", "btt", None]
    assert found.groups[-1].recommendation.rows == ()  # a head is timed as it is
    assert isclose(found.milliseconds_before, 8 * 64 + 2 * 64 + 2 * 256 + 64)
    assert isclose(found.milliseconds_after, (8 * 64 + 2 * 64 + 2 * 256) / 2 + 64)
    text = " ".join(str(found).split())
    assert "step of 4 tokens: 1,216 ms now, 640 ms expected, 1.90 x faster." in text
    assert "head (output head)" in text


def test_the_rules_convert_what_was_chosen_and_nothing_else(clock):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(16, 64), nn.Linear(64, 3))
    found = recommend_model(model, tokens=4, structures=["btt"], repeats=1)
    conversion = el.convert_(model, found.rules)
    assert sorted(swap.name for swap in conversion.swaps) == ["0", "1"]
    assert isinstance(model[2], nn.Linear)  # there, dense is faster
    assert isinstance(model[3], nn.Linear)  # the head
    assert found.code.startswith('el.convert_(model, {\n    "0": "btt",')


def test_patterns_are_short(clock):
    assert recommend_model(gpt(), tokens=4, repeats=1).rules == dict.fromkeys(
        ["*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.up", "*.down"], "btt"
    )


def test_stay_dense(clock):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    found = recommend_model(model, tokens=4, repeats=1)
    assert (found.rules, found.code) == ({}, "")
    assert found.milliseconds_before == found.milliseconds_after
    assert "Stay dense: the linear layers take 32.0 ms" in str(found)


def test_a_layer_that_is_used_twice_takes_its_time_twice(clock):
    layer = nn.Linear(64, 64)
    found = recommend_model(nn.Sequential(layer, nn.ReLU(), layer), tokens=4, repeats=1)
    assert [group.count for group in found.groups] == [2]
    assert isclose(found.milliseconds_before, 128)


def test_layers_that_cannot_be_replaced_are_listed(clock):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    nn.utils.parametrizations.weight_norm(model[1])
    found = recommend_model(model, tokens=4, repeats=1)
    assert [note.names for note in found.left] == [("1",)]
    assert "left alone, not timed: 1 (" in str(found)
    assert found.rules == {"0": "btt", "2": "btt"}


def test_shapes_differ_by_bias_and_dtype(clock):
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, dtype=torch.float64)
    )
    found = [group.recommendation for group in recommend_model(model, repeats=1, tokens=4).groups]
    assert [(r.bias, r.dtype) for r in found] == [
        (True, "float32"),
        (False, "float32"),
        (True, "float64"),
    ]
    same = recommend_model(model, repeats=1, tokens=4, dtype=torch.float32)
    assert len(same.groups) == 2


def test_a_model_on_the_meta_device_has_shapes_enough(clock):
    with torch.device("meta"):
        model = gpt()
    assert recommend_model(model, tokens=4, repeats=1).groups[0].count == 8


def test_all_numbers_are_plain_data(clock):
    data = json.loads(json.dumps(recommend_model(gpt(), tokens=4, repeats=1).as_dict()))
    assert data["rules"]["*.up"] == "btt"
    assert [group["chosen"] for group in data["groups"]] == ["btt", "btt", "btt", None]
    assert isclose(sum(g["milliseconds_after"] for g in data["groups"]), data["milliseconds_after"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, "the model is given as 3"),
        (nn.ReLU(), "ReLU has no linear layer"),
        (nn.Linear(8, 8), "the model itself is a Linear"),
        (nn.Sequential(nn.LazyLinear(8)), "no linear layer of Sequential can be replaced: 0: "),
    ],
)
def test_models_without_a_layer_to_replace(model, message):
    with pytest.raises(EinlinearError, match=message):
        recommend_model(model)


MODULE = """
import einlinear as el
from torch import nn

size = 3
ready = nn.Sequential(nn.Linear(4, 4))

class Kinds:
    @staticmethod
    def make(): return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

def make(): return el.GPT(20, context=8, width=16, depth=1, num_heads=2)
def needs(x): return x
def number(): return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "a_few_models.py").write_text(MODULE)
    (tmp_path / "broken_models.py").write_text("import nothing_of_that_name")
    (tmp_path / "odd_models.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = list(sys.path)
    yield
    assert sys.path == path
    sys.modules.pop("a_few_models", None)


def test_a_model_by_name(folder):
    assert isinstance(build_model("a_few_models:make"), el.GPT)
    assert isinstance(build_model("a_few_models:Kinds.make"), nn.Sequential)
    assert isinstance(build_model("a_few_models:ready"), nn.Sequential)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_few_models", "the model is 'a_few_models'"),
        ("a_few_models:make()", "the model is"),
        ("a_few_models:makee", "no 'makee'\n.*\n  fix:  did you mean 'make'"),
        ("a_few_models:size", "a_few_models:size is 3"),
        ("a_few_models:needs", r"needs\(\) failed: TypeError: .*missing 1 required"),
        ("a_few_models:number", r"number\(\) returned 3"),
        ("few_models:make", "there is no module 'few_models'"),
        ("a_few_models.inner:make", "there is no module 'a_few_models.inner'"),
        ("broken_models:make", "importing broken_models failed: ModuleNotFoundError: No module"),
        ("odd_models:make", "importing odd_models failed: ZeroDivisionError"),
    ],
)
def test_names_that_lead_to_no_model(folder, name, message):
    with pytest.raises(EinlinearError, match=message):
        build_model(name)


def test_the_command_for_a_model(folder, capsys):
    words = "recommend --model a_few_models:make --tokens 8 --repeats 1 --threads 1"
    main([*words.split(), "--plot", "a.svg", "--json", "a.json"])
    out = capsys.readouterr().out
    assert "16 -> 16, 8 tokens, float32, no bias, 1 thread, forward + backward\n" in out
    assert "blocks.0.mlp.up\n  1 x 16 -> 64" in out
    assert "Stay dense: " in out or "el.convert_(model, {" in out
    with open("a.json", encoding="utf-8") as file:
        assert len(json.load(file)["groups"]) == 4
