"""The fast variants as two operators of torch, `einlinear::multiply` and `einlinear::gradients`.

Both are opaque to torch, with rules for shapes, for vmap and for counting FLOPs. An autograd
function joins them, because torch.func does not support operators that register autograd.

Legend: t tokens, d inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from einlinear.layers.engine import compiled
from einlinear.layers.opaque import (
    fake_gradients,
    gradient_flops,
    hand_over,
    is_differentiated,
    only_wanted,
    plan_of,
    without_none,
)
from einlinear.layers.reference import multiply_by_einsum, reference_gradients
from einlinear.layers.strided import multiply_strided, padded, strided_gradients
from einlinear.structures.plan import Plan


def multiply_by_operator(
    plan: Plan, x_td: Tensor, factors: Sequence[Tensor], bias: Tensor | None, variant: str
) -> Tensor:
    """W x + b for rows of input, by a fast variant, differentiable in everything."""
    key = hand_over(plan)
    if torch.compiler.is_compiling():
        if not is_differentiated([x_td, bias, *factors]):  # dynamo rejects the function then
            made: Tensor = multiply_op(x_td, list(factors), bias, variant, *key)
            return made
        function: type[_Multiply] = _Multiply
    else:
        if variant == "engine" and not torch.is_grad_enabled():
            others = factors if bias is None else [*factors, bias]
            if compiled.is_direct(x_td, others):
                return compiled.compiled_forward(plan, x_td, factors, bias)
        function = _MultiplyEager
    y_to: Tensor = function.apply(x_td, bias, variant, *key, *factors)  # type: ignore[no-untyped-call]
    return y_to


def _multiply(
    x_td: Tensor,
    factors: list[Tensor],
    bias: Tensor | None,
    variant: str,
    structure: str,
    d_in: int,
    d_out: int,
) -> Tensor:
    """W x + b. Falls back from the engine if it is unavailable, as in an exported program."""
    plan = plan_of(structure, d_in, d_out)
    if variant == "engine" and compiled.is_usable(x_td):
        return compiled.compiled_forward(plan, x_td, factors, bias)
    return multiply_strided(plan, x_td, factors, bias)


multiply_op = torch.library.custom_op("einlinear::multiply", _multiply, mutates_args=())


@multiply_op.register_fake
def _(x_td: Tensor, *arguments: Any) -> Tensor:
    return x_td.new_empty(x_td.shape[0], arguments[-1])  # tokens, d_out


@multiply_op.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    x_td: Tensor,
    factors: list[Tensor],
    bias: Tensor | None,
    variant: str,
    *key: Any,
) -> tuple[Tensor, int]:
    plan, (x_dim, factor_dims, bias_dim) = plan_of(*key), in_dims[:3]
    x, is_batched = _in_front(x_td, x_dim), x_dim is not None
    z = padded(x, plan.d_in_padded).reshape(*x.shape[:-1], *plan.x_shape)
    for step, factor, dim in zip(plan.steps, factors, factor_dims, strict=True):
        before, word, after = step.equation.replace("->", ",").split(",")
        left, right = "Y" * is_batched, "Y" * (dim is not None)  # Y: the axis of vmap
        is_batched = is_batched or dim is not None
        equation = f"{left}{before},{right}{word}->{'Y' * is_batched}{after}"
        z = torch.einsum(equation, z, _in_front(factor, dim))
    y = z.flatten(2 if is_batched else 1)[..., : plan.d_out]
    return y if bias is None else y + _in_front(bias, bias_dim).unsqueeze(-2), 0


def _in_front(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if dim is None else tensor.movedim(dim, 0)


@register_flop_formula(torch.ops.einlinear.multiply)
def _(x: Sequence[int], *arguments: Any, **_: Any) -> int:
    return 2 * x[0] * plan_of(*arguments[-3:]).macs


def _gradients(
    x_td: Tensor,
    factors: list[Tensor],
    grad_to: Tensor,
    wanted: list[bool],
    variant: str,
    structure: str,
    d_in: int,
    d_out: int,
) -> list[Tensor]:
    """The gradients of input, bias and factors; empty where none is wanted."""
    plan = plan_of(structure, d_in, d_out)
    if variant == "engine" and compiled.is_usable(x_td):
        grads = compiled.compiled_backward(plan, x_td, factors, grad_to, wanted)
    else:
        grads = strided_gradients(plan, x_td, factors, grad_to, wanted)
    return without_none(grads, x_td)


gradients_op = torch.library.custom_op("einlinear::gradients", _gradients, mutates_args=())


@gradients_op.register_fake
def _(
    x_td: Tensor, factors: list[Tensor], grad_to: Tensor, wanted: list[bool], *_: Any
) -> list[Tensor]:
    return fake_gradients([x_td, grad_to.sum(0), *factors], wanted)


@gradients_op.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    x_td: Tensor,
    factors: list[Tensor],
    grad_to: Tensor,
    *arguments: Any,
) -> tuple[list[Tensor], list[int]]:
    def at(i: int, tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if dim is None else tensor.select(dim, i)

    sets = [
        gradients_op(
            at(i, x_td, in_dims[0]),
            [at(i, factor, dim) for factor, dim in zip(factors, in_dims[1], strict=True)],
            at(i, grad_to, in_dims[2]),
            *arguments,
        )
        for i in range(info.batch_size)
    ]
    columns = list(zip(*sets, strict=True))
    return [torch.stack(column) for column in columns], [0] * len(columns)


@register_flop_formula(torch.ops.einlinear.gradients)
def _(x: Sequence[int], _: object, __: object, *arguments: Any, **___: Any) -> int:
    (wants_input, _, *wanted), _, *key = arguments
    return gradient_flops(tuple(key), x[0], wants_input, wanted)


class _Multiply(torch.autograd.Function):
    """The operators joined: forward, backward, and backward once more. Works under torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_td: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        (variant, *key), factors = arguments[:4], list(arguments[4:])
        others = factors if bias is None else [*factors, bias]
        is_direct = variant == "engine" and compiled.is_direct(x_td, others)
        multiply = _multiply if is_direct else multiply_op
        return multiply(x_td, factors, bias, variant, *key)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_td, _, ctx.variant, *ctx.key = inputs[:6]
        ctx.save_for_backward(x_td, *inputs[6:])
        ctx.save_for_forward(x_td, *inputs[6:])

    @staticmethod
    def backward(ctx: Any, grad_to: Tensor) -> tuple[Any, ...]:
        x_td, *factors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [needs[0], needs[1], *needs[6:]]
        if torch.is_grad_enabled() or _is_batched([grad_to, x_td, *factors]):
            plan = plan_of(*ctx.key)
            grads = batched_gradients(
                lambda grad: reference_gradients(plan, x_td, factors, grad), grad_to
            )
        else:
            is_direct = ctx.variant == "engine" and compiled.is_direct(x_td, [grad_to, *factors])
            make = _gradients if is_direct else gradients_op
            grads = make(x_td, factors, grad_to, wanted, ctx.variant, *ctx.key)
        used = only_wanted(grads, wanted)
        return *used[:2], None, None, None, None, *used[2:]


