"""How a plan is multiplied: the variants, the choice between them, and the operator for torch.

Legend: x_td rows of input, y_te rows of output, padded to the plan's widths; t is tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import register_flop_formula

from einlinear.errors import EinlinearError
from einlinear.layers import strided
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.text import parse

VARIANTS = ("einsum", "strided", "dense")

_SAVE_BYTES = 24 * 2**20  # larger intermediates are made again: fresh memory costs more


def multiply(plan: Plan, x_td: Tensor, factors: Sequence[Tensor], variant: str) -> Tensor:
    """Y = W x for rows of input, by one of the variants; factors in the order of the plan's steps.

    einsum:  one torch.einsum per step; the reference, and best where steps are plain matrices.
    strided: batched multiplies in place, blocked over tokens.
    dense:   the matrix W itself, made anew, for widths so small that structure does not pay.
    """
    if variant == "einsum":
        return einsum_steps(plan, x_td, factors)
    if variant == "strided":
        tokens = x_td.shape[0]
        is_compiling = torch.compiler.is_compiling()
        save = (
            torch.is_grad_enabled()
            and not is_compiling  # no guard on the number of tokens
            and isinstance(tokens, int)
            and tokens * plan.inner_width * x_td.element_size() <= _SAVE_BYTES
        )
        function = _Strided if is_compiling else _StridedEager
        where = plan.text, plan.d_in, plan.d_out
        y_te: Tensor = function.apply(x_td, *where, save, *factors)[0]  # type: ignore[no-untyped-call]
        return y_te
    if variant == "dense":
        return linear(x_td, dense_weight(plan, factors))
    raise EinlinearError(
        what=f"there is no variant {variant!r}",
        rule=f"a variant is one of {', '.join(VARIANTS)}",
        fix="leave the choice to the layer, or name one of them",
    )


def einsum_steps(plan: Plan, x_td: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """One einsum per step, tokens outermost throughout."""
    z = x_td.reshape(x_td.shape[0], *plan.x_shape)
    for step, factor in zip(plan.steps, factors, strict=True):
        z = torch.einsum(step.equation, z, factor)
    return z.reshape(x_td.shape[0], plan.d_out_padded)


def dense_weight(plan: Plan, factors: Sequence[Tensor]) -> Tensor:
    """The padded matrix, laid out as nn.Linear.weight: outputs x inputs."""
    eye = torch.eye(plan.d_in_padded, dtype=factors[0].dtype, device=factors[0].device)
    return einsum_steps(plan, eye, factors).t()


def choose_variant(plan: Plan, num_tokens: int, device: str) -> str:
    """The variant that should be fastest, by a model of what each costs.

    Structured multiplies run at about two fifths of the rate of a dense one; making W costs d_in
    tokens. Where no step has batch axes, einsum is a chain of plain multiplies already; shared axes
    make the multiplies of the strided path small and many, which pays for wide layers only.
    """
    structured = 2.5 * plan.macs * num_tokens
    if plan.dense_macs * num_tokens + 2.5 * plan.macs * plan.d_in < structured:
        return "dense"
    is_plain = all([not (step.batch or step.kept) for step in plan.steps])
    is_small = any([step.kept and step.fan_in < 48 for step in plan.steps])
    if is_plain or is_small or device != "cpu" or num_tokens < 256:
        return "einsum"
    return "strided"


@lru_cache(maxsize=16384)
def _plan(structure: str, d_in: int, d_out: int) -> Plan:
    """The plan, from what an operator can carry."""
    return make_plan(parse(structure), d_in, d_out)


@torch.library.custom_op("einlinear::strided", mutates_args=())
def strided_op(
    x_td: Tensor, factors: list[Tensor], structure: str, d_in: int, d_out: int, save: bool
) -> tuple[Tensor, Tensor]:
    """The strided variant as an operator: the output, and what its backward pass wants kept."""
    plan = _plan(structure, d_in, d_out)
    rows = x_td if x_td.stride(-1) == 1 else x_td.contiguous()
    return strided.forward(plan, rows, [f.contiguous() for f in factors], save=save)


@strided_op.register_fake
def _(
    x_td: Tensor, factors: list[Tensor], structure: str, d_in: int, d_out: int, save: bool
) -> tuple[Tensor, Tensor]:
    plan = _plan(structure, d_in, d_out)
    tokens = x_td.shape[0]
    y_te = x_td.new_empty(tokens, plan.d_out_padded)
    return y_te, x_td.new_empty(tokens * plan.inner_width if save else 0)


@torch.library.custom_op("einlinear::strided_backward", mutates_args=())
def strided_backward_op(
    x_td: Tensor,
    factors: list[Tensor],
    saved: Tensor,
    grad_te: Tensor,
    wanted: list[bool],
    structure: str,
    d_in: int,
    d_out: int,
) -> list[Tensor]:
    """The gradients of the input and of the factors; empty where none is wanted."""
    plan = _plan(structure, d_in, d_out)
    rows = x_td if x_td.stride(-1) == 1 else x_td.contiguous()
    grad = grad_te if grad_te.stride(-1) == 1 else grad_te.contiguous()
    weights = [f.contiguous() for f in factors]
    grads = strided.backward(plan, rows, weights, saved, grad, wanted)
    return [x_td.new_empty(0) if grad is None else grad for grad in grads]


@strided_backward_op.register_fake
def _(
    x_td: Tensor,
    factors: list[Tensor],
    saved: Tensor,
    grad_te: Tensor,
    wanted: list[bool],
    structure: str,
    d_in: int,
    d_out: int,
) -> list[Tensor]:
    return [
        t.new_empty(t.shape if flag else 0)
        for t, flag in zip([x_td, *factors], wanted, strict=True)
    ]


def gradients(
    plan: Plan, operands: Sequence[Tensor], grad_te: Tensor, is_batched: Sequence[bool] = ()
) -> tuple[list[Tensor], list[bool]]:
    """The gradients of input and factors, step by step by einsum: slower, differentiable again.

    Some of (grad, input, factors) may have a further axis in front; which of the results then have
    it is said too.
    """
    x_td, *factors = operands
    flags = list(is_batched) or [False] * (2 + len(factors))
    grad_flag, *before_flags = flags[:2]
    tensors = [x_td.reshape(*x_td.shape[:-1], *plan.x_shape)]
    for step, factor, flag in zip(plan.steps[:-1], factors, flags[2:], strict=False):
        both = [before_flags[-1], flag]
        tensors.append(_batched_einsum(step.equation, [tensors[-1], factor], both))
        before_flags.append(any(both))
    sizes = plan.sizes
    grad = grad_te.reshape(*grad_te.shape[:-1], *[sizes[edge] for edge in plan.y_edges])
    grads: list[Tensor] = []
    out_flags: list[bool] = []
    for i in reversed(range(len(factors))):
        inputs, after = plan.steps[i].equation.split("->")
        before, word = inputs.split(",")
        weights = f"{before},{after}->{word}".replace("...", "Z")  # Z: the tokens, summed
        pair = [before_flags[i], grad_flag]
        grads.append(_batched_einsum(weights, [tensors[i], grad], pair))
        out_flags.append(any(pair))
        pair = [grad_flag, flags[2 + i]]
        grad = _batched_einsum(f"{after},{word}->{before}", [grad, factors[i]], pair)
        grad_flag = any(pair)
    rows = grad.flatten(2 if grad_flag else 1)
    return [rows, *reversed(grads)], [grad_flag, *reversed(out_flags)]


class _Strided(torch.autograd.Function):
    """The operators joined: forward, backward, and backward once more. Works under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x_td: Tensor, structure: str, d_in: int, d_out: int, save: bool, *factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        y_te, saved = strided_op(x_td, list(factors), structure, d_in, d_out, save)
        return y_te, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x_td, structure, d_in, d_out, _, *factors = inputs
        ctx.where = structure, d_in, d_out
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for what is only kept
        ctx.save_for_backward(x_td, output[1], *factors)
        ctx.save_for_forward(x_td, *factors)

    @staticmethod
    def backward(ctx: Any, grad_te: Tensor | None, _: None) -> tuple[Any, ...]:
        x_td, saved, *factors = ctx.saved_tensors
        if grad_te is None:
            return (None,) * (5 + len(factors))
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[5:]]
        grads: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # the gradients are to be differentiated once more
            grads = gradients(_plan(*ctx.where), [x_td, *factors], grad_te)[0]
        else:
            grads = strided_backward_op(x_td, factors, saved, grad_te, wanted, *ctx.where)
        grads = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
        return grads[0], None, None, None, None, *grads[1:]


