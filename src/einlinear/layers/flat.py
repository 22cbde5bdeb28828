"""Program -> whole numbers: what the compiled engine runs, and how to read it.

A flat program is a list of integers: a header, the widths of its buffers, and four lists of
operations. An operation is one matrix multiply in a nest of loops, or one copy:

    C[i, n] (+)= sum over k of S[i, k] * W[k, n]       n has stride 1 in C and in W

    length MULTIPLY role step  C S W  rows n k  c_i s_i s_k w_k
           group k_block n_block gather  loops...
    length COPY role step  to from  dims...

Loops are quadruples (size, strides in C, S, W), outermost first; dims are triples (size, stride
to, stride from). An extent of TOKENS_EXTENT is the number of tokens at hand, with the buffers' row
lengths for strides. Buffers are numbered: x, y, gy, gx, other rows; then per step the factor, the
factor turned for the input gradient, and the factor's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from einlinear.layers.program import TOKENS, Buffer, Product, make_program
from einlinear.structures.plan import Plan

VERSION = 3
MULTIPLY, COPY = 1, 2
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, PACK, TURN, COLLECT = range(6)
TOKENS_EXTENT = -1
HEADER = (
    "version",
    "d_in",
    "d_out",
    "d_in_padded",
    "d_out_padded",
    "macs",
    "steps",
    "block",
    "chunk",
    "scratch",
    "row_buffers",
    "forward_at",
    "backward_at",
    "turns_at",
    "collects_at",
)
X, Y, GY, GX, INNER = range(5)
OP_ROWS, OP_K, OP_GROUP, OP_GATHER = 6, 8, 13, 16  # places in a multiply

LINE = 16  # numbers in a cache line

# Measured: how many numbers of each kind stay in cache together.
_K_BLOCK = 256  # terms of a sum before the next rows have their turn
_SCATTERED_K_BLOCK = 64  # the same, where every term lies in a cache line of its own
_W_BLOCK = 32 * 1024  # numbers of W that all rows use before the next
_GROUP_W = 16 * 1024  # numbers of W in a group of loop indices
_GATHER_N = 48  # uses of a number of S that pay for gathering it
_MANY_WEIGHTS = 2**20  # weights beyond this stream in for every block: let it have more tokens


def tokens_at_a_time(plan: Plan) -> tuple[int, int]:
    """How many tokens the forward and the backward pass take through all steps at a time."""
    if plan.params > _MANY_WEIGHTS:
        return 96, 96
    width = plan.d_in_padded + plan.d_out_padded + 2 * plan.inner_width
    if 4 * plan.inner_width <= plan.d_in_padded:
        return 96, 64
    return 24, min(64, max(24, 196608 // width))


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """A flat program with the names of its buffers."""

    plan: Plan
    numbers: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def header(self) -> dict[str, int]:
        """The numbers at the start, by name."""
        return dict(zip(HEADER, self.numbers, strict=False))

    @property
    def rows(self) -> tuple[int, ...]:
        """The row length of every row buffer, padding included."""
        start = len(HEADER)
        return self.numbers[start : start + self.header["row_buffers"]]

    def section(self, name: str) -> list[tuple[int, ...]]:
        """The operations of "forward", "backward", "turns" or "collects", without the lengths."""
        at = self.header[f"{name}_at"]
        count, at = self.numbers[at], at + 1
        found = []
        for _ in range(count):
            length = self.numbers[at]
            found.append(self.numbers[at + 1 : at + length])
            at += length
        return found

    def __str__(self) -> str:
        lines = [f"{self.plan.text} {self.plan.d_in} -> {self.plan.d_out}"]
        for name in ("forward", "turns", "backward", "collects"):
            lines += [name, *(f"  {self._line(op)}" for op in self.section(name))]
        return "\n".join(lines)

    def _line(self, op: tuple[int, ...]) -> str:
        if op[0] == COPY:
            _, _, _, to, source, *dims = op
            text = "".join(
                f"for {n} (to {a}, from {b}): " for n, a, b in zip(*[iter(dims)] * 3, strict=True)
            )
            return f"{text}{self.names[to]} = {self.names[source]}"
        _, _, _, c, s, w, rows, n, k, c_i, s_i, s_k, w_k, group, _, _, gather, *loops = op
        text = "".join(
            f"for {size} (+{a}, +{b}, +{d}): "
            for size, a, b, d in zip(*[iter(loops)] * 4, strict=True)
        )
        i, terms = ("tokens" if extent == TOKENS_EXTENT else str(extent) for extent in (rows, k))
        grouped = f" by {group}{' gathered' if gather else ''}" if group > 1 else ""
        left = f"{self.names[s]}[by {s_i or 'row'}, by {s_k or 'row'}]"
        right = f"{self.names[w]}[by {w_k or 'row'}]"
        out = f"{self.names[c]}[{i} by {c_i or 'row'}, {n}]"
        return f"{text}{out} = sum of {terms}{grouped}: {left} * {right}"


@dataclass(frozen=True, slots=True)
class _Padded(Buffer):
    """Weights whose innermost `row` numbers are followed by a cache line of nothing.

    Rows that lie a multiple of 512 bytes apart would share a few cache sets.
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


