"""Experts: a rule for convert_ that turns a layer into a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from einlinear.layers.moe.routing import expert_counts
from einlinear.layers.scaling import ExpertNorm
from einlinear.models.convert.heads import Heads
from einlinear.structures.structure import Structure, check_structure
from einlinear.structures.text import parse_structure
from einlinear.structures.values import one_of, true_or_false


@dataclass(frozen=True, slots=True)
class Experts:
    """The structure of every expert, their number, how many each token uses, and their norms."""

    structure: Structure | Heads
    num_experts: int
    num_active: int = 2
    expert_norm: ExpertNorm = "each"
    expert_gain: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.structure, Heads):
            check_structure(self.structure)
        expert_counts(self.num_experts, self.num_active)
        one_of(self.expert_norm, "expert_norm", get_args(ExpertNorm))
        true_or_false(self.expert_gain, "expert_gain")


def moe(
    structure: Structure | Heads | str,
    num_experts: int,
    num_active: int = 2,
    *,
    expert_norm: ExpertNorm = "each",
    expert_gain: bool = False,
) -> Experts:
    """Return a rule for convert_ that replaces a layer by an MoELinear. Ref: [P24 §5].

    Args:
        structure: the structure of each expert: a Structure, its text, or el.heads(...).
        num_experts: number of experts.
        num_active: number of experts that each token uses.
        expert_norm: whether factors are normalised for "each" expert, or all "together".
        expert_gain: whether every factor has a learnable gain.
    """
    structure = parse_structure(structure) if isinstance(structure, str) else structure
    return Experts(structure, num_experts, num_active, expert_norm, expert_gain)