class _StridedEager(_Strided):
    """With forward mode, which a Function that is compiled may not have."""

    @staticmethod
    def jvp(ctx: Any, x_dot: Tensor | None, *tangents: Any) -> tuple[Tensor, None]:
        plan = _plan(*ctx.where)
        x_td, *factors = ctx.saved_tensors
        z, z_dot = x_td.reshape(-1, *plan.x_shape), x_dot
        z_dot = torch.zeros_like(z) if x_dot is None else x_dot.reshape(z.shape)
        for step, factor, dot in zip(plan.steps, factors, tangents[4:], strict=True):
            z_dot = torch.einsum(step.equation, z_dot, factor)
            z_dot = z_dot if dot is None else z_dot + torch.einsum(step.equation, z, dot)
            z = torch.einsum(step.equation, z, factor)
        return z_dot.reshape(-1, plan.d_out_padded), None


@strided_op.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], x_td: Tensor, factors: list[Tensor], *where: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, None]]:
    plan = _plan(*where[:3])
    x = _in_front(x_td, in_dims[0])
    z = x.reshape(*x.shape[:-1], *plan.x_shape)
    is_batched = in_dims[0] is not None
    for step, factor, dim in zip(plan.steps, factors, in_dims[1], strict=True):
        z = _batched_einsum(
            step.equation, [z, _in_front(factor, dim)], [is_batched, dim is not None]
        )
        is_batched = is_batched or dim is not None
    return (z.flatten(2), x_td.new_empty(0)), (0, None)


