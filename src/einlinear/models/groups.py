"""Learning rates that transfer across widths: the table of a model, and parameter groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, get_args

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import Optimizer, Scaling, adam_rate, sgd_rate
from einlinear.models.facts import (
    Fact,
    find_facts,
    find_layers,
    match_names,
    named_roles,
    plain_name,
    unwrapped,
)
from einlinear.models.sites import find_sites, output_heads
from einlinear.structures.values import whole_number

_RATES = {"adam": adam_rate, "sgd": sgd_rate}


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """How one parameter is scaled: what is known of it, and what follows.

    multiplier is rate / lr. weight_decay is None where it is left to the optimizer.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    fan_in: int
    fan_out: int
    num_factors: int
    repeats: int
    init_std: float
    multiplier: float
    rate: float
    weight_decay: float | None = None

    @property
    def group_name(self) -> str:
        """What its parameter group is called: "fan_in 256, 2 factors", or the kind."""
        if self.kind not in ("matrix", "head"):
            return self.kind
        factors = f", {self.num_factors} factors" if self.num_factors > 1 else ""
        return f"{'head, ' if self.kind == 'head' else ''}fan_in {self.fan_in}{factors}"


@dataclass(frozen=True, slots=True, repr=False)
class ScalingTable:
    """The rows of all trained parameters, in the model's order; print it to read it."""

    rows: tuple[ScalingRow, ...]
    lr: float
    base_width: int
    optimizer: Optimizer

    def __iter__(self) -> Iterator[ScalingRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        head = ("parameter", "shape", "kind", "fan-in", "fan-out", "factors", "init", "x lr", "lr")
        cells = [
            (
                row.name,
                " x ".join(map(str, row.shape)) or "()",
                row.kind,
                str(row.fan_in),
                str(row.fan_out),
                str(row.num_factors),
                f"{row.init_std:.3g}",
                f"{row.multiplier:.4g}",
                f"{row.rate:.3g}",
            )
            for row in self.rows
        ]
        title = f"{self.optimizer}, lr {self.lr:g} at base width {self.base_width}"
        return f"{title}\n{aligned([head, *cells], left=3)}"

    def __repr__(self) -> str:
        return str(self)


def aligned(cells: Sequence[Sequence[str]], left: int) -> str:
    """Rows as text under a head: the first columns left-aligned, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def scaling_table(
    model: nn.Module,
    lr: float,
    *,
    base_width: int,
    optimizer: Optimizer = "adam",
    weight_decay: float | None = None,
    head: str | Iterable[str] = (),
) -> ScalingTable:
    """How every trained parameter of the model is scaled; takes what `param_groups` takes."""
    facts = _trained_facts(model, head)
    return _table(facts, lr, base_width, optimizer, weight_decay)


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    base_width: int,
    optimizer: Optimizer = "adam",
    weight_decay: float | None = None,
    head: str | Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer, with rates that transfer across widths (muP).

    A rate that is best for a model of width base_width is then near the best for wider ones, and
    for models of other structures. One group for every distinct rate and decay (and one more if
    only some parameters are DTensors); every trained parameter is in exactly one. A dense model all
    of whose linear layers have a fan-in of base_width (and, for "sgd", that fan-out too) gets lr
    everywhere. The rules are in docs/training.md.

    Args:
        model: any module, also compiled, sharded by FSDP2 or inside of DDP.
        lr: the rate at the base width.
        base_width: the width at which lr was found.
        optimizer: "adam" for Adam, AdamW and others whose steps do not depend on the size of the
            gradient; "sgd" for SGD, with or without momentum.
        weight_decay: the decay at the base width. Optimizers multiply it by the rate, so matrices
            get weight_decay * lr / rate, the same decay per step at every width; vectors and
            embeddings get 0. None leaves decay to the optimizer.
        head: a pattern of the name of the output layer, or several, besides what the model names
            itself (`layer_roles`, or Hugging Face's get_output_embeddings). Only "sgd" needs to
            know it. If neither names one, it is the layer that `convert_` takes for the head; a
            structured layer is a head only if it is named.
    """
    facts = _trained_facts(model, head)
    table = _table(facts, lr, base_width, optimizer, weight_decay)
    if not facts:
        raise EinlinearError(
            what="the model has no parameter that is trained",
            rule="an optimizer needs parameters",
            fix="set requires_grad_(True) on what should be trained",
        )
    groups: dict[tuple[Any, ...], tuple[list[nn.Parameter], dict[str, None]]] = {}
    for fact, row in zip(facts, table, strict=True):
        # Optimizers do not handle tensors and DTensors in one group.
        key = (row.rate, row.weight_decay, type(fact.parameter.data))
        parameters, names = groups.setdefault(key, ([], {}))
        parameters.append(fact.parameter)
        names[row.group_name] = None
    return [
        {"params": parameters, "lr": rate, "name": "; ".join(names)}
        | ({} if decay is None else {"weight_decay": decay})
        for (rate, decay, _), (parameters, names) in groups.items()
    ]


def _trained_facts(model: nn.Module, head: str | Iterable[str]) -> tuple[Fact, ...]:
    """Every trained parameter, those of the head as such: what is named so, else what is found."""
    asked = match_names(head, [layer.name for layer in find_layers(model)], "head")
    heads = asked | named_roles(model)["head"]
    if not heads:
        inner = unwrapped(model)
        heads = {plain_name(name) for name in output_heads(inner, find_sites(inner))}
    return find_facts(model, heads=heads)


def _table(
    facts: tuple[Fact, ...],
    lr: float,
    base_width: int,
    optimizer: Optimizer,
    weight_decay: float | None,
) -> ScalingTable:
    if optimizer not in get_args(Optimizer):
        raise EinlinearError(
            what=f"the optimizer is {quote(optimizer)}",
            rule='rates are known for "adam" and "sgd"',
            fix='use "adam" for AdamW, Lion and others whose steps do not depend on the size of '
            'the gradient, "sgd" for SGD',
        )
    base_width = whole_number(base_width, "base_width", 1)
    lr = _number(lr, "lr")
    decay = None if weight_decay is None else _number(weight_decay, "weight_decay", zero=True)
    rows = tuple(_row(fact, lr, base_width, optimizer, decay) for fact in facts)
    return ScalingTable(rows, lr, base_width, optimizer)


def _number(value: float, name: str, *, zero: bool = False) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    if is_number and (value > 0 or (zero and value == 0)):
        return float(value)
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is a number {'of 0 or more' if zero else 'above 0'}",
        fix=f"give {name} as a float; change it later with a scheduler of torch",
    )


def _row(
    fact: Fact, lr: float, base_width: int, optimizer: Optimizer, weight_decay: float | None
) -> ScalingRow:
    scaling = fact.scaling
    rate = _RATES[optimizer](scaling, lr, base_width)
    multiplier = _RATES[optimizer](scaling, 1.0, base_width)
    decay = weight_decay
    if decay is not None:
        decay = decay / multiplier if scaling.kind == "matrix" else 0.0
    return ScalingRow(
        name=fact.name,
        shape=tuple(fact.parameter.shape),
        kind=_kind(scaling),
        fan_in=scaling.fan_in,
        fan_out=scaling.fan_out,
        num_factors=scaling.num_factors,
        repeats=scaling.repeats,
        init_std=scaling.init_std,
        multiplier=multiplier,
        rate=rate,
        weight_decay=decay,
    )


def _kind(scaling: Scaling) -> str:
    is_head = scaling.head_width and scaling.kind == "matrix"
    return "head" if is_head else scaling.kind
