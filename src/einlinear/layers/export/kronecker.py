"""KroneckerLinear: a Kronecker product of matrices as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from einlinear.layers.export.cola import weight_operator
from einlinear.layers.linear import EinsumLinear


class KroneckerLinear(EinsumLinear):
    """A Kronecker product A x B x ... with its features in the usual order, A outermost.

    An EinsumLinear orders features as its steps need them; here they are put in order before the
    first step and after the last.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last axis of x."""
        edges = self.plan.x_edges
        y = super().forward(self._ordered(x, sorted(edges), edges))
        return self._ordered(y, self.plan.y_edges, sorted(self.plan.y_edges))

    def to_dense(self) -> Tensor:
        """The effective weight, (out_features, in_features), like nn.Linear.weight."""
        y, x = self.plan.y_edges, self.plan.x_edges
        rows = self._ordered(super().to_dense(), x, sorted(x))
        return self._ordered(rows.t(), y, sorted(y)).t()

    def to_cola(self) -> Any:
        """The effective weight as a lazy LinearOperator of CoLA."""
        y, x = self.plan.y_edges, self.plan.x_edges
        inner = super().to_cola()

        def product(x_td: Tensor) -> Tensor:
            y_ot: Tensor = inner @ self._ordered(x_td, sorted(x), x).t()
            return self._ordered(y_ot.t(), y, sorted(y))

        return weight_operator(
            product, (self.out_features, self.in_features), self.get_parameter("A")
        )

    def _ordered(self, rows: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
        """Rows whose axes are in another order."""
        sizes, start = self.plan.sizes, rows.dim() - 1
        split = rows.reshape(*rows.shape[:-1], *(sizes[edge] for edge in before))
        axes = [start + before.index(edge) for edge in after]
        return split.permute(*range(start), *axes).reshape(rows.shape)
