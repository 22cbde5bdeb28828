"""Default settings by task: small ones for a CPU, and those of the paper."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["cpu", "paper"]
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
    "positions": SEQUENCE_TASKS,
    "embedding_std": SEQUENCE_TASKS,
    "tied": SEQUENCE_TASKS,
    "head_aligned": SEQUENCE_TASKS,
    "teacher_width": ("regression",),
    "teacher_depth": ("regression",),
}

_COMMON: dict[str, object] = {
    "depth": 3,
    "base_width": 64,
    "weight_decay": 0.0,
    "ema": 0.0,
    "eval_points": 20,
    "betas": (0.9, 0.95),
}

_SEQUENCES: dict[str, object] = {"tied": False, "head_aligned": False}

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

# Ref: [P24 §4, App. F, G]; details that the text leaves out follow the released runs.
_PAPER_SEQUENCES = _SEQUENCES | {
    "head_size": 64,
    "positions": "learned",
    "embedding_std": 0.02,
}

_IMAGES: dict[str, object] = {
    "pool": 1,
    "activation": "relu",
    "schedule": "constant",
    "betas": (0.9, 0.999),
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
    ("text", "paper"): _PAPER_SEQUENCES
    | {
        "vocabulary": "ascii",
        "rule": "drop",
        "context": 128,
        "width": 256,
        "batch_size": 512,
        "steps": 100_000,
        "lr": 3e-3,
        "base_width": 256,
        "warmup": 2000,
        "schedule": "constant",
        "eval_size": 4096,
    },
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
    ("pixels", "paper"): _PAPER_SEQUENCES
    | {
        "width": 64,
        "batch_size": 64,
        "steps": 100_000,
        "lr": 3e-3,
        "warmup": 0,
        "schedule": "cosine",
        "eval_size": 2048,
        "betas": (0.9, 0.999),
    },
    ("regression", "cpu"): {
        "width": 64,
        "batch_size": 1024,
        "steps": 2000,
        "lr": 3e-3,
        "warmup": 50,
        "schedule": "cosine",
        "eval_size": 4096,
        "teacher_width": 1024,
        "teacher_depth": 6,
        "betas": (0.9, 0.999),
    },
    ("regression", "paper"): {
        "width": 64,
        "batch_size": 4096,
        "steps": 1_000_000,
        "lr": 1e-3,
        "warmup": 0,
        "schedule": "cosine",
        "eval_size": 16384,
        "teacher_width": 1024,
        "teacher_depth": 6,
        "betas": (0.9, 0.999),
    },
    ("cifar", "cpu"): _IMAGES
    | {
        "width": 128,
        "batch_size": 128,
        "steps": 500,
        "lr": 4e-3,
        "warmup": 20,
        "eval_size": 10_000,
    },
    ("cifar", "paper"): _IMAGES
    | {
        "width": 1024,
        "batch_size": 1024,
        "steps": 5000,
        "lr": 1e-3,
        "warmup": 0,
        "eval_size": 10_000,
    },
}


def preset_values(task: str, preset: str) -> dict[str, Any]:
    """All fields that a preset decides, with their values for the task."""
    return _COMMON | _DEFAULTS[task, preset]
