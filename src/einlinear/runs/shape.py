"""What decides the time of a training step: the model and the batch, not how fast it learns."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from einlinear.runs.config import RunConfig, settings_hash
from einlinear.runs.identity import deciding_values

NOT_IN_A_STEP = frozenset(
    {
        *("seed", "parametrization", "factor_init", "head_init", "embedding_std", "zero_query"),
        *("lr", "base_width", "base_expansion", "fixed_input", "betas", "weight_decay", "decay"),
        *("steps", "schedule", "warmup", "decay_share", "final_rate"),
        *("eval_points", "eval_spacing", "eval_size", "validation", "rule"),
        *("preset", "checkpoint_every", "save_model", "keep_state", "shard"),
    }
)
"""Settings that do not change the time of a step on one device: those of initial weights, learning
rates, the length of a run, evaluations and files."""

_ONLY_WHETHER = ("balance", "grad_clip", "ema")  # 0 for none; the value itself costs nothing
_OF_STRUCTURES = {"weight_norm": False, "convert_head": False}  # nn.Linear ignores both


def step_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that decide the time of a training step, in one form.

    They are equal for runs that have the same model, batch and optimizer, whatever their seed,
    learning rate and number of steps.
    """
    values = deciding_values({field.name: getattr(config, field.name) for field in fields(config)})
    if values["num_heads"] is not None:
        values |= {"head_size": config.width // values["num_heads"], "num_heads": None}
    if values["structure"] == "dense":  # no experts either, see in_one_form
        values |= _OF_STRUCTURES
    if not values["num_experts"]:  # presets of the paper have both, also for runs without experts
        values |= {"balance": 0.0, "expert_norm": "each", "expert_gain": False}
    values |= {name: bool(values[name]) for name in _ONLY_WHETHER}
    return {name: value for name, value in values.items() if name not in NOT_IN_A_STEP}


def step_key(config: RunConfig) -> str:
    """A short hash that runs share if their steps take the same time on the same machine."""
    return settings_hash(step_settings(config))
