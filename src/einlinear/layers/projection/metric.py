"""The distance that a projection minimises: errors weighted by inputs and by outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metric:
    """The squared distance |E|² = trace(G E H E^T) of two weights whose difference is E.

    H are the second moments of the inputs, d_in x d_in: the expected squared change of the outputs.
    G are those of the gradients of the outputs, d_out x d_out: it counts directions of the output
    by how much what follows depends on them. None stands for the identity.
    """

    inputs: Tensor | None = None
    outputs: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this is the Frobenius norm."""
        return self.inputs is None and self.outputs is None

    def gradient(self, error_oi: Tensor) -> Tensor:
        """G E H, half the gradient of the squared norm."""
        weighted = error_oi if self.inputs is None else error_oi @ self.inputs
        return weighted if self.outputs is None else self.outputs @ weighted

    def square(self, error_oi: Tensor) -> float:
        """The squared norm of a difference of weights."""
        return float((error_oi * self.gradient(error_oi)).sum())


def damped(moments: Tensor, damping: float) -> Tensor:
    """H + damping * mean(diagonal) * I, which keeps what calibration hardly saw from running free.

    Moments that are all zero become the identity.
    """
    mean = float(moments.diagonal().mean())
    if mean <= 0:
        return torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    return moments + damping * mean * torch.eye(
        len(moments), dtype=moments.dtype, device=moments.device
    )
