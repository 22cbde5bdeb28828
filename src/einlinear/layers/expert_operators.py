"""The multiply of many experts as operators of torch, and their derivatives.

`einlinear::experts` and `einlinear::experts_gradients` are opaque to torch, because how many rows
an expert has is only known while it runs: compiled and watched programs see one operator.

Legend: x_rd rows of input, y_re rows of output, w_p weights of pairs; as in `experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from einlinear.layers import compiled, grouped, strided
from einlinear.layers.cost import cheapest
from einlinear.layers.execute import einsum_steps, fitting_variants
from einlinear.layers.experts import (
    Pairs,
    Work,
    expert_scales,
    expert_shrinkage,
    is_matrix,
    normalised_experts,
)
from einlinear.layers.grouped import Mixture
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.text import parse


def multiply_experts(
    plan: Plan,
    x_rd: Tensor,
    w_p: Tensor | None,
    pairs: Pairs,
    factors: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    stds: Sequence[float] = (),
    takes: bool = True,
    adds: int = -1,
) -> Tensor:
    """The rows of every pair times the matrix of its expert, times its weight; differentiable.

    Args:
        plan: of each expert.
        x_rd: rows of input.
        w_p: the weight of every pair; without them all are 1.
        pairs: sorted by expert.
        factors: stacked along the axis of experts, in the order of the plan's steps.
        bias: is added once to the row of every token; needs `adds`.
        stds: of the factors; if given they are normalised, which needs weights.
        takes: whether x has a row per token, to be taken by its pairs; else it has a row per pair.
        adds: the number of tokens, whose rows the results are added to; -1 for a row per pair.
    """
    assert w_p is not None or not stds, "normalisation changes the weights of pairs"
    where = where_of(plan, x_rd, pairs, takes, adds, stds)
    if torch.compiler.is_compiling():
        tensors = [t for t in [x_rd, w_p, bias, *factors] if t is not None]
        if not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors])):
            made = experts_op(x_rd, w_p, bias, pairs.tokens, pairs.ends, list(factors), *where)
            y_re: Tensor = made[0]  # dynamo wants no function then
            return y_re
    outputs = _Experts.apply(x_rd, w_p, bias, pairs.tokens, pairs.ends, *where, *factors)  # type: ignore[no-untyped-call]
    y_re = outputs[0]
    return y_re


def where_of(
    plan: Plan, x_rd: Tensor, pairs: Pairs, takes: bool, adds: int, stds: Sequence[float]
) -> tuple[str, int, int, str, bool, int, list[float]]:
    """What the operators are told beside tensors."""
    how = _how(plan, x_rd, pairs)
    return plan.text, plan.d_in, plan.d_out, how, takes, adds, list(stds)


def _how(plan: Plan, x_rd: Tensor, pairs: Pairs) -> str:
    """How experts multiply: all in one call of the engine, or each by what should be fastest."""
    if is_matrix(plan):
        return "matrix"
    fitting = fitting_variants(x_rd.device.type, x_rd.dtype)
    if "engine" in fitting:
        return "engine"
    variants = tuple([variant for variant in fitting if variant != "dense"])
    if torch.compiler.is_compiling():  # nothing may depend on the number of tokens
        return cheapest(plan, 256, variants, True)
    each = pairs.tokens.shape[0] // pairs.ends.shape[0]
    return _cheapest(plan, 1 << each.bit_length(), variants, torch.is_grad_enabled())


_cheapest = lru_cache(maxsize=4096)(cheapest)


@lru_cache(maxsize=16384)
def _plan(structure: str, d_in: int, d_out: int) -> Plan:
    """The plan, from what an operator can carry."""
    return make_plan(parse(structure), d_in, d_out)


def _usable(how: str, x_rd: Tensor) -> str:
    """The engine is a wish: a program may have been exported."""
    return "strided" if how == "engine" and not compiled.is_usable(x_rd) else how


def _mixture(
    x_rd: Tensor,
    w_p: Tensor | None,
    tokens_p: Tensor,
    ends_e: Tensor,
    takes: bool,
    adds: int,
    stds: list[float],
) -> Mixture:
    num_tokens = x_rd.shape[0] if takes else max(adds, 0)
    return Mixture(tokens_p, ends_e, w_p, takes, adds >= 0, num_tokens, stds)


def direct_experts(
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
    """The output rows, and the scales of normalisation: factors x experts, or empty."""
    plan, how = _plan(structure, d_in, d_out), _usable(how, x_rd)
    if how == "engine":
        mixture = _mixture(x_rd, w_p, tokens_p, ends_e, takes, adds, stds)
        return grouped.forward(plan, x_rd, factors, bias, mixture)
    work = Work(plan, how, x_rd, tokens_p, ends_e, factors, takes=takes, adds=adds)
    if not stds or w_p is None:
        return work.forward(w_p, bias), _no_scales(x_rd)
    scales_fe = expert_scales(factors, stds)
    return work.forward(work.scaled(w_p, scales_fe), bias), scales_fe


experts_op = torch.library.custom_op("einlinear::experts", direct_experts, mutates_args=())


def _no_scales(x_rd: Tensor) -> Tensor:
    return x_rd.new_empty(0, dtype=torch.promote_types(x_rd.dtype, torch.float32))


@experts_op.register_fake
def _(
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
    num_rows = tokens_p.shape[0] if isinstance(adds, int) and adds < 0 else adds
    scales = _no_scales(x_rd)
    shape = (len(factors), ends_e.shape[0]) if stds else (0,)
    return x_rd.new_empty(num_rows, d_out), scales.new_empty(shape)


def direct_gradients(
    grad_re: Tensor,
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
    plan, how = _plan(structure, d_in, d_out), _usable(how, x_rd)
    grads: list[Tensor | None]
    if how == "engine":
        mixture = _mixture(x_rd, w_p, tokens_p, ends_e, takes, adds, stds)
        grads = grouped.backward(plan, grad_re, x_rd, factors, mixture, scales_fe, wanted)
    else:
        work = Work(plan, how, x_rd, tokens_p, ends_e, factors, takes=takes, adds=adds)
        u_p, shrink_fe = w_p, None
        if stds and w_p is not None:
            u_p = work.scaled(w_p, scales_fe)
            if any(wanted[3:]):
                shrink_fe = expert_shrinkage(factors, stds, scales_fe)
        grad_x, grad_w, grad_factors = work.backward(grad_re, u_p, wanted, shrink_fe)
        if stds and grad_w is not None:
            grad_w = work.scaled(grad_w, scales_fe)
        grads = [grad_x, grad_w, grad_re.sum(0) if wanted[2] else None, *grad_factors]
    found = zip(grads, wanted, strict=True)
    return [x_rd.new_empty(0) if grad is None or not flag else grad for grad, flag in found]


gradients_op = torch.library.custom_op(
    "einlinear::experts_gradients", direct_gradients, mutates_args=()
)


@gradients_op.register_fake
def _(
    grad_re: Tensor,
    x_rd: Tensor,
    w_p: Tensor | None,
    tokens_p: Tensor,
    ends_e: Tensor,
    scales_fe: Tensor,
    factors: list[Tensor],
    wanted: list[bool],
    *where: Any,
) -> list[Tensor]:
    weights = x_rd if w_p is None else w_p
    likes = [(x_rd, x_rd.shape), (weights, weights.shape), (grad_re, grad_re.shape[-1:])]
    likes += [(factor, factor.shape) for factor in factors]
    return [
        like.new_empty(shape if flag else 0)
        for (like, shape), flag in zip(likes, wanted, strict=True)
    ]


class _Experts(torch.autograd.Function):
    """The operators joined. Second derivatives go through plain operations of torch."""

    @staticmethod
    def forward(
        x_rd: Tensor, w_p: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        (tokens_p, ends_e), where, factors = rest[:2], rest[2:9], list(rest[9:])
        is_direct = compiled.is_direct(x_rd, factors)
        multiply: Any = direct_experts if is_direct else experts_op
        made: tuple[Tensor, Tensor] = multiply(x_rd, w_p, bias, tokens_p, ends_e, factors, *where)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.where = inputs[5:12]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:5], output[1], *inputs[12:])

    @staticmethod
    def backward(ctx: Any, grad_re: Tensor, _: Tensor) -> tuple[Any, ...]:
        x_rd, w_p, bias, tokens_p, ends_e, scales_fe, *factors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [*needs[:3], *needs[12:]]
        if torch.is_grad_enabled():  # the gradients are to be differentiated once more
            grads = _by_steps(
                grad_re, x_rd, w_p, bias, tokens_p, ends_e, factors, wanted, ctx.where
            )
        else:
            is_direct = compiled.is_direct(x_rd, [grad_re, *factors])
            make: Any = direct_gradients if is_direct else gradients_op
            grads = make(
                grad_re, x_rd, w_p, tokens_p, ends_e, scales_fe, factors, wanted, *ctx.where
            )
        kept = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
        return *kept[:3], *[None] * 9, *kept[3:]


def _by_steps(
    grad_re: Tensor,
    x_rd: Tensor,
    w_p: Tensor | None,
    bias: Tensor | None,
    tokens_p: Tensor,
    ends_e: Tensor,
    factors: list[Tensor],
    wanted: list[bool],
    where: tuple[Any, ...],
) -> list[Tensor | None]:
    """The gradients by operations of torch, which can be differentiated."""
    structure, d_in, d_out, _, takes, adds, stds = where
    plan = _plan(structure, d_in, d_out)
    # Aliases: weights may be made from the input, and its gradient must not go that way, too.
    tensors = [None if t is None else t.view_as(t) for t in (x_rd, w_p, bias, *factors)]
    x_rd, w_p, bias, *factors = tensors  # type: ignore[assignment]
    used = normalised_experts(factors, stds) if stds else factors
    rows_pd = x_rd.index_select(0, tokens_p) if takes else x_rd
    if w_p is not None:
        rows_pd = rows_pd * w_p.unsqueeze(-1).to(rows_pd.dtype)
    rows_pd = strided.padded(rows_pd, plan.d_in_padded)
    y_re = torch.cat(
        [
            einsum_steps(plan, rows_pd[start:end], [factor[expert] for factor in used])[:, :d_out]
            for expert, (start, end) in enumerate(pairwise([0, *ends_e.tolist()]))
        ]
    )
    if adds >= 0:
        y_re = y_re.new_zeros(adds, d_out).index_add(0, tokens_p, y_re)
    y_re = y_re if bias is None else y_re + bias
    inputs = [t for t, flag in zip(tensors, wanted, strict=True) if flag and t is not None]
    found = iter(torch.autograd.grad(y_re, inputs, grad_re, create_graph=True))
    return [next(found) if flag else None for flag in wanted]


@register_flop_formula(torch.ops.einlinear.experts)
def _(x: Any, w: Any, bias: Any, tokens: Sequence[int], *arguments: Any, **_: Any) -> int:
    structure, d_in, d_out = arguments[2:5]
    return 2 * tokens[0] * _plan(structure, d_in, d_out).macs


@register_flop_formula(torch.ops.einlinear.experts_gradients)
def _(grad: Any, x: Any, w: Any, tokens: Sequence[int], *arguments: Any, **_: Any) -> int:
    wanted, structure, d_in, d_out = arguments[3:7]
    macs = [step.macs for step in _plan(structure, d_in, d_out).steps]
    factors = wanted[3:]
    again = sum(macs[: strided.num_remade(wanted[1:])])
    inputs = sum(m for i, m in enumerate(macs) if wanted[0] or wanted[1] or any(factors[:i]))
    weights = sum(m for m, flag in zip(macs, factors, strict=True) if flag)
    return 2 * tokens[0] * (again + inputs + weights)
