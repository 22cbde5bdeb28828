"""What processes do that race for claims, in modules that a fresh process can import."""

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

from einlinear.runs import directory as files
from einlinear.sweeps import claims
from einlinear.sweeps.claims import Watch, take

ROOT = Path(files.__file__).parents[2]


def race(number, folders, barrier):
    """Try to take every folder, all processes at the same moment; a file tells who has won."""
    held = []
    for folder in folders:
        barrier.wait(60)
        seen = Watch().free(folder)
        claim = None if seen is None else take(folder, seen)
        if claim is not None:
            held.append(claim)
            (folder / f"winner-{number}").touch()
    barrier.wait(60)  # a process that ends gives its claims up


@contextmanager
def owner(folder, is_locking=False):
    """A process that has taken a folder, and says what it thinks of that when it is asked."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "kit.claimers", str(folder), str(int(is_locking))]
    environment = os.environ | {"PYTHONPATH": paths}
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout.readline() == "taken\n"
            yield process
        finally:
            process.kill()


def ask(process):
    """What an owner says now."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@contextmanager
def paused(process):
    """Stop a process for a while."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def _own(folder, is_locking):
    claims.BEAT_SECONDS = 0.05
    lock = (folder / "metrics.jsonl").open("ab")
    if is_locking:
        files.fcntl.flock(lock, files.fcntl.LOCK_EX)
    with take(folder, Watch().free(folder)) as claim:
        print("taken", flush=True)
        for _ in sys.stdin:
            print("lost" if claim.is_lost() else "held", flush=True)


if __name__ == "__main__":
    _own(Path(sys.argv[1]), sys.argv[2] == "1")
