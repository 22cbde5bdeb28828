"""Conversion: what is replaced in a model and what is left alone, as a value and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from einlinear.models.conversion_table import change, percent, ratio, table, wrapped
from einlinear.structures.named import call_of
from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.structure import Structure

_FEW = 6  # how many kinds of parameters outside linear layers have a line of their own


@dataclass(frozen=True, slots=True)
class Swap:
    """One layer to be replaced: all its names, its shape, its structure; counts follow from them.

    Parameters include the bias, which is kept. Multiply-adds are per token, without the bias. With
    experts, 0 standing for none, parameters are those of all, multiply-adds those of the active
    ones, and both include the gate. `typed` is the structure as the user wrote it.
    """

    names: tuple[str, ...]
    d_in: int
    d_out: int
    has_bias: bool
    structure: Structure
    num_experts: int = 0
    num_active: int = 1
    typed: str = ""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def shown(self) -> str:
        """The structure as it was typed, or as it could have been."""
        return self.typed or call_of(self.structure)

    @property
    def plan(self) -> Plan:
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
        return num_copies * self.plan.params + self._gate + self.d_out * self.has_bias

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
        """How many zeros are added to the input, and how many outputs are cut off."""
        return self.plan.d_in_padded - self.d_in, self.plan.d_out_padded - self.d_out


@dataclass(frozen=True, slots=True)
class Left:
    """One layer that stays as it is, and why."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Unseen:
    """A module with parameters that is no linear layer, so that no rule applies to it."""

    name: str
    kind: str
    params: int


@dataclass(frozen=True, slots=True)
class Lost:
    """One layer that is replaced although its weights look trained, and why they do."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """What is replaced in a model, what is left alone, and the parameters of the whole model.

    str(conversion) is a table; layers that differ only in one number of their name share a line.

    swaps: the layers that are replaced. Their new weights are drawn at random.
    left: the linear layers that stay as they are.
    unseen: the other modules with parameters, such as embeddings and fused experts.
    lost: those of the replaced layers whose weights look trained; convert_ asks before it
        replaces them.
    unmarked_source: the checkpoint, quoted, that the config names although nothing marks the
        weights as loaded: the model was built from this config, or is a copy of a part of a loaded
        one, which convert_ cannot tell apart. "" if there is none.
    """

    swaps: tuple[Swap, ...]
    left: tuple[Left, ...]
    model_params_before: int
    unseen: tuple[Unseen, ...] = ()
    lost: tuple[Lost, ...] = ()
    unmarked_source: str = ""

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
    def summary(self) -> str:
        """One sentence: "14 layers replaced: 3.1 x fewer FLOPs, 2.8 x fewer parameters"."""
        flops = ratio(self.macs_before, self.macs_after, "FLOPs")
        params = ratio(self.params_before, self.params_after, "parameters")
        growing = sum(swap.grows for swap in self.swaps)
        grows = f"; {_layers(growing)} grow{'s' * (growing == 1)}" if growing else ""
        return f"{_layers(len(self.swaps))} replaced: {flops}, {params}{grows}"

    def __str__(self) -> str:
        notes = [line for note in [*self._notes(), self.summary] for line in wrapped(note)]
        return "\n".join([*self._table(), *notes])

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows after convert_

    def _table(self) -> list[str]:
        """The replaced layers under their structures."""
        sections = {
            shown: grouped((swap.names, _facts(swap)) for swap in self.swaps if swap.shown == shown)
            for shown in dict.fromkeys(swap.shown for swap in self.swaps)
        }
        params = change(self.params_before, self.params_after)
        flops = change(2 * self.macs_before, 2 * self.macs_after)
        model = change(self.model_params_before, self.model_params_after)
        has_notes = any(facts[-1] for rows in sections.values() for _, facts in rows)
        return table(
            ("in -> out", "parameters", "FLOPs per token", "notes" * has_notes),
            sections,
            [
                (_layers(len(self.swaps)), ("", params, flops, "")),
                ("whole model", ("", model, "", "")),
            ],
        )

    def _notes(self) -> list[str]:
        """What is left alone, and what happens to the weights."""
        left = grouped((left.names, (left.reason,)) for left in self.left)
        notes = [f"left alone: {name} ({reason})" for name, (reason,) in left]
        notes += _shares(self.unseen, self.model_params_before)
        notes.append("weights: drawn anew, biases 0")
        for reason in dict.fromkeys(lost.reason for lost in self.lost):
            lost = [lost.names for lost in self.lost if lost.reason == reason]
            names = [name for name, _ in grouped((names, ()) for names in lost)]
            which = "all" if len(lost) == len(self.swaps) else ", ".join(names)
            notes.append(f"trained weights that are lost: {which} ({reason})")
        if self.unmarked_source:
            notes.append(
                f"cannot tell whether weights were loaded from {self.unmarked_source}, "
                "which the config names: nothing marks them"
            )
        return notes


def grouped(
    rows: Iterable[tuple[Sequence[str], tuple[str, ...]]],
) -> list[tuple[str, tuple[str, ...]]]:
    """Rows of names and facts; those that differ in one number of the name only are joined.

    "layers.0.fc" and "layers.1.fc" with the same facts become "layers.{0..1}.fc". The names of a
    shared layer are joined by " = ".
    """
    found: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for names, facts in rows:
        parts = names[0].split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None or len(names) > 1:
            found[" = ".join(names), "", facts] = []
            continue
        before, after = ".".join(parts[:at]), ".".join(parts[at + 1 :])
        found.setdefault((before, after, facts), []).append(int(parts[at]))
    return [
        (".".join(filter(None, [before, _runs(numbers), after])), facts)
        for (before, after, facts), numbers in found.items()
    ]


def _runs(numbers: list[int]) -> str:
    """Numbers as text: "7", "{0..11}", "{0..3,5}"; "" for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = ",".join("..".join(map(str, run)) for run in runs)
    return text if len(numbers) < 2 else f"{{{text}}}"


