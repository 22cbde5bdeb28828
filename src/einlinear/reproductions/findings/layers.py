"""The layers of the study: how records name them, and what a reader calls them."""

from __future__ import annotations

DENSE_LAYERS, BTT = "dense", "btt"
BTT_TWO_THIRDS = "theta(1/3,0,2/3,0,2/3,1/3,0)"
BTT_THREE_QUARTERS = "theta(1/4,0,3/4,0,3/4,1/4,0)"
BTT_RANK = "theta(1/2,0,1/2,0,1/2,1/2,1/4)"
LOW_RANK_BTT = "theta(2/3,0,1/3,0,2/3,1/3,0)"
LOW_RANK, LOW_RANK_WIDE = "low_rank", "low_rank(rank_exponent=3/4)"
LOW_RANK_FAN_IN = "low_rank fan-in factors"
KRONECKER, TENSOR_TRAIN = "kronecker", "tensor_train(rank_exponent=1/4)"
GENERIC = "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)"
THREE_FACTORS = "XA^1/3 XAB^1/3 XABC^1/3 YC^1/3 YBC^1/3 YABC^1/3"

STRUCTURES = {
    DENSE_LAYERS: "dense",
    BTT: "BTT, ν = ½",
    BTT_TWO_THIRDS: "BTT, ν = ⅔",
    BTT_THREE_QUARTERS: "BTT, ν = ¾",
    BTT_RANK: "BTT with rank, ν = ¾",
    LOW_RANK_BTT: "low-rank BTT, ψ = ⅔",
    LOW_RANK: "low rank, ψ = ½",
    LOW_RANK_FAN_IN: "low rank, ψ = ½, larger start",
    LOW_RANK_WIDE: "low rank, ψ = ¾",
    KRONECKER: "Kronecker, ω = ½",
    TENSOR_TRAIN: "tensor-train, ω = ½",
    GENERIC: "generic, ω = ¼",
    THREE_FACTORS: "three factors, ν = ⅓",
}
"""The structures of the scaling laws; the first is the reference."""

FULL_RANK = (BTT, BTT_TWO_THIRDS, BTT_THREE_QUARTERS, BTT_RANK, THREE_FACTORS)
"""Structures with ω = 0 and ψ = 1, besides dense."""

SHARING = {
    GENERIC: (BTT,),
    KRONECKER: (BTT,),
    TENSOR_TRAIN: (BTT_RANK, BTT_THREE_QUARTERS),
}
"""Structures with ω > 0, and all those with the same ψ and ν, but ω = 0."""

LOW = {
    LOW_RANK: (BTT,),
    LOW_RANK_FAN_IN: (BTT,),
    LOW_RANK_WIDE: (BTT_RANK, BTT_THREE_QUARTERS),
    LOW_RANK_BTT: (THREE_FACTORS,),
}
"""Structures with ψ < 1, and all those with the same ω and ν, but ψ = 1."""


def mixture(structure: str, experts: int) -> str:
    """The name of layers with experts, two of them active."""
    return f"{structure} moe 2/{experts}"


def standard_mixture(experts: int) -> str:
    """The name of models whose feed-forward nets are experts."""
    return f"dense ffn-moe 2/{experts}"


EXPERTS = (8, 16)
MIXTURES = {
    name: text
    for count in EXPERTS
    for name, text in {
        mixture(BTT, count): f"BTT-MoE, E = {count}",
        standard_mixture(count): f"standard MoE, E = {count}",
        mixture(f"low_rank(rank=d/{count})", count): f"low-rank-MoE, E = {count}",
        mixture(DENSE_LAYERS, count): f"dense-MoE, E = {count}",
    }.items()
}
PLACES = {
    mixture(BTT, 8): "all layers",
    f"{mixture(BTT, 8)} in V and O": "V and O",
    f"{mixture(BTT, 8)} in FFNs": "feed-forward nets",
}
HEADS = {
    "btt head-aligned": "head on the shared axis",
    "btt head-aligned own axis": "head on the axis of B alone (ε)",
}
OPTIMIZERS = {f"{name} muon": f"{STRUCTURES[name]}, Muon" for name in (DENSE_LAYERS, BTT)}
NAMES = STRUCTURES | MIXTURES | PLACES | HEADS | OPTIMIZERS | {mixture(BTT, 8): "BTT-MoE, E = 8"}
