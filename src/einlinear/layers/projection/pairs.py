"""Pairs: which weight maps the vectors on one side best to those on the other."""

from __future__ import annotations

import torch
from torch import Tensor

from einlinear.layers.projection.metric import Metric, damped
from einlinear.layers.projection.moments import summed_products


class Pairs:
    """First and second moments of pairs of vectors x, y, in memory that does not grow.

    Args:
        d_in: the length of x.
        d_out: the length of y.
        has_bias: whether a bias takes care of the means; moments are around them then.
        outputs: what directions of y count, d_out x d_out; all the same if left out.
    """

    def __init__(
        self, d_in: int, d_out: int, *, has_bias: bool, outputs: Tensor | None = None
    ) -> None:
        self.count = 0
        self._d_in, self._has_bias = d_in, has_bias
        self._outputs = None if outputs is None else outputs.double().cpu()
        self._products = torch.zeros(d_in + d_out, d_in, dtype=torch.float64)
        self._sum = torch.zeros(d_in + d_out, dtype=torch.float64)
        self._square = 0.0
        self._shift = torch.zeros(d_in + d_out, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the vectors along the last axes of two tensors, which belong together in order."""
        x_td = x.detach().reshape(-1, self._d_in).cpu()
        y_to = y.detach().reshape(-1, len(self._shift) - self._d_in).to(x_td)
        both = torch.cat([x_td, y_to], 1)
        if not len(both):
            return
        if self._has_bias:  # means that are large would leave no digits to what is around them
            if not self.count:
                self._shift = both.mean(0, dtype=torch.float64)
            both = both - self._shift.to(both)
            x_td, y_to = both[:, : self._d_in], both[:, self._d_in :]
        summed_products(self._products, both, x_td)
        self._sum += both.sum(0, dtype=torch.float64)
        self._square += float((y_to * self._counted(y_to)).sum(dtype=torch.float64))
        self.count += len(x_td)

    @property
    def metric(self) -> Metric:
        """What errors of a weight count."""
        return Metric(self._moments()[: self._d_in], self._outputs)

    def best_weight(self, near_oi: Tensor, damping: float) -> Tensor:
        """The W with the least mean |y - W x|², (C_yx + d N)(C_xx + d I)^-1.

        With the damping d, a share of the mean of the diagonal of C_xx, W stays close to a weight N
        in directions that x hardly has.
        """
        moments = self._moments()
        xx, yx = moments[: self._d_in], moments[self._d_in :]
        held = damped(xx, damping)
        extra = (held - xx).diagonal()
        best: Tensor = torch.linalg.solve(held, (yx + near_oi.double().cpu() * extra).mT).mT
        return best

    def best_bias(self, weight_oi: Tensor) -> Tensor:
        """The mean of y - W x."""
        mean = self._sum / max(1, self.count) + self._shift
        return mean[self._d_in :] - weight_oi.double().cpu() @ mean[: self._d_in]

    def error(self, weight_oi: Tensor) -> float:
        """The share of the mean squared y, around its mean with a bias, that W x misses."""
        weight_oi = weight_oi.double().cpu()
        moments = self._moments()
        xx, yx = moments[: self._d_in], moments[self._d_in :]
        mean = self._sum[self._d_in :] / max(1, self.count)
        whole = self._square / max(1, self.count)
        whole -= float(mean @ self._counted(mean[None])[0]) if self._has_bias else 0.0
        explained = (self._counted((2 * yx - weight_oi @ xx).mT).mT * weight_oi).sum()
        return max(0.0, 1 - float(explained) / whole) if whole > 0 else 0.0

    def _counted(self, y_to: Tensor) -> Tensor:
        return y_to if self._outputs is None else y_to @ self._outputs.to(y_to.dtype)

    def _moments(self) -> Tensor:
        moments = self._products / max(1, self.count)
        if not self._has_bias:
            return moments
        mean = self._sum / max(1, self.count)
        return moments - torch.outer(mean, mean[: self._d_in])
