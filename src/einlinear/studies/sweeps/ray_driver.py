"""The process that speaks to Ray: reads jobs, one JSON object in a line, and writes what happens.

Ray ends a process whose cluster is gone, writes to its output and changes its environment. So it
has one of its own. It leaves as soon as its input ends, be it by the death of who started it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import IO, Any

from einlinear.studies.sweeps.away import run_away
from einlinear.studies.sweeps.job import Job, Outcome

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""Between two looks at the machines of the cluster."""

_CONNECT_SECONDS = 10.0
_STORE_BYTES = 100_000_000  # jobs and outcomes are small


class Cluster:
    """A cluster of Ray: its room, and the jobs that this process runs there.

    Args:
        ray: the package.
        address: of a cluster; None starts one on this machine.
        threads: CPUs of a job.
        cpus: of a cluster that is started; None is all of the machine.
    """

    def __init__(self, ray: Any, address: str | None, threads: int, cpus: int | None) -> None:
        self._ray, self._threads = ray, threads
        self._jobs: dict[Any, Job] = {}
        self._wants_gpu = True
        if address and re.fullmatch(r"[^/]+:\d+", address):
            host, _, port = address.rpartition(":")  # Ray tries for minutes where nobody listens
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        new = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        ray.init(address or "local", **quiet, **({} if address else new))

    @property
    def largest(self) -> float:
        """CPUs of the largest machine that is there."""
        return max((node.get("CPU", 0.0) for node in self._machines()), default=0.0)

    @property
    def slots(self) -> int:
        """Jobs that there is room for, each on one machine; one where there is no machine yet."""
        machines = self._machines()
        by_gpu = self._wants_gpu and any(_gpus(machine) for machine in machines)
        cpu_jobs = [int(machine.get("CPU", 0.0) // self._threads) for machine in machines]
        gpu_jobs = [_gpus(machine) for machine in machines] if by_gpu else cpu_jobs
        return max(1, sum(map(min, cpu_jobs, gpu_jobs)))

    @property
    def is_idle(self) -> bool:
        """Whether no job runs."""
        return not self._jobs

    def start(self, job: Job) -> None:
        """Give a job to Ray, which runs it once, as soon as there is room."""
        self._wants_gpu = job.config.get("device") != "cpu"
        gpus = int(self._wants_gpu and any(map(_gpus, self._machines())))
        task = self._ray.remote(num_cpus=self._threads, num_gpus=gpus, max_retries=0)(run_away)
        self._jobs[task.remote(job)] = job

    def ended(self, seconds: float) -> Iterator[Outcome]:
        """Jobs that have ended; waits so long for one."""
        tasks, _ = self._ray.wait(list(self._jobs), timeout=seconds)
        for task in tasks:
            yield self._outcome(task, self._jobs.pop(task))

    def close(self) -> None:
        """Stop all jobs, and leave the cluster, which ends if it was started here."""
        for task in self._jobs:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _outcome(self, task: Any, job: Job) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(task)
            return outcome
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:
            # Jobs do not raise: the worker could not even begin.
            return Outcome(job.id, "error", f"a worker of Ray cannot run the job: {error}\n")
        except errors.RayError as error:
            return Outcome(job.id, "killed", f"{type(error).__name__}: {error}\n")

    def _machines(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]


def _gpus(machine: Mapping[str, float]) -> int:
    return int(machine.get("GPU", 0.0))


def serve(cluster: Cluster, jobs: SimpleQueue[Job | None], tell: Any) -> None:
    """Run jobs until there are no more; tell of room and of ends."""
    slots = looked = 0.0
    while True:
        if monotonic() - looked > LOOK_SECONDS:
            looked = monotonic()
            if cluster.slots != slots:
                slots = cluster.slots
                tell({"slots": slots})
        try:
            job = jobs.get(timeout=POLL_SECONDS) if cluster.is_idle else jobs.get_nowait()
            if job is None:
                return
            cluster.start(job)
        except Empty:
            pass
        if not cluster.is_idle:
            for outcome in cluster.ended(POLL_SECONDS):
                tell({"outcome": asdict(outcome)})


def _read(requests: IO[bytes], jobs: SimpleQueue[Job | None], is_open: Event) -> None:
    for line in requests:
        jobs.put(Job(**json.loads(line)))
    jobs.put(None)
    if not is_open.is_set():
        os._exit(1)  # while a cluster is started or joined, which may take minutes


def main() -> None:
    """Open a cluster as the arguments say, and run the jobs that are asked for."""
    # What Ray prints must not be taken for an answer, and its processes hold no end of our pipes.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def tell(values: Mapping[str, Any]) -> None:
        print("\n" + json.dumps(values), file=answers, flush=True)  # in a line of its own

    jobs: SimpleQueue[Job | None] = SimpleQueue()
    is_open = Event()
    Thread(target=_read, args=(requests, jobs, is_open), daemon=True).start()
    address, threads, cpus = json.loads(sys.argv[1])
    try:
        import ray

        cluster = Cluster(ray, address, threads, cpus)
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        return
    is_open.set()
    tell({"largest": cluster.largest, "slots": cluster.slots})
    try:
        serve(cluster, jobs, tell)
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
