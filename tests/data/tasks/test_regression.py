"""The task regression."""

import math

import pytest
import torch
from torch import nn

import einlinear as el
from einlinear import EinlinearError
from einlinear.data.tasks.task import VectorTask
from kit.task_laws import check_laws, falling_loss

SMALL = {"teacher_width": 64, "teacher_depth": 4}


def open_small(**changes):
    return el.open_task("regression", **{**SMALL, **changes})


def test_laws():
    check_laws(open_small(), open_small())


def test_shapes():
    task = open_small()
    assert isinstance(task, VectorTask)
    assert (task.name, task.unit, task.in_features, task.out_features) == (
        "regression",
        "sample",
        8,
        1,
    )
    batch = task.batch(0, 100, seed=0)
    assert batch.inputs.shape == (100, 8)
    assert batch.targets.shape == (100, 1)
    assert batch.units == 100


def test_the_teacher_of_the_paper():
    teacher = el.open_task("regression").teacher
    shapes = [tuple(weight.shape) for weight in teacher.weights]
    assert shapes == [(8, 1024), *[(1024, 1024)] * 5, (1024, 1)]
    for weight in teacher.weights[1:6]:  # a million numbers each: the deviation is known to 1e-3
        assert float(weight.std()) * math.sqrt(1024) == pytest.approx(1, abs=5e-3)


def test_answers_by_hand():
    task = open_small()
    batch = task.batch(3, 5, seed=0)
    for x, target in zip(batch.inputs.double(), batch.targets.double(), strict=True):
        for layer, weight in enumerate(task.teacher.weights):
            x = math.sqrt(2) * x.clamp(min=0) if layer else x
            x = torch.stack(
                [sum(x[i] * w for i, w in enumerate(column)) for column in weight.double().T]
            )
        assert float(target) == pytest.approx(
            (float(x) - task.teacher.mean) / task.teacher.std, abs=1e-4
        )


def test_inputs_are_normal_and_answers_standardised():
    task = open_small()
    batch = task.batch(0, 40_000, seed=5)
    x, y = batch.inputs, batch.targets
    # The mean of 320,000 numbers has deviation 0.0018, their second moment 0.0025.
    assert abs(float(x.mean())) < 6 * 0.0018
    assert abs(float(x.square().mean()) - 1) < 6 * 0.0025
    assert float((x.T @ x / len(x) - torch.eye(8)).abs().max()) < 6 * 0.008
    # The scale comes from 4,096 samples: deviations of 0.016 in the mean, more in the scale.
    assert abs(float(y.mean())) < 6 * 0.016
    assert abs(float(y.std()) - 1) < 0.1


def test_no_autocast_in_the_answers():
    task = open_small()
    plain = task.batch(0, 16, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(task.batch(0, 16, seed=0).targets, plain.targets)
    assert not plain.targets.requires_grad


def test_another_seed_is_another_teacher():
    one, other = open_small(), open_small(teacher_seed=1)
    assert one.fingerprint != other.fingerprint
    assert torch.equal(one.batch(0, 4, seed=0).inputs, other.batch(0, 4, seed=0).inputs)
    assert not torch.equal(one.batch(0, 4, seed=0).targets, other.batch(0, 4, seed=0).targets)
    # No batch of training is that of validation.
    held_out = one.validation(4)[0].inputs
    assert not any(torch.equal(one.batch(s, 4, seed=0).inputs, held_out) for s in range(5))


def test_loss_by_hand():
    task = open_small()
    batch = task.batch(0, 3, seed=0)
    outputs = torch.tensor([[0.5], [0.0], [-1.0]])
    wanted = (
        sum((o - t) ** 2 for o, t in zip([0.5, 0, -1], batch.targets[:, 0].tolist(), strict=True))
        / 3
    )
    assert float(task.loss(outputs, batch)) == pytest.approx(wanted, rel=1e-5)


def test_it_can_be_learned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    before, after = falling_loss(open_small(), model, steps=150, rows=128)
    assert before > 0.7
    assert after < 0.6 * before


def test_bad_settings(tmp_path):
    for settings, message in [
        ({"in_features": 0}, "in_features is 0"),
        ({"teacher_width": 0}, "teacher_width is 0"),
        ({"teacher_depth": 1}, "teacher_depth is 1"),
        ({"teacher_seed": -1}, "teacher_seed is -1"),
        ({"width": 3}, "did you mean 'teacher_width'"),
    ]:
        with pytest.raises(EinlinearError, match=message):
            open_small(**settings)
    with pytest.raises(EinlinearError, match="a teacher generates the data"):
        el.open_task("regression", tmp_path)
