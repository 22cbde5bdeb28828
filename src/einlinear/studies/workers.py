"""Processes that share a long piece of work, and how far it is."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.structures.values import whole_number

MOST_PROCESSES = 1024

_MOST_BYTES = 8192  # of what a process is started with; every system's pipes hold more


@dataclass(frozen=True, slots=True)
class Progress:
    """How far work is: pieces that are done, and the share of the work in them.

    Where it is not known how much there is, total and share are 0 until the end.
    """

    done: int
    total: int
    share: float


def count_processes(given: object) -> int:
    """How many processes share the work, as a user has given it."""
    return whole_number(given, "processes", 1, MOST_PROCESSES)


@contextmanager
def worker_pool(
    processes: int, start: Callable[..., None], args: tuple[Any, ...], *, does: str, needs: str
) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes that call start(*args) first; none outlives this one, however it ends.

    `args` must be small: they go through a pipe that is not read if a process is killed while it
    starts, and writing more than the pipe holds would wait for ever. `does` and `needs` say, in the
    error where a process was killed, what it did and needed.
    """
    assert len(pickle.dumps(args)) <= _MOST_BYTES, "what starts a process fits into a pipe"
    context = get_context("spawn")
    # Workers hold one end: they leave as soon as the other is closed, be it by the death of this
    # process, so that none is left behind.
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _begin, (reader, start, args))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise EinlinearError(
            what=f"a process that {does} ended before its time",
            rule=needs,
            fix="give the same command again with fewer processes; what is done is kept",
        ) from error
    finally:
        # Before the pool is shut down, which waits for every worker without end: one that was
        # starting while the pool broke is told by nobody else to leave, nor is one that waits for
        # a lock which a killed one held. All results are in by now.
        writer.close()
        pool.shutdown(wait=True, cancel_futures=True)
        reader.close()


def _begin(reader: Connection, start: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Make a process a worker: no interest in Ctrl-C, and gone with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_leave, args=(reader,), daemon=True).start()
    start(*args)


def _leave(reader: Connection) -> None:
    try:
        reader.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
