"""Plan: a structure at given widths, with its sizes, order of contraction and counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import overload

from einlinear.errors import EinlinearError
from einlinear.show.tables import facts_text
from einlinear.structures.edges import all_edges, cut
from einlinear.structures.named import named_call
from einlinear.structures.sizes import choose_sizes, fewest_macs, rank_bound
from einlinear.structures.structure import Structure, StructureSum, check_structure_or_sum
from einlinear.structures.values import whole_number

MAX_WIDTH = 2**24

_LETTERS = ascii_letters[:-2]  # Y and Z are free for batch axes

# The paper's Greek letters for its seven edges, in Latin: alpha beta gamma delta epsilon phi rho.
_PAPER_LETTERS = dict(zip(all_edges(2), "abgdefr", strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    """One batched matrix multiply: the tensor so far meets one factor.

    The factor's edges: `batch` are in the tensor before and after the step, `contracted` only
    before, `new` only after. `kept` are the tensor's other edges; the factor is shared along them.
    """

    factor: str
    batch: tuple[str, ...]
    contracted: tuple[str, ...]
    new: tuple[str, ...]
    kept: tuple[str, ...]
    equation: str
    fan_in: int
    fan_out: int
    macs: int

    @property
    def edges(self) -> tuple[str, ...]:
        """The axes of the factor, outermost first."""
        return (*self.batch, *self.contracted, *self.new)


@dataclass(frozen=True, slots=True)
class Plan:
    """A structure at given widths: all the numbers that execution and training need.

    The input, padded with zeros to d_in_padded, has the axes x_edges (outermost first); the output
    has the axes y_edges and is sliced to d_out. `layouts` are the axes of the input and of the
    result of each step. `inner_width` is how many numbers all intermediates hold for one token.
    Counts are per token, in multiply-adds (MACs), without bias.
    """

    structure: Structure
    d_in: int
    d_out: int
    edge_sizes: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[str, ...], ...]
    factor_axes: tuple[tuple[str, tuple[str, ...]], ...]
    steps: tuple[Step, ...]
    text: str
    equation: str
    d_in_padded: int
    d_out_padded: int
    x_shape: tuple[int, ...]
    inner_width: int
    params: int
    macs: int
    rank: int

    def __hash__(self) -> int:
        # These decide everything else; layers look their plan up at every call.
        return hash((self.text, self.d_in, self.d_out))

    def __str__(self) -> str:
        return facts_text(self.facts())

    def facts(self) -> dict[str, str]:
        """The plan as text for people, by name. Compute is in FLOPs, two for each multiply-add."""
        sides = (("input", self.d_in, self.d_in_padded), ("output", self.d_out, self.d_out_padded))
        padded = [f"{n} {d:,} -> {full:,} ({full / d - 1:.1%})" for n, d, full in sides if full > d]
        share, cost = self.params / self.dense_macs, self.macs / self.dense_macs
        relation = f"{cost:.2%} of dense, " + (
            f"{1 / cost:.2f} x fewer" if cost < 1 else f"{cost:.2f} x more"
        )
        call = named_call(self.structure)
        return {
            "structure": call,
            **({} if call == self.text else {"as edges": self.text}),
            "widths": f"{self.d_in:,} -> {self.d_out:,}",
            "sizes": ", ".join(f"{edge} {size:,}" for edge, size in self.edge_sizes),
            "padding": ", ".join(padded) or "none",
            "equation": self.equation,
            "parameters": f"{self.params:,}  ({share:.2%} of dense)",
            "FLOPs/token (forward)": f"{2 * self.macs:,}  "
            + ("(as many as dense)" if cost == 1 else f"({relation})"),
            "rank": f"{self.rank:,} of {min(self.d_in, self.d_out):,}",
            **{f"step {step.factor}": self._step_text(step) for step in self.steps},
        }

    def _step_text(self, step: Step) -> str:
        shape = " x ".join(map(str, self.factor_shapes[step.factor]))
        contracted, new = " ".join(step.contracted), " ".join(step.new)
        flops = f"{2 * step.macs:,} FLOPs/token"
        return f"{shape}: contracts {contracted or 'nothing'}, makes {new or 'nothing'}; {flops}"

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every edge of the structure."""
        return dict(self.edge_sizes)

    @property
    def x_edges(self) -> tuple[str, ...]:
        """The axes of the input, outermost first."""
        return self.layouts[0]

    @property
    def y_edges(self) -> tuple[str, ...]:
        """The axes of the output, outermost first."""
        return self.layouts[-1]

    @property
    def factor_edges(self) -> dict[str, tuple[str, ...]]:
        """The axes of every factor: batch, contracted, new; the innermost last."""
        return dict(self.factor_axes)

    @property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every factor, in the order of the equation's operands."""
        sizes = self.sizes
        return {f: tuple(sizes[e] for e in edges) for f, edges in self.factor_edges.items()}

    @property
    def dense_macs(self) -> int:
        """What a dense layer of these widths costs per token; also its number of parameters."""
        return self.d_in * self.d_out

    @property
    def fan_in(self) -> dict[str, int]:
        """The number of terms in each output of a factor's multiply."""
        return {step.factor: step.fan_in for step in self.steps}

    @property
    def fan_out(self) -> dict[str, int]:
        """The number of outputs that each input of a factor's multiply feeds."""
        return {step.factor: step.fan_out for step in self.steps}


