"""heads: a rule that aligns the axes of a structure with attention heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import log, prod
from typing import get_args

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.models.choices import HeadAxis
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.sizes import TOLERANCE, closest_factors, rank_bound
from einlinear.structures.structure import Structure, check_structure
from einlinear.structures.text import parse_structure
from einlinear.structures.values import one_of, whole_number

SIDES = ("output", "input")

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_HEAD_WIDTH = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_kv", "head_size")

_QUERY = ("q", "wq", "q_proj", "query", "to_q", "q_lin", "query_proj", "w_q", "c_q")
_KEY = ("k", "wk", "k_proj", "key", "to_k", "k_lin", "key_proj", "w_k", "c_k")
_VALUE = ("v", "wv", "v_proj", "value", "to_v", "v_lin", "value_proj", "w_v", "c_v")
_FUSED = ("c_attn", "in_proj", "qkv", "qkv_proj", "to_qkv", "wqkv", "query_key_value", "c_qkv")
_OUT = ("o_proj", "out_proj", "to_out", "out_lin")
_OUT_OF_ATTENTION = ("o", "wo", "w_o", "out", "proj", "c_proj", "dense", "output")

_WAYS = 64  # how many factorisations of a side to try


@dataclass(frozen=True, slots=True)
class Heads:
    """A rule for convert_: a structure with an axis that is the attention head. See `heads`."""

    num_heads: int | None
    structure: Structure
    side: str | None
    axis: HeadAxis = "shared"

    def __post_init__(self) -> None:
        check_structure(self.structure)
        one_of(self.axis, "axis", get_args(HeadAxis))
        if self.num_heads is not None:
            fix = "give the number of heads first: el.heads(16, structure=...)"
            whole_number(self.num_heads, "the number of heads", 1, fix=fix)
        if self.side not in (None, *SIDES):
            raise EinlinearError(
                what=f"the side of the heads is given as {quote(self.side)}",
                rule="heads are at the output of a layer (queries, keys, values) or at its input",
                fix='give side="output" or side="input", or leave side out to use the layer name',
            )

    def structure_for(self, model: nn.Module, name: str, d_in: int, d_out: int) -> Structure:
        """Return the structure for the layer of this name, aligned with the model's heads."""
        kind = _kind(name)
        side = self.side or {"": "", "out": "input"}.get(kind, "output")
        if not side:
            raise EinlinearError(
                what="the name does not tell where the heads are",
                rule="layers called q_proj, key or c_attn have heads at the output, those called "
                "o_proj or attn.c_proj at the input",
                fix='give the side: el.heads(..., side="output") or el.heads(..., side="input")',
            )
        _check_layout(model, name, self.axis)
        width = d_out if side == "output" else d_in
        num_heads = self.num_heads or _find(model, name, _HEADS)
        if num_heads is None:
            raise EinlinearError(
                what="the number of attention heads is unknown",
                rule=f"the number is an attribute {', '.join(_HEADS)} of a module around the "
                "layer, or of its config",
                fix="give it: el.heads(16)",
            )
        key_heads = _find(model, name, _KEY_HEADS) or num_heads
        if kind == "fused":
            num_heads += 2 * key_heads
        elif kind == "key" and self.num_heads is None:
            num_heads = key_heads
        if self.num_heads is None:
            _check_head_width(width, num_heads, _find(model, name, _HEAD_WIDTH))
        return align(self.structure, d_in, d_out, num_heads, side, self.axis)


def heads(
    num_heads: int | None = None,
    structure: Structure | str = "btt()",
    side: str | None = None,
    *,
    axis: HeadAxis = "shared",
) -> Heads:
    """Return a rule for convert_ that aligns the axes of a structure with the attention heads.

    Queries, keys and values are laid out as heads x head width, with the head outermost, and so is
    the input of the output projection. The aligned structure has an axis of exactly that many heads
    there, shared by its factors if possible. The last factor (in the output projection, the first)
    then works within each head. Ref: [P24 App. F].
    Departure: the paper lists the axes as YB YAB and XA XAB, the head first, which is axis="own";
    by default we use the shared axis, because all factors then have separate weights for every
    head.

    Args:
        num_heads: number of heads; read from the model by default. With grouped queries, keys and
            values have their own number; a fused layer has the sum of all three.
        structure: the structure to align; its other sizes are chosen again to keep the rank.
        side: "output" or "input"; read from the layer's name by default.
        axis: which axis is the head: "shared" by several factors, if possible; or "own", that of
            the last factor alone (in the output projection, of the first), which then has separate
            weights for every head, while the other factors have the same for all. Such an axis is
            innermost, so the model must lay out its heads innermost and say so in an attribute
            heads_inner=True, as GPT(heads_inner=True) does.
    """
    parsed = parse_structure(structure) if isinstance(structure, str) else structure
    return Heads(num_heads, parsed, side, axis)