class _Numbering:
    """The number of every buffer, given out as buffers are met."""

    def __init__(self, steps: int):
        self.names = ["x", "y", "gy", "gx"]
        self.widths: list[int] = []
        self.steps = steps
        self.weights: dict[str, int] = {}

    def add_rows(self, buffer: Buffer) -> None:
        if buffer.name not in self.names:
            self.names.append(buffer.name)
            self.widths.append(buffer.width)

    def __call__(self, buffer: Buffer) -> int:
        if buffer.tokens != "none":
            return self.names.index(buffer.name)
        return len(self.names) + self.weights[buffer.name]


@lru_cache(maxsize=4096)
def compile_program(plan: Plan, tokens: tuple[int, int] | None = None) -> FlatProgram:
    """The flat program of a plan; `tokens` overrides how many are taken at a time."""
    program = make_program(plan, "outer")
    count = len(plan.steps)
    number = _Numbering(count)
    for product in (*program.forward[:-1], *program.input_gradients[1:]):
        number.add_rows(product.out)
    for pack in program.packs:
        if pack:
            number.add_rows(pack[0])
    for i, step in enumerate(plan.steps):
        number.weights |= {step.factor: i, f"turned {step.factor}": count + i}
        number.weights[f"g{step.factor}"] = 2 * count + i

    forward = [_multiply(number, p, FORWARD, i) for i, p in enumerate(program.forward)]
    backward = forward[:-1]
    turns, collects = [], []
    turned_sizes = [0] * count
    for i, step in reversed(list(enumerate(plan.steps))):
        factor, pack = program.forward[i].right, program.packs[i]
        if pack:
            backward.append(_copy(number, *pack, PACK, i))
        weights = program.weight_gradients[i]
        backward.append(_multiply(number, weights, WEIGHT_GRADIENT, i))
        collects.append(_copy(number, factor, weights.out, COLLECT, i))
        inputs = program.input_gradients[i]
        shape = inputs.right.edges, inputs.right.sizes, "none"
        turned = _Padded(f"turned {factor.name}", *shape, step.fan_in)
        turned_sizes[i] = turned.width
        turns.append(_copy(number, turned, factor, TURN, i))
        backward.append(_multiply(number, replace(inputs, right=turned), INPUT_GRADIENT, i))

    widths = [plan.d_in_padded, plan.d_out_padded, plan.d_out_padded, plan.d_in_padded]
    rows = [_row(width) for width in (*widths, *number.widths)]
    sizes = [product.right.width for product in program.forward]
    body: list[int] = []
    places = []
    start = len(HEADER) + len(rows) + 2 * len(sizes)
    for operations in (forward, backward, turns, collects):
        places.append(start + len(body))
        body.append(len(operations))
        for op in operations:
            body += [len(op) + 1, *op]
    header = [VERSION, plan.d_in, plan.d_out, plan.d_in_padded, plan.d_out_padded, plan.macs, count]
    scratch = max([_scratch(op) for op in (*forward, *backward)])
    header += [*(tokens or tokens_at_a_time(plan)), scratch, len(rows), *places]
    factors = [step.factor for step in plan.steps]
    names = [
        *number.names,
        *factors,
        *(f"turned {f}" for f in factors),
        *(f"g{f}" for f in factors),
    ]
    return FlatProgram(plan, (*header, *rows, *sizes, *turned_sizes, *body), tuple(names))


