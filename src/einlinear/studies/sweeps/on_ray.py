"""Jobs as tasks of Ray, on a cluster of many machines or one that is started here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from secrets import token_hex
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import IO, Any

from einlinear.errors import EinlinearError
from einlinear.files import parse_object
from einlinear.studies.sweeps.away import missing_package
from einlinear.studies.sweeps.job import Job, Outcome
from einlinear.studies.sweeps.local import package_path

_LAST_CHARACTERS = 600  # of what was said before the end
_ANSWER = {"error", "largest", "slots", "outcome"}
_SECONDS_TO_LEAVE = 10.0

OPEN_SECONDS = 300.0
"""So long a cluster may take to start or to answer."""


class RayExecutor:
    """Each job is a task that is tried once, with some CPUs and, where there are any, one GPU.

    A process of its own speaks to Ray (`ray_driver`); when it dies, jobs that run end with it.

    Args:
        address: of a cluster: "auto", "host:6379", "ray://host:10001"; None starts one on this
            machine, which `close` ends.
        threads: CPUs of a job.
        most: jobs at once, if the cluster has room for more.
        cpus: of a cluster that is started here; all of the machine unless given.
    """

    def __init__(
        self,
        address: str | None,
        threads: int,
        *,
        most: int | None = None,
        cpus: int | None = None,
    ) -> None:
        if find_spec("ray") is None:
            raise missing_package("ray", "ray")
        self._name = f"the Ray cluster {address}" if address else "a Ray cluster on this machine"
        self._said = tempfile.TemporaryFile()
        self._process = _driver([address, threads, cpus], address is None, self._said)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._selector = DefaultSelector()
        self._selector.register(self._answers, EVENT_READ)
        self._buffer = b""
        self._slots, self._most = 1, most
        self._outcomes: list[Outcome] = []
        try:
            self._open(threads)
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """Jobs that the cluster has room for, up to the most; it may grow and shrink."""
        return self._slots if self._most is None else min(self._slots, self._most)

    def start(self, job: Job) -> None:
        """Send a job to the cluster, which runs it as soon as there is room."""
        try:
            self._requests.write(json.dumps(asdict(job)).encode() + b"\n")
            self._requests.flush()
        except OSError as error:
            raise self._gone(self._last_words()) from error

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Jobs that have ended; waits so long for one."""
        for answer in self._read(seconds):
            self._take(answer)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """Stop the jobs that still run; end the cluster if it was started here, or leave it."""
        try:
            self._requests.close()
        except OSError:
            pass  # what was not sent to a dead process
        try:
            self._process.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()  # a cluster that it has started dies with it
            self._process.wait()
        self._answers.close()
        self._selector.close()
        self._said.close()

    def _open(self, threads: int) -> None:
        """Wait for the cluster, and refuse jobs that would wait for ever."""
        answers: list[dict[str, Any]] = []
        end = monotonic() + OPEN_SECONDS
        while not answers:
            if monotonic() > end:
                raise self._gone(f"no answer for {OPEN_SECONDS / 60:g} minutes")
            answers = self._read(max(0.0, end - monotonic()))
        for answer in answers:
            largest = answer.get("largest")
            if largest and largest < threads:
                raise EinlinearError(
                    what=f"threads are {threads}, and the largest machine has {largest:g} CPUs",
                    rule="a job has all its threads on one machine",
                    fix=f"give {largest:g} threads or fewer",
                )
            self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise self._gone(answer["error"][:_LAST_CHARACTERS])
        self._slots = answer.get("slots", self._slots)
        outcome = Outcome.from_dict(answer.get("outcome", {}))
        if outcome is not None:
            self._outcomes.append(outcome)

    def _read(self, seconds: float) -> list[dict[str, Any]]:
        """Answers that are there; waits so long for some."""
        if not self._selector.select(seconds):
            return []
        data = os.read(self._answers.fileno(), 1 << 16)
        if not data:
            raise self._gone(self._last_words())
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [answer for answer in map(_answer, lines) if answer is not None]

    def _last_words(self) -> str:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        last = said.rfind("\n[") + 1  # entries of Ray's log begin so; the last may have a trace
        return f"the connection has ended\n{said[last : last + _LAST_CHARACTERS]}".strip()

    def _gone(self, how: str) -> EinlinearError:
        return EinlinearError(
            what=f"{self._name} cannot be reached: {how}",
            rule="a sweep on Ray needs a cluster that stays until it ends",
            fix="start the cluster, check the address, and give the same command again: what is "
            "done is kept",
        )


def _answer(line: bytes) -> dict[str, Any] | None:
    """What the process says in a line; None if something else was printed there."""
    try:
        answer = parse_object(line)
    except ValueError:
        return None
    return answer if answer.keys() <= _ANSWER else None


def _driver(arguments: list[Any], is_own: bool, said: IO[bytes]) -> subprocess.Popen[bytes]:
    """The process that speaks to Ray."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    # Nobody else may use a cluster that is started here, though it listens on the network.
    guarded = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)} if is_own else {}
    return subprocess.Popen(
        [sys.executable, "-m", "einlinear.studies.sweeps.ray_driver", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env=os.environ | package_path() | quiet | guarded,
        start_new_session=True,  # Ctrl-C is for the sweep, which ends its jobs
    )
