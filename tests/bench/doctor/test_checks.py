import pytest

from kit.doctor import assert_fails, assert_works, check


@pytest.mark.parametrize("model", ["HandWrittenGPT", "attention", "half", "ready"])
@pytest.mark.parametrize("name", ["convert", "project", "forward", "backward", "save", "mup"])
def test_what_works(name, model):
    assert_works(name, model)


def test_notes_say_the_numbers():
    found = check("convert", "HandWrittenGPT")
    assert found.note == "6 layers replaced, 1 left alone; 4.56 k -> 4.05 k parameters"
    assert found.numbers == {"layers": 6, "params_before": 4560, "params_after": 4048}
    assert check("forward", "HandWrittenGPT").note == "output 8 x 32 x 23, finite"
    assert check("backward", "HandWrittenGPT").numbers == {"parameters": 27}
    assert check("mup", "HandWrittenGPT").numbers["highest_lr"] > 1e-3


def test_gradients_that_do_not_reach_a_parameter():
    reason = "no gradient reaches spare.A, spare.B and spare.bias. Fix: use it in the forward"
    assert_fails("backward", "Spare", reason, before=True)
    assert_fails("backward", "Cut", "no gradient reaches first.A, first.B and", before=True)
    assert_fails("backward", "NoGradient", "the output has no gradient. Fix: ", before=True)


def test_numbers_that_are_not_finite():
    assert_fails("forward", "Infinite", "has values that are not finite", before=True)
    assert_fails("project", "Infinite", "has values that are not finite")
    assert_fails("backward", "Infinite", "gradients of first.A, first.B, ", before=True)
    assert_fails("mup", "Infinite", "not finite after a step of Adam: first.A, first.B, ")


def test_what_a_checkpoint_does_not_hold():
    assert_fails("save", "Forgetful", "the loaded model has another output. Fix: register all")


def test_an_error_of_ours_has_its_rule_and_its_fix():
    found = assert_fails("mup", "Gained", "no learning rate is known for gain (16,) of the model")
    assert ". Rule: a module that owns parameters declares how they scale" in found.note
    assert found.note.endswith(". Fix: paste this once, before the call, and check it; see below")
    assert "@el.register_scaling(Gained)\n" in found.fix
    found = assert_fails("convert", "normed", "layer 'first' cannot be replaced: it has a param")
    assert ". Rule: only plain linear layers " in found.note
    assert ". Fix: remove the obstacle; or " in found.note
    assert found.fix == ""


@pytest.mark.parametrize("name", ["backward", "mup", "speed-training"])
def test_frozen_models_are_not_trained(name):
    found = check(name, "frozen")
    assert (found.status, found.note[:25]) == ("skipped", "all parameters are frozen")


@pytest.mark.parametrize("name", ["convert", "forward", "backward", "save", "pretrained", "mup"])
def test_a_model_of_hugging_face(name):
    pytest.importorskip("transformers")
    assert_works(name, "gpt2")
