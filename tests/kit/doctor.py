"""Single checks of the doctor, of the models in kit.doctor_models."""

from functools import cache, partial

import torch

from einlinear.bench.doctor.examine import CHECKS, examine
from einlinear.bench.doctor.subject import read_subject


def named(model):
    return f"kit.doctor_models:{model}"


@cache
def subject(model, inputs=None):
    return read_subject(named(model), "btt(rank=2)", None if inputs is None else named(inputs))


def check(name, model, inputs=None):
    """The result of one check; what it says is one line."""
    found = examine(next(each for each in CHECKS if each.name == name), subject(model, inputs))
    assert found.name == name
    assert found.note
    assert "\n" not in found.note
    return found


def assert_works(name, model, note=""):
    found = check(name, model)
    assert (found.status, found.fix) == ("works", ""), found.note
    assert note in found.note


def assert_fails(name, model, reason, *, before=False):
    """The check fails with this reason; `before`: before conversion, too."""
    found = check(name, model)
    assert found.status == "failed", found.note
    assert reason in found.note
    assert ("fails before conversion, too" in found.note) == before
    return found


def without_inductor(monkeypatch):
    """Compile with all of torch.compile but the C++ compiler, which takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
