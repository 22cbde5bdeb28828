"""The process that talks to Ray: reads jobs, one JSON object per line, and writes what happens.

Ray exits the process when its cluster is gone, prints to its output and changes its environment.
That is why it runs in a child process, which leaves as soon as its input ends.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import IO, Any

from einlinear.sweeps.executors.child import Tell, speak
from einlinear.sweeps.executors.executor import run_remotely
from einlinear.sweeps.job import Job, Outcome

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0  # between two looks at the machines of the cluster
_CONNECT_SECONDS = 10.0
_STORE_BYTES = 100_000_000  # jobs and outcomes are small


class Cluster:
    """A Ray cluster: its free room and the jobs of this process. Arguments as of RayExecutor."""

    def __init__(
        self, ray: Any, address: str | None, threads: int, cpus: int | None, devices: int = 1
    ) -> None:
        self._ray, self._cpus, self._devices = ray, threads * devices, devices
        self._jobs: dict[Any, Job] = {}
        self._wants_gpu = True
        if address and re.fullmatch(r"[^/]+:\d+", address):
            host, _, port = address.rpartition(":")  # Ray retries for minutes if nobody listens
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        new = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        ray.init(address or "local", **quiet, **({} if address else new))

    @property
    def largest(self) -> float:
        """CPUs of the largest machine."""
        return max((node.get("CPU", 0.0) for node in self._machines()), default=0.0)

    @property
    def most_gpus(self) -> int:
        """GPUs of the machine that has the most."""
        return max(map(_gpus, self._machines()), default=0)

    @property
    def slots(self) -> int:
        """How many jobs there is room for, each on one machine; one if there is no machine yet."""
        machines = self._machines()
        by_gpu = self._wants_gpu and any(_gpus(machine) for machine in machines)
        cpu_jobs = [int(machine.get("CPU", 0.0) // self._cpus) for machine in machines]
        gpu_jobs = [_gpus(machine) // self._devices for machine in machines]
        gpu_jobs = gpu_jobs if by_gpu else cpu_jobs
        return max(1, sum(map(min, cpu_jobs, gpu_jobs)))

    @property
    def is_idle(self) -> bool:
        """Whether no job is running."""
        return not self._jobs

    def start(self, job: Job) -> None:
        """Submit a job to Ray, which runs it once, as soon as there is room."""
        self._wants_gpu = job.config.get("device") != "cpu"
        gpus = self._devices if self._wants_gpu and self.most_gpus else 0
        task = self._ray.remote(num_cpus=self._cpus, num_gpus=gpus, max_retries=0)(run_remotely)
        self._jobs[task.remote(job)] = job

    def ended(self, seconds: float) -> Iterator[Outcome]:
        """Yield jobs that have ended, waiting up to `seconds` for the first."""
        tasks, _ = self._ray.wait(list(self._jobs), timeout=seconds)
        for task in tasks:
            yield self._outcome(task, self._jobs.pop(task))

    def close(self) -> None:
        """Stop all jobs and leave the cluster, which ends if it was started here."""
        for task in self._jobs:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _outcome(self, task: Any, job: Job) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(task)
            return outcome
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:
            # Jobs do not raise: the worker could not even start.
            return Outcome(job.id, "error", f"a Ray worker cannot run the job: {error}\n")
        except errors.RayError as error:
            return Outcome(job.id, "killed", f"{type(error).__name__}: {error}\n")

    def _machines(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]


def _gpus(machine: Mapping[str, float]) -> int:
    return int(machine.get("GPU", 0.0))


def serve(cluster: Cluster, jobs: SimpleQueue[Job | None], tell: Tell) -> None:
    """Run jobs until there are no more; report free slots and outcomes."""
    slots = looked = 0.0
    while True:
        if monotonic() - looked > _LOOK_SECONDS:
            looked = monotonic()
            if cluster.slots != slots:
                slots = cluster.slots
                tell({"slots": slots})
        with suppress(Empty):
            job = jobs.get(timeout=_POLL_SECONDS) if cluster.is_idle else jobs.get_nowait()
            if job is None:
                return
            cluster.start(job)
        if not cluster.is_idle:
            for outcome in cluster.ended(_POLL_SECONDS):
                tell({"outcome": asdict(outcome)})


def _read(requests: IO[bytes], jobs: SimpleQueue[Job | None], is_open: Event) -> None:
    for line in requests:
        jobs.put(Job(**json.loads(line)))
    jobs.put(None)
    if not is_open.is_set():
        os._exit(1)  # starting or joining a cluster may take minutes


def main() -> None:
    """Open the cluster given by the arguments, and run jobs on it."""
    tell = speak()
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes of Ray must not hold our pipe
    jobs: SimpleQueue[Job | None] = SimpleQueue()
    is_open = Event()
    Thread(target=_read, args=(requests, jobs, is_open), daemon=True).start()
    address, threads, cpus, devices = json.loads(sys.argv[1])
    try:
        import ray

        cluster = Cluster(ray, address, threads, cpus, devices)
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    is_open.set()
    tell({"largest": cluster.largest, "gpus": cluster.most_gpus, "slots": cluster.slots})
    try:
        serve(cluster, jobs, tell)
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
