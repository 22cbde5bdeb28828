"""Conversion: what is replaced in a model and what is left alone, as a value and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from einlinear.layers.scaling import ExpertNorm
from einlinear.models.convert.names import (
    LayerNames,
    NamedRow,
    grouped,
    layer_list,
    split_names,
)
from einlinear.show.numbers import amount, counted
from einlinear.show.tables import RULE, text_table, wrapped
from einlinear.structures.named import named_call
from einlinear.structures.plan import Plan, PlanSum, make_plan
from einlinear.structures.structure import Structure, StructureSum

_WIDTH = 80  # columns of the table
_FEW = 6  # kinds of other modules that are listed separately, at most


@dataclass(frozen=True, slots=True)
class Swap:
    """One layer to replace: all its names, its shape and its structure. Counts follow from them.

    Parameters include the bias, which is kept. Multiply-adds are per token and exclude it. With
    experts (0 means none), parameters count all experts, multiply-adds the active ones, and both
    include the gate. `typed` is the structure as the user wrote it.
    """

    names: LayerNames
    d_in: int
    d_out: int
    has_bias: bool
    structure: Structure | StructureSum
    num_experts: int = 0
    num_active: int = 1
    expert_norm: ExpertNorm = "each"
    expert_gain: bool = False
    typed: str = ""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def shown(self) -> str:
        """The structure as the user typed it, or could have typed it."""
        return self.typed or named_call(self.structure)

    @property
    def plan(self) -> Plan | PlanSum:
        """The plan of the new layer."""
        return make_plan(self.structure, self.d_in, self.d_out)

    @property
    def params_before(self) -> int:
        """Parameters of the dense layer."""
        return self.plan.dense_macs + self.d_out * self.has_bias

    @property
    def params_after(self) -> int:
        """Parameters of the structured layer."""
        num_copies = max(1, self.num_experts)
        gains = len(self.plan.factor_edges) * self.expert_gain
        return num_copies * self.plan.params + self._gate + gains + self.d_out * self.has_bias

    @property
    def macs_before(self) -> int:
        """Multiply-adds per token of the dense layer."""
        return self.plan.dense_macs

    @property
    def macs_after(self) -> int:
        """Multiply-adds per token of the structured layer."""
        return self.num_active * self.plan.macs + self._gate

    @property
    def grows(self) -> bool:
        """Whether the structured layer has more parameters or FLOPs than the dense one."""
        return self.params_after > self.params_before or self.macs_after > self.macs_before

    @property
    def _gate(self) -> int:
        return self.num_experts * self.d_in

    @property
    def padding(self) -> tuple[int, int]:
        """How many zeros pad the input, and how many outputs are cut off."""
        return self.plan.d_in_padded - self.d_in, self.plan.d_out_padded - self.d_out


@dataclass(frozen=True, slots=True)
class LayerNote:
    """A layer and a reason: why it is left alone, or why its weights look trained."""

    names: LayerNames
    reason: str


@dataclass(frozen=True, slots=True)
class LayerFit:
    """How close a projected layer is to the dense one.

    error: the share of the squared weight that is lost; with calibration, of the squared outputs,
        weighted as the conversion says.
    samples: how many vectors of input calibration saw. is_enough: whether at least the width.
    """

    names: LayerNames
    error: float
    samples: int = 0
    is_enough: bool = True


@dataclass(frozen=True, slots=True)
class Unseen:
    """A module with parameters that is not a linear layer, so no rule applies to it."""

    name: str
    kind: str
    params: int


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """What is replaced in a model, what is left alone, and the parameters of the whole model.

    str(conversion) is a table; layers whose names differ only in one number share a line.

    swaps: the layers to replace. Their new weights are randomly initialised, unless there are fits.
    left: the linear layers that stay as they are.
    unseen: the other modules with parameters, such as embeddings and fused experts.
    lost: replaced layers whose weights look trained; convert_ asks before it replaces them.
    unmarked_source: the checkpoint, quoted, that the config names although no weight is marked as
        loaded. Either the model was built from this config, or it is a copy of a part of a loaded
        model; convert_ cannot tell which. "" if there is none.
    fits: how close projected layers are to the dense ones.
    weighting: what calibration weighted their errors by; None without calibration.
    remarks: what else the table says.
    is_anchored: whether layers were fitted to the outputs of the original model after projection.
    """

    swaps: tuple[Swap, ...]
    left: tuple[LayerNote, ...]
    model_params_before: int
    unseen: tuple[Unseen, ...] = ()
    lost: tuple[LayerNote, ...] = ()
    unmarked_source: str = ""
    fits: tuple[LayerFit, ...] = ()
    weighting: Literal["inputs", "both"] | None = None
    remarks: tuple[str, ...] = ()
    is_anchored: bool = False

    @property
    def params_before(self) -> int:
        """Parameters of the replaced layers, before."""
        return sum(swap.params_before for swap in self.swaps)

    @property
    def params_after(self) -> int:
        """Parameters of the replaced layers, after."""
        return sum(swap.params_after for swap in self.swaps)

    @property
    def macs_before(self) -> int:
        """Multiply-adds per token of the replaced layers, before; a shared layer counts once."""
        return sum(swap.macs_before for swap in self.swaps)

    @property
    def macs_after(self) -> int:
        """Multiply-adds per token of the replaced layers, after; a shared layer counts once."""
        return sum(swap.macs_after for swap in self.swaps)

    @property
    def model_params_after(self) -> int:
        """Parameters of the whole model, after."""
        return self.model_params_before - self.params_before + self.params_after

    @property
    def lost_by_reason(self) -> dict[str, list[LayerNames]]:
        """The names of replaced layers whose weights look trained, by the reason."""
        found: dict[str, list[LayerNames]] = {}
        for layer in self.lost:
            found.setdefault(layer.reason, []).append(layer.names)
        return found

    @property
    def summary(self) -> str:
        """One sentence: "14 layers replaced: 3.1 x fewer FLOPs, 2.8 x fewer parameters"."""
        flops = _ratio(self.macs_before, self.macs_after, "FLOPs")
        params = _ratio(self.params_before, self.params_after, "parameters")
        growing = sum(swap.grows for swap in self.swaps)
        grows = f"; {counted(growing, 'layer')} grow{'s' * (growing == 1)}" if growing else ""
        return f"{counted(len(self.swaps), 'layer')} replaced: {flops}, {params}{grows}"

    def __str__(self) -> str:
        notes = [wrapped(note, _WIDTH) for note in [*self._notes(), self.summary]]
        return "\n".join([self._table(), *notes])

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows after convert_

    def _table(self) -> str:
        """Return the replaced layers under their structures, and totals."""
        sections = {
            shown: grouped(
                (swap.names, _facts(swap, self._error(swap)))
                for swap in self.swaps
                if swap.shown == shown
            )
            for shown in dict.fromkeys(swap.shown for swap in self.swaps)
        }
        params = _change(self.params_before, self.params_after)
        flops = _change(2 * self.macs_before, 2 * self.macs_after)
        model = _change(self.model_params_before, self.model_params_after)
        total = counted(len(self.swaps), "layer")
        totals = [(total, "", params, flops, ""), ("whole model", "", model, "", "")]
        has_notes = any(facts[-1] for rows in sections.values() for _, facts in rows)
        head = ("layer", "in -> out", "parameters", "FLOPs per token", "notes" * has_notes)

        return layer_table(head, sections, totals)

    def _error(self, swap: Swap) -> str:
        """What a projected layer loses: "loses 12 %"."""
        fit = next((fit for fit in self.fits if fit.names == swap.names), None)
        return f"loses {_loss_percent(fit.error)}" if fit is not None else ""

    def _about_weights(self) -> list[str]:
        """Where the new weights come from."""
        if not self.fits:
            return ["weights: randomly initialised, biases 0"]
        lost = {
            None: "weights",
            "inputs": "outputs on the calibration batches",
            "both": "outputs on the calibration batches, weighted by their effect on the output of "
            "the model",
        }[self.weighting]
        notes = [f"weights: projected; losses are shares of the squared {lost}; biases as before"]
        if self.is_anchored:
            notes = [
                "weights: projected, then fitted with their biases to the outputs of the original "
                "model; losses are shares of its squared outputs, around their mean if there is a "
                "bias"
            ]
        notes += self.remarks
        few = [fit for fit in self.fits if not fit.is_enough]
        if few:
            most = max(few, key=lambda fit: fit.samples)
            notes.append(
                f"too few calibration inputs for {layer_list([fit.names for fit in few], 5)}: "
                f"at most {most.samples:,}, and a layer needs "
                + (
                    "ten times as many as it has inputs, to fit the original model"
                    if self.is_anchored
                    else "as many as it has inputs, better ten times as many"
                )
            )
        return notes

    def _notes(self) -> list[str]:
        """Return what is left alone, and what happens to the weights."""
        left = grouped((layer.names, (layer.reason,)) for layer in self.left)
        notes = [f"left alone: {name} ({reason})" for name, (reason,) in left]
        notes += _shares(self.unseen, self.model_params_before)
        notes += self._about_weights()
        for reason, layers in self.lost_by_reason.items():
            which = "all" if len(layers) == len(self.swaps) else layer_list(layers)
            notes.append(f"trained weights that are lost: {which} ({reason})")
        if self.unmarked_source:
            notes.append(
                f"cannot tell whether weights were loaded from {self.unmarked_source}, the "
                "checkpoint that the config names: nothing marks them as loaded"
            )
        return notes


def layer_table(
    head: Sequence[str], sections: Mapping[str, Sequence[NamedRow]], totals: Sequence[Sequence[str]]
) -> str:
    """Format rows of layers under the titles of their sections, and totals.

    If names are too long, layers are listed under the modules that hold them.
    """

    def lines(is_split: bool) -> Iterator[Sequence[str] | str]:
        for title, rows in sections.items():
            yield title
            for name, facts in split_names(rows) if is_split else rows:
                yield (name if is_split else f"  {name}", *facts) if facts else name
        yield from (RULE, *totals)

    _, rule, *_ = text_table(head, lines(is_split=False)).splitlines()
    body = lines(is_split=len(rule) > _WIDTH)
    return text_table(head, body, left=len(head), width=_WIDTH)


def _facts(swap: Swap, error: str) -> tuple[str, ...]:
    padding = [f"{side} +{n}" for side, n in zip(("in", "out"), swap.padding, strict=True) if n]
    return (
        f"{swap.d_in} -> {swap.d_out}",
        _change(swap.params_before, swap.params_after),
        _change(2 * swap.macs_before, 2 * swap.macs_after),
        ", ".join([error] * bool(error) + ["grows"] * swap.grows + padding),
    )


def _loss_percent(share: float) -> str:
    if share < 1e-12:
        return "0 %"
    return f"{100 * share:.2g} %" if share >= 1e-4 else "< 0.01 %"


def _change(before: int, after: int) -> str:
    """Format two counts: "1.05 M -> 132 k"."""
    return f"{amount(before)} -> {amount(after)}"


def _ratio(before: int, after: int, noun: str) -> str:
    """Format how many times fewer or more there are: "3.1 x fewer FLOPs"."""
    if before == after:
        return f"as many {noun}"
    times = max(before, after) / max(1, min(before, after))
    if times < 1.05:
        return f"about as many {noun}"
    size = f"{times:.1f}" if times < 99.95 else f"{times:,.0f}"
    return f"{size} x {'fewer' if after < before else 'more'} {noun}"


def _shares(unseen: Sequence[Unseen], total: int) -> list[str]:
    """Describe the modules that are not linear layers by their share of all parameters."""
    kinds: dict[tuple[str, str], list[Unseen]] = {}
    for module in unseen:
        place = ".".join("#" if part.isdecimal() else part for part in module.name.split("."))
        kinds.setdefault((place, module.kind), []).append(module)
    groups = sorted(kinds.values(), key=lambda group: -_params(group))
    num_shown = sum(100 * _params(group) >= total for group in groups[:_FEW])
    lines = []
    for group in groups[:num_shown]:
        kind = f"{group[0].kind}, not a linear layer"
        names = layer_list([(module.name,) for module in group])
        lines.append(f"left alone: {names} ({kind}: {_percent(group, total)} of all parameters)")
    if rest := [module for group in groups[num_shown:] for module in group]:
        kind = ", ".join(dict.fromkeys(module.kind for module in rest))
        lines.append(f"left alone: the rest ({kind}: {_percent(rest, total)} of all parameters)")
    return lines


def _params(modules: Sequence[Unseen]) -> int:
    return sum(module.params for module in modules)


def _percent(modules: Sequence[Unseen], total: int) -> str:
    share = 100 * _params(modules) / max(1, total)
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %"