def _layers(number: int) -> str:
    return f"{number} layer{'s' * (number != 1)}"


def _facts(swap: Swap) -> tuple[str, ...]:
    padding = [f"{side} +{n}" for side, n in zip(("in", "out"), swap.padding, strict=True) if n]
    return (
        f"{swap.d_in} -> {swap.d_out}",
        change(swap.params_before, swap.params_after),
        change(2 * swap.macs_before, 2 * swap.macs_after),
        ", ".join(["grows"] * swap.grows + padding),
    )


def _shares(unseen: Sequence[Unseen], total: int) -> list[str]:
    """Which share of all parameters is in modules that are no linear layers, large ones first."""
    kinds: dict[tuple[str, str], list[Unseen]] = {}
    for module in unseen:
        place = ".".join("#" if part.isdecimal() else part for part in module.name.split("."))
        kinds.setdefault((place, module.kind), []).append(module)
    sums = [(sum(module.params for module in group), group) for group in kinds.values()]
    sums.sort(key=lambda item: -item[0])
    is_large = [i < _FEW and 100 * params >= total for i, (params, _) in enumerate(sums)]
    shown = [item for item, flag in zip(sums, is_large, strict=True) if flag]
    rest = [item for item, flag in zip(sums, is_large, strict=True) if not flag]
    lines = []
    for params, group in shown:
        names = ", ".join(name for name, _ in grouped(((m.name,), ()) for m in group))
        share = f"{percent(params, total)} of all parameters"
        lines.append(f"left alone: {names} ({group[0].kind}, not a linear layer: {share})")
    if rest:
        what = ", ".join(dict.fromkeys(group[0].kind for _, group in rest))
        share = percent(sum(params for params, _ in rest), total)
        lines.append(f"left alone: the rest ({what}: {share} of all parameters)")
    return lines
