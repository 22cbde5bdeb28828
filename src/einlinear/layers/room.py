"""Weights for which there is no memory: an error of three lines in the place of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from einlinear.errors import EinlinearError

_WORDS = ("memory", "overflow", "allocate")  # of torch where a tensor is too large


class NoRoomError(EinlinearError):
    """There is no memory for the weights of a layer or model."""


@contextmanager
def room_for(name: str, weights: int, fix: str) -> Iterator[None]:
    """The surroundings in which weights are made; `name` says in the error of what."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        if not any(word in str(error).lower() for word in _WORDS):
            raise
        raise NoRoomError(
            what=f"{name} has {weights:,} weights, for which there is no memory",
            rule="weights fit into the memory of their device",
            fix=f"{fix}, or another device or dtype",
        ) from error