@strided_backward_op.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    x_td: Tensor,
    factors: list[Tensor],
    saved: Tensor,
    grad_te: Tensor,
    wanted: list[bool],
    *where: Any,
) -> tuple[list[Tensor], list[int | None]]:
    dims = [in_dims[3], in_dims[0], *in_dims[1]]
    grad, *operands = (
        _in_front(t, dim) for t, dim in zip([grad_te, x_td, *factors], dims, strict=True)
    )
    flags = [dim is not None for dim in dims]
    grads, batched = gradients(_plan(*where), operands, grad, flags)
    return grads, [0 if flag else None for flag in batched]


def _in_front(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if dim is None else tensor.movedim(dim, 0)


def _batched_einsum(equation: str, tensors: list[Tensor], is_batched: list[bool]) -> Tensor:
    """An einsum of which some operands have a further axis Y in front, and then the result too."""
    inputs, output = equation.split("->")
    words = [
        f"Y{word}" if flag else word
        for word, flag in zip(inputs.split(","), is_batched, strict=True)
    ]
    result = f"Y{output}" if any(is_batched) else output
    return torch.einsum(f"{','.join(words)}->{result}", *tensors)


@register_flop_formula(torch.ops.einlinear.strided)
def _(
    x: Sequence[int], _: object, structure: str, d_in: int, d_out: int, *__: Any, **___: Any
) -> int:
    return 2 * x[0] * _plan(structure, d_in, d_out).macs


@register_flop_formula(torch.ops.einlinear.strided_backward)
def _(
    x: Sequence[int],
    _: object,
    saved: Sequence[int],
    __: object,
    wanted: Sequence[bool],
    structure: str,
    d_in: int,
    d_out: int,
    **___: Any,
) -> int:
    macs = [step.macs for step in _plan(structure, d_in, d_out).steps]
    again = 0 if saved[0] else sum(macs[: strided.remade(wanted)])
    inputs = sum(m for i, m in enumerate(macs) if any(wanted[: i + 1]))
    weights = sum(m for m, flag in zip(macs, wanted[1:], strict=True) if flag)
    return 2 * x[0] * (again + inputs + weights)
