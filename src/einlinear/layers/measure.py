"""Measure the time and peak memory of calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from einlinear.layers.engine import binding


def interleaved(
    actions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    few: Mapping[str, int] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each action by round; actions take turns, so that noise affects all equally.

    Each timed call follows an untimed call of the same action, as in training: fresh memory, which
    another action returned to the system, can cost as much as the work itself. `few` limits slow
    actions to that many rounds. `on_progress` is called with the round and the action before each
    run.
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
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def peak_memory(action: Callable[[], object]) -> int:
    """The peak memory of the action in bytes, beyond what torch held before.

    Includes the engine's workspace, which is released first so that the action allocates it again.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is verbose
    binding.release_workspace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    results: Any = record.profiler.kineto_results
    held = peak = 0
    for event in sorted(
        (e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + binding.workspace_bytes()
