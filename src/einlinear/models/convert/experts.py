"""Experts: a rule for convert_ that turns a layer into a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from einlinear.layers.moe.routing import expert_counts
from einlinear.models.convert.heads import Heads
from einlinear.structures.structure import Structure, check_structure
from einlinear.structures.text import parse


@dataclass(frozen=True, slots=True)
class Experts:
    """The structure of every expert, their number, and how many each token uses."""

    structure: Structure | Heads
    num_experts: int
    num_active: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.structure, Heads):
            check_structure(self.structure)
        expert_counts(self.num_experts, self.num_active)


def moe(structure: Structure | Heads | str, num_experts: int, num_active: int = 2) -> Experts:
    """Return a rule for convert_ that replaces a layer by an MoELinear. Ref: [P24 §5].

    Args:
        structure: the structure of each expert: a Structure, its text, or el.heads(...).
        num_experts: number of experts.
        num_active: number of experts that each token uses.
    """
    structure = parse(structure) if isinstance(structure, str) else structure
    return Experts(structure, num_experts, num_active)