@lru_cache(maxsize=4096)
def align(
    structure: Structure,
    d_in: int,
    d_out: int,
    num_heads: int,
    side: str,
    axis: HeadAxis = "shared",
) -> Structure:
    """Return the structure with an axis of exactly `num_heads` at this side.

    It is the outermost; with axis="own" the innermost, at one factor only. The other axes of the
    side share width / num_heads. Among the axes that can be the head, those shared by more factors
    are preferred; among the sizes that keep the rank, those closest to the structure's exponents.
    If no sizes keep the rank, those of the highest rank are used.
    Checked by: test_heads.py::test_factors_work_within_heads.
    """
    letter, width = ("Y", d_out) if side == "output" else ("X", d_in)
    if width % num_heads:
        raise EinlinearError(
            what=f"the {side} width {width} is not a multiple of {num_heads} heads",
            rule="every head has the same width",
            fix=f"give a number of heads that divides {width}, or use another rule for the layer",
        )
    wanted = make_plan(structure, d_in, d_out).rank
    if num_heads == 1:
        return structure
    best: Plan | None = None
    for edge in _head_axes(structure, letter, num_heads, axis):
        for sizes in _candidates(structure, edge, num_heads, (d_in, d_out), wanted):
            plan = make_plan(_with_sizes(structure, sizes, edge, (d_in, d_out)), d_in, d_out)
            if not _is_aligned(plan, edge, num_heads, axis):
                continue
            if plan.rank >= wanted:
                return plan.structure
            if best is None or plan.rank > best.rank:
                best = plan
    if best is None:
        raise EinlinearError(
            what=f"{structure} has no axis at {letter} that can be {num_heads} heads",
            rule="the head is the outermost of two or more axes at its side"
            if axis == "shared"
            else "the head is an axis of one factor only, the innermost of two or more at its side",
            fix="use el.btt(), el.monarch() or el.kronecker(); low rank and dense have one axis",
        )
    return best.structure


def _kind(name: str) -> str:
    """Return what a layer's name tells: query, key (or value), fused, out, or "" for nothing."""
    parts = [part.lower() for part in name.split(".") if not part.isdigit()]
    last = parts[-1] if parts else ""
    kinds = {"query": _QUERY, "key": (*_KEY, *_VALUE), "fused": _FUSED, "out": _OUT}
    for kind, names in kinds.items():
        if last in names:
            return kind
    is_in_attention = any("attn" in p or "attention" in p for p in parts[-3:-1])
    return "out" if is_in_attention and last in _OUT_OF_ATTENTION else ""


