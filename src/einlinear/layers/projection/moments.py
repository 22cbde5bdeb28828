"""Moments: second moments of vectors that come in batches, in memory that does not grow."""

from __future__ import annotations

import torch
from torch import Tensor

from einlinear.errors import EinlinearError

_ROWS = 1024  # whose products are summed before they are added in float64
_SMALL = 1e-12  # numbers below this, or above its inverse, are scaled before they are multiplied


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
        if not bool(rows.isfinite().all()):
            raise EinlinearError(
                what=f"{self._what} contain numbers that are infinite or not a number",
                rule="second moments are means over all calibration batches",
                fix="find the batch that makes them; calibrate in float32 if they overflow",
            )
        summed_products(self._sum, rows, rows)
        self.count += len(rows)


def summed_products(total: Tensor, left_tl: Tensor, right_tr: Tensor) -> None:
    """Add the sum of l r^T over pairs of rows to a total in float64.

    A few rows at a time are multiplied in float32 if that is what they are, twice as fast.
    """
    dtype = torch.promote_types(left_tl.dtype, torch.float32)
    for first in range(0, len(left_tl), _ROWS):
        left, left_size = _sized(left_tl[first : first + _ROWS].to(total.device, dtype))
        right, right_size = _sized(right_tr[first : first + _ROWS].to(total.device, dtype))
        total += (left.T @ right).double() * (left_size * right_size)


def _sized(rows: Tensor) -> tuple[Tensor, float]:
    """Rows whose products stay in the range of their dtype, and by how much they are smaller."""
    size = float(rows.abs().amax()) if rows.numel() else 0.0
    if size == 0 or _SMALL < size < 1 / _SMALL:
        return rows, 1.0
    return rows / size, size
