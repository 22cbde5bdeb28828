"""pixels: predict the next value of an image of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from einlinear.data.pixel_files import CHANNELS, SIDE, load_pictures
from einlinear.data.tasks.task import VALIDATION_BATCH, Batch, batches, random_rows, spread
from einlinear.files.arrays import Array

_VALUES = 256
_START = _VALUES

PIXELS = SIDE * SIDE * CHANNELS
"""Values of an image."""

VALUES = _VALUES + 1
"""Tokens: the values of a pixel, and the start."""


@dataclass(frozen=True, slots=True, eq=False)
class PixelTask:
    """Images as 192 values in raster order, the colours of a pixel one after the other.

    The input is a start token, then all values but the last. The vocabulary thus has 257 tokens;
    the start token is never a target, and the loss ignores its logit. The unit "pixel" is one
    value: one colour of one pixel.

    Departure: the released model has no logit for the start token, and also reads the last value,
    after which there is nothing to predict. Its epochs visit every image once; a batch here is
    drawn with replacement, so that it depends on step and seed alone.
    """

    train: Array
    test: Array
    fingerprint: str
    name: str = "pixels"
    unit: str = "pixel"
    vocab_size: int = VALUES
    context: int = PIXELS

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """Random images."""
        rows = random_rows(len(self.train), step, size, seed=seed, share=share)
        return self._rows(self.train, rows)

    def validation(self, size: int, *, batch: int = VALIDATION_BATCH) -> Sequence[Batch]:
        """Images for validation, evenly spread."""
        rows = spread(len(self.test), size)
        return batches(rows, batch, lambda chosen: self._rows(self.test, chosen))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean cross entropy of the values, in nats."""
        logits = outputs[..., :_VALUES].flatten(0, -2).float()
        return nn.functional.cross_entropy(logits, batch.targets.flatten())

    def _rows(self, images: Array, rows: npt.NDArray[np.int64]) -> Batch:
        values = images[rows].reshape(len(rows), self.context).astype(np.int64)
        targets = torch.from_numpy(values)
        inputs = torch.full_like(targets, _START)
        inputs[:, 1:] = targets[:, :-1]
        return Batch(inputs, targets, targets.numel())


def open_pixel_task(data: str | Path | Sequence[str | Path] | None = None) -> PixelTask:
    """Open the task on files of images, or on patches of two photographs.

    Args:
        data: .npz files with train_x and test_x, or x or X (as in CIFAR-5M), or a folder of them,
            or a folder of CIFAR-10; larger images are averaged over boxes.
    """
    pictures = load_pictures(data)
    return PixelTask(pictures.train, pictures.test, pictures.fingerprint())
