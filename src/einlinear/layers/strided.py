"""The portable fast path: a program run by torch's batched matrix multiply, in place.

Every operand and result is a view with the strides of the program: no activation is copied or
transposed. Tokens are processed in blocks, so that intermediates stay in cache; the backward pass
recomputes them block by block, because fresh memory for all would cost as much as the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product as indices
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from einlinear.layers.engine.program import TOKENS, Product, Program, make_program
from einlinear.structures.plan import Plan

# Tokens at a time: as many as keep intermediates in a cache of 3 MB, within limits. Measured, see
# docs/performance.md.
_BLOCK_BYTES = 3 * 2**20
_BLOCK_RANGE = (256, 1100)

_Loop = tuple[int, int, int, int]  # size, and strides in out, left and right


def blocks(num_tokens: int, bytes_per_token: int) -> list[tuple[int, int]]:
    """Start and length of blocks of about equal length.

    Lengths are odd multiples of 8 where possible. The edges of an intermediate are multiples of the
    length apart: powers of two would fall into one cache set, and vectors should be aligned.
    """
    shortest, longest = _BLOCK_RANGE
    block = min(longest, max(shortest, _BLOCK_BYTES // max(1, bytes_per_token)))
    count = max(1, -(-num_tokens // block))
    length = max(1, -(-num_tokens // count))
    if count > 1:
        length = 8 * (-(-length // 8) | 1)
    return [(start, min(length, num_tokens - start)) for start in range(0, num_tokens, length)]


def multiply_strided(
    plan: Plan, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None
) -> Tensor:
    """The output for rows of input."""
    program = make_program(plan)
    x = rows(padded(x, plan.d_in_padded))
    factors = contiguous(factors)
    y = x.new_empty(x.shape[0], plan.d_out_padded)
    for start, length in blocks(x.shape[0], plan.inner_width * x.element_size()):
        block = slice(start, start + length)
        inner = _intermediates(program, x, length)
        _run_forward(program, factors, [x[block], *inner, y[block]], length)
        if bias is not None:
            y[block, : plan.d_out].add_(bias)
    return y[:, : plan.d_out].contiguous()


def rows(tensor: Tensor) -> Tensor:
    """Rows with contiguous numbers; a copy only if they are not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, contiguous; copies only of those that are not."""
    return [t if t.is_contiguous() else t.contiguous() for t in tensors]


def padded(tensor: Tensor, width: int) -> Tensor:
    """Rows padded with zeros to a width; the rows themselves if they have it."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def num_remade(wanted: Sequence[bool]) -> int:
    """How many intermediates the gradients of the wanted factors need again."""
    return max((i for i, flag in enumerate(wanted) if flag), default=0)


