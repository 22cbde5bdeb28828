"""What a task is: batches by their step, a fixed set for validation, a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from einlinear.structures.values import whole_number

VALIDATION_BATCH = 64
"""How many rows a batch for validation has at most, unless told otherwise."""

_LARGEST = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of inputs and what is to be said about them; units is over how many the loss is."""

    inputs: Tensor
    targets: Tensor
    units: int


@runtime_checkable
class Task(Protocol):
    """What a model is trained on.

    A batch is a function of its arguments alone: the position of a run in its data is the number
    of its step.
    """

    @property
    def name(self) -> str:
        """What the task is called in settings."""

    @property
    def unit(self) -> str:
        """Over what the loss is a mean: "token", "pixel", "sample" or "image"."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the batches but step, size and seed."""

    def batch(self, step: int, size: int, *, seed: int, share: slice | None = None) -> Batch:
        """The rows of a step, or a share of them: `size` is that of the whole batch."""

    def validation(self, size: int, *, batch: int = VALIDATION_BATCH) -> Sequence[Batch]:
        """At most `size` rows, the same for every run, in batches of at most `batch` rows."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The mean over the units of the batch, in nats, or of squared errors."""


@runtime_checkable
class SequenceTask(Task, Protocol):
    """A task of sequences: tokens (row, place) in, logits (row, place, token) out."""

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""

    @property
    def context(self) -> int:
        """How long a sequence is."""


@runtime_checkable
class VectorTask(Task, Protocol):
    """A task of vectors: (row, in_features) in, (row, out_features) out."""

    @property
    def in_features(self) -> int:
        """The width of an input."""

    @property
    def out_features(self) -> int:
        """The width of an output: classes, or numbers to be told."""


def random_words(
    step: int, size: int, *, seed: int, share: slice | None = None
) -> npt.NDArray[np.uint64]:
    """Random numbers of 64 bits for the rows of a step.

    They come from a generator that counts (Philox): seed and step are its key and counter, so that
    no step needs those before it. A share is a part of the same numbers.
    """
    words: npt.NDArray[np.uint64] = generator_bits(step, seed=seed).random_raw(row_count(size))
    return words if share is None else words[share]


def row_count(size: int) -> int:
    """How many rows a batch is to have, if that can be."""
    return whole_number(size, "the size of a batch", 1)


def generator_bits(step: int, *, seed: int) -> np.random.Philox:
    """The generator of a step."""
    step = whole_number(step, "the step", 0, _LARGEST)
    seed = whole_number(seed, "the seed", 0, _LARGEST)
    return np.random.Philox(
        key=np.array([seed, 0], np.uint64), counter=np.array([0, 0, 0, step], np.uint64)
    )


def spread(available: int, size: int) -> npt.NDArray[np.int64]:
    """At most `size` rows out of those there are, evenly spread, in order."""
    count = min(available, row_count(size))
    return np.arange(count, dtype=np.int64) * available // count


def batches(
    rows: npt.NDArray[np.int64], batch: int, make: Callable[[npt.NDArray[np.int64]], Batch]
) -> tuple[Batch, ...]:
    """The rows in batches."""
    batch = row_count(batch)
    return tuple(make(rows[start : start + batch]) for start in range(0, len(rows), batch))
