"""Many experts on the compiled engine: tensors handed over, nothing gathered.

Legend: x_rd rows of input and y_re rows of output, of tokens or of pairs; w_p weights of pairs; a
factor has the axis of experts in front. As in `experts`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from einlinear.layers import engine
from einlinear.layers.compiled import address_of, name_of
from einlinear.layers.strided import contiguous, rows
from einlinear.structures.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Which rows meet which experts, with what weights.

    tokens_p: the token of each pair, sorted by expert.
    ends_e: where the pairs of each expert end.
    w_p: the weight of each pair; without them all are 1.
    takes: whether x has a row per token, else it has a row per pair.
    adds: whether y has a row per token, to which results are added; else it has a row per pair.
    num_tokens: how many tokens there are.
    stds: of the factors, if they are normalised.
    """

    tokens_p: Tensor
    ends_e: Tensor
    w_p: Tensor | None
    takes: bool
    adds: bool
    num_tokens: int
    stds: Sequence[float] = ()

    def num_rows(self, are_tokens: bool) -> int:
        """How many rows input or output have."""
        return self.num_tokens if are_tokens else self.tokens_p.shape[0]


class _Arguments:
    """Addresses of what both passes read, checked: the engine reads bare addresses."""

    def __init__(self, plan: Plan, x_rd: Tensor, factors: Sequence[Tensor], mixture: Mixture):
        dtype, num_experts = x_rd.dtype, mixture.ends_e.shape[0]
        self.dtype = torch.promote_types(dtype, torch.float32)  # of weights and scales
        self.x_rd, self.factors = rows(x_rd), contiguous(factors)
        size = Size((mixture.num_rows(mixture.takes), plan.d_in))
        self.x = [address_of(self.x_rd, size, dtype), self.x_rd.stride(0)]
        self.shapes = [Size((num_experts, *plan.factor_shapes[s.factor])) for s in plan.steps]
        self.at = [
            address_of(factor, shape, dtype)
            for factor, shape in zip(self.factors, self.shapes, strict=True)
        ]
        self.tokens_p, self.ends_e = mixture.tokens_p.contiguous(), mixture.ends_e.contiguous()
        self.w_p = None if mixture.w_p is None else mixture.w_p.to(self.dtype).contiguous()
        self.stds = array("d", mixture.stds)
        assert len(self.stds) in (0, len(self.at)), "one std per factor"
        num_pairs = self.tokens_p.shape[0]
        self.work = [
            num_experts,
            num_pairs,
            address_of(self.tokens_p, Size((num_pairs,)), torch.int64),
            address_of(self.ends_e, Size((num_experts,)), torch.int64),
            0 if self.w_p is None else address_of(self.w_p, Size((num_pairs,)), self.dtype),
            mixture.takes,
            mixture.adds,
            mixture.num_tokens,
            self.stds.buffer_info()[0] if self.stds else 0,
        ]


def forward(
    plan: Plan, x_rd: Tensor, factors: Sequence[Tensor], bias: Tensor | None, mixture: Mixture
) -> tuple[Tensor, Tensor]:
    """The rows of output, and the scales of normalisation: factors x experts, or empty."""
    given = _Arguments(plan, x_rd, factors, mixture)
    y_re = x_rd.new_empty(mixture.num_rows(mixture.adds), plan.d_out)
    shape = (len(factors), mixture.ends_e.shape[0]) if mixture.stds else (0,)
    scales_fe = x_rd.new_empty(shape, dtype=given.dtype)
    bias = bias if bias is None else bias.contiguous()
    bias_at = 0 if bias is None else address_of(bias, Size((plan.d_out,)), x_rd.dtype)
    head = [torch.get_num_threads(), *given.x, bias_at, y_re.data_ptr(), plan.d_out]
    numbers = [*head, *given.work, scales_fe.data_ptr(), *given.at]
    engine.call_experts("experts_forward", plan, name_of(x_rd.dtype), numbers)
    return y_re, scales_fe


def backward(
    plan: Plan,
    grad_re: Tensor,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    mixture: Mixture,
    scales_fe: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, weights, bias and factors, as far as wanted."""
    given = _Arguments(plan, x_rd, factors, mixture)
    grad_re = rows(grad_re)
    size = Size((mixture.num_rows(mixture.adds), plan.d_out))
    grad_at = [address_of(grad_re, size, x_rd.dtype), grad_re.stride(0)]
    shape = (len(factors), mixture.ends_e.shape[0]) if mixture.stds else (0,)
    scales_at = address_of(scales_fe, Size(shape), given.dtype)
    has_bias = wanted[2] and mixture.takes and mixture.adds
    grads = [
        x_rd.new_empty(given.x_rd.shape) if wanted[0] else None,
        None if given.w_p is None or not wanted[1] else torch.empty_like(given.w_p),
        x_rd.new_empty(plan.d_out) if has_bias else None,
        *(x_rd.new_empty(s) if f else None for s, f in zip(given.shapes, wanted[3:], strict=True)),
    ]
    grad_x, grad_w, grad_bias, *grad_factors = (0 if g is None else g.data_ptr() for g in grads)
    head = [torch.get_num_threads(), *given.x, *grad_at, grad_x, plan.d_in, grad_bias, grad_w]
    numbers = [*head, *given.work, scales_at, *given.at, *grad_factors]
    engine.call_experts("experts_backward", plan, name_of(x_rd.dtype), numbers)
    if wanted[2] and not has_bias:
        grads[2] = grad_re.sum(0)
    return grads
