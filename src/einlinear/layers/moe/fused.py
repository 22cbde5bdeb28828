"""Gate and experts as one step of autograd, for plain tensors that need not go through operators.

The gate reads the same input as the experts, so its share of the input's gradient is added to
theirs in place. A second array of that size, fresh from the system, would make the layer's backward
pass about a tenth longer.

Legend: as in `assignment`; g_... are gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from einlinear.layers.engine import compiled
from einlinear.layers.moe.assignment import Assignment, assign
from einlinear.layers.moe.operators import (
    expert_variant,
    experts_backward,
    experts_forward,
    multiply_experts,
)
from einlinear.layers.moe.routing import Gate, choose_experts
from einlinear.layers.opaque import differentiable_gradients, only_wanted
from einlinear.structures.plan import Plan


def can_fuse(gate: Gate, x_td: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether `gate_and_experts` applies: plain tensors of one dtype, and no hooks at the gate."""
    if torch.compiler.is_compiling() or x_td.dtype not in (torch.float32, torch.float64):
        return False
    is_plain = type(gate) is Gate and "forward" not in gate.__dict__
    is_plain = is_plain and not _has_any_global_hook()  # type: ignore[no-untyped-call]
    is_plain = is_plain and not (gate._forward_hooks or gate._forward_pre_hooks)
    is_plain = is_plain and not (gate._backward_hooks or gate._backward_pre_hooks)
    return (
        is_plain
        and compiled.is_direct(x_td, [gate.weight, *tensors])
        and not torch.is_autocast_enabled(x_td.device.type)
    )


def gate_and_experts(
    plan: Plan,
    x_td: Tensor,
    gate_ed: Tensor,
    bias: Tensor | None,
    factors: Sequence[Tensor],
    *,
    num_active: int,
    stds: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The output rows, the logits and the chosen experts; the first two are differentiable."""
    made: tuple[Tensor, Tensor, Tensor] = _GateAndExperts.apply(  # type: ignore[no-untyped-call]
        x_td, gate_ed, bias, plan, num_active, stds, *factors
    )
    return made


class _GateAndExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_td: Tensor,
        gate_ed: Tensor,
        bias: Tensor | None,
        plan: Plan,
        num_active: int,
        stds: Sequence[float],
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_te = linear(x_td, gate_ed)
        experts_tk = choose_experts(logits_te, x_td, num_active)
        weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
        assignment, order_p = assign(experts_tk, weights_tk, gate_ed.shape[0])
        ctx.plan, ctx.stds = plan, stds
        ctx.variant = expert_variant(plan, x_td, assignment)
        y_to, scales_fe = experts_forward(plan, ctx.variant, x_td, factors, bias, assignment, stds)
        has_gate = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(experts_tk, *([] if has_gate else [logits_te]))
        ctx.set_materialize_grads(False)
        pairs = assignment.tokens_p, assignment.ends_e, assignment.w_p, order_p
        routed = experts_tk, weights_tk, scales_fe
        ctx.save_for_backward(x_td, gate_ed, bias, *pairs, *routed, *factors)
        return y_to, logits_te, experts_tk

    @staticmethod
    def backward(
        ctx: Any, g_to: Tensor | None, g_logits_te: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        # All at once: checkpointing allows saved tensors to be read only once.
        x_td, gate_ed, bias, tokens_p, ends_e, w_p, order_p, *routed = ctx.saved_tensors
        experts_tk, weights_tk, scales_fe, *factors = routed
        needs = ctx.needs_input_grad
        wanted = [*needs[:3], *needs[-len(factors) :]]
        assignment = Assignment(tokens_p, ends_e, w_p, x_td.shape[0])
        given = [g for g in (g_to, g_logits_te) if g is not None]
        if torch.is_grad_enabled() or not compiled.is_direct(x_td, given):

            def steps(
                x_td: Tensor, gate_ed: Tensor, bias: Tensor | None, *factors: Tensor
            ) -> tuple[Tensor, Tensor]:
                logits_te = linear(x_td, gate_ed)
                weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
                w_p = weights_tk.flatten().index_select(0, order_p)
                weighted = Assignment(tokens_p, ends_e, w_p, x_td.shape[0])
                y_to = multiply_experts(ctx.plan, x_td, factors, weighted, bias=bias, stds=ctx.stds)
                return y_to, logits_te

            inputs = [x_td, gate_ed, bias, *factors]
            grads = differentiable_gradients(steps, inputs, [g_to, g_logits_te], wanted)
        else:
            has_gate = wanted[0] or wanted[1]
            g_x: Tensor | None = None
            others: Sequence[Tensor | None] = [None] * (1 + len(factors))
            if g_to is not None:
                asked = [wanted[0], has_gate, *wanted[2:]]
                g_x, g_w, *others = experts_backward(
                    ctx.plan, ctx.variant, g_to, x_td, factors, assignment,
                    scales_fe, ctx.stds, asked,
                )  # fmt: skip
                if g_w is not None:
                    g_tk = _through_softmax(weights_tk, order_p, g_w)
                    if g_logits_te is None:
                        g_logits_te = g_tk.new_zeros(x_td.shape[0], gate_ed.shape[0])
                    g_logits_te = g_logits_te.scatter_add(-1, experts_tk, g_tk)
            g_gate = None
            if g_logits_te is not None and wanted[0]:
                g_x = g_logits_te @ gate_ed if g_x is None else g_x.addmm_(g_logits_te, gate_ed)
            if g_logits_te is not None and wanted[1]:
                g_gate = g_logits_te.t() @ x_td
            grads = only_wanted([g_x, g_gate, *others], wanted)
        return *grads[:3], None, None, None, *grads[3:]


def _through_softmax(weights_tk: Tensor, order_p: Tensor, g_p: Tensor) -> Tensor:
    """The gradient of the chosen logits, given that of the weights of pairs."""
    g_tk = torch.empty_like(weights_tk).flatten().index_copy_(0, order_p, g_p)
    g_tk = g_tk.view_as(weights_tk) * weights_tk
    return g_tk.sub_(weights_tk * g_tk.sum(-1, keepdim=True))
