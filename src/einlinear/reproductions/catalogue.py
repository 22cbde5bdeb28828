"""What can be reproduced: the figures of the paper, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from einlinear.errors import EinlinearError, did_you_mean, quote

Scale = Literal["cpu", "paper"]
"""cpu: small models on the data of the package. paper: the paper's own widths and steps."""

ReproductionKind = Literal["sweep", "landscape", "atlas"]
"""What makes the figure: a sweep and its report, a landscape of learning rates, or the atlas."""

SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A figure of the paper that can be made again.

    figure: its number in [P24].
    about: what it shows, in a few words.
    reference: the structure that its report compares with; None for dense.
    """

    name: str
    figure: str
    about: str
    kind: ReproductionKind = "sweep"
    reference: str | None = None


REPRODUCTIONS = {
    entry.name: entry
    for entry in (
        Reproduction("taxonomy", "2", "all structures by ω, ψ and ν", "atlas"),
        Reproduction("frontiers", "3", "power laws of the families, on text"),
        Reproduction("exponents", "4", "effects of ω, ψ and ν: all 23 structures, on text"),
        Reproduction("pixels", "5, top", "the same on pixels of images"),
        Reproduction("regression", "5, bottom", "the same on a random teacher"),
        Reproduction("moe", "6", "experts in every layer (BTT), standard MoE, dense"),
        Reproduction("moe-structures", "7", "experts of BTT, low rank, dense"),
        Reproduction("landscape", "8", "learning rates, naive and under µP", "landscape"),
        Reproduction("gpt2", "9", "GPT-2's vocabulary, longer context, structured head"),
        Reproduction("heads", "10", "BTT aligned with attention heads", reference="btt"),
    )
}
"""All of them, in the order of the paper's figures."""


def find_reproduction(name: str) -> Reproduction:
    """The reproduction with this name."""
    if isinstance(name, str) and name in REPRODUCTIONS:
        return REPRODUCTIONS[name]
    raise EinlinearError(
        what=f"there is no reproduction named {quote(name)}",
        rule=f"the names are {', '.join(REPRODUCTIONS)}",
        fix=did_you_mean(name, REPRODUCTIONS, "einlinear reproduce lists them"),
    )


def check_scale(scale: str) -> Scale:
    """Return a scale that exists."""
    if isinstance(scale, str) and scale in SCALES:
        return scale
    raise EinlinearError(
        what=f"scale is {quote(scale)}",
        rule="scale is cpu, minutes to hours on a CPU, or paper, the models of the paper",
        fix=did_you_mean(scale, SCALES, "give scale=cpu"),
    )
