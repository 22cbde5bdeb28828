"""Fusion: which nets of a model are computed in one pass, and what is left alone, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from einlinear.models.convert.conversion import LayerNote, layer_table
from einlinear.models.convert.names import LayerNames, grouped, layer_list
from einlinear.show.numbers import counted
from einlinear.show.tables import wrapped

_WIDTH = 80  # columns of the table
_HEAD = ("module", "in -> hidden -> out", "activation")


@dataclass(frozen=True, slots=True)
class FusedNet:
    """A feed-forward net that is computed in one pass.

    names: of the module that holds it. layers: the names of its linear layers in the model.
    structures: of these layers, as text. activation: "gelu", or "gated silu".
    """

    names: LayerNames
    layers: tuple[str, ...]
    widths: tuple[int, int, int]
    structures: str
    activation: str


@dataclass(frozen=True, slots=True, repr=False)
class Fusion:
    """The feed-forward nets that are computed in one pass, and the layers left alone.

    str(fusion) is a table; modules whose names differ only in one number share a line.

    nets: what is fused.
    left: the structured layers that are not part of these nets, and dense layers of other nets.
    remarks: what else the table says.
    """

    nets: tuple[FusedNet, ...]
    left: tuple[LayerNote, ...]
    remarks: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One sentence: "12 feed-forward nets run in one pass"."""
        count = len(self.nets)
        return f"{counted(count, 'feed-forward net')} run{'s' * (count == 1)} in one pass"

    def __str__(self) -> str:
        sections = {
            shown: grouped(
                (net.names, (" -> ".join(map(str, net.widths)), net.activation))
                for net in self.nets
                if net.structures == shown
            )
            for shown in dict.fromkeys(net.structures for net in self.nets)
        }
        left: dict[str, list[LayerNames]] = {}
        for layer in self.left:
            left.setdefault(layer.reason, []).append(layer.names)
        notes = [f"left alone: {layer_list(names)} ({reason})" for reason, names in left.items()]
        notes += [*self.remarks, self.summary]
        table = layer_table(_HEAD, sections, [(counted(len(self.nets), "net"), "", "")])
        return "\n".join([table, *(wrapped(note, _WIDTH) for note in notes)])

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows after fuse_
