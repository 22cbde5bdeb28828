"""Default settings by task: small ones for a CPU, and those of the paper and its released code."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["cpu", "paper", "release", "paper-gpt2", "release-gpt2"]
"""Where the defaults of a run come from.

cpu: learns something within minutes on a CPU.
paper: the setting of [P24], with details that its text leaves out from the released code.
release: the same as the released code runs it, where the two differ: the base width of text.
paper-gpt2, release-gpt2: the same two for text with the GPT-2 vocabulary [P24 App. F].
"""
TaskName = Literal["text", "pixels", "regression", "cifar"]

SEQUENCE_TASKS: tuple[TaskName, ...] = ("text", "pixels")

# Fields that only some tasks have; None for all other tasks.
OWN_FIELDS: dict[str, tuple[TaskName, ...]] = {
    "validation": ("text",),
    "vocabulary": ("text",),
    "rule": ("text",),
    "pool": ("cifar",),
    "activation": ("cifar",),
    "context": ("text",),
    "head_size": SEQUENCE_TASKS,
    "num_heads": SEQUENCE_TASKS,
    "bias": SEQUENCE_TASKS,
    "zero_query": SEQUENCE_TASKS,
    "scale_branches": (*SEQUENCE_TASKS, "regression"),
    "input_norm": ("regression",),
    "positions": SEQUENCE_TASKS,
    "embedding_std": SEQUENCE_TASKS,
    "tied": SEQUENCE_TASKS,
    "head_aligned": SEQUENCE_TASKS,
    "head_axis": SEQUENCE_TASKS,
    "base_expansion": (*SEQUENCE_TASKS, "regression"),
    "fixed_input": ("regression", "cifar"),
    "teacher_width": ("regression",),
    "teacher_depth": ("regression",),
}

_COMMON: dict[str, object] = {
    "depth": 3,
    "base_width": 64,
    "weight_decay": 0.0,
    "ema": 0.0,
    "eval_points": 20,
    "eval_spacing": "geometric",
    "betas": (0.9, 0.95),
    "weight_norm": True,
    "grad_clip": 1.0,
    "precision": "float32",
    "tf32": False,
    "convert_head": False,
    "expert_norm": "each",
    "expert_gain": False,
    "head_init": "small",
}

_SEQUENCES: dict[str, object] = {
    "tied": False,
    "head_aligned": False,
    "head_axis": "shared",
    "base_expansion": 1,
    "bias": False,
    "zero_query": False,
    "scale_branches": True,
}
_REGRESSION: dict[str, object] = {
    "teacher_width": 1024,
    "schedule": "cosine",
    "betas": (0.9, 0.999),
}

# At small scale, learned positions lead to a plateau on which all structures look the same. A head
# size of 16 and embeddings of standard deviation 1 also work better there.
_SMALL_SEQUENCES = _SEQUENCES | {
    "depth": 2,
    "head_size": 16,
    "positions": "alibi",
    "embedding_std": 1.0,
    "schedule": "constant",
    "ema": 0.1,
}

# Ref: [P24 §4, App. F, G]; details that the text leaves out follow the released runs. Evaluations
# are 2,500 steps apart, as in the released GPT runs: 40 or more after the warm-up.
# Departure: on a CPU, the released code of text computes in float32. A preset does not know the
# device, so text is bfloat16 there, too.
_PAPER_SEQUENCES = _SEQUENCES | {
    "head_init": "zero",
    "positions": "learned",
    "embedding_std": 0.02,
    "tf32": True,
    "eval_spacing": "even",
}

_PAPER_TEXT = _PAPER_SEQUENCES | {
    "vocabulary": "ascii",
    "rule": "drop",
    "context": 128,
    "head_size": 64,
    "width": 256,
    "batch_size": 512,
    "steps": 100_000,
    "lr": 3e-3,
    "base_width": 256,  # as the text says
    "warmup": 2000,
    "schedule": "constant",
    "precision": "bfloat16",
    "expert_norm": "together",  # as the experts of btt in the released code
    "expert_gain": True,
    "eval_points": 40,
    "eval_size": 4096,
}

# Its rate is given for 3 blocks of width 256; for 12 blocks the branches are halved, and the rate
# is the same: the released code prints a multiplier of the rate for the depth, but does not use it.
# Departure: the paper does not give the batch and the number of steps; these are those of the runs
# with 96 symbols, 65,536 tokens a step.
_PAPER_GPT2 = _PAPER_TEXT | {
    "vocabulary": "gpt2",
    "context": 512,
    "depth": 12,
    "batch_size": 128,
    "lr": 2e-3,
    "convert_head": True,
    "eval_size": 1024,
}

_RELEASED_BASE: dict[str, object] = {"base_width": 768}  # of the released script as it stands

_EPOCH_IMAGES, _EPOCHS = 5_982_688, 2  # of CIFAR-5M

_PAPER_PIXELS = _PAPER_SEQUENCES | {
    "num_heads": 8,
    "base_expansion": 4,
    "bias": True,
    "zero_query": True,
    "scale_branches": False,
    "width": 64,
    "batch_size": 64,
    "steps": _EPOCHS * _EPOCH_IMAGES // 64,
    "lr": 3e-3,
    "warmup": 0,
    "schedule": "cosine",
    "grad_clip": 0.0,
    "eval_points": 75,
    "eval_size": 2048,
    "betas": (0.9, 0.999),
}

# The released runs use the plain einsum, without weight normalisation.
_PAPER_REGRESSION = _REGRESSION | {
    "head_init": "zero",
    "width": 64,
    "base_expansion": 4,
    "fixed_input": True,
    "batch_size": 4096,
    "steps": 1_000_000,
    "lr": 1e-3,
    "warmup": 0,
    "weight_norm": False,
    "grad_clip": 0.0,
    "input_norm": True,
    "scale_branches": False,
    "teacher_depth": 7,  # six hidden layers and an output layer
    "eval_points": 400,
    "eval_spacing": "even",
    "eval_size": 16384,
}

_IMAGES: dict[str, object] = {
    "pool": 1,
    "activation": "relu",
    "fixed_input": False,
    "schedule": "constant",
    "betas": (0.9, 0.999),
}

_PAPER_IMAGES = _IMAGES | {
    "head_init": "zero",
    "width": 1024,
    "fixed_input": True,
    "batch_size": 1024,
    "steps": 5000,
    "lr": 1e-3,
    "warmup": 0,
    "eval_points": 40,
    "eval_spacing": "even",
    "eval_size": 10_000,
}

_DEFAULTS: dict[tuple[str, str], dict[str, object]] = {
    ("text", "cpu"): _SMALL_SEQUENCES
    | {
        "vocabulary": "ascii",
        "rule": "drop",
        "context": 64,
        "width": 64,
        "batch_size": 32,
        "steps": 1000,
        "lr": 1e-2,
        "warmup": 50,
        "eval_size": 256,
    },
    ("text", "paper"): _PAPER_TEXT,
    ("text", "release"): _PAPER_TEXT | _RELEASED_BASE,
    ("text", "paper-gpt2"): _PAPER_GPT2,
    ("text", "release-gpt2"): _PAPER_GPT2 | _RELEASED_BASE,
    ("pixels", "cpu"): _SMALL_SEQUENCES
    | {
        "width": 64,
        "batch_size": 16,
        "steps": 1000,
        "lr": 6e-3,
        "warmup": 50,
        "eval_size": 128,
        "betas": (0.9, 0.999),
    },
    ("pixels", "paper"): _PAPER_PIXELS,
    ("pixels", "release"): _PAPER_PIXELS,
    ("regression", "cpu"): _REGRESSION
    | {
        "width": 64,
        "base_expansion": 1,
        "fixed_input": False,
        "batch_size": 1024,
        "steps": 2000,
        "lr": 3e-3,
        "warmup": 50,
        "input_norm": False,
        "scale_branches": True,
        "teacher_depth": 6,
        "eval_size": 4096,
    },
    ("regression", "paper"): _PAPER_REGRESSION,
    ("regression", "release"): _PAPER_REGRESSION,
    ("cifar", "cpu"): _IMAGES
    | {
        "width": 128,
        "batch_size": 128,
        "steps": 500,
        "lr": 4e-3,
        "warmup": 20,
        "eval_size": 10_000,
    },
    ("cifar", "paper"): _PAPER_IMAGES,
    ("cifar", "release"): _PAPER_IMAGES,
}


def presets_of(task: str) -> tuple[str, ...]:
    """The presets that a task has."""
    return tuple(preset for name, preset in _DEFAULTS if name == task)


def preset_values(task: str, preset: str) -> dict[str, Any]:
    """All fields that a preset decides, with their values for the task."""
    return _COMMON | _DEFAULTS[task, preset]
