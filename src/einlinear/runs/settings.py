"""What a single setting of a run may be: its choices, its bounds, and the check of a value."""

from __future__ import annotations

from math import isfinite, nan
from numbers import Real
from pathlib import Path
from typing import Literal, get_args

from einlinear.data.choices import CharacterRule, VocabularyName
from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.layers.scaling import Decay, ExpertNorm, FactorInit, HeadInit, Parametrization
from einlinear.models.choices import ActivationName, HeadAxis, PositionKind
from einlinear.runs.presets import OWN_FIELDS, Preset, TaskName, presets_of
from einlinear.structures.values import one_of, true_or_false, whole_number

Schedule = Literal["constant", "cosine", "wsd"]
Spacing = Literal["geometric", "even", "fixed"]
Precision = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Shard = Literal["ddp", "fsdp2"]
ExpertsOf = Literal["linear", "ffn"]
ExpertLayers = Literal["all", "vo", "ffn"]
OptimizerName = Literal["adamw", "muon"]

# Lowest and highest value of each integer field.
_MOST, _MOST_STEPS = 10**9, 10**12
WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "num_experts": (0, _MOST),
    "num_active": (1, _MOST),
    "width": (1, _MOST),
    "depth": (1, _MOST),
    "head_size": (1, _MOST),
    "num_heads": (1, _MOST),
    "context": (1, _MOST),
    "pool": (1, _MOST),
    "teacher_width": (1, _MOST),
    "teacher_depth": (1, _MOST),
    "batch_size": (1, _MOST),
    "accumulation": (1, _MOST),
    "steps": (1, _MOST_STEPS),
    "base_width": (1, _MOST),
    "base_expansion": (1, _MOST),
    "warmup": (0, _MOST_STEPS),
    "eval_points": (1, 10**6),
    "eval_size": (1, _MOST),
    "seed": (0, 2**63 - 1),
    "checkpoint_every": (0, _MOST_STEPS),
}
# The same for float fields; True excludes the lowest value.
_REAL: dict[str, tuple[float, float | None, bool]] = {
    "lr": (0, None, True),
    "balance": (0, None, False),
    "embedding_std": (0, None, True),
    "weight_decay": (0, None, False),
    "grad_clip": (0, None, False),
    "decay_share": (0, 1, False),
    "final_rate": (0, 1, False),
    "ema": (0, 1, False),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "task": get_args(TaskName),
    "experts": get_args(ExpertsOf),
    "expert_layers": get_args(ExpertLayers),
    "expert_norm": get_args(ExpertNorm),
    "preset": get_args(Preset),
    "vocabulary": get_args(VocabularyName),
    "rule": get_args(CharacterRule),
    "positions": get_args(PositionKind),
    "head_axis": get_args(HeadAxis),
    "activation": get_args(ActivationName),
    "parametrization": get_args(Parametrization),
    "head_init": get_args(HeadInit),
    "factor_init": get_args(FactorInit),
    "optimizer": get_args(OptimizerName),
    "decay": get_args(Decay),
    "schedule": get_args(Schedule),
    "eval_spacing": get_args(Spacing),
    "precision": get_args(Precision),
    "device": get_args(Device),
    "shard": get_args(Shard),
}
_FLAGS = (
    "convert_head",
    "head_aligned",
    "weight_norm",
    "tied",
    "bias",
    "zero_query",
    "scale_branches",
    "input_norm",
    "expert_gain",
    "fixed_input",
    "tf32",
    "compile",
    "save_model",
    "keep_state",
)
HEAD_SETTINGS = ("head_size", "num_heads")  # one of the two decides the other


def checked_setting(task: str, name: str, value: object) -> object:
    """Check the value of a field and return it in canonical form."""
    tasks = OWN_FIELDS.get(name)
    if tasks is not None and task not in tasks:
        if value is None:
            return None
        raise EinlinearError(
            what=f"{name} is {quote(value)}, and the task is {task}",
            rule=f"{name} is a setting of {' and '.join(tasks)}",
            fix=f"leave out {name}",
        )
    if name in HEAD_SETTINGS and value is None:
        return None
    if name in WHOLE_NUMBERS:
        return whole_number(value, name, *WHOLE_NUMBERS[name])
    if name in _REAL:
        return _real(name, value, *_REAL[name])
    if name in _CHOICES:
        return check_choice(name, value)
    if name in _FLAGS:
        return true_or_false(value, name)
    return _betas(value) if name == "betas" else _text(name, value)


def _as_float(value: object) -> float:
    """The value as a float; nan if it is not a number, or too large."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan
    except OverflowError:
        return nan


def _real(name: str, value: object, low: float, high: float | None, is_above: bool) -> float:
    number = _as_float(value)
    if isfinite(number):
        if (number > low or (number == low and not is_above)) and (high is None or number <= high):
            return number
    scope = f"above {low:g}" if is_above else f"of {low:g} or more"
    scope = scope if high is None else f"from {low:g} to {high:g}"
    raise EinlinearError(
        what=f"{name} is {quote(value)}",
        rule=f"{name} is a number {scope}",
        fix=f"give a float {scope}",
    )


def check_preset(task: str, preset: str) -> None:
    """Refuse a preset that the task does not have."""
    if preset not in (known := presets_of(task)):
        raise EinlinearError(
            what=f"preset is {preset}, and the task is {task}",
            rule=f"the presets of {task} are {', '.join(known)}",
            fix="give one of them",
        )


def check_choice(name: str, value: object) -> object:
    """Return a value that is one of the choices of its setting."""
    choices = _CHOICES[name]
    if isinstance(value, str) and value in choices:  # looking for the nearest one takes long
        return value
    return one_of(value, name, choices, fix=did_you_mean(value, choices, ""))


def _betas(value: object) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2:
        first, second = (_real("each of betas", beta, 0, 1, False) for beta in value)
        if first < 1 and second < 1:
            return first, second
    raise EinlinearError(
        what=f"betas is {quote(value)}",
        rule="betas are two numbers of 0 or more, below 1",
        fix="give (0.9, 0.95)",
    )


def _text(name: str, value: object) -> str | None:
    if name in ("data", "validation") and value is None:
        return None
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value:
        return value
    raise EinlinearError(
        what=f"{name} is {quote(value)}", rule=f"{name} is a string", fix=f"give {name} in quotes"
    )
