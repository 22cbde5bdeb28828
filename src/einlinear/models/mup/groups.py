"""Learning rates that transfer across widths: parameter groups, and a table that explains them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from numbers import Real
from typing import Any, get_args

from torch import nn

from einlinear.errors import EinlinearError, quote
from einlinear.layers.scaling import (
    ADAM_SHARE,
    BaseShape,
    Decay,
    MatrixAxes,
    Optimizer,
    adam_rate,
    infer_axes,
    muon_rate,
    sgd_rate,
)
from einlinear.models.mup.base import Base, base_shapes
from einlinear.models.survey.facts import (
    Fact,
    find_facts,
    find_layers,
    match_names,
    named_roles,
    plain_name,
    unwrapped,
)
from einlinear.models.survey.sites import find_sites, output_heads
from einlinear.show.tables import text_table
from einlinear.structures.values import one_of

_RATES = {"adam": adam_rate, "sgd": sgd_rate, "muon": adam_rate}  # Muon leaves some to AdamW


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """The scaling of one parameter, and the learning rate and decay that follow from it.

    base_in is the fan-in of the same layer in the base, kept dense. multiplier is rate / lr, or
    rate / adam_lr for what Muon leaves to AdamW. weight_decay is None if it is left to the
    optimizer. axes are those of the matrices that Muon orthogonalises; None for all other
    parameters and optimizers.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    fan_in: int
    fan_out: int
    num_factors: int
    repeats: int
    init_std: float
    base_in: int
    multiplier: float
    rate: float
    weight_decay: float | None = None
    axes: MatrixAxes | None = None

    @property
    def group_name(self) -> str:
        """The name of its parameter group: "fan_in 256, 2 factors", or the kind."""
        if self.kind not in ("matrix", "head"):
            return self.kind
        factors = f", {self.num_factors} factors" if self.num_factors > 1 else ""
        if self.axes is not None:
            return f"muon, {self.fan_in} -> {self.fan_out}{factors}"
        return f"{'head, ' if self.kind == 'head' else ''}fan_in {self.fan_in}{factors}"


