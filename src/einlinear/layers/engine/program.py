"""Plan -> program: the matrix multiplies of a layer as buffers, loops and strides.

Every product of a structured layer (forward, input gradient, weight gradient) has the form

    C[loops, m, n] (+)= sum over k of  A[loops, m, k] * B[loops, k, n]

Buffers are never rearranged: permuting edges only changes strides. The input and the output store
tokens outermost, as rows of the layer's width. Intermediates depend on who runs the program:

- The portable path makes large multiplies, so intermediates store tokens innermost.
- The compiled engine takes a few tokens at a time, so intermediates store tokens outermost too, and
  n has stride 1 in the result and in the right operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TypeVar

from einlinear.structures.plan import Plan, Step

TOKENS = "t"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of a program: its edges, outermost first, and the place of its token axis.

    tokens: "outer" if each token is a row, "inner" if tokens are the innermost axis, "none" for
        weights.
    """

    name: str
    edges: tuple[str, ...]
    sizes: tuple[int, ...]
    tokens: str

    @property
    def width(self) -> int:
        """How many numbers it holds for one token, or in all for weights."""
        return prod(self.sizes)

    def stride(self, edge: str, num_tokens: int, row: int) -> int:
        """The stride of an edge; 0 if the buffer does not have the edge.

        `row` is the stride between rows if tokens are outermost.
        """
        if edge == TOKENS:
            return {"outer": row, "inner": 1, "none": 0}[self.tokens]
        if edge not in self.edges:
            return 0
        inside = prod(self.sizes[self.edges.index(edge) + 1 :])
        return inside * num_tokens if self.tokens == "inner" else inside


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of matrix multiplies: out (+)= left @ right for every index of the loops.

    Each of m, n, k and every loop is a group of edges. In each buffer that has the group, a single
    stride describes it: the stride of its innermost edge. Loops over edges that `out` lacks sum
    into it.
    """

    out: Buffer
    left: Buffer
    right: Buffer
    m: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]
    loops: tuple[tuple[str, ...], ...]

    @property
    def weights(self) -> Buffer:
        """The operand that is a factor; weight gradients have none."""
        return self.left if self.left.tokens == "none" else self.right

    def operands(self, weights: T, tensor: T) -> tuple[T, T]:
        """Order the factor and the other tensor as left and right operand."""
        return (weights, tensor) if self.left.tokens == "none" else (tensor, weights)

    def __str__(self) -> str:
        loops = "".join(f"for {'.'.join(loop)}: " for loop in self.loops)
        m, n, k = (".".join(group) or "1" for group in (self.m, self.n, self.k))
        return (
            f"{loops}{self.out.name}[{m}, {n}] += {self.left.name}[{m}, {k}] "
            f"@ {self.right.name}[{k}, {n}]"
        )


@dataclass(frozen=True, slots=True)
class Program:
    """All products of a layer, one per step: forward, input gradients, weight gradients.

    `packs` has one entry per step. If neither of the two tensors of a weight gradient stores its
    group of edges contiguously, the entry is a copy to make first, as (to, from); otherwise None.

    The gradient of an intermediate has a different layout from the intermediate: edges that the
    backward pass creates are innermost. The axes of a factor are therefore needed in up to three
    orders: one to read in the forward pass, one to read in the backward pass, and one to write its
    gradient.
    """

    plan: Plan
    forward: tuple[Product, ...]
    input_gradients: tuple[Product, ...]
    weight_gradients: tuple[Product, ...]
    packs: tuple[tuple[Buffer, Buffer] | None, ...]

    def __str__(self) -> str:
        parts = {
            "forward": self.forward,
            "input gradients": self.input_gradients,
            "weight gradients": self.weight_gradients,
        }
        lines = [
            f"{title}\n" + "\n".join(f"  {product}" for product in products)
            for title, products in parts.items()
        ]
        for pack in self.packs:
            if pack:
                to, source = pack
                lines.append(f"pack {to.name}[{'.'.join(to.edges)}] = {source.name}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def make_program(plan: Plan, tokens: str = "inner") -> Program:
    """The program of a plan; `tokens` places the tokens of intermediates: "inner" or "outer"."""
    sizes = plan.sizes
    last = len(plan.steps)
    t = (TOKENS,)

    def tensor(i: int, name: str, edges: tuple[str, ...]) -> Buffer:
        where = "outer" if i in (0, last) else tokens
        return Buffer(name, edges, tuple(sizes[edge] for edge in edges), where)

    names = ["x", *(f"z{i}" for i in range(1, last)), "y"]
    values = [tensor(i, names[i], edges) for i, edges in enumerate(plan.layouts)]
    gradients = [tensor(i, f"g{names[i]}", _turned(plan, i)) for i in range(last + 1)]

    forward, input_gradients, weight_gradients = [], [], []
    packs: list[tuple[Buffer, Buffer] | None] = []
    for i, step in enumerate(plan.steps):

        def factor(
            name: str, k: Buffer, n: Buffer, step: Step = step
        ) -> tuple[Buffer, tuple[str, ...], tuple[str, ...]]:
            """The factor with contracted edges in the order of `k`, new edges in that of `n`."""
            contracted = tuple(edge for edge in k.edges if edge in step.contracted)
            new = tuple(edge for edge in n.edges if edge in step.new)
            edges = (*step.batch, *contracted, *new)
            shape = tuple(sizes[edge] for edge in edges)
            return Buffer(name, edges, shape, "none"), contracted, new

        before, after = values[i], values[i + 1]
        weights, k, n = factor(step.factor, before, after)
        if after.tokens == "outer":
            forward.append(_product(after, before, weights, m=t, n=n, k=k))
        else:
            forward.append(_product(after, weights, before, m=n, n=t, k=k))

        source, target = gradients[i + 1], gradients[i]
        weights, k, n = factor(step.factor, target, source)
        if tokens == "outer":
            weights = _regrouped(weights, (*step.batch, *n, *k))
            input_gradients.append(_product(target, source, weights, m=t, n=k, k=n))
            product, pack = _weight_gradient(step, before, source)
            weight_gradients.append(product)
            packs.append(pack)
            continue
        if target.tokens == "outer":
            input_gradients.append(_product(target, source, weights, m=t, n=k, k=n))
        else:
            input_gradients.append(_product(target, weights, source, m=k, n=t, k=n))

        weights, k, n = factor(f"g{step.factor}", before, source)
        weight_gradients.append(_product(weights, before, source, m=k, n=n, k=t))
        packs.append(None)
    return Program(
        plan, tuple(forward), tuple(input_gradients), tuple(weight_gradients), tuple(packs)
    )


def _weight_gradient(
    step: Step, before: Buffer, source: Buffer
) -> tuple[Product, tuple[Buffer, Buffer] | None]:
    """The product that sums over tokens to give a weight gradient, and the copy it needs, if any.

    The right operand is the tensor whose group of edges is contiguous, or the one with the larger
    group if both are. If neither is, the narrower tensor is copied first.
    """
    groups = {
        buffer.name: tuple(edge for edge in buffer.edges if edge in edges)
        for buffer, edges in ((before, step.contracted), (source, step.new))
    }
    pairs = [(before, source), (source, before)]
    ready = [
        (a, b) for a, b in pairs if b.edges[len(b.edges) - len(groups[b.name]) :] == groups[b.name]
    ]
    if ready:
        left, right = max(ready, key=lambda pair: _size(pair[1], groups[pair[1].name]))
        pack = None
    else:
        left, original = min(pairs, key=lambda pair: pair[1].width)
        inner = groups[original.name]
        edges = (*(edge for edge in original.edges if edge not in inner), *inner)
        right = _regrouped(original, edges, f"packed {original.name}")
        groups[right.name] = inner
        pack = (right, original)
    m, n = groups[left.name], groups[right.name]
    sizes = dict(zip(before.edges + source.edges, before.sizes + source.sizes, strict=True))
    edges = (*step.batch, *m, *n)
    out = Buffer(f"g{step.factor}", edges, tuple(sizes[edge] for edge in edges), "none")
    return _product(out, left, right, m=m, n=n, k=(TOKENS,)), pack


def _regrouped(buffer: Buffer, edges: tuple[str, ...], name: str = "") -> Buffer:
    """The buffer with its edges in the given order."""
    sizes = dict(zip(buffer.edges, buffer.sizes, strict=True))
    shape = tuple(sizes[edge] for edge in edges)
    return Buffer(name or buffer.name, edges, shape, buffer.tokens)


def _size(buffer: Buffer, group: tuple[str, ...]) -> int:
    sizes = dict(zip(buffer.edges, buffer.sizes, strict=True))
    return prod(sizes[edge] for edge in group)


def _turned(plan: Plan, i: int) -> tuple[str, ...]:
    """The axes of the gradient after i steps, ordered for the backward pass.

    The groups are those of Plan.layouts, seen from the output. Outermost first: edges that neither
    neighbouring step touches, edges that only step i creates, edges that step i creates and step
    i + 1 contracts, and edges that only step i + 1 contracts.
    """
    edges = plan.layouts[i]
    if i in (0, len(plan.steps)):
        return edges
    made, contracted = plan.steps[i - 1].new, plan.steps[i].contracted
    place = {(False, False): 0, (True, False): 1, (True, True): 2, (False, True): 3}
    return tuple(sorted(edges, key=lambda edge: place[edge in made, edge in contracted]))


def _product(
    out: Buffer,
    left: Buffer,
    right: Buffer,
    *,
    m: tuple[str, ...],
    n: tuple[str, ...],
    k: tuple[str, ...],
) -> Product:
    inner = {*m, *n, *k}
    edges = dict.fromkeys((*out.edges, *left.edges, *right.edges))
    loops = [edge for edge in edges if edge not in inner]
    return Product(out, left, right, m, n, k, _fuse(loops, (out, left, right)))


def _fuse(edges: list[str], buffers: tuple[Buffer, ...]) -> tuple[tuple[str, ...], ...]:
    """The loops, with neighbouring edges merged if they are adjacent in every buffer."""
    groups: list[tuple[str, ...]] = []
    for edge in edges:
        if groups and all(_follows(groups[-1][-1], edge, buffer) for buffer in buffers):
            groups[-1] = (*groups[-1], edge)
        else:
            groups.append((edge,))
    return tuple(groups)


def _follows(first: str, second: str, buffer: Buffer) -> bool:
    """Whether the buffer has neither edge, or has the second directly inside the first."""
    if first not in buffer.edges:
        return second not in buffer.edges
    return (first, second) in pairwise(buffer.edges)
