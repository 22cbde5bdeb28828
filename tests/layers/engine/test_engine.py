import os
import subprocess
import sys
import threading
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases import STRUCTURES, structures
from einlinear import make_plan
from einlinear.errors import EinlinearError
from einlinear.layers.engine import binding
from einlinear.layers.engine.cache import LARGE, SMALL
from einlinear.layers.engine.flat import compile_program
from layers.engine.test_flat import reference

pytestmark = pytest.mark.skipif(not binding.is_available(), reason=binding.status())

TARGETS = binding.supported_targets() if binding.is_available() else ()
TOKENS = [0, 1, 2, 5, 7, 8, 13, 64, 100]
TOL = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 2e-2}
EXAMPLES = 50  # random structures per target and dtype
MANY = int(os.environ.get("EINLINEAR_RANDOM_STRUCTURES", "4500"))  # the same in the slow test
LARGEST = 10**7  # products that the oracle adds up for a random structure
GUARD = 7.5  # exact in every dtype
CACHES = (SMALL, LARGE)


@pytest.fixture(params=TARGETS)
def target(request):
    binding.set_target(request.param)
    yield request.param
    binding.set_target()


def to_bfloat16(values):
    """To nearest, ties to even, as whole numbers of 16 bits; kept apart from the engine's way."""
    exact = np.asarray(values, np.float32)
    bits = exact.view(np.uint32)
    low = bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & ((bits >> 16) & 1 == 1))
    return ((bits >> 16) + up).astype(np.uint16)


def encode(values, dtype):
    return to_bfloat16(values) if dtype == "bfloat16" else np.asarray(values, dtype)


def decode(values, dtype):
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


class Rows:
    """Rows of some width at some distance, with guard values around every one of them."""

    def __init__(self, tokens, width, dtype, values=None, gap=3):
        self.row, self.shape, self.dtype = width + gap, (tokens, width), dtype
        self.data = encode(np.full((tokens + 2) * self.row, GUARD), dtype)
        self.itemsize = self.data.itemsize
        if values is not None:
            self.inside[...] = encode(values, dtype)

    @property
    def inside(self):
        rows = self.data.reshape(-1, self.row)
        return rows[1 : 1 + self.shape[0], : self.shape[1]]

    @property
    def address(self):
        return self.data.ctypes.data + self.row * self.itemsize

    def values(self):
        """What is inside; guards are checked."""
        found = decode(self.inside.copy(), self.dtype)
        rows = decode(self.data, self.dtype).reshape(-1, self.row).copy()
        rows[1 : 1 + self.shape[0], : self.shape[1]] = GUARD
        assert (rows == GUARD).all(), "something outside the rows was written"
        return found


class Case:
    """Random arrays of a plan in a dtype, and the exact results for them."""

    def __init__(self, plan, tokens, dtype="float32", seed=0, gap=3):
        rng = np.random.default_rng(seed)
        self.plan, self.tokens, self.dtype, self.gap = plan, tokens, dtype, gap
        self.x = Rows(tokens, plan.d_in, dtype, rng.standard_normal((tokens, plan.d_in)), gap)
        self.grad_y = Rows(
            tokens, plan.d_out, dtype, rng.standard_normal((tokens, plan.d_out)), gap
        )
        shapes = plan.factor_shapes
        self.factors = [
            encode(rng.standard_normal(shapes[s.factor]) / np.sqrt(s.fan_in), dtype)
            for s in plan.steps
        ]
        self.bias = encode(rng.standard_normal(plan.d_out), dtype)

    def exact(self, number=lambda value: value):
        """Output and gradients in double; with ``np.abs``, the sizes that errors relate to."""
        plan = self.plan
        pad_in, pad_out = plan.d_in_padded - plan.d_in, plan.d_out_padded - plan.d_out
        x = number(np.pad(self.x.values(), ((0, 0), (0, pad_in))))
        grad_y = number(np.pad(self.grad_y.values(), ((0, 0), (0, pad_out))))
        factors = [number(decode(f, self.dtype)) for f in self.factors]
        y, grad_x, grads = reference(plan, x, factors, grad_y)
        return y[:, : plan.d_out], grad_x[:, : plan.d_in], grads

    def forward(self, bias=False, threads=1, tokens=None, **options):
        first, last = tokens or (0, self.tokens)
        y = Rows(last - first, self.plan.d_out, self.dtype, gap=self.gap)
        scales = binding.call_forward(
            self.plan,
            self.dtype,
            last - first,
            self.x.address + first * self.x.row * self.x.itemsize,
            self.x.row,
            [f.ctypes.data for f in self.factors],
            self.bias.ctypes.data if bias else 0,
            y.address,
            y.row,
            threads=threads,
            **options,
        )
        return (y.values(), scales) if options else y.values()

    def backward(self, threads=1, wanted=None):
        plan = self.plan
        wanted = wanted or [True] * (2 + len(plan.steps))
        grad_x = Rows(self.tokens, plan.d_in, self.dtype, gap=self.gap)
        grads = [Rows(1, f.size, self.dtype) for f in self.factors]
        grad_bias = Rows(1, plan.d_out, self.dtype)
        binding.call_backward(
            plan,
            self.dtype,
            self.tokens,
            self.x.address,
            self.x.row,
            [f.ctypes.data for f in self.factors],
            self.grad_y.address,
            self.grad_y.row,
            grad_x.address if wanted[0] else 0,
            grad_x.row,
            [g.address if w else 0 for g, w in zip(grads, wanted[2:], strict=True)],
            grad_bias.address if wanted[1] else 0,
            threads=threads,
        )
        return grad_x.values(), grad_bias.values()[0], [g.values()[0] for g in grads]


