"""Metrics shown elsewhere, with stand-ins for what may not be installed."""

import sys
from types import ModuleType

import pytest

from einlinear import EinlinearError, train
from einlinear.training.mirrors import open_mirror
from kit.runs import numbers, tiny


class Board:
    def __init__(self, folder, purge_step):
        self.folder, self.purge_step, self.rows, self.is_closed = folder, purge_step, [], False

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
        made.append((Board if name == "tensorboard" else Account)(*args, **options))
        return made[-1]

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
        assert not made
        train(config, tmp_path, mirrors=[mirror])
        assert not made[0].is_closed
    assert made[0].is_closed
    losses = [(step, value) for step, name, value in made[0].rows if name == "loss"]
    points = [line for line in numbers(tmp_path) if line["kind"] == "point"]
    assert losses == [(line["step"], line["loss"]) for line in points]
    shown = [(step, key) for step, key, _ in made[0].rows]
    assert len(set(shown)) == len(shown), "a name has two values at one step"
    trained = [(step, value) for step, key, value in made[0].rows if key == "train_loss"]
    lines = [line for line in numbers(tmp_path) if line["kind"] == "train"]
    assert trained == [(line["step"], line["train_loss"]) for line in lines]
    with open_mirror(name, config, tmp_path) as mirror:
        train(config, tmp_path, mirrors=[mirror])
    assert len(made) == 1, "a run that has finished is shown again"
    if name == "wandb":
        assert made[0].options["mode"] == "offline"
        assert made[0].options["config"] == config.as_dict()
    else:
        assert made[0].folder == str(tmp_path / "tensorboard")
        assert made[0].purge_step == 0


def test_a_mirror_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EinlinearError, match="wandb is not installed"):
        with open_mirror("wandb", tiny(), tmp_path):
            pass
