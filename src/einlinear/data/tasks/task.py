"""Task: batches by step, a fixed validation set, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from einlinear.structures.values import whole_number

VALIDATION_BATCH = 64
"""Default number of rows in a validation batch."""

_LARGEST = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets; the loss is the mean over `units` units."""

    inputs: Tensor
    targets: Tensor
    units: int


@runtime_checkable
class Task(Protocol):
    """What a model is trained on.

    A batch depends only on its arguments: a run's position in its data is its step.
    """

    @property
    def name(self) -> str:
        """The name of the task in settings."""

    @property
    def unit(self) -> str:
        """What the loss is averaged over: "token", "pixel", "sample" or "image"."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the batches except step, size and seed."""

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """The batch of a step, or a share of it; `size` is the size of the whole batch."""

    def validation(self, size: int, *, batch: int = VALIDATION_BATCH) -> Sequence[Batch]:
        """At most `size` rows, the same for every run, in batches of at most `batch` rows."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean over the units of the batch, in nats or as a squared error."""


@runtime_checkable
class SequenceTask(Task, Protocol):
    """A task of sequences: tokens (row, place) in, logits (row, place, token) out."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""

    @property
    def context(self) -> int:
        """The length of a sequence."""


@runtime_checkable
class VectorTask(Task, Protocol):
    """A task of vectors: (row, in_features) in, (row, out_features) out."""

    @property
    def in_features(self) -> int:
        """The width of an input."""

    @property
    def out_features(self) -> int:
        """The width of an output: classes, or numbers to predict."""


def random_words(
    step: int, size: int, *, seed: int, share: slice | None = None
) -> npt.NDArray[np.uint64]:
    """Return random 64-bit numbers for the rows of a step.

    They come from a counter-based generator (Philox) with the seed as key and the step as counter,
    so that no step depends on earlier ones. A share is a slice of the same numbers.
    """
    words: npt.NDArray[np.uint64] = generator_bits(step, seed=seed).random_raw(row_count(size))
    return words if share is None else words[share]


def random_rows(
    available: int, step: int, size: int, *, seed: int, share: slice | None = None
) -> npt.NDArray[np.int64]:
    """Sample the rows of a step with replacement from the available ones."""
    words = random_words(step, size, seed=seed, share=share)
    rows: npt.NDArray[np.int64] = (words % np.uint64(available)).astype(np.int64)
    return rows


def row_count(size: int) -> int:
    """Return the number of rows of a batch, or refuse it."""
    return whole_number(size, "the size of a batch", 1)


def generator_bits(step: int, *, seed: int) -> np.random.Philox:
    """The random generator of a step."""
    step = whole_number(step, "the step", 0, _LARGEST)
    seed = whole_number(seed, "the seed", 0, _LARGEST)
    return np.random.Philox(
        key=np.array([seed, 0], np.uint64), counter=np.array([0, 0, 0, step], np.uint64)
    )


def spread(available: int, size: int) -> npt.NDArray[np.int64]:
    """Choose at most `size` of the available rows, evenly spread, in order."""
    count = min(available, row_count(size))
    return np.arange(count, dtype=np.int64) * available // count


def batches(
    rows: npt.NDArray[np.int64], batch: int, make: Callable[[npt.NDArray[np.int64]], Batch]
) -> tuple[Batch, ...]:
    """Make batches of rows."""
    batch = row_count(batch)
    return tuple(make(rows[start : start + batch]) for start in range(0, len(rows), batch))
