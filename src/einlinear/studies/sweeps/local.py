"""Jobs in processes of this machine, which stay for many jobs and are replaced when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import IO, Any

from einlinear.errors import EinlinearError
from einlinear.files import parse_object
from einlinear.studies.sweeps.job import Job, Outcome
from einlinear.studies.sweeps.plan import PlannedRun, PlanRequest

_LAST_CHARACTERS = 2000  # of what a worker said before it died
_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_SAVE = 2.0  # a user who presses Ctrl-C waits for it
_PLAN = ("runs", "wrong", "raised")  # what an answer to a request for a plan has one of

SILENT_SECONDS = 300.0
"""So long a process that makes a plan may say nothing: it tells of every model it has counted."""


class LocalExecutor:
    """Worker processes, each with some threads; on a machine with GPUs each has one of its own.

    Args:
        processes: how many jobs run at once.
        threads: that each process has; a job may use fewer.
        gpus: how many there are; process i gets number i modulo this.
    """

    def __init__(self, processes: int, threads: int, gpus: int = 0) -> None:
        self._threads, self._gpus = threads, gpus
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
        """The plan of a sweep, made in a process that has no job."""
        # What kills the process may be a run that is timed, such as one that needs all memory.
        for is_timed in (request.is_timed, False):
            worker = self._next()
            self._idle.insert(0, worker)
            answer = worker.ask(replace(request, is_timed=is_timed))
            if answer is not None:
                return _plan(answer)
            words = worker.last_words("that makes the plan").splitlines()
            how = ": ".join(dict.fromkeys((words[0], words[-1])))
        raise EinlinearError(
            what=f"no plan could be made, in two attempts: {how}",
            rule="a process of this machine counts what every model of the study costs",
            fix="check that there is memory for it and that torch can be imported, then give the "
            "same command again",
        )

    def start(self, job: Job) -> None:
        """Begin a job in a process that has none."""
        worker = self._next()
        self._busy.append(worker)
        worker.take(job)

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Jobs that have ended; waits so long for one."""
        outcomes = []
        for key, _ in self._selector.select(seconds):
            worker: _Worker = key.data
            data = os.read(key.fd, 1 << 16)
            worker.buffer += data
            if not data:
                worker.has_ended = True
                self._selector.unregister(worker.answers)
            if worker not in self._busy:
                continue  # it has died, and is replaced when there is a job
            outcome = worker.outcome()
            if not data:
                outcomes.append(Outcome(worker.job, "killed", worker.last_words("of the run")))
            elif outcome is not None:
                outcomes.append(outcome)
            else:
                continue  # the rest is on its way
            self._busy.remove(worker)
            self._idle.append(worker)
        return outcomes

    def close(self) -> None:
        """End all processes; runs that are under way save a checkpoint, if they are quick."""
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
        """A process without a job, which lives."""
        worker = self._idle.pop(0)
        if worker.is_alive():
            return worker
        self._end(worker)
        return self._worker(worker.number)

    def _worker(self, number: int) -> _Worker:
        try:
            worker = _Worker(number, _environment(number, self._threads, self._gpus))
        except OSError as error:
            raise EinlinearError(
                what=f"process {number + 1} of the sweep cannot be started: {error.strerror}",
                rule="every process needs memory and some open files",
                fix="give fewer processes, or raise the limits that ulimit -a shows",
            ) from error
        self._selector.register(worker.answers, EVENT_READ, worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        if worker.answers in self._selector.get_map():
            self._selector.unregister(worker.answers)
        worker.end()


class _Worker:
    """A process, its pipes, and the job it has."""

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        self.number = number
        self.job = ""  # the id of the last one
        self.buffer = b""
        self.has_ended = False  # its answers have: a process that dies is seen a little later
        self.is_silent = False  # it was killed because it said nothing
        self._errors = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "einlinear.studies.sweeps.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its workers
            )
        except OSError:
            self._errors.close()
            raise
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests: IO[bytes] = self.process.stdin
        self.answers: IO[bytes] = self.process.stdout

    def is_alive(self) -> bool:
        """Whether the process can take a job."""
        return not self.has_ended and self.process.poll() is None

    def take(self, job: Job) -> None:
        """Send a job."""
        self.job = job.id
        self._send("job", job)

    def ask(self, request: PlanRequest) -> Mapping[str, Any] | None:
        """Send a request, and wait for what is said to it; None if the process dies or hangs."""
        self._send("plan", request)
        with DefaultSelector() as selector:
            selector.register(self.answers, EVENT_READ)
            heard = monotonic()
            while not self.has_ended:
                if not selector.select(max(0.0, heard + SILENT_SECONDS - monotonic())):
                    self.is_silent = True
                    self.process.kill()
                    break
                data = os.read(self.answers.fileno(), 1 << 16)
                self.buffer += data
                heard = monotonic()
                for said in self._said() if b"\n" in data else ():
                    if any(key in said for key in _PLAN):
                        return said
                self.has_ended = not data
        self.has_ended = True
        return None

    def outcome(self) -> Outcome | None:
        """How the job has ended, if that was said."""
        found = map(Outcome.from_dict, self._said())
        return next((o for o in found if o is not None and o.id == self.job), None)

    def _said(self) -> list[dict[str, Any]]:
        """Objects that have been said, whole; all else that a worker prints while it starts is not.

        Files of a site or user, as sitecustomize, may print before a worker can prevent it.
        """
        *lines, self.buffer = self.buffer.split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(parse_object(line))
            except ValueError:
                continue
        return found

    def _send(self, kind: str, what: Job | PlanRequest) -> None:
        try:
            self.requests.write(json.dumps({kind: asdict(what)}).encode() + b"\n")
            self.requests.flush()
        except OSError:
            pass  # it has just died, which the end of its answers tells

    def last_words(self, whose: str) -> str:
        """How the process ended, and what it last said."""
        try:
            code = self.process.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:  # it has closed its pipe, and lives
            self.process.kill()
            code = self.process.wait()
        how = f"ended with code {code}" if code >= 0 else f"was killed by {_signal(-code)}"
        if self.is_silent:
            how = f"has said nothing for {SILENT_SECONDS / 60:g} minutes"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _LAST_CHARACTERS))
        said = self._errors.read().decode(errors="replace").strip()
        return f"the process {whose} {how}\n" + (f"{said}\n" if said else "")

    def wait(self, seconds: float) -> None:
        """Wait so long for the process to end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))

    def end(self) -> None:
        """Let the process go, at once."""
        self.process.kill()
        self.process.wait()
        for file in (self.requests, self.answers, self._errors):
            try:
                file.close()
            except OSError:
                pass  # what was not sent to a dead process


def _plan(answer: Mapping[str, Any]) -> tuple[PlannedRun, ...]:
    """What a worker has planned; raises what it says is wrong."""
    if "wrong" in answer:
        raise EinlinearError(**answer["wrong"])
    if "raised" in answer:
        raise RuntimeError(f"no plan could be made:\n{answer['raised']}")
    return tuple(map(PlannedRun.from_dict, answer["runs"]))


def _environment(number: int, threads: int, gpus: int) -> dict[str, str]:
    """That of this process, with the package on the path, and threads and a GPU of its own."""
    # Threads that spin while they wait take time from other processes.
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    own = {**package_path(), **waiting, "OMP_NUM_THREADS": str(threads)}
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(gpus)]
        own["CUDA_VISIBLE_DEVICES"] = names[number % gpus]
    return os.environ | own


def package_path() -> dict[str, str]:
    """Variables with which a new process imports the same package as this one."""
    root = str(Path(__file__).parents[3])
    # Named in PYTHONPATH, the folder of all installed packages would hide modules of Python itself.
    is_installed = root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    paths = ["" if is_installed else root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # modules of the folder in which a user works hide none of ours
    }


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
