from types import SimpleNamespace

import pytest
import torch
from torch import nn

from einlinear.bench.doctor.inputs import find_input, tensors_of
from einlinear.bench.doctor.subject import read_subject
from einlinear.errors import EinlinearError
from kit import doctor_models
from kit.doctor import named


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("HandWrittenGPT", "int64 8 x 32 (made up)"),  # 32 is all that its positions allow
        ("Two", "float32 1024 x 16 (made up)"),
        ("half", "bfloat16 1024 x 16 (made up)"),
        ("attention", "float32 8 x 128 x 16 (made up)"),
    ],
)
def test_inputs_that_are_made_up(model, shown):
    found = find_input(getattr(doctor_models, model)())
    assert str(found) == shown


def test_a_model_of_hugging_face_returns_no_cache():
    pytest.importorskip("transformers")
    found = find_input(doctor_models.gpt2())
    assert str(found) == "int64 8 x 32, use_cache False (made up)"


def test_images_by_the_config():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5))
    model.config = SimpleNamespace(image_size=4, num_channels=3)
    assert str(find_input(model)) == "float32 8 x 3 x 4 x 4 (made up)"


def test_the_example_of_the_model_comes_first():
    model = doctor_models.Two()
    model.example_input_array = torch.ones(2, 16)
    assert str(find_input(model)) == "float32 2 x 16 (its example_input_array)"


def test_trials_change_nothing():
    model = doctor_models.Picky().train()
    model.first.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(EinlinearError, match="no input is known for Picky; float32 1024 x 16 "):
        find_input(model)
    assert (model.training, model.first.training, model.second.training) == (True, False, True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    ("inputs", "shown"),
    [
        ("picky_inputs", "x float32 4 x 16, scale 2.0"),
        ("picky_tuple", "float32 4 x 16, float32 one number"),
    ],
)
def test_inputs_that_are_given(inputs, shown):
    assert str(read_subject(named("Picky"), "btt", named(inputs)).inputs) == shown
    assert str(read_subject(named("Two"), "btt", named("numbers")).inputs) == "float32 4 x 16"


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            "Picky",
            None,
            r"(?s)missing 1 required.*'scale'\n  rule: without --inputs, .*\n  fix:  give",
        ),
        ("Two", "wrong_inputs", "the model fails on its input, float32 4 x 17: RuntimeError: "),
        ("Two", "text_inputs", "the inputs are 'a text'\n  rule: inputs are a tensor, a tuple"),
        ("Two", "nothing", "has no 'nothing'\n  rule: inputs are named MODULE:FUNCTION"),
        ("on_meta", None, "Two is on the device meta"),
        ("no_layers", None, "ReLU has no linear layer to replace"),
        ("uncopied", None, "the same model each time, which cannot be copied: RuntimeError: there"),
    ],
)
def test_subjects_that_cannot_be_examined(model, inputs, message):
    with pytest.raises(EinlinearError, match=message):
        read_subject(named(model), "btt", None if inputs is None else named(inputs))


def test_a_structure_that_does_not_exist():
    with pytest.raises(EinlinearError, match="did you mean 'btt'"):
        read_subject(named("Two"), "bt")


def test_each_check_gets_a_fresh_model():
    subject = read_subject(named("ready"), "btt")
    first, second = subject.plain(), subject.plain()
    assert len({id(first), id(second), id(doctor_models.ready)}) == 3
    assert type(subject.converted().first).__name__ == "EinsumLinear"
    assert type(doctor_models.ready.first) is nn.Linear


def test_tensors_in_whatever_a_model_returns():
    one, two = torch.ones(1), torch.ones(2)
    assert [len(t) for t in tensors_of({"a": one, "b": (None, [two]), "c": 3})] == [1, 2]
    assert tensors_of("text") == []
