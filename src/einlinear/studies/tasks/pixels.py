"""pixels: say the next value of an image of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from einlinear.studies.arrays import Array
from einlinear.studies.pixel_files import COLOURS, SIDE, load_pictures
from einlinear.studies.tasks.task import VALIDATION_BATCH, Batch, batches, random_words, spread

_VALUES = 256
_START = _VALUES

PIXELS = SIDE * SIDE * COLOURS
"""Values of an image."""

VALUES = _VALUES + 1
"""Tokens: the values of a pixel, and the start."""


@dataclass(frozen=True, slots=True, eq=False)
class PixelTask:
    """Images as 192 values in raster order, the colours of a pixel one after the other.

    The input is a start token and then all values but the last. So the model knows 257 tokens; the
    start token is never to be said, and the loss does not look at its logit. Here "pixel" is one
    value, that is one colour of one pixel.
    """

    train: Array
    test: Array
    fingerprint: str
    name: str = "pixels"
    unit: str = "pixel"
    vocab_size: int = VALUES
    context: int = PIXELS

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """Images chosen at random."""
        words = random_words(step, size, seed=seed, share=share)
        return self._rows(self.train, (words % np.uint64(len(self.train))).astype(np.int64))

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
    """The task on files of images, or on patches of two photographs.

    Args:
        data: .npz files with train_x and test_x, or x or X (as those of CIFAR-5M), or a folder of
            them, or a folder of CIFAR-10; larger images are averaged over boxes.
    """
    pictures = load_pictures(data)
    return PixelTask(pictures.train, pictures.test, pictures.fingerprint())
