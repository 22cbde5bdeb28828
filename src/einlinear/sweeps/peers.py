"""Peers: the other processes of a run on several devices; the first is the one that has the job.

They know each other by the variables that torchrun sets. Each leaves as soon as its input ends,
even if the first process was killed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from threading import Event, Thread

from einlinear.sweeps.executors.child import Child, speak
from einlinear.sweeps.job import Job

_POLL_SECONDS = 0.5
_SECONDS_TO_LEAVE = 5.0
_LAST_CHARACTERS = 2000  # of a peer's standard error

HANG_SECONDS = 20.0
"""How long the first process may wait for a peer that has died; torch does not always notice."""


@contextmanager
def peers_of(job: Job) -> Iterator[None]:
    """Start the other processes of a run; within the block, this process is the first of them."""
    if job.devices == 1:
        yield
        return
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(job.devices),
    }
    peers: list[Child] = []
    is_over = Event()
    try:
        for rank in range(1, job.devices):
            peers.append(Child(__name__, (), common | _ranks(rank)))
            with suppress(OSError):  # it has just died, which the others will notice
                peers[-1].send(asdict(job))
        Thread(target=_watch, args=(peers, is_over), daemon=True).start()
        with _variables(common | _ranks(0)):
            yield
    except BaseException:
        _repeat_last_words(peers)
        raise
    finally:
        is_over.set()
        for peer in peers:
            peer.leave(_SECONDS_TO_LEAVE)


def _ranks(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment within the block."""
    held = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _watch(peers: Sequence[Child], is_over: Event) -> None:
    """End this process if it still waits long after a peer has died."""
    while not is_over.wait(_POLL_SECONDS):
        if any(peer.process.poll() for peer in peers):
            if not is_over.wait(HANG_SECONDS):
                _repeat_last_words(peers)
                os._exit(1)
            return


def _repeat_last_words(peers: Sequence[Child]) -> None:
    """Print what peers that failed have said, which goes to the log of the run."""
    for rank, peer in enumerate(peers, 1):
        if peer.process.poll() and (said := peer.said()[-_LAST_CHARACTERS:]):
            print(f"process {rank} of the run:\n{said}", file=sys.stderr, flush=True)


def main() -> None:
    """Train the run of the job in the input, as one of several processes."""
    speak()
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    Thread(target=_leave_with_input, daemon=True).start()
    from einlinear.runs.config import RunConfig
    from einlinear.training.devices.distributed import SharedError  # torch takes seconds to load
    from einlinear.training.thaw import usable_source
    from einlinear.training.train import train

    with suppress(OSError):  # another machine may lack it, and not need it
        os.chdir(job.folder)
    with suppress(SharedError):  # the first process reports it
        config = RunConfig.from_dict(job.config)
        source = usable_source(job.source, config)
        train(config, job.directory, threads=job.threads, thaw=source)


def _leave_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    code = 0
    try:
        main()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # threads of torch sometimes hang while the interpreter shuts down
