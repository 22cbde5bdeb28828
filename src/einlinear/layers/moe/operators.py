"""The multiply of many experts as operators of torch, and their derivatives.

`einlinear::experts` and `einlinear::experts_gradients` are opaque to torch, because how many rows
an expert has is known only at run time: a compiled or watched program sees one operator. Names of
their arguments appear in programs that torch 2.6 exports, so they stay: `how` is the variant,
`takes` and `adds` tell whether input and output have a row per token, `adds` being how many, or -1.

Legend: as in `assignment`; factors are stacked along a first axis of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from einlinear.layers.cost import KNOWN_DEVICES, cheapest, cheapest_cached
from einlinear.layers.engine import compiled
from einlinear.layers.export.plain import is_exporting
from einlinear.layers.moe import grouped
from einlinear.layers.moe.assignment import Assignment
from einlinear.layers.moe.blocked import BlockedExperts
from einlinear.layers.moe.plain import multiply_experts_plainly
from einlinear.layers.moe.portable import PortableExperts, is_matrix, no_scales, reference_experts
from einlinear.layers.opaque import (
    differentiable_gradients,
    fake_gradients,
    gradient_flops,
    hand_over,
    is_differentiated,
    only_wanted,
    plan_of,
    without_none,
)
from einlinear.layers.variants import fitting_variants
from einlinear.structures.plan import Plan


def multiply_experts(
    plan: Plan,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    assignment: Assignment,
    *,
    bias: Tensor | None = None,
    stds: Sequence[float] = (),
) -> Tensor:
    """The row of every pair times the matrix of its expert, times its weight; differentiable.

    The bias is added once to the row of each token; the output must then have a row per token.
    With stds, one per factor, the factors are normalised, which needs weights of pairs.
    """
    assert assignment.w_p is not None or not stds, "normalisation changes the weights of pairs"
    if is_exporting():
        return multiply_experts_plainly(plan, x_rd, factors, assignment, bias=bias, stds=stds)
    tokens_p, ends_e, w_p = assignment.tokens_p, assignment.ends_e, assignment.w_p
    adds = assignment.num_tokens if assignment.y_by_token else -1
    how = expert_variant(plan, x_rd, assignment)
    settings = *hand_over(plan), how, assignment.x_by_token, adds, list(stds)
    if torch.compiler.is_compiling() and not is_differentiated([x_rd, w_p, bias, *factors]):
        made = experts_op(x_rd, w_p, bias, tokens_p, ends_e, list(factors), *settings)
    else:  # which dynamo rejects where nothing is differentiated
        made = _Experts.apply(x_rd, w_p, bias, tokens_p, ends_e, *settings, *factors)  # type: ignore[no-untyped-call]
    y_ro: Tensor = made[0]
    return y_ro


def expert_variant(plan: Plan, x_rd: Tensor, assignment: Assignment) -> str:
    """How experts multiply: all in one call of the engine, or each by what should be fastest."""
    if is_matrix(plan):
        return "matrix"
    fitting = fitting_variants(x_rd.device.type, x_rd.dtype)
    if "engine" in fitting:
        return "engine"
    if x_rd.device.type not in KNOWN_DEVICES:
        return "einsum"
    variants = tuple([variant for variant in fitting if variant != "dense"])
    if torch.compiler.is_compiling():  # nothing may depend on the number of tokens
        return cheapest(plan, 256, variants, True)
    each = assignment.num_pairs // assignment.num_experts
    return cheapest_cached(plan, 1 << each.bit_length(), variants, torch.is_grad_enabled())


def experts_forward(
    plan: Plan,
    variant: str,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    assignment: Assignment,
    stds: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """The output rows, and the scales of normalisation (factors x experts, or empty).

    Falls back from the engine if it is unavailable, as in an exported program.
    """
    if variant == "engine":
        if compiled.is_usable(x_rd):
            return grouped.grouped_forward(plan, x_rd, factors, bias, assignment, stds)
        variant = "strided"
    make = PortableExperts if x_rd.is_cpu else BlockedExperts
    return make(plan, variant, x_rd, factors, assignment, stds).forward(bias)


def experts_backward(
    plan: Plan,
    variant: str,
    grad_ro: Tensor,
    x_rd: Tensor,
    factors: Sequence[Tensor],
    assignment: Assignment,
    scales_fe: Tensor,
    stds: Sequence[float],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of input, weights, bias and factors, as far as wanted."""
    if variant == "engine":
        if compiled.is_usable(x_rd):
            return grouped.grouped_backward(
                plan, grad_ro, x_rd, factors, assignment, scales_fe, stds, wanted
            )
        variant = "strided"
    make = PortableExperts if x_rd.is_cpu else BlockedExperts
    experts = make(plan, variant, x_rd, factors, assignment, stds)
    return only_wanted(experts.backward(grad_ro, scales_fe, wanted), wanted)


def _assignment(
    x_rd: Tensor, w_p: Tensor | None, tokens_p: Tensor, ends_e: Tensor, takes: bool, adds: int
) -> Assignment:
    """The assignment, from what an operator can carry."""
    num_tokens = x_rd.shape[0] if takes else max(adds, 0)
    return Assignment(tokens_p, ends_e, w_p, num_tokens, takes, adds >= 0)


