"""Flat programs run by numpy, one loop index at a time: the oracle of the compiled engine."""

import numpy as np

from einlinear.layers.engine.abi import (
    TOKENS_EXTENT,
    CopyField,
    OpField,
    OpKind,
    OpRole,
    ProgramHeader,
    RowBuffer,
)
from einlinear.layers.engine.flat import dims_of, loops_of


def run(program, tokens, x, factors, grad_y=None):
    """y, or (grad_x, gradients of factors), of padded rows; in double, factors as flat arrays."""
    count = program.header["steps"]
    rows = program.rows
    buffers = [np.full(tokens * row, np.nan) for row in rows]
    strides = list(rows)
    buffers[RowBuffer.X], strides[RowBuffer.X] = x.ravel(), x.shape[1]
    sizes = program.numbers[ProgramHeader.LENGTH + len(rows) :]
    assert list(sizes[:count]) == [f.size for f in factors]
    transposed = [np.full(size, np.nan) for size in sizes[count : 2 * count]]
    sums = [np.zeros(f.size) for f in factors]
    buffers += [f.ravel() for f in factors] + transposed + sums
    if grad_y is None:
        operations = program.section("forward")
    else:
        buffers[RowBuffer.GY], strides[RowBuffer.GY] = grad_y.ravel(), grad_y.shape[1]
        operations = [*program.section("transposes"), *program.section("backward")]
    for op in operations:
        execute(op, tokens, buffers, strides)
    if grad_y is None:
        return rows_of(
            buffers[RowBuffer.Y], tokens, rows[RowBuffer.Y], program.header["d_out_padded"]
        )
    out = [np.full(f.size, np.nan) for f in factors]
    first = len(rows)
    buffers[first : first + count] = out  # a collect writes where the factor is
    for op in program.section("collects"):
        execute(op, tokens, buffers, strides)
    width = program.header["d_in_padded"]
    return rows_of(buffers[RowBuffer.GX], tokens, rows[RowBuffer.GX], width), out


def rows_of(buffer, tokens, row, width):
    return buffer.reshape(tokens, row)[:, :width]


def view(buffer, at, shape, strides):
    last = at + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert last < buffer.size or 0 in shape
    steps = [s * buffer.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(buffer[at:], shape, steps)


def execute(op, tokens, buffers, strides):
    role = op[OpField.ROLE]
    if op[OpField.KIND] == OpKind.COPY:
        to, source = op[CopyField.TO], op[CopyField.FROM]
        sizes, to_strides, from_strides = zip(*dims_of(op), strict=True)
        times = tokens if role == OpRole.PACK else 1
        for t in range(times):
            starts = [t * strides[to], t * strides[source]] if role == OpRole.PACK else [0, 0]
            target = view(buffers[to], starts[0], sizes, to_strides)
            target[...] = view(buffers[source], starts[1], sizes, from_strides)
        return
    _, _, _, _, c, s, w, m, n, k, c_i, s_i, s_k, w_k, *_ = op
    if m == TOKENS_EXTENT:
        m, c_i, s_i = tokens, strides[c], strides[s]
    if k == TOKENS_EXTENT:
        k, s_k, w_k = tokens, strides[s], strides[w]
    loops = loops_of(op)
    for index in np.ndindex(*(loop[0] for loop in loops)):
        at = [sum(i * d[j] for i, d in zip(index, loops, strict=True)) for j in (1, 2, 3)]
        left = view(buffers[s], at[1], (m, k), (s_i, s_k))
        right = view(buffers[w], at[2], (k, n), (w_k, 1))
        out = view(buffers[c], at[0], (m, n), (c_i, 1))
        out[...] = left @ right + (out if role == OpRole.WEIGHT_GRADIENT else 0)