def strided_gradients(
    plan: Plan,
    x: Tensor,
    factors: Sequence[Tensor],
    grad_y: Tensor,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the input, of the bias and of the factors, as far as wanted."""
    program = make_program(plan)
    want_x, want_bias, *want_factors = wanted
    grad_bias = grad_y.sum(0) if want_bias else None
    x, grad_y = rows(padded(x, plan.d_in_padded)), rows(padded(grad_y, plan.d_out_padded))
    factors = contiguous(factors)
    axes = [step.edges for step in plan.steps]
    weights = [
        _reordered(factor, edges, step.weights.edges)
        for factor, edges, step in zip(factors, axes, program.input_gradients, strict=True)
    ]
    grads = [
        x.new_zeros(step.out.sizes) if flag else None
        for step, flag in zip(program.weight_gradients, want_factors, strict=True)
    ]
    grad_x = x.new_empty(x.shape[0], plan.d_in_padded) if want_x else None
    for start, length in blocks(x.shape[0], plan.inner_width * x.element_size()):
        block = slice(start, start + length)
        tensors = [x[block], *_intermediates(program, x, length)]
        _run_forward(program, factors, tensors[: 1 + num_remade(want_factors)], length)
        source = grad_y[block]
        for i in reversed(range(len(factors))):
            grad = grads[i]
            if grad is not None:
                _run(program.weight_gradients[i], grad, tensors[i], source, length, add=True)
            if not (want_x or any(want_factors[:i])):
                break
            step = program.input_gradients[i]
            target = x.new_empty(step.out.width * length) if i or grad_x is None else grad_x[block]
            _run(step, target, *step.operands(weights[i], source), length)
            source = target
    return [
        None if grad_x is None else grad_x[:, : plan.d_in].contiguous(),
        grad_bias,
        *(
            None if grad is None else _reordered(grad, step.out.edges, edges)
            for grad, step, edges in zip(grads, program.weight_gradients, axes, strict=True)
        ),
    ]


def _intermediates(program: Program, x: Tensor, length: int) -> list[Tensor]:
    """Memory for the intermediates of a block."""
    return [x.new_empty(step.out.width * length) for step in program.forward[:-1]]


def _run_forward(
    program: Program, factors: Sequence[Tensor], tensors: list[Tensor], length: int
) -> None:
    """Compute each tensor from the one before it."""
    for step, weight, before, after in zip(
        program.forward, factors, tensors, tensors[1:], strict=False
    ):
        _run(step, after, *step.operands(weight, before), length)


def _reordered(weight: Tensor, edges: tuple[str, ...], wanted: tuple[str, ...]) -> Tensor:
    """A factor with its axes in another order; the factor itself if the order is the same."""
    if edges == wanted:
        return weight
    return weight.permute([edges.index(edge) for edge in wanted]).contiguous()


@lru_cache(maxsize=65536)
def _strides(
    step: Product, num_tokens: int, rows: tuple[int, int, int]
) -> tuple[tuple[_Loop, ...], tuple[int, int, int], tuple[tuple[int, int], ...]]:
    """The loops, largest first; the sizes m, n, k; the strides of out, left and right."""
    buffers = (step.out, step.left, step.right)
    sizes = {TOKENS: num_tokens}
    for buffer in buffers:
        sizes |= dict(zip(buffer.edges, buffer.sizes, strict=True))

    def stride(group: tuple[str, ...], which: int) -> int:
        return buffers[which].stride(group[-1], num_tokens, rows[which]) if group else 1

    def size(group: tuple[str, ...]) -> int:
        return prod(sizes[edge] for edge in group)

    loops = [(size(g), stride(g, 0), stride(g, 1), stride(g, 2)) for g in step.loops]
    loops.sort(reverse=True)
    matrices = ((step.m, step.n), (step.m, step.k), (step.k, step.n))
    strides = tuple((stride(a, i), stride(b, i)) for i, (a, b) in enumerate(matrices))
    return tuple(loops), (size(step.m), size(step.n), size(step.k)), strides


def _run(
    step: Product, out: Tensor, left: Tensor, right: Tensor, num_tokens: int, *, add: bool = False
) -> None:
    """Run one product on views: a batched multiply along the largest loop, inside the others."""
    rows = tuple(t.stride(0) if t.dim() == 2 else 0 for t in (out, left, right))
    loops, (m, n, k), (at_out, at_left, at_right) = _strides(step, num_tokens, rows)
    (count, *along), *others = loops or ((1, 0, 0, 0),)
    starts = [t.storage_offset() for t in (out, left, right)]
    adds_up = add or any(loop[1] == 0 for loop in others)
    for index in indices(*(range(loop[0]) for loop in others)):
        at = [
            start + sum(i * loop[1 + which] for i, loop in zip(index, others, strict=True))
            for which, start in enumerate(starts)
        ]
        a = left.as_strided((count, m, k), (along[1], *at_left), at[1])
        b = right.as_strided((count, k, n), (along[2], *at_right), at[2])
        if count > 1 and not along[0]:  # the loop sums into the result
            out.as_strided((m, n), at_out, at[0]).add_(torch.bmm(a, b).sum(0))
            continue
        c = out.as_strided((count, m, n), (along[0], *at_out), at[0])
        if adds_up:
            c.baddbmm_(a, b)
        else:
            torch.bmm(a, b, out=c)
