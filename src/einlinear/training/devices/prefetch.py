"""Prefetcher: makes the next batches in a thread while a GPU computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from einlinear.data.tasks.task import Batch

MakeBatch = Callable[[int, int], Batch]
"""Makes the batch of a step and of one part of it; it depends on these two numbers only."""

_AHEAD = 2  # batches


class Prefetcher:
    """Gives the same batches as `make`, which a thread has called ahead of time.

    Batches are asked for in order, step by step and part by part. Any other step restarts the order
    from there. An error in `make` is raised where its batch is asked for.

    Args:
        make: makes a batch.
        num_steps: where to stop.
        num_parts: parts of a step.
        start: called first in the thread.
    """

    def __init__(
        self,
        make: MakeBatch,
        num_steps: int,
        num_parts: int,
        start: Callable[[], None] = lambda: None,
    ) -> None:
        self._make, self._num_parts = make, num_parts
        self._end = num_steps * num_parts
        self._made: deque[tuple[int, Future[Batch]]] = deque()
        self._thread = ThreadPoolExecutor(1, "einlinear-batches", start)

    def __call__(self, step: int, part: int) -> Batch:
        """The batch of a part of a step; starts to make those after it."""
        number = step * self._num_parts + part
        if not self._made or self._made[0][0] != number:
            self._forget()
            self._ask(number)
        _, asked = self._made.popleft()
        last = self._made[-1][0] if self._made else number
        for later in range(last + 1, min(number + _AHEAD + 1, self._end)):
            self._ask(later)
        return asked.result()

    def close(self) -> None:
        """Stop the thread, after the batch that it is making."""
        self._forget()
        self._thread.shutdown(cancel_futures=True)

    def _ask(self, number: int) -> None:
        made = self._thread.submit(self._make, *divmod(number, self._num_parts))
        self._made.append((number, made))

    def _forget(self) -> None:
        for _, asked in self._made:
            asked.cancel()
        self._made.clear()


def prefetcher_for(
    device: torch.device, make: MakeBatch, num_steps: int, num_parts: int
) -> Prefetcher:
    """A prefetcher whose batches are in pinned memory, from which copies to a GPU do not wait."""

    def make_pinned(step: int, part: int) -> Batch:
        batch = make(step, part)
        return Batch(_pinned(batch.inputs), _pinned(batch.targets), batch.units)

    # Each thread has a current GPU of its own; on another one, it would take memory.
    return Prefetcher(make_pinned, num_steps, num_parts, lambda: torch.cuda.set_device(device))


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