class _MultiplyEager(_Multiply):
    """With forward mode, which dynamo does not support in a function."""

    @staticmethod
    def jvp(ctx: Any, x_dot: Tensor | None, bias_dot: Tensor | None, *dots: Any) -> Tensor:
        """The sum over all operands of the product with the operand's tangent in its place."""
        plan, operands = plan_of(*ctx.key), list(ctx.saved_tensors)
        y_dot: Tensor = operands[0].new_zeros(operands[0].shape[0], plan.d_out)
        for i, dot in enumerate([x_dot, *dots[4:]]):
            if dot is not None:
                changed = [*operands[:i], dot, *operands[i + 1 :]]
                y_dot = y_dot + multiply_by_einsum(plan, changed[0], changed[1:])
        return y_dot if bias_dot is None else y_dot + bias_dot


def _is_batched(tensors: Sequence[Tensor]) -> bool:
    """Whether vmap or autograd's is_grads_batched added an axis to one of the tensors."""
    if torch.compiler.is_compiling():
        return False
    is_vmapped = any(torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors)
    return is_vmapped or compiled.is_batched(tensors[0])


def batched_gradients(make: Callable[[Tensor], list[Tensor]], grad_to: Tensor) -> list[Tensor]:
    """What `make` returns for a gradient; one by one if autograd's is_grads_batched batched it.

    That kind of batching knows neither einsum nor our operators.
    """
    if not compiled.is_batched(grad_to):
        return make(grad_to)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sets = [make(grad) for grad in torch._remove_batch_dim(grad_to, level, 0, 0)]
    return [
        torch._add_batch_dim(torch.stack(column), 0, level) for column in zip(*sets, strict=True)
    ]
