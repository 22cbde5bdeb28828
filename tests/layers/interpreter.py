"""Flat programs run by numpy, one loop index at a time: the oracle of the compiled engine."""

from math import prod

import numpy as np

from einlinear.layers import flat


def run(program, tokens, x, factors, grad_y=None):
    """y, or (grad_x, gradients of factors), of padded rows; in double, factors as flat arrays."""
    count = program.header["steps"]
    rows = program.rows
    buffers = [np.full(tokens * row, np.nan) for row in rows]
    strides = list(rows)
    buffers[flat.X], strides[flat.X] = x.ravel(), x.shape[1]
    sizes = program.numbers[len(flat.HEADER) + len(rows) :]
    assert list(sizes[:count]) == [f.size for f in factors]
    turned = [np.full(size, np.nan) for size in sizes[count : 2 * count]]
    sums = [np.zeros(f.size) for f in factors]
    buffers += [f.ravel() for f in factors] + turned + sums
    if grad_y is None:
        operations = program.section("forward")
    else:
        buffers[flat.GY], strides[flat.GY] = grad_y.ravel(), grad_y.shape[1]
        operations = [*program.section("turns"), *program.section("backward")]
    for op in operations:
        execute(op, tokens, buffers, strides)
    if grad_y is None:
        return rows_of(buffers[flat.Y], tokens, rows[flat.Y], program.header["d_out_padded"])
    out = [np.full(f.size, np.nan) for f in factors]
    first = len(rows)
    buffers[first : first + count] = out  # a collect writes where the factor is
    for op in program.section("collects"):
        execute(op, tokens, buffers, strides)
    width = program.header["d_in_padded"]
    return rows_of(buffers[flat.GX], tokens, rows[flat.GX], width), out


def rows_of(buffer, tokens, row, width):
    return buffer.reshape(tokens, row)[:, :width]


def view(buffer, at, shape, strides):
    last = at + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert last < buffer.size or 0 in shape
    steps = [s * buffer.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(buffer[at:], shape, steps)


def execute(op, tokens, buffers, strides):
    if op[0] == flat.COPY:
        _, role, _, to, source, *dims = op
        sizes, to_strides, from_strides = dims[::3], dims[1::3], dims[2::3]
        times = tokens if role == flat.PACK else 1
        for t in range(times):
            starts = [t * strides[to], t * strides[source]] if role == flat.PACK else [0, 0]
            target = view(buffers[to], starts[0], sizes, to_strides)
            target[...] = view(buffers[source], starts[1], sizes, from_strides)
        return
    _, role, _, c, s, w, m, n, k, c_i, s_i, s_k, w_k, _, _, _, _, *loops = op
    if m == flat.TOKENS_EXTENT:
        m, c_i, s_i = tokens, strides[c], strides[s]
    if k == flat.TOKENS_EXTENT:
        k, s_k, w_k = tokens, strides[s], strides[w]
    sizes = loops[::4]
    for index in np.ndindex(*sizes) if prod(sizes) else ():
        at = [sum(i * d for i, d in zip(index, loops[j::4], strict=True)) for j in (1, 2, 3)]
        left = view(buffers[s], at[1], (m, k), (s_i, s_k))
        right = view(buffers[w], at[2], (k, n), (w_k, 1))
        out = view(buffers[c], at[0], (m, n), (c_i, 1))
        out[...] = left @ right + (out if role == flat.WEIGHT_GRADIENT else 0)
