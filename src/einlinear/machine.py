"""What a machine is, for readers of what was measured on it."""

from __future__ import annotations

import os
import platform
from math import inf

import torch

from einlinear import __version__
from einlinear.layers import engine


def machine_facts() -> dict[str, object]:
    """What a reader must know to compare numbers."""
    return {
        "einlinear": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "engine": engine.status(),
    }


def memory_bytes() -> float:
    """How much memory the machine has; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # pragma: no cover - other systems
        return inf
