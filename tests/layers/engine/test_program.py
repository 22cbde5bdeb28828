from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import STRUCTURES, structures
from einlinear import make_plan
from einlinear.layers.engine.program import TOKENS, make_program


def groups(step):
    return [step.m, step.n, step.k, *step.loops]


@given(structures(), st.integers(1, 64))
def test_every_group_has_one_stride_in_every_buffer(s, width):
    program = make_program(make_plan(s, width, width))
    for step in (*program.forward, *program.input_gradients, *program.weight_gradients):
        for buffer in (step.out, step.left, step.right):
            sizes = dict(zip(buffer.edges, buffer.sizes, strict=True))
            for group in groups(step):
                held = [edge for edge in group if edge in buffer.edges]
                assert held in ([], list(group)) or group == (TOKENS,)
                for outer, inner in pairwise(held):
                    expected = buffer.stride(inner, 7, 100) * sizes[inner]
                    assert buffer.stride(outer, 7, 100) == expected


@given(structures(), st.integers(1, 64))
def test_with_tokens_outermost_every_n_is_contiguous(s, width):
    program = make_program(make_plan(s, width, width), "outer")
    for step in (*program.forward, *program.input_gradients, *program.weight_gradients):
        assert TOKENS not in step.n
        assert {b.tokens for b in (step.out, step.left, step.right)} <= {"outer", "none"}
        if step.n:
            assert step.out.stride(step.n[-1], 1, 0) == 1
            assert step.right.stride(step.n[-1], 1, 0) == 1


def test_packs_are_for_steps_in_the_middle():
    plan = make_plan(STRUCTURES["btt(rank=2,num_factors=4)"], 256, 256)
    program = make_program(plan, "outer")
    assert [pack is not None for pack in program.packs] == [False, True, True, False]
    assert "pack packed" in str(program)


def run(step, tensors, num_tokens):
    """A product by its definition, one number at a time, on flat buffers."""
    buffers = {"out": step.out, "left": step.left, "right": step.right}
    sizes = {TOKENS: num_tokens}
    for buffer in buffers.values():
        sizes |= dict(zip(buffer.edges, buffer.sizes, strict=True))
    edges = [edge for group in groups(step) for edge in group]
    total = np.zeros(step.out.width * (num_tokens if step.out.tokens != "none" else 1))
    for index in np.ndindex(*(sizes[edge] for edge in edges)):
        at = {
            name: sum(
                i * buffer.stride(edge, num_tokens, buffer.width)
                for i, edge in zip(index, edges, strict=True)
            )
            for name, buffer in buffers.items()
        }
        total[at["out"]] += tensors[0][at["left"]] * tensors[1][at["right"]]
    return total


@settings(max_examples=40)
@given(structures(max_edges_per_side=2), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_forward_program_is_the_equation(s, d_in, d_out, num_tokens):
    plan = make_plan(s, d_in, d_out)
    program = make_program(plan)
    rng = np.random.default_rng(0)
    factors = {name: rng.standard_normal(shape) for name, shape in plan.factor_shapes.items()}
    x = rng.standard_normal((num_tokens, *(plan.sizes[edge] for edge in plan.x_edges)))
    expected = np.einsum(plan.equation, x, *factors.values())
    flat = x.ravel()
    for step, planned in zip(program.forward, plan.steps, strict=True):
        flat = run(step, step.operands(factors[planned.factor].ravel(), flat), num_tokens)
    np.testing.assert_allclose(flat.reshape(expected.shape), expected, atol=1e-10)


@pytest.mark.parametrize("name", STRUCTURES)
def test_intermediates_are_written_without_gaps(name):
    """So that a batched multiply may fill them at once."""
    program = make_program(make_plan(STRUCTURES[name], 64, 64))
    for step in (*program.forward[:-1], *program.input_gradients[1:]):
        assert step.out.edges[-len(step.m) :] == step.m or not step.m
        assert prod(step.out.sizes) == step.out.width


def test_a_program_can_be_read():
    text = str(make_program(make_plan(STRUCTURES["btt(rank=2)"], 64, 64)))
    assert "for XAB: z1[AB.YAB, t] += A[AB.YAB, XA] @ x[XA, t]" in text
    assert "for YAB: y[t, YB] += z1[t, XAB.AB] @ B[XAB.AB, YB]" in text
