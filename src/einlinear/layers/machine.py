"""The machine: facts to print beside measurements, its memory, and an error if that runs out."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from einlinear.errors import EinlinearError
from einlinear.layers.engine import binding
from einlinear.version import __version__

_OUT_OF_MEMORY = ("memory", "overflow", "allocate")  # words in torch's errors
_PROCESSORS = "/proc/cpuinfo"
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_facts() -> dict[str, object]:
    """What readers need to compare measurements."""
    return {
        "einlinear": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "engine": binding.status(),
    }


def processor_model() -> str | None:
    """The name of the processor, such as AMD EPYC 7763; None if the system does not tell."""
    with suppress(OSError, ValueError):
        for line in Path(_PROCESSORS).read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    return None


def memory_bytes() -> int | None:
    """How much memory a process may use here; None if the system does not tell."""
    found = []
    with suppress(AttributeError, OSError, ValueError):  # on Windows
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            found.append(int(Path(path).read_text(encoding="utf-8")))
    return min((size for size in found if size > 0), default=None)


class NoRoomError(EinlinearError):
    """There is not enough memory for the weights of a layer or model."""


@contextmanager
def room_for(name: str, weights: int, fix: str) -> Iterator[None]:
    """A context in which weights are allocated; turns torch's memory errors into a NoRoomError.

    name: what has the weights, for the error message.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        if not any(word in str(error).lower() for word in _OUT_OF_MEMORY):
            raise
        raise NoRoomError(
            what=f"{name} has {weights:,} weights, for which there is no memory",
            rule="weights fit into the memory of their device",
            fix=f"{fix}, or another device or dtype",
        ) from error
