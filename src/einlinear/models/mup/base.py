"""The base of learning rates: the shape of every layer in the model on which lr was tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.layers.moe.routing import Gate
from einlinear.layers.scaling import BaseShape, Optimizer, ParameterKind, Scaling, uniform_base
from einlinear.models.survey.facts import Fact, plain_name, unwrapped
from einlinear.models.survey.inferred import own_parameters
from einlinear.models.survey.scalings import module_scaling
from einlinear.show.numbers import listed
from einlinear.structures.values import whole_number

_PACKED = {"q_proj": "in_proj", "k_proj": "in_proj", "v_proj": "in_proj", "in_proj": "q_proj"}
"""Names of nn.MultiheadAttention's projections, and of those that `convert_` makes of them."""


@dataclass(frozen=True, slots=True)
class Base:
    """What the learning rates of a model are relative to; exactly one form of three.

    model: a model at the base width, or {pattern: in_features of the layer in that model}.
    base_width: the width at which lr was tuned; alone, the in_features of every layer there.
    width: the width of the model itself, if only layers with a multiple of it grow.
    """

    model: nn.Module | Mapping[str, int] | None = None
    base_width: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.base_width is None):
            both = "both base and base_width are" if self.base_width is not None else "no base is"
            raise EinlinearError(
                what=f"{both} given",
                rule="learning rates are relative to those of one base model, on which lr was "
                "tuned",
                fix="give one: base=a model at the base width, base={pattern: in_features}, "
                "base_width=64, or base_width=64 with width=the model's own width",
            )
        if self.width is not None and self.base_width is None:
            raise EinlinearError(
                what=f"width is {quote(self.width)}, with base and without base_width",
                rule="the width of the model is compared with base_width; base needs neither",
                fix="leave out width, or give base_width and width without base",
            )
        for name in ("base_width", "width"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(getattr(self, name), name, 1))
        if self.base_width is None and not isinstance(self.model, nn.Module | Mapping):
            raise EinlinearError(
                what=f"base is {quote(self.model)}",
                rule="base is a model at the base width, or a table of in_features by pattern",
                fix='give base=make_model(64), base={"*.down": 256, "*": 64}, or base_width=64',
            )

    def __str__(self) -> str:
        return "the base's widths" if self.base_width is None else f"base width {self.base_width}"


def base_shapes(
    model: nn.Module, facts: tuple[Fact, ...], base: Base, optimizer: Optimizer
) -> tuple[BaseShape, ...]:
    """Return the shape of every parameter's layer in the base."""
    if isinstance(base.model, nn.Module):
        return _like_model(model, facts, base.model, optimizer)
    if base.model is not None:
        return _from_table(model, facts, base.model, optimizer)
    assert base.base_width is not None, "a base is a model or a width"
    if base.width is None:
        return tuple(uniform_base(fact.scaling, base.base_width) for fact in facts)
    return _by_width(facts, base.base_width, base.width)


def _by_width(facts: tuple[Fact, ...], base_width: int, width: int) -> tuple[BaseShape, ...]:
    """Shrink what is a multiple of the width; all else is the same at every width."""

    def shrunk(size: int) -> int:
        return size if size % width else size // width * base_width

    shapes, num_grown = [], 0
    for fact in facts:
        scaling = fact.scaling
        d_in, d_out = _widths(scaling) or _refuse_unknown(fact.name, "the model")
        num_grown += scaling.kind == "matrix" and d_in % width == 0
        fan_out = scaling.head_width or shrunk(d_out)
        shapes.append(BaseShape(shrunk(d_in) if scaling.kind == "matrix" else 1, fan_out))
    if facts and not num_grown:
        widths = sorted({str(w[0]) for f in facts if (w := _widths(f.scaling)) and w[0] > 1})
        raise EinlinearError(
            what=f"width is {width}, and no layer has a multiple of it as in_features",
            rule="layers whose in_features are a multiple of the model's width grow with it",
            fix=f"give the width of the model; its layers have {listed(widths, 8) or 'no'} inputs",
        )
    return tuple(shapes)


def _widths(scaling: Scaling) -> tuple[int, int] | None:
    """Return the widths of a parameter's layer; None if a factor does not tell them."""
    if scaling.kind != "matrix":
        return 1, scaling.fan_out
    if scaling.d_in and scaling.d_out:
        return scaling.d_in, scaling.d_out
    return (scaling.fan_in, scaling.fan_out) if scaling.num_factors == 1 else None


