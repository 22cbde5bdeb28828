"""The gate on the compiled engine: one call that routes tokens, and one for the gradients.

Legend: as in `assignment`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from einlinear.layers.engine import binding
from einlinear.layers.engine.abi import GateArguments
from einlinear.layers.engine.compiled import DTYPES, address_of
from einlinear.layers.moe.assignment import Assignment, assign
from einlinear.layers.moe.routing import choose_experts
from einlinear.layers.strided import rows


@dataclass(frozen=True, slots=True, eq=False)
class RoutedTokens:
    """Where the gate sends tokens.

    order_p: where each pair is among the flattened choices.
    """

    logits_te: Tensor
    experts_tk: Tensor
    assignment: Assignment
    order_p: Tensor


def _arguments(x_td: Tensor, gate_ed: Tensor, num_active: int) -> GateArguments:
    (tokens, width), num_experts = x_td.shape, gate_ed.shape[0]
    arguments = GateArguments()
    arguments.dtype = binding.DTYPE_CODES[DTYPES[x_td.dtype]]
    arguments.tokens, arguments.width = tokens, width
    arguments.num_experts, arguments.num_active = num_experts, num_active
    arguments.threads = torch.get_num_threads()
    arguments.x, arguments.x_row = x_td.data_ptr(), x_td.stride(0)
    arguments.gate = address_of(gate_ed, (num_experts, width), x_td.dtype)
    return arguments


def route_tokens(x_td: Tensor, gate_ed: Tensor, num_active: int) -> RoutedTokens:
    """The logits of tokens, their experts, weighted by a softmax, and the pairs by expert."""
    x_td, gate_ed = rows(x_td), gate_ed.contiguous()
    num_tokens, num_experts = x_td.shape[0], gate_ed.shape[0]
    num_pairs = num_tokens * num_active
    logits_te = x_td.new_empty(num_tokens, num_experts)
    experts_tk = x_td.new_empty(num_tokens, num_active, dtype=torch.int64)
    order_p, tokens_p = x_td.new_empty(2, num_pairs, dtype=torch.int64)
    ends_e, w_p = x_td.new_empty(num_experts, dtype=torch.int64), x_td.new_empty(num_pairs)
    arguments = _arguments(x_td, gate_ed, num_active)
    arguments.logits, arguments.chosen = logits_te.data_ptr(), experts_tk.data_ptr()
    arguments.pair_order, arguments.pair_tokens = order_p.data_ptr(), tokens_p.data_ptr()
    arguments.expert_ends, arguments.pair_weights = ends_e.data_ptr(), w_p.data_ptr()
    if binding.run_gate(arguments):
        return RoutedTokens(
            logits_te, experts_tk, Assignment(tokens_p, ends_e, w_p, num_tokens), order_p
        )
    experts_tk = choose_experts(logits_te, x_td, num_active)
    weights_tk = logits_te.gather(-1, experts_tk).softmax(-1)
    return RoutedTokens(logits_te, experts_tk, *assign(experts_tk, weights_tk, num_experts))


def gate_gradient(
    x_td: Tensor,
    gate_ed: Tensor,
    assignment: Assignment,
    g_p: Tensor,
    g_logits_te: Tensor | None,
    *,
    g_x: Tensor | None,
    wants_gate: bool,
) -> Tensor | None:
    """The gradient of the gate, if wanted, given those of the weights of pairs and of the logits.

    The gate's share of the input's gradient is added to g_x, if there is one.
    """
    assert assignment.w_p is not None, "a gate weights the pairs"
    x_td, gate_ed, g_p = rows(x_td), gate_ed.contiguous(), g_p.contiguous()
    g_gate = torch.empty_like(gate_ed) if wants_gate else None
    num_active = assignment.num_pairs // max(1, assignment.num_tokens)
    arguments = _arguments(x_td, gate_ed, max(1, num_active))
    tokens_p, ends_e = assignment.tokens_p.contiguous(), assignment.ends_e.contiguous()
    w_p = assignment.w_p.contiguous()
    arguments.pair_tokens = address_of(tokens_p, (assignment.num_pairs,), torch.int64)
    arguments.expert_ends = address_of(ends_e, (gate_ed.shape[0],), torch.int64)
    arguments.pair_weights = address_of(w_p, (assignment.num_pairs,), x_td.dtype)
    arguments.grad_pair_weights = address_of(g_p, (assignment.num_pairs,), x_td.dtype)
    if g_logits_te is not None:
        g_logits_te = g_logits_te.contiguous()
        shape = (x_td.shape[0], gate_ed.shape[0])
        arguments.grad_logits = address_of(g_logits_te, shape, x_td.dtype)
    if g_x is not None:
        arguments.grad_x, arguments.grad_x_row = g_x.data_ptr(), g_x.stride(0)
    if g_gate is not None:
        arguments.grad_gate = g_gate.data_ptr()
    binding.run_engine("gate_backward", arguments)
    return g_gate
