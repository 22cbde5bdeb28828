"""Program -> integers: the form in which the compiled engine runs a program.

A flat program is a list of integers: a header, the row length of each row buffer, the size of each
factor and transposed factor, and four lists of operations. Each list starts with its length. An
operation is a matrix multiply in a nest of loops, or a copy; `abi` names its fields:

    C[i, n] (+)= sum over k of S[i, k] * W[k, n]       n has stride 1 in C and in W

    length MULTIPLY role step  C S W  rows n k  c_i s_i s_k w_k
           group k_block n_block gather  loops...
    length COPY role step  to from  dims...

Loops are (size, strides in C, S and W), outermost first; dims are (size, stride to, stride from).
An extent of TOKENS_EXTENT is the number of tokens in the buffers; its strides are the buffers' row
lengths. Buffers are numbered: x, y, gy, gx, other rows; then, one per step, the factors, the
factors transposed for the input gradient, and the gradients of the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from einlinear.layers.engine.abi import (
    DIM_LENGTH,
    LOOP_LENGTH,
    PROGRAM_VERSION,
    TOKENS_EXTENT,
    CopyField,
    MultiplyField,
    OpField,
    OpKind,
    OpRole,
    ProgramHeader,
)
from einlinear.layers.engine.cache import CacheShape, first_level
from einlinear.layers.engine.program import TOKENS, Buffer, Product, make_program
from einlinear.structures.plan import Plan

LINE = 16  # numbers in a cache line

# Measured: how many numbers of each kind fit in cache together.
_K_BLOCK = 256  # terms of a sum before the next rows
_SCATTERED_K_BLOCK = 64  # the same if every term is in another cache line
_SCATTERED_TOKENS = 36  # and of a weight gradient
_W_BLOCK = 32 * 1024  # numbers of W that all rows use before the next
_GROUP_W = 16 * 1024  # numbers of W in a group of loop indices
_MOST_ROWS, _FEWER_ROWS = 12, 8  # of a tile: those of C are often in one cache set
_MOST_SCATTERED = 48  # terms in cache lines of their own that fit for the most rows
_GATHER_N = 48  # uses of a number of S that pay for gathering it
_MANY_WEIGHTS = 2**18  # more weights than this are read again for every block: use larger blocks


def tokens_at_a_time(plan: Plan, cache: CacheShape) -> tuple[int, int]:
    """How many tokens at a time go through all steps, forward and backward."""
    is_narrow = 4 * plan.inner_width <= plan.d_in_padded
    if cache.is_large:
        if is_narrow:
            return 96, 48
        is_many = plan.params > _MANY_WEIGHTS
        if len(plan.steps) > 2 and not is_many:
            return 12, 24  # little arithmetic per number of an intermediate: keep these close
        return (96, 2 * _SCATTERED_TOKENS) if is_many else (36, _SCATTERED_TOKENS)
    if plan.params > 4 * _MANY_WEIGHTS:
        return 96, 96
    if is_narrow:
        return 96, 64
    width = plan.d_in_padded + plan.d_out_padded + 2 * plan.inner_width
    return 24, min(64, max(24, 196608 // width))


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """A flat program with the names of its buffers."""

    plan: Plan
    numbers: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def header(self) -> dict[str, int]:
        """The fields at the start, by name in lower case."""
        fields = [field for field in ProgramHeader if field != ProgramHeader.LENGTH]
        return {field.name.lower(): self.numbers[field] for field in fields}

    @property
    def rows(self) -> tuple[int, ...]:
        """The row length of every row buffer, padding included."""
        start = int(ProgramHeader.LENGTH)
        return self.numbers[start : start + self.header["row_buffers"]]

    def section(self, name: str) -> list[tuple[int, ...]]:
        """The operations of "forward", "backward", "transposes" or "collects"."""
        at = self.header[name]
        count, at = self.numbers[at], at + 1
        found = []
        for _ in range(count):
            length = self.numbers[at + OpField.LENGTH]
            found.append(self.numbers[at : at + length])
            at += length
        return found

    def __str__(self) -> str:
        lines = [f"{self.plan.text} {self.plan.d_in} -> {self.plan.d_out}"]
        for name in ("forward", "transposes", "backward", "collects"):
            lines += [name, *(f"  {self._line(op)}" for op in self.section(name))]
        return "\n".join(lines)

    def _line(self, op: tuple[int, ...]) -> str:
        if op[OpField.KIND] == OpKind.COPY:
            text = "".join(f"for {n} (to {a}, from {b}): " for n, a, b in dims_of(op))
            return f"{text}{self.names[op[CopyField.TO]]} = {self.names[op[CopyField.FROM]]}"
        _, _, _, _, c, s, w, rows, n, k, c_i, s_i, s_k, w_k, group, _, _, gather, _, *_ = op
        text = "".join(f"for {size} (+{a}, +{b}, +{d}): " for size, a, b, d in loops_of(op))
        i, terms = ("tokens" if extent == TOKENS_EXTENT else str(extent) for extent in (rows, k))
        grouped = f" by {group}{' gathered' if gather else ''}" if group > 1 else ""
        left = f"{self.names[s]}[by {s_i or 'row'}, by {s_k or 'row'}]"
        right = f"{self.names[w]}[by {w_k or 'row'}]"
        out = f"{self.names[c]}[{i} by {c_i or 'row'}, {n}]"
        return f"{text}{out} = sum of {terms}{grouped}: {left} * {right}"


def loops_of(op: Sequence[int]) -> list[tuple[int, ...]]:
    """The loops of a multiply: (size, strides in C, S and W)."""
    return _entries(op, MultiplyField.LOOPS, LOOP_LENGTH)


def dims_of(op: Sequence[int]) -> list[tuple[int, ...]]:
    """The dims of a copy: (size, stride to, stride from)."""
    return _entries(op, CopyField.DIMS, DIM_LENGTH)


def _entries(op: Sequence[int], start: int, length: int) -> list[tuple[int, ...]]:
    return [tuple(op[at : at + length]) for at in range(start, len(op), length)]


@dataclass(frozen=True, slots=True)
class _Padded(Buffer):
    """Weights whose innermost `row` numbers are followed by an unused cache line.

    Rows a multiple of 512 bytes apart would share a few cache sets.
    """

    row: int

    @property
    def padded_row(self) -> int:
        return self.row + (LINE if self.row % 128 == 0 else 0)

    @property
    def width(self) -> int:
        return prod(self.sizes) // self.row * self.padded_row

    def stride(self, edge: str, num_tokens: int, row: int) -> int:
        plain = Buffer.stride(self, edge, num_tokens, row)
        return plain if plain < self.row else plain // self.row * self.padded_row


@lru_cache(maxsize=4096)
def compile_program(
    plan: Plan, tokens: tuple[int, int] | None = None, cache: CacheShape | None = None
) -> FlatProgram:
    """The flat program of a plan.

    tokens: overrides `tokens_at_a_time`.
    cache: the first-level cache to run in; that of this machine if left out.
    """
    cache = cache or first_level()
    program = make_program(plan, "outer")
    count = len(plan.steps)
    outs = [product.out for product in (*program.forward[:-1], *program.input_gradients[1:])]
    outs += [pack[0] for pack in program.packs if pack]
    inner = {buffer.name: buffer.width for buffer in outs}
    factors = [step.factor for step in plan.steps]
    names = ["x", "y", "gy", "gx", *inner, *factors]
    names += [f"transposed {factor}" for factor in factors] + [f"g{factor}" for factor in factors]
    number = {name: i for i, name in enumerate(names)}

    forward = [
        _multiply(number, p, OpRole.FORWARD, i, cache) for i, p in enumerate(program.forward)
    ]
    backward = forward[:-1]
    transposes, collects = [], []
    transposed_sizes = [0] * count
    for i, step in reversed(list(enumerate(plan.steps))):
        factor, pack = program.forward[i].right, program.packs[i]
        if pack:
            backward.append(_copy(number, *pack, OpRole.PACK, i))
        weights = program.weight_gradients[i]
        backward.append(_multiply(number, weights, OpRole.WEIGHT_GRADIENT, i, cache))
        collects.append(_copy(number, factor, weights.out, OpRole.COLLECT, i))
        inputs = program.input_gradients[i]
        shape = inputs.right.edges, inputs.right.sizes, "none"
        transposed = _Padded(f"transposed {factor.name}", *shape, step.fan_in)
        transposed_sizes[i] = transposed.width
        transposes.append(_copy(number, transposed, factor, OpRole.TRANSPOSE, i))
        inputs = replace(inputs, right=transposed)
        backward.append(_multiply(number, inputs, OpRole.INPUT_GRADIENT, i, cache))

    widths = [plan.d_in_padded, plan.d_out_padded, plan.d_out_padded, plan.d_in_padded]
    rows = [_row(width) for width in (*widths, *inner.values())]
    sizes = [product.right.width for product in program.forward]
    body: list[int] = []
    places = []
    start = int(ProgramHeader.LENGTH) + len(rows) + 2 * len(sizes)
    for operations in (forward, backward, transposes, collects):
        places.append(start + len(body))
        body.append(len(operations))
        for op in operations:
            body += op
    header = [
        PROGRAM_VERSION,
        plan.d_in,
        plan.d_out,
        plan.d_in_padded,
        plan.d_out_padded,
        plan.macs,
        count,
    ]
    scratch = max([_scratch(op) for op in (*forward, *backward)])
    header += [
        *(tokens or tokens_at_a_time(plan, cache)),
        scratch,
        int(not cache.is_large),
        len(rows),
        *places,
    ]
    return FlatProgram(plan, (*header, *rows, *sizes, *transposed_sizes, *body), tuple(names))


def _scratch(op: list[int]) -> int:
    """How many numbers per token are gathered at a time."""
    if op[OpField.KIND] == OpKind.COPY or not op[MultiplyField.GATHER]:
        return 0
    rows = op[MultiplyField.ROWS]
    return op[MultiplyField.GROUP] * (op[MultiplyField.K] if rows == TOKENS_EXTENT else rows)


def _row(width: int) -> int:
    """A row length that is an odd number of cache lines, so that rows do not share a cache set."""
    return (-(-width // LINE) | 1) * LINE


def _multiply(
    number: dict[str, int], product: Product, role: int, step: int, cache: CacheShape
) -> list[int]:
    buffers = (product.out, product.left, product.right)
    sizes: dict[str, int] = {TOKENS: TOKENS_EXTENT}
    for buffer in buffers:
        sizes |= dict(zip(buffer.edges, buffer.sizes, strict=True))

    def extent(group: tuple[str, ...]) -> int:
        return TOKENS_EXTENT if group == (TOKENS,) else prod(sizes[edge] for edge in group)

    def stride(group: tuple[str, ...], buffer: Buffer) -> int:
        """The stride of a group in a buffer; 0 for tokens: the row length at run time."""
        return buffer.stride(group[-1], 1, 0) if group else 1

    out, left, right = buffers
    loops = [(extent(g), *(stride(g, buffer) for buffer in buffers)) for g in product.loops]
    # The loop whose indices share cache lines of S is innermost.
    near = min((loop[2] for loop in loops if loop[2]), default=LINE)
    loops.sort(key=lambda loop: loop[2] == near)
    s_i, s_k = stride(product.m, left), stride(product.k, left)
    m, n, k = extent(product.m), extent(product.n), extent(product.k)
    length, apart = (k, s_k) if m == TOKENS_EXTENT else (m, s_i)  # of S for one token
    is_long = min(loops[-1][0], length) >= 8 if loops else False
    gather = near == 1 < apart and is_long and n >= _GATHER_N and not cache.is_large
    if gather:
        group = 8 if k == TOKENS_EXTENT and length * n >= 4096 else LINE
    elif near < LINE and s_k != 1:
        group = LINE // near
    else:
        group = max(1, _GROUP_W // (n * max(k, 32)))
    is_scattered = not gather and apart >= LINE
    if is_scattered and k == TOKENS_EXTENT:
        k_block = _SCATTERED_TOKENS
    else:
        k_block = _SCATTERED_K_BLOCK if is_scattered else _K_BLOCK
    n_block = max(32, _W_BLOCK // min(k_block, k if k > 0 else 64) // 32 * 32)
    places = [number[buffer.name] for buffer in buffers]
    strides = [stride(product.m, out), s_i, s_k, stride(product.k, right)]
    terms = k_block if k == TOKENS_EXTENT else min(k, k_block)
    fits = cache.is_large and not (is_scattered and terms > _MOST_SCATTERED)
    blocks = [group, k_block, n_block, int(gather), _MOST_ROWS if fits else _FEWER_ROWS]
    flat = [value for loop in loops for value in loop]
    return _operation(OpKind.MULTIPLY, role, step, *places, m, n, k, *strides, *blocks, *flat)


def _copy(number: dict[str, int], to: Buffer, source: Buffer, role: int, step: int) -> list[int]:
    """A copy between two orders of edges; the last two dims are those along which each is dense."""
    sizes = dict(zip(to.edges, to.sizes, strict=True))
    dims: list[list[int]] = []
    for edge in to.edges:
        dim = [sizes[edge], to.stride(edge, 1, 0), source.stride(edge, 1, 0)]
        if dims and dims[-1][1] == dim[0] * dim[1] and dims[-1][2] == dim[0] * dim[2]:
            dims[-1] = [dims[-1][0] * dim[0], dim[1], dim[2]]  # adjacent in both
        else:
            dims.append(dim)
    dims = [dim for dim in dims if dim[0] > 1] or [[1, 1, 1]]
    densest_to, densest_from = (min(dim[i] for dim in dims) for i in (1, 2))
    dims.sort(key=lambda dim: (dim[1] == densest_to, dim[2] == densest_from))
    if len(dims) == 1:
        dims.insert(0, [1, 0, 0])
    flat = [value for dim in dims for value in dim]
    return _operation(OpKind.COPY, role, step, number[to.name], number[source.name], *flat)


def _operation(*fields: int) -> list[int]:
    return [len(fields) + 1, *map(int, fields)]
