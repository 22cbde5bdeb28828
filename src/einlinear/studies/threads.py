"""Threads of a run: as many as its steps can use, and none that spin while they wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from einlinear.studies.config import RunConfig
from einlinear.studies.needs import step_macs

MACS_PER_THREAD = 500_000_000
"""Multiply-adds of a step, forward, for each thread. Threads wait for each other hundreds of times
in a step; a step of less work gains nothing from a second one, and on a busy machine takes many
times as long."""

MOST_THREADS = 1024


def choose_threads(config: RunConfig, available: int) -> int:
    """How many threads a run uses on the processor, of those that there are."""
    if available == 1 or (config.device != "cpu" and torch.cuda.is_available()):
        return available
    return max(1, min(available, step_macs(config) // MACS_PER_THREAD))


@contextmanager
def using_threads(config: RunConfig, count: int | None) -> Iterator[None]:
    """So many threads of torch meanwhile, chosen for the run if None; then as many as before."""
    held = torch.get_num_threads()
    torch.set_num_threads(choose_threads(config, held) if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(held)