def _scratch(op: list[int]) -> int:
    """How many numbers per token are gathered at a time."""
    if op[0] == COPY or not op[OP_GATHER]:
        return 0
    return op[OP_GROUP] * (op[OP_K] if op[OP_ROWS] == TOKENS_EXTENT else op[OP_ROWS])


def _row(width: int) -> int:
    """A row length that is an odd number of cache lines: rows do not fall into one cache set."""
    return (-(-width // LINE) | 1) * LINE


def _multiply(number: _Numbering, product: Product, role: int, step: int) -> list[int]:
    buffers = (product.out, product.left, product.right)
    sizes: dict[str, int] = {TOKENS: TOKENS_EXTENT}
    for buffer in buffers:
        sizes |= dict(zip(buffer.edges, buffer.sizes, strict=True))

    def extent(group: tuple[str, ...]) -> int:
        return TOKENS_EXTENT if group == (TOKENS,) else prod(sizes[edge] for edge in group)

    def stride(group: tuple[str, ...], buffer: Buffer) -> int:
        """Of a token 0, which stands for the buffer's row length at run time."""
        return buffer.stride(group[-1], 1, 0) if group else 1

    out, left, right = buffers
    loops = [(extent(g), *(stride(g, buffer) for buffer in buffers)) for g in product.loops]
    # Innermost the loop whose indices share cache lines of S.
    near = min((loop[2] for loop in loops if loop[2]), default=LINE)
    loops.sort(key=lambda loop: loop[2] == near)
    s_i, s_k = stride(product.m, left), stride(product.k, left)
    m, n, k = extent(product.m), extent(product.n), extent(product.k)
    length, apart = (k, s_k) if m == TOKENS_EXTENT else (m, s_i)  # of S for one token
    gather = near == 1 < apart and min(loops[-1][0], length) >= 8 and n >= _GATHER_N
    if gather:
        group = 8 if k == TOKENS_EXTENT and length * n >= 4096 else LINE
    elif near < LINE and s_k != 1:
        group = LINE // near
    else:
        group = max(1, _GROUP_W // (n * max(k, 32)))
    k_block = _SCATTERED_K_BLOCK if s_k >= LINE and not gather else _K_BLOCK
    n_block = max(32, _W_BLOCK // min(k_block, k if k > 0 else 64) // 32 * 32)
    places = [number(buffer) for buffer in buffers]
    strides = [stride(product.m, out), s_i, s_k, stride(product.k, right)]
    blocks = [group, k_block, n_block, int(gather)]
    flat = [value for loop in loops for value in loop]
    return [MULTIPLY, role, step, *places, m, n, k, *strides, *blocks, *flat]


def _copy(number: _Numbering, to: Buffer, source: Buffer, role: int, step: int) -> list[int]:
    """A copy with its edges rearranged; last the two along which the one or the other is dense."""
    sizes = dict(zip(to.edges, to.sizes, strict=True))
    dims: list[list[int]] = []
    for edge in to.edges:
        dim = [sizes[edge], to.stride(edge, 1, 0), source.stride(edge, 1, 0)]
        if dims and dims[-1][1] == dim[0] * dim[1] and dims[-1][2] == dim[0] * dim[2]:
            dims[-1] = [dims[-1][0] * dim[0], dim[1], dim[2]]  # they follow each other in both
        else:
            dims.append(dim)
    dims = [dim for dim in dims if dim[0] > 1] or [[1, 1, 1]]
    densest_to, densest_from = (min(dim[i] for dim in dims) for i in (1, 2))
    dims.sort(key=lambda dim: (dim[1] == densest_to, dim[2] == densest_from))
    if len(dims) == 1:
        dims.insert(0, [1, 0, 0])
    return [COPY, role, step, number(to), number(source), *(x for dim in dims for x in dim)]
