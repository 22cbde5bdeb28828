"""Moments: second moments of vectors that come in batches, in memory that does not grow."""

from __future__ import annotations

import torch
from torch import Tensor

from einlinear.errors import EinlinearError

_ROWS = 8192  # vectors that are in float64 at a time


class Moments:
    """The mean of x xᵀ over all vectors x seen so far, summed in float64.

    Args:
        width: the length of the vectors.
        device: where the sum is kept; by default, on the CPU.
        what: what the vectors are, for messages.
    """

    def __init__(
        self,
        width: int,
        device: torch.device | str | None = None,
        *,
        what: str = "the calibration inputs",
    ) -> None:
        self.count = 0
        self._what = what
        self._sum = torch.zeros(width, width, dtype=torch.float64, device=device)

    @property
    def width(self) -> int:
        """The length of the vectors."""
        return len(self._sum)

    @property
    def mean(self) -> Tensor:
        """The mean of x xᵀ, width x width; zeros before the first vector."""
        return self._sum / max(1, self.count)

    @property
    def is_zero(self) -> bool:
        """Whether all vectors were zero, or there were none."""
        return not bool(self._sum.diagonal().any())

    @property
    def is_enough(self) -> bool:
        """Whether there were as many vectors as numbers in each, so that no direction is unseen."""
        return self.count >= self.width

    def add(self, vectors: Tensor) -> None:
        """Add the vectors along the last axis of a tensor."""
        if vectors.shape[-1:] != (self.width,):
            raise EinlinearError(
                what=f"{self._what} have shape {tuple(vectors.shape)}",
                rule=f"they are vectors of {self.width} numbers along the last axis",
                fix=f"give a tensor of shape (..., {self.width})",
            )
        rows = vectors.detach().reshape(-1, self.width)
        for first in range(0, len(rows), _ROWS):
            numbers = rows[first : first + _ROWS].to(self._sum.device, torch.float64)
            if not bool(numbers.isfinite().all()):
                raise EinlinearError(
                    what=f"{self._what} contain numbers that are infinite or not a number",
                    rule="second moments are means over all calibration batches",
                    fix="find the batch that makes them; calibrate in float32 if they overflow",
                )
            self._sum.addmm_(numbers.T, numbers)
            self.count += len(numbers)
