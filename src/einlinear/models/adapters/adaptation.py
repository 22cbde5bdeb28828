"""Adaptation: which layers of a model have adapters, what is trained, and what is left alone."""

from __future__ import annotations

from dataclasses import dataclass

from einlinear.models.convert.conversion import LayerNote, Swap, layer_table
from einlinear.models.convert.names import grouped
from einlinear.show.numbers import amount, counted, listed
from einlinear.show.tables import wrapped

_WIDTH = 80  # columns of the table
_HEAD = ("layer", "in -> out", "parameters", "of its adapter")


@dataclass(frozen=True, slots=True, repr=False)
class Adaptation:
    """The adapters of a model, the other parameters that are trained, and the layers left alone.

    str(adaptation) is a table; layers whose names differ only in one number share a line.

    adapted: the layers that have got an adapter, with its structure.
    left: the linear layers that have none.
    trainable: the names of parameters outside these adapters that are trained.
    trained_params: all parameters that are trained, those of adapters included.
    model_params: all parameters of the model, adapters included.
    """

    adapted: tuple[Swap, ...]
    left: tuple[LayerNote, ...]
    trainable: tuple[str, ...]
    trained_params: int
    model_params: int

    @property
    def params(self) -> int:
        """Parameters of the adapters."""
        return sum(swap.plan.params for swap in self.adapted)

    @property
    def share(self) -> float:
        """The share of all parameters that is trained."""
        return self.trained_params / self.model_params

    @property
    def summary(self) -> str:
        """One sentence: "2 layers adapted: 12 k of 1.2 M parameters are trained (1.0 %)"."""
        return (
            f"{counted(len(self.adapted), 'layer')} adapted: {amount(self.trained_params)} of "
            f"{amount(self.model_params)} parameters are trained ({100 * self.share:.2g} %)"
        )

    def __str__(self) -> str:
        left = grouped((layer.names, (layer.reason,)) for layer in self.left)
        notes = [f"left alone: {name} ({reason})" for name, (reason,) in left]
        notes.append("adapters: zero at the start, so the output of the model is unchanged")
        if self.trainable:
            notes.append(f"trained besides: {listed(self.trainable, 8)}")
        notes.append(self.summary)
        return "\n".join([self._table(), *(wrapped(note, _WIDTH) for note in notes)])

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows after adapt_

    def _table(self) -> str:
        sections = {
            shown: grouped(
                (swap.names, _facts(swap)) for swap in self.adapted if swap.shown == shown
            )
            for shown in dict.fromkeys(swap.shown for swap in self.adapted)
        }
        before = amount(sum(swap.params_before for swap in self.adapted))
        total = (counted(len(self.adapted), "layer"), "", before, amount(self.params))
        return layer_table(_HEAD, sections, [total])


def _facts(swap: Swap) -> tuple[str, ...]:
    shape = f"{swap.d_in} -> {swap.d_out}"
    return shape, amount(swap.params_before), amount(swap.plan.params)
