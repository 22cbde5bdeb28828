"""TF32 and bfloat16 hold in steps and in evaluations, and only there."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from einlinear.models.gpt import GPT
from einlinear.training import train as module
from einlinear.training.plan import plan_run
from einlinear.training.train import train, using_tf32
from kit.runs import tiny

CUDA = torch.device("cuda")
matmul = torch.backends.cuda.matmul


def settings():
    return matmul.allow_tf32, getattr(matmul, "fp32_precision", None)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("tf32", [True, False])
def test_steps_and_evaluations(monkeypatch, precision, tf32):
    """The switches are those of a GPU; the run itself is on the CPU."""
    before = settings()
    monkeypatch.setattr(module, "using_tf32", lambda _, is_allowed: using_tf32(CUDA, is_allowed))
    monkeypatch.setattr(module, "plan_run", lambda c, is_checked: plan_run(c, is_checked=False))
    seen = set()

    def look(model, _):
        if isinstance(model, GPT):
            seen.add((model.training, matmul.allow_tf32, torch.is_autocast_enabled("cpu")))

    hook = register_module_forward_pre_hook(look)
    try:
        train(tiny(steps=4, eval_points=2, tf32=tf32, precision=precision))
    finally:
        hook.remove()
    is_half = precision == "bfloat16"
    assert seen == {(True, tf32, is_half), (False, tf32, is_half)}
    assert settings() == before
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_restores_tf32():
    before = settings()
    with pytest.raises(ZeroDivisionError), using_tf32(CUDA, not before[0]):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.skipif(not hasattr(matmul, "fp32_precision"), reason="torch has one setting")
def test_what_a_caller_set_by_the_newer_name_is_restored():
    older, newer = settings()
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            _ = matmul.allow_tf32
        with using_tf32(CUDA, False):
            assert settings() == (False, "ieee")
        assert matmul.fp32_precision == "tf32"
        with pytest.raises(RuntimeError):
            _ = matmul.allow_tf32
    finally:
        matmul.allow_tf32 = older
        matmul.fp32_precision = newer
    assert settings() == (older, newer)
