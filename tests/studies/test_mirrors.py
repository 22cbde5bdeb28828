"""Metrics shown elsewhere, with stand-ins for what may not be installed."""

import sys
from types import ModuleType

import pytest

from einlinear import EinlinearError, train
from einlinear.studies.mirrors import open_mirror
from runs import numbers, tiny


class Board:
    def __init__(self, folder):
        self.folder, self.rows, self.is_closed = folder, [], False

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))

    def close(self):
        self.is_closed = True


class Account:
    def __init__(self, **options):
        self.options, self.rows, self.is_closed = options, [], False

    def log(self, values, step):
        self.rows += [(step, name, value) for name, value in values.items()]

    def finish(self):
        self.is_closed = True


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_mirror_gets_every_number(tmp_path, monkeypatch, name):
    made = []

    def make(*args, **options):
        made.append(Board(*args) if name == "tensorboard" else Account(**options))
        return made[0]

    path, maker = {
        "tensorboard": ("torch.utils.tensorboard", "SummaryWriter"),
        "wandb": ("wandb", "init"),
    }[name]
    module = ModuleType(path)
    setattr(module, maker, make)
    monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = tiny()
    with open_mirror(name, config, tmp_path) as mirror:
        train(config, tmp_path, mirrors=[mirror])
        assert not made[0].is_closed
    assert made[0].is_closed
    losses = [(step, value) for step, name, value in made[0].rows if name == "loss"]
    points = [line for line in numbers(tmp_path) if line["kind"] == "point"]
    assert losses == [(line["step"], line["loss"]) for line in points]
    if name == "wandb":
        assert made[0].options["mode"] == "offline"
        assert made[0].options["config"] == config.as_dict()
    else:
        assert made[0].folder == str(tmp_path / "tensorboard")


def test_a_mirror_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EinlinearError, match="wandb is not installed"):
        with open_mirror("wandb", tiny(), tmp_path):
            pass
