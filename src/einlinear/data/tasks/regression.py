"""regression: predict the output of a large random network on a random input."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from einlinear.data.tasks.task import VALIDATION_BATCH, Batch, generator_bits, row_count
from einlinear.errors import EinlinearError, quote
from einlinear.structures.values import whole_number

IN_FEATURES = 8
"""Default width of an input."""

_HIGHEST_SEED = 2**63  # runs use seeds below; the teacher and validation use seeds above
_WEIGHTS, _SCALE, _VALIDATION = 0, 1, 2  # what a stream of random numbers is for
_DEEPEST = 10_000
_MOST_NUMBERS = 2**31  # of a teacher and its activations
_SAMPLES = 4096  # inputs that standardise the outputs of the teacher


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """A network without biases, with √2 ReLU between its layers and standardised outputs.

    Weights are normal with standard deviation 1/√fan_in, so that the outputs of all layers have
    about unit size. Ref: [P24 App. D].
    """

    weights: tuple[Tensor, ...]
    mean: float
    std: float

    def to(self, device: torch.device | str) -> Teacher:
        """The same teacher on a device."""
        return replace(self, weights=tuple(weight.to(device) for weight in self.weights))

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs, (row, 1); never under autocast, because they are the targets."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return (self.raw(x) - self.mean) / self.std

    def raw(self, x: Tensor) -> Tensor:
        """The outputs before they are standardised."""
        first, *others = self.weights
        x = x @ first
        for weight in others:
            x = x.relu_().mul_(sqrt(2)) @ weight
        return x


@dataclass(frozen=True, slots=True, eq=False)
class RegressionTask:
    """Normal inputs with the teacher's outputs as targets: unlimited data.

    Inputs are drawn on the CPU, by step and seed, and are the same on every device. The teacher
    answers them on its own device, so targets differ between devices by rounding only.
    Departure: the released code draws inputs on the device, from one stream for the whole run.
    """

    teacher: Teacher
    fingerprint: str
    teacher_seed: int
    name: str = "regression"
    unit: str = "sample"

    @property
    def in_features(self) -> int:
        """The width of an input."""
        return int(self.teacher.weights[0].shape[0])

    @property
    def out_features(self) -> int:
        """One number."""
        return 1

    def to(self, device: torch.device | str) -> RegressionTask:
        """The same task with its teacher, and so its batches, on a device."""
        return replace(self, teacher=self.teacher.to(device))

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """Fresh inputs."""
        seed = whole_number(seed, "the seed", 0, _HIGHEST_SEED - 1)
        x = _normal(step, (row_count(size), self.in_features), seed)
        return self._answered(x if share is None else x[share])

    def validation(self, size: int, *, batch: int = VALIDATION_BATCH) -> Sequence[Batch]:
        """Inputs that depend only on the teacher's seed; as many as requested."""
        seed = _HIGHEST_SEED + self.teacher_seed
        x = _normal(_VALIDATION, (row_count(size), self.in_features), seed)
        starts = range(0, len(x), row_count(batch))
        return tuple(self._answered(x[start : start + batch]) for start in starts)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean squared error; a model that always predicts the mean has 1."""
        return nn.functional.mse_loss(outputs.float(), batch.targets)

    def _answered(self, x: Tensor) -> Batch:
        device = self.teacher.weights[0].device
        x = x.contiguous()
        if device.type == "cuda":
            x = x.pin_memory()  # the copy then does not wait for the steps before it
        x = x.to(device, non_blocking=True)
        return Batch(x, self.teacher(x), len(x))


def open_regression_task(
    data: str | Path | Sequence[str | Path] | None = None,
    *,
    in_features: int = IN_FEATURES,
    teacher_width: int = 1024,
    teacher_depth: int = 7,
    teacher_seed: int = 0,
) -> RegressionTask:
    """Open the task of a teacher, by default the paper's. Ref: [P24 App. D].

    Args:
        data: must be None, because this task reads no file.
        in_features: the width of an input.
        teacher_width: of the hidden layers of the teacher.
        teacher_depth: number of layers, input and output layer included; the paper's has six
            hidden layers and an output layer.
        teacher_seed: each seed gives another teacher.
    """
    if data is not None:
        raise EinlinearError(
            what=f"regression is given the data {quote(data)}",
            rule="a teacher generates the data of regression",
            fix="leave the data out; set in_features, teacher_width and teacher_depth instead",
        )
    in_features = whole_number(in_features, "in_features", 1)
    teacher_width = whole_number(teacher_width, "teacher_width", 1)
    teacher_depth = whole_number(teacher_depth, "teacher_depth", 2, _DEEPEST)
    teacher_seed = whole_number(teacher_seed, "teacher_seed", 0, _HIGHEST_SEED - 1)
    widths = [in_features, *[teacher_width] * (teacher_depth - 1), 1]
    needed = _SAMPLES * max(widths) + sum(a * b for a, b in pairwise(widths))
    if needed > _MOST_NUMBERS:
        raise EinlinearError(
            what=f"a teacher of in_features {in_features:,}, teacher_width {teacher_width:,} and "
            f"teacher_depth {teacher_depth:,} needs {4 * needed / 1e9:,.0f} GB",
            rule=f"the weights and answers of a teacher take at most {4 * _MOST_NUMBERS / 1e9:.0f} "
            "GB",
            fix="give a smaller teacher_width or teacher_depth; the paper's are 1024 and 7",
        )
    text = f"regression 1 {widths} {teacher_seed}"
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    return RegressionTask(make_teacher(widths, teacher_seed), fingerprint, teacher_seed)


def make_teacher(widths: Sequence[int], seed: int) -> Teacher:
    """Make the teacher of a seed, with outputs of mean 0 and standard deviation 1."""
    key = _HIGHEST_SEED + seed
    numbers = np.random.Generator(generator_bits(_WEIGHTS, seed=key))
    weights = tuple(
        torch.from_numpy(numbers.standard_normal((d_in, d_out), np.float32)) / sqrt(d_in)
        for d_in, d_out in pairwise(widths)
    )
    with torch.no_grad():
        answers = Teacher(weights, 0.0, 1.0)(_normal(_SCALE, (_SAMPLES, widths[0]), key)).double()
    return Teacher(weights, float(answers.mean()), float(answers.std()))


def _normal(step: int, shape: tuple[int, int], seed: int) -> Tensor:
    numbers = np.random.Generator(generator_bits(step, seed=seed))
    return torch.from_numpy(numbers.standard_normal(shape, np.float32))