@dataclass(frozen=True, slots=True, repr=False)
class ScalingTable:
    """One row for each trained parameter, in the model's order; print it to read it."""

    rows: tuple[ScalingRow, ...]
    lr: float
    base_width: int | None
    optimizer: Optimizer
    adam_lr: float | None = None

    def __iter__(self) -> Iterator[ScalingRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        head = ["parameter", "shape", "kind", "fan-in", "fan-out", "factors", "init", "base-in"]
        is_muon = self.optimizer == "muon"
        cells = [
            (
                row.name,
                " x ".join(map(str, row.shape)) or "()",
                row.kind,
                str(row.fan_in),
                str(row.fan_out),
                str(row.num_factors),
                f"{row.init_std:.3g}",
                str(row.base_in),
                f"{row.multiplier:.4g}",
                f"{row.rate:.3g}",
                *(["adamw" if row.axes is None else "muon"] if is_muon else []),
            )
            for row in self.rows
        ]
        base = "the base's widths" if self.base_width is None else f"base width {self.base_width}"
        title = f"{self.optimizer}, lr {self.lr:g} at {base}"
        if self.adam_lr is not None:
            title += f"; adamw, lr {self.adam_lr:g}"
        head += ["x lr", "lr", *(["by"] if is_muon else [])]
        return f"{title}\n{text_table(head, cells, left=3)}"

    def __repr__(self) -> str:
        return str(self)


def scaling_table(
    model: nn.Module,
    lr: float,
    *,
    base: nn.Module | Mapping[str, int] | None = None,
    base_width: int | None = None,
    width: int | None = None,
    optimizer: Optimizer = "adam",
    weight_decay: float | None = None,
    decay: Decay = "independent",
    head: str | Iterable[str] = (),
    adam_lr: float | None = None,
) -> ScalingTable:
    """Return how every trained parameter is scaled; the arguments are those of `param_groups`."""
    facts = _trained_facts(model, head)
    given = Base(base, base_width, width)
    return _table(model, facts, lr, given, optimizer, weight_decay, decay, adam_lr)


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    base: nn.Module | Mapping[str, int] | None = None,
    base_width: int | None = None,
    width: int | None = None,
    optimizer: Optimizer = "adam",
    weight_decay: float | None = None,
    decay: Decay = "independent",
    head: str | Iterable[str] = (),
    adam_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer, with rates that transfer across widths.

    With these groups (µP), the best learning rate of the base model is also close to the best for
    wider models and for other structures. There is one group for each distinct rate and decay
    (DTensors get groups of their own), and every trained parameter is in exactly one. The rules are
    in docs/training.md.

    Rates are relative to the same layer of the base, the dense model on which you tuned lr. Say
    what it is in one of three ways:

    - base: a dense model with the shapes of the base gets lr everywhere.
    - base_width and width: as base, if every width of the model that is a multiple of `width` grows
      with it and all others stay.
    - base_width alone: every layer of the base has base_width inputs (and, for "sgd", outputs,
      except for the head). Simple, but it also scales input layers, and the second matrix of a
      feed-forward net of 4 x the width has a quarter of lr in the base itself.

    Args:
        model: any module; it may be compiled, sharded by FSDP2 or wrapped in DDP.
        lr: the learning rate of the base model.
        base: the model at the width at which you tuned lr, on any device, also "meta", before or
            after `convert_`: layers are found by name, and of a structured one only in_features and
            out_features count. Or, except for "sgd", {pattern: in_features}: patterns match the
            names of layers or parameters, and the first match decides.
        base_width: the width at which you tuned lr.
        width: the width of the model; see above.
        optimizer: "adam" for Adam, AdamW and others whose steps do not depend on the size of the
            gradient; "sgd" for SGD, with or without momentum; "muon" for `einlinear.Muon`, whose
            groups also tell the axes of their matrices.
        weight_decay: the decay of matrices in the base; vectors and embeddings get 0. None leaves
            decay to the optimizer.
        decay: "independent" gives matrices weight_decay * lr / rate: as optimizers multiply it by
            the rate, each step decays by the same share at every width. "standard" gives them
            weight_decay, so that the decay per step falls with the rate.
        head: pattern or patterns for the name of the output layer, in addition to what the model
            declares (`layer_roles`, or Hugging Face's get_output_embeddings). Only "sgd" and
            "muon" need it.
            If nothing names a head, it is the layer that `convert_` takes for the head; a
            structured layer is a head only if it is named.
        adam_lr: with "muon", the learning rate at the base width of all that AdamW trains: the
            head, embeddings and vectors. Half of lr by default.
    """
    facts = _trained_facts(model, head)
    given = Base(base, base_width, width)
    table = _table(model, facts, lr, given, optimizer, weight_decay, decay, adam_lr)
    if not facts:
        raise EinlinearError(
            what="the model has no trainable parameters",
            rule="an optimizer needs parameters",
            fix="call requires_grad_(True) on the parameters to train",
        )
    groups: dict[tuple[Any, ...], tuple[list[nn.Parameter], dict[str, None]]] = {}
    for fact, row in zip(facts, table, strict=True):
        # Optimizers cannot mix tensors and DTensors in one group.
        key = (row.rate, row.weight_decay, row.axes, type(fact.parameter.data))
        parameters, names = groups.setdefault(key, ([], {}))
        parameters.append(fact.parameter)
        names[row.group_name] = None
    return [
        {"params": parameters, "lr": rate, "name": "; ".join(names)}
        | ({} if decay is None else {"weight_decay": decay})
        | ({"axes": axes and asdict(axes)} if optimizer == "muon" else {})
        for (rate, decay, axes, _), (parameters, names) in groups.items()
    ]


def plain_groups(
    model: nn.Module, lr: float, *, optimizer: Optimizer, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups without µP: all parameters share one learning rate and decay.

    With "muon", what AdamW trains has a rate of its own.
    """
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    if optimizer != "muon":
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [{"params": parameters, "lr": lr, **decay}]
    return [
        {**group, "lr": lr * ADAM_SHARE if group["axes"] is None else lr, **decay}
        for group in param_groups(model, lr, base_width=1, optimizer=optimizer)
    ]


def _trained_facts(model: nn.Module, head: str | Iterable[str]) -> tuple[Fact, ...]:
    """Return every trained parameter; the head is what is named so, or else what is found."""
    asked = match_names(head, [layer.name for layer in find_layers(model)], "head")
    heads = asked | named_roles(model)["head"]
    if not heads:
        inner = unwrapped(model)
        heads = {plain_name(name) for name in output_heads(inner, find_sites(inner))}
    return find_facts(model, heads=heads)


def _table(
    model: nn.Module,
    facts: tuple[Fact, ...],
    lr: float,
    base: Base,
    optimizer: Optimizer,
    weight_decay: float | None,
    decay: Decay,
    adam_lr: float | None,
) -> ScalingTable:
    fix = 'give "adam" for AdamW, Lion and others whose steps do not depend on the size of the '
    fix += 'gradient, "sgd" for SGD, "muon" for el.Muon'
    one_of(optimizer, "optimizer", get_args(Optimizer), fix=fix)
    one_of(decay, "decay", get_args(Decay))
    lr = _number(lr, "lr")
    if weight_decay is not None:
        weight_decay = _number(weight_decay, "weight_decay", zero=True)
    if optimizer == "muon":
        adam_lr = lr * ADAM_SHARE if adam_lr is None else _number(adam_lr, "adam_lr")
    elif adam_lr is not None:
        raise EinlinearError(
            what=f"adam_lr is {quote(adam_lr)}, and the optimizer {optimizer}",
            rule="adam_lr is the rate of what Muon leaves to AdamW",
            fix='leave out adam_lr, or give optimizer="muon"',
        )
    shapes = base_shapes(model, facts, base, optimizer)
    rows = tuple(
        _row(fact, shape, lr, optimizer, weight_decay, decay, adam_lr)
        for fact, shape in zip(facts, shapes, strict=True)
    )
    return ScalingTable(rows, lr, base.base_width, optimizer, adam_lr)


def _number(value: float, name: str, *, zero: bool = False) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
    if is_number and (value > 0 or (zero and value == 0)):
        return float(value)
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is a finite number {'of 0 or more' if zero else 'above 0'}",
        fix=f"give {name} as a float; to change it during training, use a torch scheduler",
    )


def _row(
    fact: Fact,
    base: BaseShape,
    lr: float,
    optimizer: Optimizer,
    weight_decay: float | None,
    decay: Decay,
    adam_lr: float | None,
) -> ScalingRow:
    scaling = fact.scaling
    is_matrix = scaling.kind == "matrix"
    axes = None
    if optimizer == "muon" and is_matrix and not scaling.head_width:
        axes = _axes(fact)
        multiplier, rate = muon_rate(scaling, 1.0), muon_rate(scaling, lr)
    else:
        own = lr if adam_lr is None else adam_lr
        multiplier, rate = (_RATES[optimizer](scaling, r, base) for r in (1.0, own))
    if weight_decay is not None:
        scale = multiplier if decay == "independent" else 1.0
        weight_decay = weight_decay / scale if is_matrix else 0.0
    return ScalingRow(
        name=fact.name,
        shape=tuple(fact.parameter.shape),
        kind="head" if is_matrix and scaling.head_width else scaling.kind,
        fan_in=scaling.fan_in,
        fan_out=scaling.fan_out,
        num_factors=scaling.num_factors,
        repeats=scaling.repeats,
        init_std=scaling.init_std,
        base_in=base.fan_in,
        multiplier=multiplier,
        rate=rate,
        weight_decay=weight_decay,
        axes=axes,
    )


def _axes(fact: Fact) -> MatrixAxes:
    """Return the axes of the matrices of a parameter."""
    axes = infer_axes(fact.scaling, fact.parameter.shape)
    if axes is None:
        raise EinlinearError(
            what=f"{fact.name} has the shape {tuple(fact.parameter.shape)}, a fan-in of "
            f"{fact.scaling.fan_in} and a fan-out of {fact.scaling.fan_out}",
            rule="Muon must know which axes of a parameter are the inputs of its matrices, and "
            "which the outputs",
            fix="in the rule of its module, give el.matrix_scaling(fan_in, fan_out, "
            "el.MatrixAxes(inputs=(-1,), outputs=(-2,))) with the right axes, counted from the end",
        )
    return axes
