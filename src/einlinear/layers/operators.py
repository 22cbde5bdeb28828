"""The fast variants as operators of torch, with everything torch wants to know of an operator.

Two operators, `einlinear::multiply` and `einlinear::gradients`, are opaque to torch: they have
rules for shapes, for vmap and for counting FLOPs. An autograd function joins them, because the
functions of torch.func do not take operators with autograd of their own.

Legend: x_td rows of input, y_te rows of output, z what lies between; t is tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from einlinear.layers import compiled, strided
from einlinear.layers.strided import padded
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.text import parse


def run(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], bias: Tensor | None, variant: str
) -> Tensor:
    """W x + b for rows of input, by a fast variant, differentiable in everything."""
    where = variant, plan.text, plan.d_in, plan.d_out
    others = factors if bias is None else [*factors, bias]
    if torch.compiler.is_compiling():
        needs_gradients = [tensor.requires_grad for tensor in [x_td, *others]]
        if not (torch.is_grad_enabled() and any(needs_gradients)):  # dynamo wants no function then
            made: Tensor = multiply_op(x_td, list(factors), bias, *where)
            return made
        function: type[_Multiply] = _Multiply
    else:
        is_inference = variant == "engine" and not torch.is_grad_enabled()
        if is_inference and compiled.is_direct(x_td, others):
            return compiled.forward(plan, x_td, factors, bias)
        function = _MultiplyEager
    y_te: Tensor = function.apply(x_td, bias, *where, *factors)  # type: ignore[no-untyped-call]
    return y_te


@lru_cache(maxsize=16384)
def _plan(structure: str, d_in: int, d_out: int) -> Plan:
    """The plan, from what an operator can carry."""
    return make_plan(parse(structure), d_in, d_out)


def _multiply(
    x_td: Tensor,
    factors: list[Tensor],
    bias: Tensor | None,
    variant: str,
    structure: str,
    d_in: int,
    d_out: int,
) -> Tensor:
    """The output for rows of input. The engine is a wish: a program may have been exported."""
    plan = _plan(structure, d_in, d_out)
    if variant == "engine" and compiled.is_usable(x_td):
        return compiled.forward(plan, x_td, factors, bias)
    return strided.forward(plan, x_td, factors, bias)


multiply_op = torch.library.custom_op("einlinear::multiply", _multiply, mutates_args=())


@multiply_op.register_fake
def _(x_td: Tensor, *arguments: Any) -> Tensor:
    return x_td.new_empty(x_td.shape[0], arguments[-1])  # tokens, d_out


def _gradients(
    x_td: Tensor,
    factors: list[Tensor],
    grad_te: Tensor,
    wanted: list[bool],
    variant: str,
    structure: str,
    d_in: int,
    d_out: int,
) -> list[Tensor]:
    """The gradients of input, bias and factors; empty where none is wanted."""
    plan = _plan(structure, d_in, d_out)
    if variant == "engine" and compiled.is_usable(x_td):
        grads = compiled.backward(plan, x_td, factors, grad_te, wanted)
    else:
        grads = strided.backward(plan, x_td, factors, grad_te, wanted)
    return [x_td.new_empty(0) if grad is None else grad for grad in grads]


gradients_op = torch.library.custom_op("einlinear::gradients", _gradients, mutates_args=())


@gradients_op.register_fake
def _(
    x_td: Tensor, factors: list[Tensor], grad_te: Tensor, wanted: list[bool], *where: Any
) -> list[Tensor]:
    shapes = [x_td.shape, grad_te.shape[-1:], *(factor.shape for factor in factors)]
    return [
        x_td.new_empty(shape if flag else 0) for shape, flag in zip(shapes, wanted, strict=True)
    ]


class _Multiply(torch.autograd.Function):
    """The operators joined: forward, backward, and backward once more. Works under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_td: Tensor, bias: Tensor | None, variant: str, *rest: Any) -> Tensor:
        structure, d_in, d_out, *factors = rest
        others = factors if bias is None else [*factors, bias]
        is_direct = variant == "engine" and compiled.is_direct(x_td, others)
        multiply = _multiply if is_direct else multiply_op
        return multiply(x_td, factors, bias, variant, structure, d_in, d_out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_td, _, *ctx.where = inputs[:6]
        ctx.save_for_backward(x_td, *inputs[6:])
        ctx.save_for_forward(x_td, *inputs[6:])

    @staticmethod
    def backward(ctx: Any, grad_te: Tensor) -> tuple[Any, ...]:
        x_td, *factors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [needs[0], needs[1], *needs[6:]]
        grads: Sequence[Tensor | None]
        if compiled.is_batched(grad_te):
            grads = batched_gradients(_plan(*ctx.where[1:]), [x_td, *factors], grad_te)
        elif torch.is_grad_enabled():  # the gradients are to be differentiated once more
            grads = gradients(_plan(*ctx.where[1:]), [x_td, *factors], grad_te)[0]
        else:
            is_engine = ctx.where[0] == "engine"
            is_direct = is_engine and compiled.is_direct(x_td, [grad_te, *factors])
            make = _gradients if is_direct else gradients_op
            grads = make(x_td, factors, grad_te, wanted, *ctx.where)
        grads = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
        return *grads[:2], None, None, None, None, *grads[2:]


class _MultiplyEager(_Multiply):
    """With forward mode, which a function that is compiled may not have."""

    @staticmethod
    def jvp(ctx: Any, x_dot: Tensor | None, bias_dot: Tensor | None, *dots: Any) -> Tensor:
        plan = _plan(*ctx.where[1:])
        x_td, *factors = ctx.saved_tensors
        z = _as_axes(plan, x_td)
        z_dot = torch.zeros_like(z) if x_dot is None else _as_axes(plan, x_dot)
        for step, factor, dot in zip(plan.steps, factors, dots[4:], strict=True):
            z_dot = torch.einsum(step.equation, z_dot, factor)
            z_dot = z_dot if dot is None else z_dot + torch.einsum(step.equation, z, dot)
            z = torch.einsum(step.equation, z, factor)
        y_dot = z_dot.flatten(1)[:, : plan.d_out]
        return y_dot if bias_dot is None else y_dot + bias_dot


def _as_axes(plan: Plan, x_td: Tensor) -> Tensor:
    """Rows of input, padded, with the axes of the plan; a further axis in front may stay."""
    return padded(x_td, plan.d_in_padded).reshape(*x_td.shape[:-1], *plan.x_shape)


def gradients(
    plan: Plan, operands: Sequence[Tensor], grad_te: Tensor, is_batched: Sequence[bool] = ()
) -> tuple[list[Tensor], list[bool]]:
    """The gradients of input, bias, factors, step by step by einsum: slower, differentiable again.

    Some of (grad, input, factors) may have a further axis in front; which of the results then have
    it is said too.
    """
    x_td, *factors = operands
    flags = list(is_batched) or [False] * (2 + len(factors))
    grad_flag, *before_flags = flags[:2]
    tensors = [_as_axes(plan, x_td)]
    for step, factor, flag in zip(plan.steps[:-1], factors, flags[2:], strict=False):
        both = [before_flags[-1], flag]
        tensors.append(_batched_einsum(step.equation, [tensors[-1], factor], both))
        before_flags.append(any(both))
    sizes = plan.sizes
    grad = padded(grad_te, plan.d_out_padded)
    grad = grad.reshape(*grad_te.shape[:-1], *[sizes[edge] for edge in plan.y_edges])
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
    rows = grad.flatten(2 if grad_flag else 1)[..., : plan.d_in]
    results = [rows, grad_te.sum(-2), *reversed(grads)]
    return results, [grad_flag, flags[0], *reversed(out_flags)]


def batched_gradients(
    plan: Plan,
    operands: Sequence[Tensor],
    grad_te: Tensor,
    through: Callable[[list[Tensor]], list[Tensor]] = list,
) -> list[Tensor]:
    """The same for a gradient that autograd batched itself, which knows neither einsum nor us.

    `through` is applied to each set of gradients.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    many = torch._remove_batch_dim(grad_te, level, 0, 0)
    sets = [through(gradients(plan, operands, grad)[0]) for grad in many]
    return [
        torch._add_batch_dim(torch.stack(column), 0, level) for column in zip(*sets, strict=True)
    ]


@multiply_op.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    x_td: Tensor,
    factors: list[Tensor],
    bias: Tensor | None,
    *where: Any,
) -> tuple[Tensor, int]:
    plan = _plan(*where[1:])
    z = _as_axes(plan, _in_front(x_td, in_dims[0]))
    is_batched = in_dims[0] is not None
    for step, factor, dim in zip(plan.steps, factors, in_dims[1], strict=True):
        pair = [is_batched, dim is not None]
        z = _batched_einsum(step.equation, [z, _in_front(factor, dim)], pair)
        is_batched = any(pair)
    y = z.flatten(2 if is_batched else 1)[..., : plan.d_out]
    if bias is not None:
        y = y + _in_front(bias, in_dims[2]).unsqueeze(-2)
    return y, 0


@gradients_op.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    x_td: Tensor,
    factors: list[Tensor],
    grad_te: Tensor,
    wanted: list[bool],
    variant: str,
    *where: Any,
) -> tuple[list[Tensor], list[int | None]]:
    dims = [in_dims[2], in_dims[0], *in_dims[1]]
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


@register_flop_formula(torch.ops.einlinear.multiply)
def _(x: Sequence[int], *arguments: Any, **_: Any) -> int:
    return 2 * x[0] * _plan(*arguments[-3:]).macs


@register_flop_formula(torch.ops.einlinear.gradients)
def _(x: Sequence[int], _: object, __: object, *arguments: Any, **___: Any) -> int:
    wanted, _, *where = arguments
    macs = [step.macs for step in _plan(*where).steps]
    factors = wanted[2:]
    again = sum(macs[: strided.num_remade(wanted)])
    inputs = sum(m for i, m in enumerate(macs) if wanted[0] or any(factors[:i]))
    weights = sum(m for m, flag in zip(macs, factors, strict=True) if flag)
    return 2 * x[0] * (again + inputs + weights)
