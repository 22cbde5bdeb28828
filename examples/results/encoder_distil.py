"""Distil an encoder: train a student until its vectors are those of its teacher."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_TOGETHER = 100  # batches that are drawn together and sorted by length
_KEPT_EVERY = 100  # steps between checkpoints


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to distil; the defaults were chosen by short runs on other sentences."""

    steps: int = 800
    size: int = 32
    rate: float = 3e-4
    warm: float = 0.02  # of the steps


def pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Vectors of length 1: the mean of the hidden states that are not padding."""
    weights = attention_mask.unsqueeze(-1).to(hidden)
    return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def distil_(
    student: nn.Module,
    teacher: nn.Module,
    batch_of: Callable[[list[str]], Mapping[str, Tensor]],
    sentences: list[str],
    recipe: Recipe,
    kept: Path,
) -> dict[str, Any]:
    """Train the student on what the teacher makes of sentences; resume from a checkpoint.

    Return what it took: sentences, and seconds of all cores together.
    """
    trained = {name: p for name, p in student.named_parameters() if "word_embeddings" not in name}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=recipe.rate, weight_decay=0.0, betas=(0.9, 0.98), fused=True
    )
    first, used, seen = 0, 0.0, 0
    if kept.exists():
        state = torch.load(kept)
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        first, used, seen = state["steps"], state["used"], state["seen"]
    start = time.process_time() - used
    for step in range(first, recipe.steps):
        texts = drawn(sentences, step, recipe.size)
        loss = _loss(student, teacher, batch_of(texts))
        rate = recipe.rate * min(1, (step + 1) / (recipe.warm * recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / recipe.steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        seen += len(texts)
        if (step + 1) % _KEPT_EVERY == 0:
            used = time.process_time() - start
            print(f"  step {step + 1}  {used:.0f} s  loss {loss.item():.4f}", flush=True)
            parts = {"student": student.state_dict(), "optimizer": optimizer.state_dict()}
            new = kept.with_suffix(".part")
            torch.save({**parts, "steps": step + 1, "used": used, "seen": seen}, new)
            new.replace(kept)
    return {"seen": seen, "cpu_seconds": round(time.process_time() - start)}


def drawn(sentences: list[str], step: int, size: int) -> list[str]:
    """The sentences of a step: of similar length, and others in each step of a pass."""
    many = _TOGETHER * size
    rounds = max(1, len(sentences) // many)
    block = step // _TOGETHER % rounds
    together = sorted(sentences[block * many : (block + 1) * many], key=len)
    places = list(range(0, len(together), size))
    random.Random(step // _TOGETHER).shuffle(places)
    place = places[step % _TOGETHER % len(places)]
    return together[place : place + size]


def _loss(student: nn.Module, teacher: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """One minus the cosine of the vectors of student and teacher."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = teacher(**batch).last_hidden_state
    made = student(**batch).last_hidden_state
    vectors, goals = (pooled(each.float(), batch["attention_mask"]) for each in (made, wanted))
    return 1 - (vectors * goals).sum(1).mean()
