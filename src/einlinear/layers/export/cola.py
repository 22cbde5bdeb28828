"""A layer's weight as a linear operator of CoLA, which multiplies by the layer's own product."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from einlinear.errors import EinlinearError


def cola_module(wanted: str) -> Any:
    """The package cola; an error if it is not installed."""
    if find_spec("cola") is None:
        raise EinlinearError(
            what=f"{wanted} needs the package cola, which is not installed",
            rule="CoLA is an optional package",
            fix="pip install cola-ml",
        )
    return import_module("cola")


def weight_operator(
    product: Callable[[Tensor], Tensor], shape: tuple[int, int], like: Tensor
) -> Any:
    """A CoLA operator of a shape, outputs x inputs, given the product of rows with its transpose.

    The matrix is never built: transpose and adjoint multiply by the derivative of the product.
    """
    cola = cola_module("to_cola()")

    def multiply(columns: Tensor) -> Tensor:
        return product(columns.t().contiguous()).t()

    def transposed(rows: Tensor) -> Tensor:
        zeros = torch.zeros(rows.shape[0], shape[1], dtype=like.dtype, device=like.device)
        pull_back: Any = torch.func.vjp(product, zeros)[1]
        back: Tensor = pull_back(rows)[0]
        return back

    operator = cola.ops.LinearOperator(like.dtype, shape, matmat=multiply)
    operator._rmatmat = transposed
    operator.device = like.device
    return operator
