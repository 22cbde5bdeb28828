"""Conversion: what is replaced in a model and what is left alone, as a value and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from einlinear.structures.plan import Plan, make_plan
from einlinear.structures.structure import Structure


@dataclass(frozen=True, slots=True)
class Swap:
    """One layer to be replaced: all its names, its shape, its structure; counts follow from them.

    Parameters include the bias, which is kept. Multiply-adds are per token, without the bias. With
    experts, 0 standing for none, parameters are those of all, multiply-adds those of the active
    ones, and both include the gate.
    """

    names: tuple[str, ...]
    d_in: int
    d_out: int
    has_bias: bool
    structure: Structure
    num_experts: int = 0
    num_active: int = 1

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

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
class Conversion:
    """What is replaced in a model, what is left alone, and the parameters of the whole model.

    str(conversion) is a table; layers that differ only in one number of their name share a line.
    """

    swaps: tuple[Swap, ...]
    left: tuple[Left, ...]
    model_params_before: int

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

    def __str__(self) -> str:
        header = ("layer", "in -> out", "structure", "parameters", "FLOPs per token", "padding")
        lines = grouped((swap.names, _facts(swap)) for swap in self.swaps)
        many = f"{len(self.swaps)} layer{'s' * (len(self.swaps) != 1)}"
        counts = (
            _change(self.params_before, self.params_after),
            _change(2 * self.macs_before, 2 * self.macs_after),
        )
        model = _change(self.model_params_before, self.model_params_after)
        rows = [(name, *facts) for name, facts in lines]
        rows += [(many, "", "", *counts, ""), ("whole model", "", "", model, "", "")]
        text = _table(header, rows, num_totals=2)
        left = grouped((left.names, (left.reason,)) for left in self.left)
        return "\n".join([text, *(f"left alone: {name} ({reason})" for name, (reason,) in left)])


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


def _facts(swap: Swap) -> tuple[str, ...]:
    d_in, d_out = swap.padding
    experts = f"{swap.num_experts} experts, {swap.num_active} active: " * bool(swap.num_experts)
    padding = " ".join(f"{side} +{n}" for side, n in (("in", d_in), ("out", d_out)) if n)
    return (
        f"{swap.d_in} -> {swap.d_out}",
        f"{experts}{swap.structure}",
        _change(swap.params_before, swap.params_after),
        _change(2 * swap.macs_before, 2 * swap.macs_after),
        padding or "none",
    )


def _change(before: int, after: int) -> str:
    return f"{before:,} -> {after:,}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]], num_totals: int) -> str:
    """Aligned columns, a line under the header and one above the totals."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))

    def line(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()

    body = [line(row) for row in rows]
    return "\n".join([line(header), rule, *body[:-num_totals], rule, *body[-num_totals:]])