def _around(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules around a layer, the innermost first."""
    around = [model]
    for part in name.split(".")[:-1]:
        around.append(around[-1].get_submodule(part))
    return around[::-1]


def _check_layout(model: nn.Module, name: str, axis: HeadAxis) -> None:
    """Refuse an axis that is not where the model has its heads."""
    around = _around(model, name)
    is_inner = any(getattr(module, "heads_inner", False) is True for module in around)
    if is_inner != (axis == "own"):
        raise EinlinearError(
            what=f'the axis is "{axis}", and the model lays out its heads '
            + ("innermost: heads_inner is True" if is_inner else "outermost"),
            rule="a shared axis is outermost, the own axis of a factor innermost",
            fix='give axis="own", or a model with its heads outermost'
            if is_inner
            else 'give axis="shared", or a model with its heads innermost, such as '
            "el.GPT(..., heads_inner=True)",
        )


def _find(model: nn.Module, name: str, keys: tuple[str, ...]) -> int | None:
    """Return the first integer attribute of these names in the modules around a layer."""
    for module in _around(model, name):
        for source in (module, getattr(module, "config", None)):
            for key in keys:
                value = getattr(source, key, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None


def _check_head_width(width: int, num_heads: int, head_width: int | None) -> None:
    if head_width is not None and width != num_heads * head_width:
        raise EinlinearError(
            what=f"the width is {width}, but the model has {num_heads} heads of {head_width} here",
            rule="the width at the side of the heads is heads x head width",
            fix="give the number: el.heads(16), with side= if the name misleads; or exclude the "
            "layer from the pattern",
        )


def _head_axes(structure: Structure, letter: str, num_heads: int, axis: HeadAxis) -> list[str]:
    """Return the edges that can become the head, those shared by most factors first.

    With axis="own", only those of one factor.
    """
    at_side = [(edge, value) for edge, value in structure.edges if letter in edge]
    free = [e for e, value in at_side if isinstance(value, Fraction) or value == num_heads]
    free = [edge for edge in free if axis == "shared" or len(edge) == 2]
    return sorted(free, key=lambda edge: (-len(edge), edge)) if len(at_side) > 1 else []


def _candidates(
    structure: Structure, edge: str, num_heads: int, widths: tuple[int, int], wanted: int
) -> Iterator[dict[str, int]]:
    """Yield sizes at both sides with `edge` as the head, those of the wanted rank first.

    Within each group, sizes closer to the exponents come first. The sizes at the side of the heads
    multiply to its exact width. The other side may be padded, but only if its width has no sizes
    close enough to the exponents.
    """
    at_head, other = ("Y", "X") if edge[0] == "Y" else ("X", "Y")
    width = dict(zip("XY", widths, strict=True))
    head_ways = _head_ways(structure, edge, num_heads, width[at_head])
    exponents, fixed = _shares(structure, other, "")
    rest = width[other] // prod(fixed.values())
    ideal = structure[edge]
    moved = abs(log(num_heads, width[at_head]) - ideal) if isinstance(ideal, Fraction) else 0.0
    ranks = make_plan(structure, *widths).sizes

    def pairs(total: int, tolerance: float) -> list[dict[str, int]]:
        ways = closest_factors(total, rest, tuple(exponents.values()), tolerance, _WAYS)
        found = [
            (a + b, ranks | x | fixed | dict(zip(exponents, y, strict=True)))
            for (a, x), (b, y) in product(head_ways, ways)
        ]
        return [sizes for _, sizes in sorted(found, key=lambda item: item[0])]

    lower: list[dict[str, int]] = []
    for total in range(rest, min(rest * 11 // 10, rest + 128) + 1):
        for sizes in pairs(total, TOLERANCE + moved):
            if rank_bound(sizes) >= wanted:
                yield sizes
            else:
                lower.append(sizes)
    lower += pairs(rest, 2.0)
    yield from sorted(lower, key=lambda sizes: -min(wanted, rank_bound(sizes)))[:_WAYS]


def _head_ways(
    structure: Structure, edge: str, num_heads: int, width: int
) -> list[tuple[int, dict[str, int]]]:
    """Return sizes at the side of the heads that multiply to its width, with their deviation."""
    exponents, fixed = _shares(structure, edge[0], edge)
    fixed = fixed | {edge: num_heads}
    rest = width // prod(fixed.values())
    if rest * prod(fixed.values()) != width:
        return []
    ways = closest_factors(rest, rest, tuple(exponents.values()), 2.0, _WAYS)
    return [(cost, fixed | dict(zip(exponents, sizes, strict=True))) for cost, sizes in ways]


def _shares(
    structure: Structure, letter: str, head: str
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the other edges at a side: exponents that sum to 1, and fixed sizes."""
    at_side = [(edge, v) for edge, v in structure.edges if letter in edge and edge != head]
    growing = {edge: float(v) for edge, v in at_side if isinstance(v, Fraction)}
    total = sum(growing.values())
    fixed = {edge: v for edge, v in at_side if isinstance(v, int)}
    return {edge: v / total for edge, v in growing.items()}, fixed


def _with_sizes(
    structure: Structure, sizes: dict[str, int], head: str, widths: tuple[int, int]
) -> Structure:
    """Return a structure with these sizes at these widths: all fixed except one edge per side.

    A padded side gets exponents instead, because fixed sizes must divide the width.
    """
    edges: dict[str, object] = {e: v for e, v in structure.edges if e[0] not in "XY"}
    for letter, width in zip("XY", widths, strict=True):
        given = {e: v for e, v in structure.edges if letter in e}
        at_side = {e: sizes[e] for e in given if sizes[e] > 1} or {next(iter(given)): 1}
        growing = {e: n for e, n in at_side.items() if isinstance(given[e], Fraction) and e != head}
        last = max(growing or at_side, key=lambda edge: at_side[edge])
        if prod(at_side.values()) == width:
            edges |= {**at_side, last: Fraction(1)}
        else:
            base = width // prod(n for e, n in at_side.items() if e not in growing)
            near = {e: Fraction(log(n, base)).limit_denominator(1000) for e, n in growing.items()}
            near[last] += 1 - sum(near.values())
            edges |= {**at_side, **near}
    return Structure.from_edges(edges)


def _is_aligned(plan: Plan, edge: str, num_heads: int, axis: HeadAxis) -> bool:
    """Return whether the edge is the head: at its end of the side, and of the right size."""
    edges = plan.y_edges if edge[0] == "Y" else plan.x_edges
    place = 0 if axis == "shared" else -1
    return edges[place] == edge and plan.sizes[edge] == num_heads
