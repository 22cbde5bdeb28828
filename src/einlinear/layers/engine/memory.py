"""Memory that a process keeps for its next use, instead of returning it to the system."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import suppress

from einlinear.errors import EinlinearError

# Parameters of glibc's mallopt. M_MMAP_THRESHOLD cannot exceed 32 MB, so blocks above it are kept
# only if no block is mapped at all.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1  # as a size: more than there is


def keep_memory() -> None:
    """Let this process keep the memory that it has allocated, for its next allocations.

    The C library returns large blocks to the system after each use, and the next use causes a page
    fault for every 4 KB. Training frees and allocates the same blocks at every step. Call this
    once, before the first large allocation. It affects the whole process and cannot be undone:
    memory that the process frees is not available to other processes before it ends.

    `einlinear train`, the workers of sweeps and the benchmarks do this by themselves. It works with
    glibc, on Linux; elsewhere it raises an EinlinearError.
    """
    obstacle = _obstacle()
    if not obstacle:
        mallopt = ctypes.CDLL(None).mallopt
        if not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER)):
            obstacle = "its mallopt refuses the settings"
    if obstacle:
        raise EinlinearError(
            what=f"this process cannot keep its memory: {obstacle}",
            rule="keep_memory changes settings of glibc's malloc",
            fix="leave it out: everything works without it, and some steps take longer",
        )


def keep_memory_if_possible() -> None:
    """Keep memory in a process of our own, where that is possible."""
    with suppress(EinlinearError):
        keep_memory()


def _obstacle() -> str:
    """Why the C library has no such settings; empty if it has."""
    name, version = platform.libc_ver()
    if sys.platform != "linux" or name != "glibc":
        return f"its C library is {name or 'not known'} {version}, on {sys.platform}"
    return "" if hasattr(ctypes.CDLL(None), "mallopt") else "its C library has no mallopt"
