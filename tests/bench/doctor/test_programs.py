import pytest
import torch

from einlinear.bench.doctor import programs
from kit.doctor import assert_fails, assert_works, check, without_inductor


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    without_inductor(monkeypatch)


def test_compile_says_into_how_many_graphs():
    assert_works("compile", "ready", "forward and backward, in 1 graph; ")
    found = check("compile", "Branching")
    assert found.status == "works"
    assert "graphs (Data-dependent branching); differs by " in found.note


def test_operators_that_no_program_can_hold(capfd):
    fix = "Fix: say what shape the operator returns, with torch.library.register_fake"
    assert_fails("compile", "Opaque", fix, before=True)
    assert_fails("export", "Opaque", "There was no fake impl registered", before=True)
    assert capfd.readouterr() == ("", "")


def test_a_forward_that_decides_by_values(capfd):
    fix = "Fix: its forward decides by the values of a tensor: use torch.where or torch.cond"
    assert_fails("export", "Branching", fix, before=True)
    assert capfd.readouterr() == ("", "")  # torch prints whole programs


def test_outputs_that_differ():
    fix = "Fix: draw no random numbers in eval mode"
    for name in ("compile", "export"):
        found = assert_fails(name, "Noisy", fix, before=True)
        assert found.note.startswith("its output differs by 1")  # 100 % and more
        assert_fails(name, "Infinite", "the output has values that are not finite", before=True)


@pytest.mark.parametrize("model", ["ready", "zero_head"])  # zeros would hide what is wrong
def test_a_wrong_program_is_no_fault_of_the_model(monkeypatch, model):
    def wrong(*given):
        program = real(*given)
        for name, weight in program.state_dict.items():
            if name == "first.A":  # only the converted model has one
                weight.data.mul_(0.5)
        return program

    real = torch.export.export
    monkeypatch.setattr(torch.export, "export", wrong)
    assert_fails("export", model, "its output differs by ")


def test_exported_programs():
    assert_works("export", "ready", "torch.export; differs by ")
    assert check("export", "ready").numbers["error"] < 1e-5
    assert_works("export", "half")


def test_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert_fails("compile", "ready", "torch.compile compiles none of it", before=True)


def test_onnx_needs_packages(monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    found = check("onnx", "ready")
    assert (found.status, found.note) == ("skipped", "pip install onnx onnxscript onnxruntime")


@pytest.mark.slow
def test_onnx():
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    for model in ("HandWrittenGPT", "attention", "ready"):
        assert_works("onnx", model, "onnxruntime; ")
    assert_fails("onnx", "Branching", "torch.where or torch.cond", before=True)


@pytest.mark.slow
def test_programs_of_a_gpt():
    assert_works("compile", "HandWrittenGPT", "in 1 graph; ")
    assert_works("export", "HandWrittenGPT")
    pytest.importorskip("transformers")
    assert_works("compile", "gpt2", "in 1 graph; ")
    assert_works("export", "gpt2")