def assert_close(found, exact, size, dtype):
    """Each number is off by a fraction of the sum of its terms' sizes, however they cancel."""
    assert np.shape(found) == np.shape(exact) == np.shape(size)
    excess = np.abs(found - exact) - TOL[dtype] * size
    assert np.max(excess, initial=-1.0) <= 1e-30, (found, exact, size)


def check(case, threads=1):
    y, grad_x, grads = case.exact()
    size_y, size_x, sizes = case.exact(np.abs)
    dtype = case.dtype
    bias = decode(case.bias, dtype)
    size_biased = size_y + np.abs(bias)
    assert_close(case.forward(threads=threads), y, size_y, dtype)
    assert_close(case.forward(bias=True, threads=threads), y + bias, size_biased, dtype)
    got_x, got_bias, got = case.backward(threads=threads)
    assert_close(got_x, grad_x, size_x, dtype)
    grad_y = case.grad_y.values()
    assert_close(got_bias, grad_y.sum(0), np.abs(grad_y).sum(0), dtype)
    for found, exact, size in zip(got, grads, sizes, strict=True):
        assert_close(found, exact.ravel(), size.ravel(), dtype)
    stds = [(0.5, 20.0)[i % 2] / np.sqrt(step.fan_in) for i, step in enumerate(case.plan.steps)]
    rms = [np.sqrt(np.mean(np.square(decode(f, dtype)))) for f in case.factors]
    scale = np.prod([min(1.0, std / one) for std, one in zip(stds, rms, strict=True)])
    normalised, _ = case.forward(bias=True, threads=threads, stds=stds)
    assert_close(normalised, y * scale + bias, size_y * scale + np.abs(bias), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_named_structures(name, dtype, target):
    for (d_in, d_out), tokens in zip([(64, 64), (96, 60), (13, 31)], [13, 7, 64], strict=True):
        check(Case(make_plan(STRUCTURES[name], d_in, d_out), tokens, dtype))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ["btt(rank=2)", "kronecker(num_factors=3)", "low_rank"])
def test_token_counts(name, tokens, target):
    for threads in (1, 2, 3):
        check(Case(make_plan(STRUCTURES[name], 96, 112), tokens), threads)


@pytest.mark.no_cover
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "d_in", "d_out"),
    [
        (name, *widths)
        for name in ("btt(rank=2)", "btt(rank_exponent=1/4)", "tensor_train(rank=3)")
        for widths in ((2500, 64), (64, 2500), (2401, 61))
    ],
)
def test_gathered_steps(name, d_in, d_out, dtype, target, monkeypatch):
    """Steps whose numbers are gathered first; random structures of small widths have few."""
    plan = make_plan(STRUCTURES[name], d_in, d_out)
    assert compile_program(plan, cache=SMALL).header["scratch"] > 0
    monkeypatch.setitem(binding._prepared, id(plan), binding._Prepared(plan, cache=SMALL))
    for tokens, threads in ((1, 1), (13, 1), (70, 2)):
        check(Case(plan, tokens, dtype), threads)


