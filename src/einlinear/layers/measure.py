"""Time and memory of calls, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from einlinear.layers import engine


def interleaved(
    actions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    few: Mapping[str, int] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each action by round, taken in turns so that noise falls on all alike.

    Each timed call follows an untimed one of the same action, as it would in training: memory that
    another action gave back to the system is fresh for the next, which costs as much as the work.
    Actions named in few, the slow ones, take part in so many of the first rounds only. on_progress
    is told the round and the action, before it runs.
    """
    rounds = {name: min(repeats, (few or {}).get(name, repeats)) for name in actions}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(repeats):
        for name, action in actions.items():
            if number >= rounds[name]:
                continue
            if on_progress is not None:
                on_progress(f"round {number + 1} of {repeats}, {name}")
            action()
            _finish()
            start = time.perf_counter()
            action()
            _finish()
            times[name].append(time.perf_counter() - start)
    return times


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(action: Callable[[], object]) -> int:
    """The most bytes held at once during the action, beyond those that torch held before.

    What torch held, plus the engine's workspace, which is let go first and made anew.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # what measures memory is talkative
    engine.release_workspace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    results: Any = record.profiler.kineto_results
    held = peak = 0
    for event in sorted(
        (e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + engine.workspace_bytes()
