"""Worker processes for a long piece of work."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.structures.values import whole_number

MOST_PROCESSES = 1024

_MOST_BYTES = 8192  # of the arguments that start a process; the pipes of every system hold more


def count_processes(given: object) -> int:
    """Return the number of processes that a user asks for, or refuse it."""
    return whole_number(given, "processes", 1, MOST_PROCESSES)


@contextmanager
def worker_pool(
    processes: int, start: Callable[..., None], args: tuple[Any, ...]
) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of new processes that call start(*args) first and never outlive this process.

    `args` must be small: they go through a pipe that nobody reads if a process is killed while it
    starts, and writing more than the pipe holds would wait forever.
    """
    assert len(pickle.dumps(args)) <= _MOST_BYTES, "the arguments fit into a pipe"
    context = get_context("spawn")
    # Workers hold one end and leave as soon as the other is closed, even by the death of this
    # process.
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _begin, (reader, start, args))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise EinlinearError(
            what="a worker process was killed",
            rule="every process needs memory for a few chunks of text",
            fix="run the same command again, with fewer processes, to resume",
        ) from error
    finally:
        # First, because the shutdown waits for every worker: nobody else tells a worker to leave
        # that was starting while the pool broke, or that waits for a lock of a killed one.
        writer.close()
        pool.shutdown(wait=True, cancel_futures=True)
        reader.close()


def _begin(reader: Connection, start: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Start a worker: it ignores Ctrl-C, and leaves with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_leave, args=(reader,), daemon=True).start()
    start(*args)


def _leave(reader: Connection) -> None:
    try:
        reader.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
