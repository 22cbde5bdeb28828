"""Gate and experts as one step of autograd, where tensors may be read past torch's operators.

The gate reads the input that the experts read, so its share of the input's gradient is added to
theirs in place. A second array of that size, fresh from the system, would make the layer's backward
pass about a tenth longer.

Legend: x_td rows of input, y_te rows of output, logits_te of the gate, experts_tk and weights_tk of
each token, g_... gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from einlinear.layers import compiled
from einlinear.layers.expert_operators import (
    direct_experts,
    direct_gradients,
    multiply_experts,
    where_of,
)
from einlinear.layers.experts import Pairs, sort_pairs
from einlinear.layers.routing import Gate, choose_experts
from einlinear.structures.plan import Plan


def is_mixable(gate: Gate, x_td: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether `mix` can do the work: plain tensors of one dtype, and nobody listens at the gate."""
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


def mix(
    plan: Plan,
    x_td: Tensor,
    gate_ed: Tensor,
    bias: Tensor | None,
    factors: Sequence[Tensor],
    *,
    num_active: int,
    stds: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of output, the logits and the experts; the first two are differentiable."""
    made: tuple[Tensor, Tensor, Tensor] = _Mixture.apply(  # type: ignore[no-untyped-call]
        x_td, gate_ed, bias, plan, num_active, list(stds), *factors
    )
    return made


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_td: Tensor,
        gate_ed: Tensor,
        bias: Tensor | None,
        plan: Plan,
        num_active: int,
        stds: list[float],
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_te = linear(x_td, gate_ed)
        experts_tk = choose_experts(logits_te, x_td, num_active)
        weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
        pairs = sort_pairs(experts_tk, gate_ed.shape[0])
        w_p = weights_tk.flatten().index_select(0, pairs.order)
        ctx.where = where_of(plan, x_td, pairs, True, x_td.shape[0], stds)
        ctx.plan, ctx.stds = plan, stds
        y_te, scales_fe = direct_experts(
            x_td, w_p, bias, pairs.tokens, pairs.ends, list(factors), *ctx.where
        )
        has_gate = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(experts_tk, *([] if has_gate else [logits_te]))
        ctx.set_materialize_grads(False)
        table = (pairs.order, pairs.tokens, pairs.ends, experts_tk, weights_tk, w_p, scales_fe)
        ctx.save_for_backward(x_td, gate_ed, bias, *table, *factors)
        return y_te, logits_te, experts_tk

    @staticmethod
    def backward(
        ctx: Any, g_te: Tensor | None, g_logits: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # asked for once: checkpointing wants it so
        (x_td, gate_ed, bias, *table), factors = saved[:10], list(saved[10:])
        needs = ctx.needs_input_grad
        wanted = [*needs[:3], *needs[6:]]
        is_plain = [g for g in (g_te, g_logits) if g is not None]
        if torch.is_grad_enabled() or not compiled.is_direct(x_td, is_plain):
            inputs = [x_td, gate_ed, bias, *factors]
            grads = _by_steps(ctx.plan, inputs, table, ctx.stds, g_te, g_logits, wanted)
        else:
            grads = _gradients(ctx.where, x_td, gate_ed, factors, table, g_te, g_logits, wanted)
        kept = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
        return *kept[:3], None, None, None, *kept[3:]


def _gradients(
    where: tuple[Any, ...],
    x_td: Tensor,
    gate_ed: Tensor,
    factors: list[Tensor],
    table: list[Tensor],
    g_te: Tensor | None,
    g_logits: Tensor | None,
    wanted: list[bool],
) -> list[Tensor | None]:
    """The gradients of input, gate, bias and factors."""
    order_p, tokens_p, ends_e, experts_tk, weights_tk, w_p, scales_fe = table
    has_gate = wanted[0] or wanted[1]
    g_x: Tensor | None = None
    others: Sequence[Tensor | None] = [None] * (1 + len(factors))
    if g_te is not None:
        asked = [wanted[0], has_gate, *wanted[2:]]
        g_x, g_w, *others = direct_gradients(
            g_te, x_td, w_p, tokens_p, ends_e, scales_fe, factors, asked, *where
        )
        if has_gate:
            g_tk = torch.empty_like(weights_tk).flatten().index_copy_(0, order_p, g_w)
            g_tk = g_tk.view_as(weights_tk) * weights_tk
            g_tk -= weights_tk * g_tk.sum(-1, keepdim=True)
            start = g_x.new_zeros(x_td.shape[0], gate_ed.shape[0]) if g_logits is None else g_logits
            g_logits = start.scatter_add(-1, experts_tk, g_tk)
    if g_logits is None or not has_gate:
        return [g_x, None, *others]
    if wanted[0]:
        g_x = g_logits @ gate_ed if g_x is None else g_x.addmm_(g_logits, gate_ed)
    return [g_x, g_logits.t() @ x_td if wanted[1] else None, *others]


def _by_steps(
    plan: Plan,
    inputs: list[Tensor],
    table: list[Tensor],
    stds: list[float],
    g_te: Tensor | None,
    g_logits: Tensor | None,
    wanted: list[bool],
) -> list[Tensor | None]:
    """The same by operations that can be differentiated once more."""
    order_p, tokens_p, ends_e, experts_tk = table[:4]
    with torch.enable_grad():
        # Aliases: where an input was made from another, its gradient must not go that way, too.
        tensors = [None if t is None else t.view_as(t) for t in inputs]
        x_td, gate_ed, bias, *factors = tensors
        logits_te = linear(x_td, gate_ed)
        weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
        y_te = multiply_experts(
            plan,
            x_td,
            weights_tk.flatten().index_select(0, order_p),
            Pairs(order_p, tokens_p, ends_e),
            factors,
            bias=bias,
            stds=stds,
            adds=experts_tk.shape[0],
        )
    pairs = [(y_te, g_te), (logits_te, g_logits)]
    outputs = [(made, grad) for made, grad in pairs if grad is not None]
    asked = [t for t, flag in zip(tensors, wanted, strict=True) if flag and t is not None]
    found = iter(
        torch.autograd.grad(
            [made for made, _ in outputs],
            asked,
            [grad for _, grad in outputs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(found) if flag else None for flag in wanted]
