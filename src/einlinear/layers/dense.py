"""Dense execution of layers so narrow that a dense multiply is faster than the steps.

The matrix is made by the engine, with normalised factors: the rows of the identity go through the
layer. Gradients of the factors are those of the layer for these rows, given the gradient of the
matrix. Without gradients, the matrix is kept until a factor changes.

Legend: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from einlinear.layers.cost import MOST_KEPT
from einlinear.layers.eager import save_call, saved_gradients
from einlinear.layers.engine import compiled
from einlinear.structures.plan import Plan


def can_be_dense(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether a layer may be executed like this: its matrix is small and not rounded."""
    is_small = plan.d_in * plan.d_out <= MOST_KEPT
    return is_small and dtype in (torch.float32, torch.float64)


class DenseWeight:
    """The matrix of a layer without gradients, kept until something changes.

    It knows the bits of the factors that it was made of. Versions of tensors would not tell: a
    write through `data` or numpy does not count.
    """

    def __init__(
        self,
        call: compiled.LayerCall,
        own: Mapping[str, Tensor | None],
        factors: Sequence[Tensor],
        bias: Tensor | None,
        weight_norm: bool,
    ):
        self._call, self._weight_norm, self._bias = call, weight_norm, bias
        self._own, self._factors = [*own.values()], [*factors]
        self._addresses, self._sizes = call.factors.addresses, call.factors.sizes
        self._has_same_bits = call.comparison()
        self._weight_do = call.forward(_identity(call.d_in, call.dtype), has_bias=False)
        self._weight_od = self._weight_do.t()

    def multiply(
        self,
        x: Tensor,
        own: Mapping[str, Tensor | None],
        weight_norm: bool,
        choices: Mapping[str, str],
    ) -> Tensor | None:
        """W x + b; None if parameters, their values or settings changed, or if x does not fit.

        This is all that a small layer does, so nothing is checked that torch itself checks.
        """
        call, factors = self._call, self._factors
        if (
            call.variants[0].get(x.numel() // call.d_in) != "dense"
            or choices != call.choices
            or weight_norm is not self._weight_norm
            or len(own) != len(self._own)
            or not all(map(is_, own.values(), self._own))
            or [*map(compiled.ADDRESS, factors)] != self._addresses
            or [*map(compiled.BYTES, factors)] != self._sizes
            or not all(map(Tensor.is_contiguous, factors))
            or compiled.is_recorded()
            or not self._has_same_bits()
        ):
            return None
        try:
            if self._bias is not None and x.dim() == 2:
                return torch.addmm(self._bias, x, self._weight_do)
            return torch.nn.functional.linear(x, self._weight_od, self._bias)
        except RuntimeError:  # the layer says what is wrong
            return None


def multiply_densely(
    call: compiled.LayerCall, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """W x + b, differentiable, for tensors that `multiply_eagerly` takes."""
    return _apply(call, x, bias, *factors)


class _Dense(torch.autograd.Function):
    """A dense multiply; second derivatives by the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        call: compiled.LayerCall,
        x: Tensor,
        bias: Tensor | None,
        *factors: Tensor,
    ) -> Tensor:
        at = save_call(ctx, call, x, factors)
        weight_do = call.forward(_identity(call.d_in, call.dtype), at, has_bias=False)
        ctx.weight_od = weight_do.t()
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight_do)
        return torch.nn.functional.linear(x, ctx.weight_od, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        return saved_gradients(ctx, grad_y, _dense_gradients)


_apply = compiled.apply_directly(_Dense)


def _dense_gradients(
    ctx: Any,
    call: compiled.LayerCall,
    x: Tensor | None,
    factors: Sequence[Tensor],
    grad_y: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, bias and factors."""
    grad_x = torch.matmul(grad_y, ctx.weight_od) if wanted[0] else None
    if grad_y.dim() != 2:
        grad_y = grad_y.reshape(-1, call.d_out)
    grad_bias = grad_y.sum(0) if wanted[1] else None
    if x is None:
        return [grad_x, grad_bias, *[None] * len(factors)]
    x_td = x if x.dim() == 2 else x.reshape(-1, call.d_in)
    grad_do = torch.mm(x_td.t(), grad_y)
    rows = _identity(call.d_in, call.dtype)
    only_factors = (False, False, *wanted[2:])
    _, _, *grads = call.backward(rows, factors, grad_do, only_factors, ctx.scales)
    return [grad_x, grad_bias, *grads]


@lru_cache(maxsize=16)
def _identity(width: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.eye(width, dtype=dtype, device="cpu")
