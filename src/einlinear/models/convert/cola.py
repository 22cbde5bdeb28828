"""Linear operators of CoLA as layers: dense matrices, products of two or more, Kronecker products.

Legend: letters of factors A, B, C, ...; a matrix of CoLA is outputs x inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from einlinear.errors import EinlinearError
from einlinear.layers.export.cola import cola_module, weight_operator
from einlinear.layers.linear import EinsumLinear
from einlinear.structures.named import dense, low_rank
from einlinear.structures.structure import Structure

_LETTERS = "ABCDEF"


def from_cola(operator: Any) -> EinsumLinear:
    """A layer without bias and normalisation whose dense form is a CoLA operator.

    Takes Dense, Product of Dense (a layer of low rank, cut at its narrowest place), Kronecker of
    up to six operators, and multiples and transposes of these. Needs the package cola-ml.
    """
    ops = cola_module("from_cola").ops
    is_operator = isinstance(operator, ops.LinearOperator)
    if not is_operator or operator.xnp.__name__ != "cola.backends.torch_fns":
        raise _not_supported(operator, "it is no LinearOperator of CoLA with torch's tensors")
    if operator.dtype.is_complex:
        raise _not_supported(operator, f"its dtype is {operator.dtype}")
    is_turned = isinstance(operator, ops.Transpose | ops.Adjoint)
    inner = operator.A if is_turned else operator
    parts = list(inner.Ms) if isinstance(inner, ops.Product) else [inner]
    scale = prod([part.c for part in parts if isinstance(part, ops.ScalarMul)])
    parts = [part for part in parts if not isinstance(part, ops.ScalarMul)]
    with torch.no_grad():
        if len(parts) == 1 and isinstance(parts[0], ops.Kronecker):
            matrices = [matrix.to_dense() for matrix in parts[0].Ms]
            layer = _kronecker(operator, [m.t() for m in matrices] if is_turned else matrices)
        elif parts and all(isinstance(part, ops.Dense) for part in parts):
            matrices = [part.to_dense() for part in parts]
            layer = _product([m.t() for m in reversed(matrices)] if is_turned else matrices)
        else:
            raise _not_supported(operator, "it has no structure that a layer can have")
        layer.get_parameter("A").mul_(scale)
    return layer


def _product(matrices: Sequence[Tensor]) -> EinsumLinear:
    """A product of matrices: the matrix itself, or low rank, cut where the product is narrowest."""
    d_out, d_in = matrices[0].shape[0], matrices[-1].shape[1]
    inner = [left.shape[1] for left, _ in pairwise(matrices)]
    if min(inner, default=d_in) >= min(d_in, d_out):
        return _filled(EinsumLinear, dense(), d_in, d_out, [_chain(matrices)])
    cut = inner.index(min(inner)) + 1
    halves = [_chain(matrices[cut:]), _chain(matrices[:cut])]
    return _filled(EinsumLinear, low_rank(rank=min(inner)), d_in, d_out, halves)


def _chain(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.linalg.multi_dot(list(matrices))


def _kronecker(operator: Any, matrices: Sequence[Tensor]) -> EinsumLinear:
    """A Kronecker product with the sizes of its matrices."""
    if len(matrices) > len(_LETTERS):
        raise _not_supported(operator, f"it has {len(matrices)} factors, more than six")
    edges: dict[str, object] = {}
    for side, axis in (("Y", 0), ("X", 1)):
        sizes = [matrix.shape[axis] for matrix in matrices]
        free = sizes.index(max(sizes))  # whose size follows from the width
        for i, (letter, size) in enumerate(zip(_LETTERS, sizes, strict=False)):
            if i == free or size > 1:
                edges[side + letter] = Fraction(1) if i == free else size
    d_out, d_in = (prod(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
    return _filled(KroneckerLinear, Structure.from_edges(edges), d_in, d_out, matrices)


def _filled(
    kind: type[EinsumLinear],
    structure: Structure,
    d_in: int,
    d_out: int,
    matrices: Sequence[Tensor],
) -> EinsumLinear:
    """A layer whose factors A, B, ... are the matrices, each inputs x outputs."""
    like = matrices[0]
    layer = kind(
        d_in, d_out, False, structure=structure, weight_norm=False, device=like.device,
        dtype=like.dtype,
    )  # fmt: skip
    for letter, matrix in zip(_LETTERS, matrices, strict=False):
        factor: Tensor = getattr(layer, letter)
        factor.copy_(matrix.t().reshape(factor.shape))
    return layer


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


def _not_supported(operator: object, reason: str) -> EinlinearError:
    kind = type(operator).__name__.partition("[")[0]  # without the types of its parts
    return EinlinearError(
        what=f"{kind} cannot become a layer: {reason}",
        rule="from_cola takes Dense, Product of Dense, Kronecker, multiples and transposes of "
        "these, of real torch tensors",
        fix="give el.from_cola(cola.ops.Dense(operator.to_dense())), which is a dense layer",
    )