# 1 to 4 factors, any widths, rows apart, few or many threads.
random_cases = given(
    structures(),
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from(TOKENS[1:]),
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from(CACHES),
)


def check_random(target_name, dtype, s, d_in, d_out, tokens, gap, threads, cache):
    plan = make_plan(s, d_in, d_out)
    assume(tokens * prod(plan.sizes.values()) <= LARGEST)
    binding.set_target(target_name)
    binding._prepared[id(plan)] = binding._Prepared(plan, cache=cache)
    try:
        check(Case(plan, tokens, dtype, gap=gap), threads)
    finally:
        binding.set_target()
        del binding._prepared[id(plan)]


@pytest.mark.no_cover
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("target_name", TARGETS)
@settings(max_examples=EXAMPLES)
@random_cases
def test_random_structures(target_name, dtype, s, d_in, d_out, tokens, gap, threads, cache):
    check_random(target_name, dtype, s, d_in, d_out, tokens, gap, threads, cache)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("target_name", TARGETS)
@settings(max_examples=MANY)
@random_cases
def test_many_random_structures(target_name, dtype, s, d_in, d_out, tokens, gap, threads, cache):
    check_random(target_name, dtype, s, d_in, d_out, tokens, gap, threads, cache)


def bits(values):
    return np.ascontiguousarray(values).view(np.uint64)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "d_in", "d_out"),
    [("btt(rank=2)", 256, 256), ("generic", 97, 101), ("btt(num_factors=3)", 216, 343)],
)
def test_forward_does_not_depend_on_threads_or_company(name, d_in, d_out, dtype, target):
    """Bit for bit: all tokens at once, on 1, 2 or 3 threads, or one at a time."""
    case = Case(make_plan(STRUCTURES[name], d_in, d_out), 131, dtype)
    together = case.forward(bias=True)
    for threads in (2, 3):
        assert (bits(case.forward(bias=True, threads=threads)) == bits(together)).all()
    alone = [case.forward(bias=True, tokens=(t, t + 1)) for t in range(case.tokens)]
    assert (bits(np.concatenate(alone)) == bits(together)).all()


def test_block_sizes_and_caches_change_nothing(monkeypatch):
    plan = make_plan(STRUCTURES["btt(rank=2)"], 256, 192)
    case = Case(plan, 100)
    expected = case.forward()
    for tokens, cache in product(((1, 1), (5, 7), (12, 24), (100, 100)), CACHES):
        monkeypatch.setitem(binding._prepared, id(plan), binding._Prepared(plan, tokens, cache))
        assert (bits(case.forward()) == bits(expected)).all()
        check(case, threads=2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["btt(rank=2)", "generic", "dense"])
def test_normalisation_is_folded_in(name, dtype, target):
    plan = make_plan(STRUCTURES[name], 97, 128)
    case = Case(plan, 9, dtype)
    stds = [0.5 * np.sqrt(np.mean(np.square(decode(f, dtype)))) for f in case.factors]
    stds[-1] *= 100  # this one is small enough as it is
    y, scales = case.forward(bias=True, stds=stds)
    expected = [0.5] * (len(stds) - 1) + [1.0]
    np.testing.assert_allclose(scales, expected, rtol=1e-6)
    bias = decode(case.bias, dtype)
    size = case.exact(np.abs)[0] * np.prod(expected) + np.abs(bias)
    assert_close(y, case.exact()[0] * np.prod(expected) + bias, size, dtype)
    again, same = case.forward(bias=True, scales=scales)
    assert same == scales
    assert (bits(again) == bits(y)).all()


def test_scales_do_not_depend_on_threads():
    case = Case(make_plan(STRUCTURES["btt(rank=2)"], 1024, 1024), 64)
    stds = [0.01] * len(case.factors)
    y, scales = case.forward(stds=stds)
    again, same = case.forward(stds=stds, threads=3)
    assert scales == same
    assert (bits(y) == bits(again)).all()
    assert max(scales) < 1


def test_only_what_is_wanted_is_written(target):
    plan = make_plan(STRUCTURES["btt(num_factors=3)"], 100, 90)
    case = Case(plan, 30)
    full = case.backward()
    for wanted in ([1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0] * 5):
        grad_x, grad_bias, grads = case.backward(wanted=wanted)
        pairs = zip([grad_x, grad_bias, *grads], [full[0], full[1], *full[2]], wanted, strict=True)
        for found, exact, is_wanted in pairs:
            if is_wanted:
                np.testing.assert_array_equal(found, exact)
            else:
                assert (found == GUARD).all()


