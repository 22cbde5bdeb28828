"""Many experts on the compiled engine, which reads each token's row where it is.

Legend: as in `assignment`; factors are stacked along a first axis of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from einlinear.layers.engine import binding
from einlinear.layers.engine.compiled import DTYPES, address_of
from einlinear.layers.moe.assignment import Assignment
from einlinear.layers.strided import contiguous, rows
from einlinear.structures.plan import Plan


class _Inputs:
    """The tensors that both passes read, checked, and a call with their addresses filled in."""

    def __init__(
        self,
        plan: Plan,
        x_rd: Tensor,
        factors: Sequence[Tensor],
        assignment: Assignment,
        stds: Sequence[float],
    ):
        dtype, num_experts, num_pairs = x_rd.dtype, assignment.num_experts, assignment.num_pairs
        self.real = torch.promote_types(dtype, torch.float32)  # dtype of weights and scales
        self.scales_shape = (len(factors), num_experts) if stds else (0,)
        self.factor_shapes = [(num_experts, *shape) for shape in binding.factor_shapes(plan)]
        self.x_rd, self.factors = rows(x_rd), contiguous(factors)
        self.tokens_p = assignment.tokens_p.contiguous()
        self.ends_e = assignment.ends_e.contiguous()
        self.w_p = None if assignment.w_p is None else assignment.w_p.to(self.real).contiguous()
        addresses = [
            address_of(factor, shape, dtype)
            for factor, shape in zip(self.factors, self.factor_shapes, strict=True)
        ]
        call = self.call = binding.make_arguments(plan, DTYPES[dtype], addresses)
        if stds:
            binding.set_array(call, "stds", stds, len(addresses))
        size = assignment.num_rows(assignment.x_by_token), plan.d_in
        call.x, call.x_row = address_of(self.x_rd, size, dtype), self.x_rd.stride(0)
        call.tokens, call.threads = assignment.num_tokens, torch.get_num_threads()
        call.num_experts, call.num_pairs = num_experts, num_pairs
        call.pair_tokens = address_of(self.tokens_p, (num_pairs,), torch.int64)
        call.expert_ends = address_of(self.ends_e, (num_experts,), torch.int64)
        call.x_by_token, call.y_by_token = assignment.x_by_token, assignment.y_by_token
        if self.w_p is not None:
            call.pair_weights = address_of(self.w_p, (num_pairs,), self.real)


def grouped_forward(
    plan: Plan,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    assignment: Assignment,
    stds: Sequence[float] = (),
) -> tuple[Tensor, Tensor]:
    """The output rows, and the scales of normalisation (factors x experts, or empty).

    With stds, the standard deviations of the factors, these are normalised.
    """
    inputs = _Inputs(plan, x_rd, factors, assignment, stds)
    y_ro = x_rd.new_empty(assignment.num_rows(assignment.y_by_token), plan.d_out)
    scales_fe = x_rd.new_empty(inputs.scales_shape, dtype=inputs.real)
    bias = bias if bias is None else bias.contiguous()
    call = inputs.call
    call.bias = 0 if bias is None else address_of(bias, (plan.d_out,), x_rd.dtype)
    call.y, call.y_row = y_ro.data_ptr(), plan.d_out
    call.scales = scales_fe.data_ptr()
    binding.run_engine("experts_forward", call)
    return y_ro, scales_fe


def grouped_backward(
    plan: Plan,
    grad_ro: Tensor,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    assignment: Assignment,
    scales_fe: Tensor,
    stds: Sequence[float],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, weights, bias and factors; None for those not wanted."""
    inputs = _Inputs(plan, x_rd, factors, assignment, stds)
    grad_ro = rows(grad_ro)
    size = assignment.num_rows(assignment.y_by_token), plan.d_out
    has_bias = wanted[2] and assignment.x_by_token and assignment.y_by_token
    shapes = inputs.factor_shapes
    grads = [
        x_rd.new_empty(inputs.x_rd.shape) if wanted[0] else None,
        None if inputs.w_p is None or not wanted[1] else torch.empty_like(inputs.w_p),
        x_rd.new_empty(plan.d_out) if has_bias else None,
        *(x_rd.new_empty(s) if flag else None for s, flag in zip(shapes, wanted[3:], strict=True)),
    ]
    call = inputs.call
    call.grad_y, call.grad_y_row = address_of(grad_ro, size, x_rd.dtype), grad_ro.stride(0)
    call.scales = address_of(scales_fe, inputs.scales_shape, inputs.real)
    at = [0 if grad is None else grad.data_ptr() for grad in grads]
    call.grad_x, call.grad_pair_weights, call.grad_bias = at[:3]
    call.grad_x_row = plan.d_in
    binding.set_array(call, "grad_factors", at[3:], len(factors))
    binding.run_engine("experts_backward", call)
    if wanted[2] and not has_bias:
        grads[2] = grad_ro.sum(0)
    return grads
