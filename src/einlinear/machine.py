"""What a machine is, for readers of what was measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from einlinear import __version__
from einlinear.layers import engine

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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


def memory_bytes() -> int | None:
    """How much memory a process of this machine may use; None where the system does not say."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # pragma: no cover - Windows
        pass
    for path in _LIMITS:
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal():  # "max" is no limit
            found.append(int(text))
    return min((size for size in found if size > 0), default=None)
