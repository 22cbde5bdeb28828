"""LocalExecutor: jobs in processes of this machine, which are reused, and replaced if they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

from einlinear.errors import EinlinearError
from einlinear.sweeps.executors.child import Child
from einlinear.sweeps.job import Job, Outcome
from einlinear.sweeps.plan import PlannedRun, PlanRequest

_LAST_CHARACTERS = 2000  # of a dead worker's standard error
_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_SAVE = 2.0  # a user who presses Ctrl-C waits for it
_PLAN = ("runs", "wrong", "raised")  # an answer to a request for a plan has one of these

SILENT_SECONDS = 300.0
"""How long a process may stay silent while it plans: it reports after every model."""


class LocalExecutor:
    """Worker processes with some threads each, of which a job may use fewer.

    On a machine with GPUs, each process has so many devices of its own, in order; if there are more
    processes than that gives, they share.
    """

    def __init__(self, processes: int, threads: int, gpus: int = 0, devices: int = 1) -> None:
        self._threads, self._gpus, self._devices = threads, gpus, devices
        self._selector = DefaultSelector()
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        try:
            for number in range(processes):
                self._idle.append(self._worker(number))
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """How many jobs can run at once."""
        return len(self._idle) + len(self._busy)

    def plan(self, request: PlanRequest) -> tuple[PlannedRun, ...]:
        """Let an idle process plan a sweep."""
        # A timed run may kill the process, for example by using all memory.
        for is_timed in (request.is_timed, False):
            worker = self._next()
            self._idle.insert(0, worker)
            answer = worker.plan(replace(request, is_timed=is_timed))
            if answer is not None:
                return _plan(answer)
            words = worker.last_words("that makes the plan").splitlines()
            how = ": ".join(dict.fromkeys((words[0], words[-1])))
        raise EinlinearError(
            what=f"no plan could be made, in two attempts: {how}",
            rule="a process of this machine counts what every model of the study costs",
            fix="check that there is enough memory and that torch can be imported, then run the "
            "same command again",
        )

    def start(self, job: Job) -> None:
        """Start a job in an idle process."""
        worker = self._next()
        self._busy.append(worker)
        worker.job = job.id
        worker.ask("job", job)

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Return jobs that have ended, waiting up to `seconds` for the first."""
        outcomes = []
        for key, _ in self._selector.select(seconds):
            worker: _Worker = key.data
            outcome = worker.outcome()
            if worker.has_ended:
                self._selector.unregister(worker)
            if worker not in self._busy:
                continue  # it has died; the next job replaces it
            if worker.has_ended:
                outcome = Outcome(worker.job, "killed", worker.last_words("of the run"))
            if outcome is None:
                continue  # the rest of the answer is on its way
            outcomes.append(outcome)
            self._busy.remove(worker)
            self._idle.append(worker)
        return outcomes

    def close(self) -> None:
        """Stop all processes; running jobs have a moment to save a checkpoint."""
        for worker in self._busy:
            worker.process.terminate()
        for worker in self._idle:
            worker.process.kill()
        end = monotonic() + _SECONDS_TO_SAVE
        for worker in self._busy:
            worker.wait(end - monotonic())
        for worker in [*self._idle, *self._busy]:
            self._end(worker)
        self._idle, self._busy = [], []
        self._selector.close()

    def _next(self) -> _Worker:
        """An idle process that is alive."""
        worker = self._idle.pop(0)
        if worker.is_alive():
            return worker
        self._end(worker)
        return self._worker(worker.number)

    def _worker(self, number: int) -> _Worker:
        try:
            own = _environment(number, self._threads, self._gpus, self._devices)
            worker = _Worker(number, own)
        except OSError as error:
            raise EinlinearError(
                what=f"process {number + 1} of the sweep cannot be started: {error.strerror}",
                rule="every process needs memory and some open files",
                fix="use fewer processes, or raise the limits that ulimit -a shows",
            ) from error
        self._selector.register(worker, EVENT_READ, worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        if worker in self._selector.get_map():
            self._selector.unregister(worker)
        worker.end()


class _Worker(Child):
    """A worker process and the job it has."""

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        super().__init__("einlinear.sweeps.executors.worker", (), environment)
        self.number = number
        self.job = ""  # the id of the last one
        self.is_silent = False  # it was killed for staying silent

    def ask(self, kind: str, request: Job | PlanRequest) -> None:
        """Send a request."""
        with suppress(OSError):  # it has just died; the end of its output shows that
            self.send({kind: asdict(request)})

    def plan(self, request: PlanRequest) -> Mapping[str, Any] | None:
        """Ask for a plan and wait for the answer; None if the process dies or hangs."""
        self.ask("plan", request)
        with DefaultSelector() as selector:
            selector.register(self, EVENT_READ)
            while not self.has_ended:
                if not selector.select(SILENT_SECONDS):
                    self.is_silent = self.has_ended = True
                    self.process.kill()
                    break
                for answer in self.read():
                    if any(key in answer for key in _PLAN):
                        return answer
        return None

    def outcome(self) -> Outcome | None:
        """Read output; return the outcome of the job if it is there."""
        found = map(Outcome.from_dict, self.read())
        return next((o for o in found if o is not None and o.id == self.job), None)

    def last_words(self, whose: str) -> str:
        """How the process ended, and the end of its standard error."""
        code = self.wait(_SECONDS_TO_LEAVE)
        if code is None:  # it closed its output but is still running
            self.process.kill()
            code = self.process.wait()
        how = f"ended with code {code}" if code >= 0 else f"was killed by {_signal(-code)}"
        if self.is_silent:
            how = f"has said nothing for {SILENT_SECONDS / 60:g} minutes"
        said = self.said()[-_LAST_CHARACTERS:]
        return f"the process {whose} {how}\n" + (f"{said}\n" if said else "")


def _plan(answer: Mapping[str, Any]) -> tuple[PlannedRun, ...]:
    """The plan in a worker's answer; raises the error in it."""
    if "wrong" in answer:
        raise EinlinearError(**answer["wrong"])
    if "raised" in answer:
        raise RuntimeError(f"no plan could be made:\n{answer['raised']}")
    return tuple(map(PlannedRun.from_dict, answer["runs"]))


def _environment(number: int, threads: int, gpus: int, devices: int = 1) -> dict[str, str]:
    """Variables that give a process its threads and its GPUs."""
    # Threads that spin while they wait take time from other processes.
    waiting = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    own = {"OMP_WAIT_POLICY": waiting, "OMP_NUM_THREADS": str(threads)}
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(gpus)]
        first = number % (gpus // devices) * devices
        own["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + devices])
    return own


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