def _refuse_unknown(name: str, place: str) -> tuple[int, int]:
    raise EinlinearError(
        what=f"the width of the layer of {name} in {place} is unknown",
        rule="a factor of several sums over a part of its layer's inputs",
        fix="add d_in and d_out, the widths of the whole layer, to its Scaling",
    )


def _from_table(
    model: nn.Module, facts: tuple[Fact, ...], table: Mapping[str, int], optimizer: Optimizer
) -> tuple[BaseShape, ...]:
    """Take in_features from a table; the first pattern that matches a layer decides."""
    if optimizer == "sgd":
        raise EinlinearError(
            what=f"base is a table of in_features, and the optimizer {quote(optimizer)}",
            rule='rates of "sgd" also need out_features',
            fix="give base=a model at the base width; it may be on the meta device",
        )
    sizes = {
        pattern: whole_number(size, f"base[{quote(pattern)}]", 1) for pattern, size in table.items()
    }
    inner = unwrapped(model)
    names = [plain_name(name) for name, _ in inner.named_modules()]
    names += [plain_name(name) for name, _ in inner.named_parameters(remove_duplicate=False)]
    for pattern in sizes:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            layers = list(dict.fromkeys(owner for fact in facts for owner in fact.owners))
            raise EinlinearError(
                what=f"base: the pattern {quote(pattern)} matches no layer",
                rule="a pattern matches the full name of a layer or parameter; * stands for any "
                "text",
                fix=did_you_mean(pattern, names, f"the layers are {listed(layers, 20)}"),
            )
    shapes = []
    for fact in facts:
        own = {*fact.owners, *_full_names(fact)}
        found = [s for pattern, s in sizes.items() if any(fnmatchcase(n, pattern) for n in own)]
        if fact.scaling.kind != "matrix":
            shapes.append(BaseShape(1, 0))
        elif found:
            shapes.append(BaseShape(found[0], 0))
        else:
            _refuse_unmatched(fact.owners[0] or fact.name, sizes)
    return tuple(shapes)


def _refuse_unmatched(layer: str, sizes: Mapping[str, int]) -> None:
    raise EinlinearError(
        what=f"base: no pattern matches the layer {quote(layer)}; the patterns are "
        f"{listed([repr(pattern) for pattern in sizes], 8) or 'none'}",
        rule="a table gives every layer with matrices its in_features in the base",
        fix=f'add {{"{layer}": in_features}}, or a last pattern "*" for all other layers',
    )


def _full_names(fact: Fact) -> list[str]:
    return [_joined(owner, key) for owner, key in zip(fact.owners, fact.keys, strict=True)]


def _joined(owner: str, key: str) -> str:
    return f"{owner}.{key}" if owner else key


def _refuse_missing(layer: str, known: list[str]) -> None:
    near = get_close_matches(layer, known, 3, 0.0)
    has = f"; the nearest it has: {listed([repr(name) for name in near])}" if near else ""
    raise EinlinearError(
        what=f"the base has no layer {quote(layer)}{has}",
        rule="the base has a layer of the same name for every layer of the model",
        fix="make the base as you make the model, only narrower; or give "
        'base={"*.down": 256, "*": 64}, patterns with the in_features of the base',
    )


def _like_model(
    model: nn.Module, facts: tuple[Fact, ...], base: nn.Module, optimizer: Optimizer
) -> tuple[BaseShape, ...]:
    """Take the widths of the layers of the same names in a model at the base width."""
    known = _known_widths(base)
    layers = [plain_name(name) for name, module in unwrapped(base).named_modules() if name]
    gates = {
        plain_name(name)
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, Gate)
    }
    shapes = []
    for fact in facts:
        kind = fact.scaling.kind
        if kind == "scalar" or (kind != "matrix" and optimizer != "sgd"):
            shapes.append(BaseShape(1, 0))  # its rate is lr
            continue
        found: dict[BaseShape, str] = {}
        others: list[_Known] = []
        for owner, key in zip(fact.owners, fact.keys, strict=True):
            entries = [known[name] for name in _counterparts(owner, key) if name in known]
            same = [entry for entry in entries if entry.serves(kind)]
            if not same and owner in gates:
                same = _for_gate(owner, fact.scaling, known)
            if same:
                found.setdefault(same[0].shape(kind), _joined(owner, key))
            others += entries
        if not found and others:
            _refuse_kind(fact, others[0])
        if not found:
            _refuse_missing(fact.owners[0] or fact.name, layers)
        if len(found) > 1:
            _refuse_two_shapes(found)
        shapes.append(next(iter(found)))
    return tuple(shapes)