def _experts(
    x_rd: Tensor,
    w_p: Tensor | None,
    bias: Tensor | None,
    tokens_p: Tensor,
    ends_e: Tensor,
    factors: list[Tensor],
    structure: str,
    d_in: int,
    d_out: int,
    how: str,
    takes: bool,
    adds: int,
    stds: list[float],
) -> tuple[Tensor, Tensor]:
    plan = plan_of(structure, d_in, d_out)
    assignment = _assignment(x_rd, w_p, tokens_p, ends_e, takes, adds)
    return experts_forward(plan, how, x_rd, factors, bias, assignment, stds)


experts_op = torch.library.custom_op("einlinear::experts", _experts, mutates_args=())


@experts_op.register_fake
def _(x_rd: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    _, _, tokens_p, ends_e, factors, _, _, d_out, _, _, adds, stds = arguments
    num_rows = tokens_p.shape[0] if isinstance(adds, int) and adds < 0 else adds
    shape = (len(factors), ends_e.shape[0]) if stds else (0,)
    return x_rd.new_empty(num_rows, d_out), no_scales(x_rd).new_empty(shape)


@register_flop_formula(torch.ops.einlinear.experts)
def _(x: Any, w: Any, bias: Any, tokens: Sequence[int], *arguments: Any, **__: Any) -> int:
    _, _, structure, d_in, d_out, *_ = arguments
    return 2 * tokens[0] * plan_of(structure, d_in, d_out).macs


def _experts_gradients(
    grad_ro: Tensor,
    x_rd: Tensor,
    w_p: Tensor | None,
    tokens_p: Tensor,
    ends_e: Tensor,
    scales_fe: Tensor,
    factors: list[Tensor],
    wanted: list[bool],
    structure: str,
    d_in: int,
    d_out: int,
    how: str,
    takes: bool,
    adds: int,
    stds: list[float],
) -> list[Tensor]:
    """The gradients of input, weights, bias and factors; empty where none is wanted."""
    plan = plan_of(structure, d_in, d_out)
    assignment = _assignment(x_rd, w_p, tokens_p, ends_e, takes, adds)
    grads = experts_backward(plan, how, grad_ro, x_rd, factors, assignment, scales_fe, stds, wanted)
    return without_none(grads, x_rd)


experts_gradients_op = torch.library.custom_op(
    "einlinear::experts_gradients", _experts_gradients, mutates_args=()
)


@experts_gradients_op.register_fake
def _(grad_ro: Tensor, x_rd: Tensor, w_p: Tensor | None, *arguments: Any) -> list[Tensor]:
    _, _, _, factors, wanted, *_ = arguments
    weights = x_rd if w_p is None else w_p
    return fake_gradients([x_rd, weights, grad_ro.sum(0), *factors], wanted)


@register_flop_formula(torch.ops.einlinear.experts_gradients)
def _(grad: Any, x: Any, w: Any, tokens: Sequence[int], *arguments: Any, **__: Any) -> int:
    _, _, _, (wants_x, wants_w, _, *wanted), structure, d_in, d_out, *_ = arguments
    return gradient_flops((structure, d_in, d_out), tokens[0], wants_x or wants_w, wanted)


class _Experts(torch.autograd.Function):
    """The operators joined. Second derivatives go through plain operations of torch.

    Inputs are five tensors as of `experts_op`, then its seven settings, then the factors.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, settings, factors = inputs[:5], inputs[5:12], list(inputs[12:])
        multiply: Any = _experts if compiled.is_direct(tensors[0], factors) else experts_op
        made: tuple[Tensor, Tensor] = multiply(*tensors, factors, *settings)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.settings = inputs[5:12]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:5], output[1], *inputs[12:])

    @staticmethod
    def backward(ctx: Any, grad_ro: Tensor, _: Tensor) -> tuple[Any, ...]:
        x_rd, w_p, bias, tokens_p, ends_e, scales_fe, *factors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [*needs[:3], *needs[12:]]
        if torch.is_grad_enabled():  # the gradients are to be differentiated once more

            def multiply(
                x_rd: Tensor, w_p: Tensor | None, bias: Tensor | None, *factors: Tensor
            ) -> tuple[Tensor]:
                *key, _, takes, adds, stds = ctx.settings
                assignment = _assignment(x_rd, w_p, tokens_p, ends_e, takes, adds)
                return (reference_experts(plan_of(*key), x_rd, factors, bias, assignment, stds),)

            inputs = [x_rd, w_p, bias, *factors]
            grads = differentiable_gradients(multiply, inputs, [grad_ro], wanted)
        else:
            is_direct = compiled.is_direct(x_rd, [grad_ro, *factors])
            make: Any = _experts_gradients if is_direct else experts_gradients_op
            tensors = grad_ro, x_rd, w_p, tokens_p, ends_e, scales_fe
            grads = only_wanted(make(*tensors, factors, wanted, *ctx.settings), wanted)
        return *grads[:3], *[None] * 9, *grads[3:]
