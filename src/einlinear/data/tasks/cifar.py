"""cifar: classify images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from einlinear.data.images import Images, load_images
from einlinear.data.tasks.task import VALIDATION_BATCH, Batch, batches, random_rows, spread
from einlinear.errors import EinlinearError, quote


@dataclass(frozen=True, slots=True, eq=False)
class CifarTask:
    """Images as vectors, standardised per colour, and their classes."""

    images: Images
    name: str = "cifar"
    unit: str = "image"

    @property
    def in_features(self) -> int:
        """Pixels times colours."""
        return int(self.images.train_x.shape[1])

    @property
    def out_features(self) -> int:
        """How many classes there are."""
        return self.images.num_classes

    @property
    def fingerprint(self) -> str:
        """A hash of the images and of their pooling."""
        return self.images.fingerprint

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """Random images."""
        rows = random_rows(len(self.images.train_y), step, size, seed=seed, share=share)
        return _rows(self.images.train_x, self.images.train_y, rows)

    def validation(self, size: int, *, batch: int = VALIDATION_BATCH) -> Sequence[Batch]:
        """Test images, evenly spread."""
        x, y = self.images.test_x, self.images.test_y
        return batches(spread(len(y), size), batch, lambda rows: _rows(x, y, rows))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean cross entropy of the classes, in nats."""
        return nn.functional.cross_entropy(outputs.float(), batch.targets)


def _rows(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> Batch:
    return Batch(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]), len(rows))


def open_cifar_task(
    data: str | Path | Sequence[str | Path] | None = None, *, pool: int = 1
) -> CifarTask:
    """Open the task on images with classes, or on patches of two photographs.

    Args:
        data: an .npz with train_x, train_y, test_x, test_y, or a folder of CIFAR-10 as
            distributed; `load_images` describes the task on the patches.
        pool: side of the squares of pixels that are averaged to one.
    """
    if data is not None and not isinstance(data, (str, Path)):
        raise EinlinearError(
            what=f"cifar is given {len(data)} files"
            if isinstance(data, list | tuple)
            else f"cifar is given the data {quote(data)}",
            rule="the images and classes are in one file or one folder",
            fix="give one path",
        )
    return CifarTask(load_images(data, pool))
