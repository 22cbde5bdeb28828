import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import STRUCTURES, structures
from einlinear import make_plan
from einlinear.layers.engine.abi import MultiplyField, OpField, OpKind
from einlinear.layers.engine.cache import LARGE, SMALL, first_level
from einlinear.layers.engine.flat import LINE, compile_program
from kit import interpreter


def reference(plan, x, factors, grad_y):
    """Output and gradients by brute force: the equation itself and its derivatives, in double."""
    inputs, out = plan.equation.replace("...", "Z").split("->")
    words = inputs.split(",")
    sizes = plan.sizes
    names = list(plan.factor_edges)
    by_name = dict(zip([step.factor for step in plan.steps], factors, strict=True))
    operands = [
        x.reshape(len(x), *plan.x_shape),
        *(by_name[f].reshape(plan.factor_shapes[f]) for f in names),
    ]
    y = np.einsum(f"{inputs}->{out}", *operands, optimize=True)
    grad = grad_y.reshape(len(x), *(sizes[edge] for edge in plan.y_edges))
    grads = []
    for i, word in enumerate(words):
        others = [o for j, o in enumerate(operands) if j != i] + [grad]
        rest = ",".join([w for j, w in enumerate(words) if j != i] + [out])
        missing = "".join(c for c in word if c not in rest)
        assert not missing
        grads.append(np.einsum(f"{rest}->{word}", *others, optimize=True))
    by_name = dict(zip(names, grads[1:], strict=True))
    ordered = [by_name[step.factor].ravel() for step in plan.steps]
    return y.reshape(len(x), plan.d_out_padded), grads[0].reshape(x.shape), ordered


def numbers(plan, tokens, seed=0):
    rng = np.random.default_rng(seed)
    shapes = plan.factor_shapes
    x = rng.standard_normal((tokens, plan.d_in_padded))
    grad_y = rng.standard_normal((tokens, plan.d_out_padded))
    factors = []
    for step in plan.steps:
        shape = shapes[step.factor]
        factors.append(rng.standard_normal(shape) / np.sqrt(step.fan_in))
    return x, factors, grad_y


def check(plan, tokens, cache=None):
    x, factors, grad_y = numbers(plan, tokens)
    program = compile_program(plan, cache=cache)
    y, grad_x, grads = reference(plan, x, factors, grad_y)
    flat = [f.ravel() for f in factors]
    np.testing.assert_allclose(interpreter.run(program, tokens, x, flat), y, atol=1e-9)
    got_x, got = interpreter.run(program, tokens, x, flat, grad_y)
    np.testing.assert_allclose(got_x, grad_x, atol=1e-9)
    for a, b in zip(got, grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.no_cover
@settings(max_examples=150)
@given(
    structures(),
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(1, 3),
    st.sampled_from([SMALL, LARGE]),
)
def test_flat_programs_are_the_equation_and_its_derivatives(s, d_in, d_out, tokens, cache):
    check(make_plan(s, d_in, d_out), tokens, cache)


@pytest.mark.parametrize("name", STRUCTURES)
def test_flat_programs_of_named_structures(name):
    check(make_plan(STRUCTURES[name], 64, 48), 2)


@given(structures(), st.integers(1, 64))
def test_rows_never_fall_into_one_cache_set(s, width):
    assert all(row // LINE % 2 == 1 for row in compile_program(make_plan(s, width, width)).rows)


def test_a_flat_program_can_be_read():
    text = str(compile_program(make_plan(STRUCTURES["btt(rank=2)"], 64, 64)))
    assert "y[tokens by row, 8] = sum of 16" in text
    assert "transposed A" in text


def test_the_cache_of_this_machine_is_plausible():
    cache = first_level()
    assert 4 * 1024 <= cache.size <= 2**20
    assert 1 <= cache.ways <= 64
    assert SMALL.is_large is False
    assert LARGE.is_large


def test_a_cache_is_read_as_linux_describes_it(tmp_path):
    described = [
        ("1", "Instruction", "64K", "16"),
        ("1", "Data", "48K", "12"),
        ("2", "Unified", "2048K", "16"),
    ]
    assert first_level(tmp_path / "nothing") == SMALL
    for number, values in enumerate(described):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        names = ("level", "type", "size", "ways_of_associativity")
        for name, value in zip(names, values, strict=True):
            (folder / name).write_text(value + "\n")
    assert first_level(tmp_path) == LARGE
    (tmp_path / "index1" / "size").write_text("unknown")
    first_level.cache_clear()
    assert first_level(tmp_path) == SMALL


def test_the_most_rows_only_where_they_fit():
    plan = make_plan(STRUCTURES["btt(rank=2)"], 1024, 1024)
    most = {}
    for cache in (SMALL, LARGE):
        program = compile_program(plan, None, cache)
        products = [op for op in program.section("backward") if op[OpField.KIND] == OpKind.MULTIPLY]
        most[cache] = {op[MultiplyField.MOST_ROWS] for op in products}
    assert most[SMALL] == {8}
    assert 12 in most[LARGE]
