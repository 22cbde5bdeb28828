"""The 23 structures of the paper's experiments, by name, and the family of each."""

from __future__ import annotations

from einlinear.structures.structure import Structure

_FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "full-rank BTT": {
        "btt 1/2 1/2": ("1/2", "0", "1/2", "0", "1/2", "1/2", "0"),
        "btt 1/3 2/3": ("1/3", "0", "2/3", "0", "2/3", "1/3", "0"),
        "btt 1/4 3/4": ("1/4", "0", "3/4", "0", "3/4", "1/4", "0"),
        "btt 2/3 1/3": ("2/3", "0", "1/3", "0", "1/3", "2/3", "0"),
        "btt 3/4 1/4": ("3/4", "0", "1/4", "0", "1/4", "3/4", "0"),
        # Departure: the released code counts these two as low rank, but their rank is full.
        "btt 1/3 1/3": ("1/3", "0", "2/3", "0", "1/3", "2/3", "0"),
        "btt 1/4 1/4": ("1/4", "0", "3/4", "0", "1/4", "3/4", "0"),
    },
    "narrow BTT": {
        "btt 2/3 2/3": ("2/3", "0", "1/3", "0", "2/3", "1/3", "0"),
        "btt 3/4 3/4": ("3/4", "0", "1/4", "0", "3/4", "1/4", "0"),
    },
    "BTT with rank": {
        "btt 1/2 1/2 rank 1/4": ("1/2", "0", "1/2", "0", "1/2", "1/2", "1/4"),
        "btt 1/2 1/2 rank 1/3": ("1/2", "0", "1/2", "0", "1/2", "1/2", "1/3"),
        "btt 1/3 2/3 rank 1/4": ("1/3", "0", "2/3", "0", "2/3", "1/3", "1/4"),
        "btt 2/3 1/3 rank 1/4": ("2/3", "0", "1/3", "0", "1/3", "2/3", "1/4"),
        "btt 2/3 2/3 rank 1/4": ("2/3", "0", "1/3", "0", "2/3", "1/3", "1/4"),
        "btt 1/3 1/3 rank 1/4": ("1/3", "0", "2/3", "0", "1/3", "2/3", "1/4"),
    },
    "TT": {
        "kronecker 1/2 1/2": ("1/2", "1/2", "0", "1/2", "1/2", "0", "0"),
        "kronecker 1/3 2/3": ("1/3", "2/3", "0", "1/3", "2/3", "0", "0"),
        "tt 1/2 1/2 rank 1/4": ("1/2", "1/2", "0", "1/2", "1/2", "0", "1/4"),
        "tt 1/3 2/3 rank 1/4": ("1/3", "2/3", "0", "1/3", "2/3", "0", "1/4"),
    },
    "low rank": {
        "low rank 3/4": ("1", "0", "0", "0", "1", "0", "3/4"),
        "low rank 1/2": ("1", "0", "0", "0", "1", "0", "1/2"),
    },
    "generic": {
        "generic": ("1/2", "1/4", "1/4", "1/4", "1/2", "1/4", "0"),
        "generic rank 1/4": ("1/2", "1/4", "1/4", "1/4", "1/2", "1/4", "1/4"),
    },
}
"""Thetas by name, in families. The numbers in a name are XA, YB and the rank's exponent."""


def paper_structures() -> dict[str, Structure]:
    """The 23 structures of the paper's experiments, by name; dense is not among them.

    The numbers in a name are the exponents of XA and YB, then that of the rank AB, if there is one:
    "btt 1/3 2/3 rank 1/4". The rank of low-rank structures is their only number. `paper_families`
    tells which kind each one is. Ref: [P24 §4]; the values are those of the released code.
    """
    return {
        name: Structure.from_theta(theta)
        for thetas in _FAMILIES.values()
        for name, theta in thetas.items()
    }


def paper_families() -> dict[str, str]:
    """The family of each structure in `paper_structures`, by the name of the structure.

    - "full-rank BTT": no parameter sharing, full rank, rank 1 between the factors: ω = 0, ψ = 1.
    - "narrow BTT": the same with lower rank, ψ < 1.
    - "BTT with rank": more than one term, so they cost more: ν ≥ 7/12.
    - "TT": Kronecker products and tensor trains, which share parameters: ω > 0, ψ = 1.
    - "low rank": ω = 0, ψ = ν < 1.
    - "generic": all seven exponents are positive, or all but the rank; ω > 0, ψ = 1.
    """
    return {name: family for family, thetas in _FAMILIES.items() for name in thetas}
