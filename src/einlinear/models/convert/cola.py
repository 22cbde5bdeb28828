"""Linear operators of CoLA as layers: dense matrices, products of two or more, Kronecker products.

Legend: letters of factors A, B, C, ...; a matrix of CoLA is outputs x inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from einlinear.errors import EinlinearError
from einlinear.layers.export.cola import cola_module
from einlinear.layers.export.kronecker import KroneckerLinear
from einlinear.layers.linear import EinsumLinear
from einlinear.structures.named import dense, low_rank
from einlinear.structures.structure import Structure

_LETTERS = "ABCDEF"


def from_cola(operator: Any) -> EinsumLinear:
    """A layer without bias and normalisation whose dense form is a CoLA operator.

    Takes Dense, Product of Dense (a layer of low rank, cut at its narrowest place), Kronecker of
    up to six operators, and multiples and transposes of these, nested as you like. Needs the
    package cola-ml.
    """
    ops = cola_module("from_cola").ops
    is_operator = isinstance(operator, ops.LinearOperator)
    if not is_operator or operator.xnp.__name__ != "cola.backends.torch_fns":
        raise _not_supported(operator, "it is no LinearOperator of CoLA with torch's tensors")
    if operator.dtype.is_complex:
        raise _not_supported(operator, f"its dtype is {operator.dtype}")
    scale, parts = _flat(ops, operator)
    with torch.no_grad():
        if len(parts) == 1 and isinstance(parts[0][0], ops.Kronecker):
            kronecker, is_turned = parts[0]
            layer = _kronecker(operator, [_matrix(part, is_turned) for part in kronecker.Ms])
        elif parts and all(isinstance(part, ops.Dense) for part, _ in parts):
            layer = _product([_matrix(*part) for part in parts])
        else:
            raise _not_supported(operator, "it has no structure that a layer can have")
        layer.get_parameter("A").mul_(scale)
    return layer


def _flat(ops: Any, operator: Any, is_turned: bool = False) -> tuple[Any, list[tuple[Any, bool]]]:
    """The scale of an operator and the factors of its product, each with whether it is transposed.

    Multiples, products and transposes may be nested.
    """
    if isinstance(operator, ops.ScalarMul):
        return operator.c, []
    if isinstance(operator, ops.Transpose | ops.Adjoint):
        return _flat(ops, operator.A, not is_turned)
    if not isinstance(operator, ops.Product):
        return 1, [(operator, is_turned)]
    inner = [_flat(ops, part, is_turned) for part in operator.Ms]
    parts = [own for _, own in (reversed(inner) if is_turned else inner)]
    return prod(scale for scale, _ in inner), list(chain.from_iterable(parts))


def _matrix(operator: Any, is_turned: bool) -> Tensor:
    matrix: Tensor = operator.to_dense()
    return matrix.t() if is_turned else matrix


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


def _not_supported(operator: object, reason: str) -> EinlinearError:
    kind = type(operator).__name__.partition("[")[0]  # without the types of its parts
    return EinlinearError(
        what=f"{kind} cannot become a layer: {reason}",
        rule="from_cola takes Dense, Product of Dense, Kronecker, multiples and transposes of "
        "these, of real torch tensors",
        fix="give el.from_cola(cola.ops.Dense(operator.to_dense())), which is a dense layer",
    )