def test_no_tokens_give_zero_gradients():
    case = Case(make_plan(STRUCTURES["btt(rank=2)"], 64, 64), 0)
    _, grad_bias, grads = case.backward()
    assert not grad_bias.any()
    assert not any(g.any() for g in grads)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan(target):
    plan = make_plan(STRUCTURES["dense"], 1, 1)
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.standard_normal(500), [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38]])
    case = Case(plan, len(values), "bfloat16")
    case.x.inside[:, 0] = to_bfloat16(values)
    case.x.inside[502, 0] = 0x7FC0
    case.factors[0][...] = to_bfloat16([[1.0078125]])  # 1 + 2**-7: products need rounding
    product = decode(case.x.inside[:, 0], "bfloat16") * 1.0078125
    with np.errstate(over="ignore"):
        expected = decode(to_bfloat16(product.astype(np.float32)), "bfloat16")
    found = case.forward()[:, 0]
    assert np.isnan(found[502])
    np.testing.assert_array_equal(np.delete(found, 502), np.delete(expected, 502))


def test_the_check_fails_where_a_factor_differs():
    case = Case(make_plan(STRUCTURES["btt(rank=2)"], 64, 64), 5)
    y, size = case.exact()[0], case.exact(np.abs)[0]
    case.factors[1].ravel()[3] += 0.5
    with pytest.raises(AssertionError):
        assert_close(case.forward(), y, size, "float32")


def test_the_guard_is_noticed():
    rows = Rows(2, 4, "float32")
    rows.data[4 + 2] = 0
    with pytest.raises(AssertionError, match="outside"):
        rows.values()


def test_several_python_threads_at_once():
    cases = [
        Case(make_plan(STRUCTURES[name], 128, 160), 200, seed=i)
        for i, name in enumerate(["btt(rank=2)", "kronecker", "btt(num_factors=3)", "low_rank"])
    ]
    expected = [(case.forward(threads=2), case.backward(threads=2)[2]) for case in cases]
    failures = []

    def work(i):
        for _ in range(20):
            y, grads = cases[i].forward(threads=2), cases[i].backward(threads=2)[2]
            same = (y == expected[i][0]).all()
            same = same and all((a == b).all() for a, b in zip(grads, expected[i][1], strict=True))
            if not same:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


CHILD = """
import os, sys
sys.path[:0] = {path!r}
{before}
from layers.engine.test_engine import Case
from cases import STRUCTURES
from einlinear import make_plan
from einlinear.layers.engine import binding
case = Case(make_plan(STRUCTURES["btt(rank=2)"], 256, 256), 300)
expected, grads = case.forward(threads=2), case.backward(threads=2)[2]
if {pool!r} not in binding.status():
    sys.exit(77)
child = os.fork()
y, again = case.forward(threads=2), case.backward(threads=2)[2]
same = (y == expected).all() and all((a == b).all() for a, b in zip(grads, again))
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
assert same and status == 0, status
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("before", "pool"), [("", "its own threads"), ("import torch", "torch's thread pool")]
)
def test_after_a_fork(before, pool):
    """In a fresh process, where libgomp is there with torch only."""
    code = CHILD.format(path=[p for p in sys.path if p], before=before, pool=pool)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 77 and before:
        pytest.skip("torch is here without libgomp")
    assert done.returncode == 0, done.stderr


def test_bad_calls_are_refused():
    plan = make_plan(STRUCTURES["btt(rank=2)"], 64, 64)
    case = Case(plan, 2)
    at = [f.ctypes.data for f in case.factors]
    good = (plan, "float32", 2, case.x.address, case.x.row, at, 0, case.x.address, case.x.row)
    for place, value in [
        (0, "plan"),
        (1, "float16"),
        (2, 1.5),
        (3, None),
        (5, at[:1]),
        (5, at * 2),
    ]:
        bad = list(good)
        bad[place] = value
        with pytest.raises(EinlinearError):
            binding.call_forward(*bad)
    with pytest.raises(EinlinearError, match="1 stds"):
        binding.call_forward(*good, stds=[1.0])
    with pytest.raises(EinlinearError, match="'mmx'"):
        binding.set_target("mmx")
