"""RayExecutor: jobs as Ray tasks, on an existing cluster or on one started on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from secrets import token_hex
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.sweeps.executors.child import Child
from einlinear.sweeps.executors.executor import missing_package
from einlinear.sweeps.job import Job, Outcome

_LAST_CHARACTERS = 600  # of an error, or of the last log entry
_ANSWER = {"error", "largest", "gpus", "slots", "outcome"}
_SECONDS_TO_LEAVE = 10.0

OPEN_SECONDS = 300.0
"""How long a cluster may take to start or to answer."""


class RayExecutor:
    """Runs each job as one task, tried once, with some CPUs and, if there are any, GPUs.

    A child process (`ray_driver`) talks to Ray. When it dies, running jobs end with it.

    Args:
        address: of a cluster: "auto", "host:6379", "ray://host:10001"; None starts one on this
            machine, which `close` ends.
        threads: CPUs of each device of a job.
        devices: GPUs of a job, all on one machine; without GPUs, its processes.
        most: jobs at once, if the cluster has room for more.
        cpus: of a cluster started here; None is all of the machine.
    """

    def __init__(
        self,
        address: str | None,
        threads: int,
        *,
        devices: int = 1,
        most: int | None = None,
        cpus: int | None = None,
    ) -> None:
        if find_spec("ray") is None:
            raise missing_package("ray", "ray")
        self._name = f"the Ray cluster {address}" if address else "a Ray cluster on this machine"
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        # A cluster started here listens on the network, but only this process may use it.
        guarded = {} if address else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
        arguments = [json.dumps([address, threads, cpus, devices])]
        self._child = Child("einlinear.sweeps.executors.ray_driver", arguments, quiet | guarded)
        self._selector = DefaultSelector()
        self._selector.register(self._child, EVENT_READ)
        self._slots, self._most = 1, most
        self._outcomes: list[Outcome] = []
        try:
            self._open(threads, devices)
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """How many jobs the cluster has room for, up to the most; it may grow and shrink."""
        return self._slots if self._most is None else min(self._slots, self._most)

    def start(self, job: Job) -> None:
        """Send a job to the cluster, which runs it as soon as there is room."""
        try:
            self._child.send(asdict(job))
        except OSError as error:
            raise self._gone(self._last_words()) from error

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Return jobs that have ended, waiting up to `seconds` for the first."""
        for answer in self._read(seconds):
            self._take(answer)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """Stop running jobs; end the cluster if it was started here, else leave it."""
        self._selector.close()
        self._child.leave(_SECONDS_TO_LEAVE)  # a cluster started by the child dies with it

    def _open(self, threads: int, devices: int) -> None:
        """Wait for the cluster, and refuse jobs that would wait forever."""
        answers: list[dict[str, Any]] = []
        end = monotonic() + OPEN_SECONDS
        while not answers:
            if monotonic() > end:
                raise self._gone(f"no answer for {OPEN_SECONDS / 60:g} minutes")
            answers = self._read(max(0.0, end - monotonic()))
        for answer in answers:
            largest = answer.get("largest")
            if largest and largest < threads * devices:
                many = f" for each of {devices} devices" if devices > 1 else ""
                raise EinlinearError(
                    what=f"threads are {threads}{many}, and the largest machine has {largest:g} "
                    "CPUs",
                    rule="a job has all its threads on one machine",
                    fix=f"use {largest // devices:g} threads or fewer"
                    if largest >= devices
                    else f"use {largest:g} devices or fewer",
                )
            gpus = answer.get("gpus")
            if gpus and gpus < devices:
                raise EinlinearError(
                    what=f"devices are {devices}, and the machine with the most GPUs has {gpus}",
                    rule="a job has all its GPUs on one machine",
                    fix=f"use {gpus} devices or fewer",
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
        """The answers that have arrived, waiting up to `seconds` for the first."""
        if not self._selector.select(seconds):
            return []
        answers = self._child.read()
        if self._child.has_ended:
            raise self._gone(self._last_words())
        return [answer for answer in answers if answer.keys() <= _ANSWER]

    def _last_words(self) -> str:
        said = self._child.said()
        last = said.rfind("\n[") + 1  # where the last entry of Ray's log begins
        return f"the connection has ended\n{said[last : last + _LAST_CHARACTERS]}".strip()

    def _gone(self, how: str) -> EinlinearError:
        return EinlinearError(
            what=f"{self._name} cannot be reached: {how}",
            rule="a sweep on Ray needs a cluster that stays until it ends",
            fix="start the cluster, check the address, and run the same command again to resume",
        )
