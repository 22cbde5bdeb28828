"""What decides the numbers of a run: its settings, without those that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from einlinear.layers.scaling import HeadInit
from einlinear.structures.named import dense
from einlinear.structures.sizes import SIZES_RULE
from einlinear.structures.text import parse_structure

_Values = Mapping[str, Any]

_WITHOUT_EFFECT: tuple[tuple[Callable[[_Values], bool], _Values], ...] = (
    (
        lambda run: not run["num_experts"],
        {"num_active": 2, "balance": 0.01, "expert_layers": "all"},
    ),
    (lambda run: not run["weight_norm"], {"expert_norm": "each"}),
    (
        lambda run: run["experts"] == "ffn",
        {
            "expert_norm": "each",
            "expert_gain": False,
            "factor_init": "spectral",
        },
    ),
    # The presets of the paper's text have both settings, also for runs without experts.
    (
        lambda run: (
            not run["num_experts"]
            and (run["expert_norm"], run["expert_gain"]) != ("together", True)
        ),
        {"expert_norm": "each", "expert_gain": False},
    ),
    (lambda run: not run["head_aligned"], {"head_axis": "shared"}),
    # nn.Linear has no factors. Without µP they start alike: only the limit of their norm differs.
    (
        lambda run: (
            run["structure"] == "dense"
            or (run["parametrization"] != "mup" and not run["weight_norm"])
        ),
        {"factor_init": "spectral"},
    ),
    # Rates of Muon do not depend on the base; the head, which AdamW trains, has the same in both.
    (
        lambda run: run["parametrization"] != "mup" or run["optimizer"] == "muon",
        {"base_expansion": 1, "fixed_input": False},
    ),
    (
        lambda run: run["parametrization"] != "mup" or not run["weight_decay"],
        {"decay": "independent"},
    ),
    (lambda run: run["schedule"] != "wsd", {"decay_share": 0.2}),
    (lambda run: run["schedule"] == "constant", {"final_rate": 0.0}),
)
"""Settings that have no effect on the runs for which a test is true, with values that replace them.

The values are those that presets give, so that the ids of such runs are what they were. For the
same reason some settings count though dense layers ignore them, where presets have several values:
weight_norm, convert_head, and the expert norm together with gains.
"""


def first_head(parametrization: object) -> HeadInit:
    """How the heads of all runs started before there was a choice."""
    return "usual" if parametrization in ("naive", "unit") else "zero"


def deciding_values(values: _Values) -> dict[str, Any]:
    """The settings of a run in one form: equal for runs that give the same numbers.

    Not every such pair is found: settings are compared one by one, without training anything.
    """
    decided = in_one_form(values)
    for has_no_effect, usual in _WITHOUT_EFFECT:
        if has_no_effect(decided):
            decided |= usual
    # Presets of pixels differ in which of the two they give, so pixels keep both forms.
    if decided["task"] == "text" and decided["num_heads"] is not None:
        decided |= {"head_size": decided["width"] // decided["num_heads"], "num_heads": None}
    if values["structure"] != "dense":
        decided["sizes_rule"] = SIZES_RULE
    return decided


def in_one_form(values: _Values) -> dict[str, Any]:
    """The settings with the canonical text of the structure; nn.Linear stays "dense"."""
    structure = values["structure"]
    if structure != "dense":
        structure = canonical_text(structure)
    elif values["num_experts"]:
        structure = str(dense())
    is_first = values["head_init"] == first_head(values["parametrization"])
    head = None if is_first else values["head_init"]  # earlier ids had no such setting
    return {**values, "structure": structure, "head_init": head}


@cache
def canonical_text(structure: str) -> str:
    """The canonical text of a structure; raises if it is not one."""
    return str(parse_structure(structure))