@dataclass(frozen=True, slots=True)
class PlanSum:
    """A sum of structures at given widths: the plan of every term, and the counts of all together.

    Edges and factors are named after their terms: "0.XA" is the edge XA of the first.
    """

    structure: StructureSum
    plans: tuple[Plan, ...]

    @property
    def d_in(self) -> int:
        """The width of the input."""
        return self.plans[0].d_in

    @property
    def d_out(self) -> int:
        """The width of the output."""
        return self.plans[0].d_out

    @property
    def params(self) -> int:
        """The parameters of all terms."""
        return sum(plan.params for plan in self.plans)

    @property
    def macs(self) -> int:
        """The multiply-adds of all terms per token; adding up their outputs is not counted."""
        return sum(plan.macs for plan in self.plans)

    @property
    def dense_macs(self) -> int:
        """What a dense layer of these widths costs per token; also its number of parameters."""
        return self.d_in * self.d_out

    @property
    def rank(self) -> int:
        """The sum of the ranks, at most full rank: an upper bound."""
        return min(self.d_in, self.d_out, sum(plan.rank for plan in self.plans))

    @property
    def d_in_padded(self) -> int:
        """The widest padded input of all terms."""
        return max(plan.d_in_padded for plan in self.plans)

    @property
    def d_out_padded(self) -> int:
        """The widest padded output of all terms."""
        return max(plan.d_out_padded for plan in self.plans)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every edge of every term."""
        return {
            f"{i}.{edge}": size
            for i, plan in enumerate(self.plans)
            for edge, size in plan.edge_sizes
        }

    @property
    def factor_edges(self) -> dict[str, tuple[str, ...]]:
        """The axes of every factor of every term."""
        return {
            f"{i}.{factor}": edges
            for i, plan in enumerate(self.plans)
            for factor, edges in plan.factor_axes
        }

    def __str__(self) -> str:
        share, cost = self.params / self.dense_macs, self.macs / self.dense_macs
        whole = facts_text(
            {
                "sum": named_call(self.structure),
                "widths": f"{self.d_in:,} -> {self.d_out:,}",
                "parameters": f"{self.params:,}  ({share:.2%} of dense)",
                "FLOPs/token (forward)": f"{2 * self.macs:,}  ({cost:.2%} of dense)",
                "rank": f"{self.rank:,} of {min(self.d_in, self.d_out):,}",
            }
        )
        return "\n\n".join([whole, *map(str, self.plans)])


@overload
def make_plan(structure: Structure, d_in: int, d_out: int) -> Plan: ...


@overload
def make_plan(structure: StructureSum, d_in: int, d_out: int) -> PlanSum: ...


@overload
def make_plan(structure: Structure | StructureSum, d_in: int, d_out: int) -> Plan | PlanSum: ...


def make_plan(structure: Structure | StructureSum, d_in: int, d_out: int) -> Plan | PlanSum:
    """Plan a layer d_in -> d_out of a structure, or of a sum. Plans are values, and cached."""
    given = check_structure_or_sum(structure)
    d_in = whole_number(d_in, "the input width", 1, MAX_WIDTH)
    d_out = whole_number(d_out, "the output width", 1, MAX_WIDTH)
    if isinstance(given, StructureSum):
        return PlanSum(given, tuple(_make_plan(term, d_in, d_out) for term in given.terms))
    return _make_plan(given, d_in, d_out)


@lru_cache(maxsize=16384)
def _make_plan(structure: Structure, d_in: int, d_out: int) -> Plan:
    letters = _letters(structure)
    sizes = choose_sizes(structure, d_in, d_out)
    _, order = fewest_macs(sizes)
    layouts = _lay_out(sizes, order)
    steps = tuple(
        _make_step(factor, before, after, sizes, letters)
        for factor, before, after in zip(order, layouts, layouts[1:], strict=False)
    )
    axes = {step.factor: step.edges for step in sorted(steps, key=lambda step: step.factor)}
    operands = [f"...{_word(layouts[0], letters)}", *(_word(a, letters) for a in axes.values())]
    shapes = [tuple(sizes[edge] for edge in layout) for layout in layouts]
    return Plan(
        structure=structure,
        text=str(structure),
        d_in_padded=prod(shapes[0]),
        d_out_padded=prod(shapes[-1]),
        x_shape=shapes[0],
        inner_width=sum(prod(shape) for shape in shapes[1:-1]),
        d_in=d_in,
        d_out=d_out,
        edge_sizes=tuple(sizes.items()),
        layouts=layouts,
        steps=steps,
        equation=f"{','.join(operands)}->...{_word(layouts[-1], letters)}",
        factor_axes=tuple(axes.items()),
        params=sum(prod(sizes[edge] for edge in edges) for edges in axes.values()),
        macs=sum(step.macs for step in steps),
        rank=min(d_in, d_out, int(rank_bound(sizes))),
    )


def _lay_out(sizes: dict[str, int], order: str) -> tuple[tuple[str, ...], ...]:
    """The axes of the input, of every intermediate and of the output, outermost first.

    In an intermediate, new edges are innermost, and the edges that are contracted next are
    together: carried, next, next and new, new. Both groups then have one stride, so every step is a
    plain matrix multiply in place, without a transpose. Carried edges keep their order.
    """
    cuts = [cut(sizes, order[:i]) for i in range(len(order) + 1)]
    layouts: list[tuple[str, ...]] = []
    for i in range(1, len(cuts)):
        carried = [edge for edge in (layouts[-1] if layouts else cuts[0]) if edge in cuts[i]]
        new = [edge for edge in cuts[i] if edge not in cuts[i - 1]]
        next_cut = cuts[i + 1] if i + 1 < len(cuts) else cuts[i]
        edges = [(edge in new, edge not in next_cut, edge) for edge in (*carried, *new)]
        edges.sort(key=lambda item: (item[0], item[1] != item[0]))
        layouts.append(tuple(edge for *_, edge in edges))
    first = [edge for edge in layouts[0] if edge in cuts[0]]
    return (*first, *(edge for edge in cuts[0] if edge not in first)), *layouts


def _make_step(
    factor: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    sizes: dict[str, int],
    letters: dict[str, str],
) -> Step:
    batch = tuple(edge for edge in before if edge in after and factor in edge)
    contracted = tuple(edge for edge in before if edge not in after)
    new = tuple(edge for edge in after if edge not in before)
    operand = _word((*batch, *contracted, *new), letters)
    return Step(
        factor=factor,
        batch=batch,
        contracted=contracted,
        new=new,
        kept=tuple(edge for edge in before if edge in after and factor not in edge),
        equation=f"...{_word(before, letters)},{operand}->...{_word(after, letters)}",
        fan_in=prod(sizes[edge] for edge in contracted),
        fan_out=prod(sizes[edge] for edge in new),
        macs=prod(sizes[edge] for edge in {*before, *after}),
    )


def _letters(structure: Structure) -> dict[str, str]:
    """One letter of the equation for each edge: the paper's for its seven, else a, b, c, ..."""
    edges = [edge for edge, _ in structure.edges]
    if len(edges) > len(_LETTERS):
        raise EinlinearError(
            what=f"the structure has {len(edges)} edges",
            rule=f"an einsum has one letter per edge, so there are at most {len(_LETTERS)}",
            fix="leave out edges, or use at most four factors, which have 41 edges",
        )
    if set(edges) <= set(_PAPER_LETTERS):
        return _PAPER_LETTERS
    return dict(zip(edges, _LETTERS, strict=False))


def _word(edges: Iterable[str], letters: dict[str, str]) -> str:
    return "".join(letters[edge] for edge in edges)
