"""Gate and experts as one step of autograd, for plain tensors that need not go through operators.

The gate runs on the engine: its products, the choice of experts, the softmax and the sorting of
pairs are one call forward and one backward. It reads the same input as the experts, so its share of
the input's gradient is added to theirs in place. A second array of that size, fresh from the
system, would make the layer's backward pass about a tenth longer.

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
from einlinear.layers.moe.assignment import Assignment
from einlinear.layers.moe.gated import gate_gradient, route_tokens
from einlinear.layers.moe.operators import (
    expert_variant,
    experts_backward,
    experts_forward,
    multiply_experts,
)
from einlinear.layers.moe.routing import Gate
from einlinear.layers.opaque import differentiable_gradients, only_wanted
from einlinear.structures.plan import Plan


def can_fuse(gate: Gate, x_td: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether `gate_and_experts` applies: plain tensors that the engine takes, no hooks."""
    if torch.compiler.is_compiling() or x_td.dtype not in (torch.float32, torch.float64):
        return False
    if not compiled.is_usable(x_td):
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
        route = route_tokens(x_td, gate_ed, num_active)
        logits_te, experts_tk, assignment = route.logits_te, route.experts_tk, route.assignment
        ctx.plan, ctx.stds = plan, stds
        ctx.variant = expert_variant(plan, x_td, assignment)
        y_to, scales_fe = experts_forward(plan, ctx.variant, x_td, factors, bias, assignment, stds)
        has_gate = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(experts_tk, *([] if has_gate else [logits_te]))
        ctx.set_materialize_grads(False)
        pairs = assignment.tokens_p, assignment.ends_e, assignment.w_p, route.order_p
        ctx.save_for_backward(x_td, gate_ed, bias, *pairs, experts_tk, scales_fe, *factors)
        return y_to, logits_te, experts_tk

    @staticmethod
    def backward(
        ctx: Any, g_to: Tensor | None, g_logits_te: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        # All at once: checkpointing allows saved tensors to be read only once.
        x_td, gate_ed, bias, tokens_p, ends_e, w_p, order_p, *others = ctx.saved_tensors
        experts_tk, scales_fe, *factors = others
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
            g_x: Tensor | None = None
            g_gate: Tensor | None = None
            rest: Sequence[Tensor | None] = [None] * (1 + len(factors))
            if g_to is not None:
                asked = [wanted[0], wanted[0] or wanted[1], *wanted[2:]]
                g_x, g_p, *rest = experts_backward(
                    ctx.plan, ctx.variant, g_to, x_td, factors, assignment,
                    scales_fe, ctx.stds, asked,
                )  # fmt: skip
                if g_p is not None:
                    g_gate = gate_gradient(
                        x_td, gate_ed, assignment, g_p, g_logits_te,
                        g_x=g_x, wants_gate=wanted[1],
                    )  # fmt: skip
            elif g_logits_te is not None:
                g_x = g_logits_te @ gate_ed if wanted[0] else None
                g_gate = g_logits_te.t() @ x_td if wanted[1] else None
            grads = only_wanted([g_x, g_gate, *rest], wanted)
        return *grads[:3], None, None, None, *grads[3:]