@dataclass(frozen=True, slots=True)
class _Known:
    """A parameter or layer of the base; widths is None if its factors do not tell them."""

    name: str
    kind: ParameterKind
    widths: tuple[int, int] | None

    def serves(self, kind: ParameterKind) -> bool:
        """Whether a parameter of this kind may have it as its counterpart."""
        return self.kind == kind or (kind == "vector" and self.kind == "matrix")

    def with_outputs(self, fan_out: int) -> _Known:
        """The same layer with other outputs."""
        return _Known(self.name, self.kind, self.widths and (self.widths[0], fan_out))

    def shape(self, kind: ParameterKind) -> BaseShape:
        """The shape for a parameter of this kind."""
        d_in, d_out = self.widths or _refuse_unknown(self.name, "the base")
        return BaseShape(d_in if kind == "matrix" else 1, d_out)


def _known_widths(base: nn.Module) -> dict[str, _Known]:
    """Return the parameters of the base, and its layers whose matrices have the same widths."""
    known: dict[str, _Known] = {}
    for name, module in unwrapped(base).named_modules(remove_duplicate=False):
        name, own = plain_name(name), own_parameters(module)
        declared = (module_scaling(module) if own else None) or {}
        scaling = {key: value for key, value in declared.items() if key in own}
        for key, value in scaling.items():
            full = _joined(name, key)
            known[full] = _Known(full, value.kind, _widths(value))
        matrices = [value for value in scaling.values() if value.kind == "matrix"]
        widths = {_widths(value) for value in matrices or scaling.values()}
        kinds = {value.kind for value in matrices or scaling.values()}
        if len(widths) == len(kinds) == 1:
            known[name] = _Known(name, kinds.pop(), widths.pop())
    return known


def _for_gate(gate: str, scaling: Scaling, known: Mapping[str, _Known]) -> list[_Known]:
    """Return the layer that a mixture replaces, which reads what its gate reads.

    The standard MoE replaces a net of two layers, of which `up` is the first.
    """
    mixture = gate.rpartition(".")[0]
    layers = [known[name] for name in (mixture, _joined(mixture, "up")) if name in known]
    return [layer.with_outputs(scaling.fan_out) for layer in layers if layer.kind == "matrix"]


def _counterparts(owner: str, key: str) -> Iterator[str]:
    """Yield the names that a parameter, or its layer, may have in the base, the nearest first.

    Conversion may split a packed attention into projections, and a mixture of feed-forward nets
    holds as parameters what are layers without it.
    """
    full = _joined(owner, key)
    yield full
    yield owner
    stem = full.removesuffix("_weight").removesuffix("_bias")  # attn.q_proj_weight, mlp.up_bias
    yield stem
    for name in (stem, owner):  # attn.in_proj has become attn.q_proj, or the other way round
        parent, _, last = name.rpartition(".")
        yield f"{name}_weight"
        if last in _PACKED:
            yield _joined(parent, _PACKED[last])
            yield _joined(parent, f"{_PACKED[last]}_weight")


def _refuse_kind(fact: Fact, other: _Known) -> None:
    raise EinlinearError(
        what=f"{fact.name} is of the kind {fact.scaling.kind}; in the base, {other.name} is of the "
        f"kind {other.kind}",
        rule="a layer and its counterpart in the base hold the same kinds of parameters",
        fix="make the base as you make the model, only narrower",
    )


def _refuse_two_shapes(found: Mapping[BaseShape, str]) -> None:
    given = [f"{name} has ({s.fan_in}, {s.fan_out})" for s, name in found.items()]
    raise EinlinearError(
        what=f"layers that share a parameter differ in the base: {listed(given)}",
        rule="layers that share a parameter have one shape at every width",
        fix="make the base as you make the model, only narrower",
    )
