"""Jobs of Slurm, one for each run, through submitit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any, Literal

from einlinear.errors import EinlinearError, quote
from einlinear.studies.sweeps.away import missing_package, run_away
from einlinear.studies.sweeps.job import Job, Outcome
from einlinear.studies.sweeps.local import package_path

_ASK_SECONDS = 10.0
"""Between two questions to Slurm, each for all jobs. Jobs that end well are seen by their files."""

_LAST_CHARACTERS = 1000  # of what a job said before it died
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "GONE",
    "INTERRUPTED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_MORE = {"begin", "gpus", "licenses", "nice", "reservation"}  # of sbatch; submitit hands them on
_OURS = {  # what a run decides, or what needs more than a text
    "additional_parameters",
    "array_parallelism",
    "dependency",
    "job_name",
    "nodes",
    "ntasks_per_node",
    "num_gpus",
    "srun_args",
    "teardown",
    "use_srun",
}


class SlurmExecutor:
    """Each job is one of Slurm, which outlives this process unless `close` is called.

    Args:
        folder: for what submitit writes: scripts, arguments, results, logs; on a shared disk.
        slots: jobs that are queued or run at once.
        threads: CPUs of a job.
        options: of sbatch, such as {"partition": "cpu", "time": "120", "mem": "4GB"}; time in
            minutes, the default of the partition unless given.
        cluster: "local" runs the same jobs as processes of this machine, without Slurm.
    """

    def __init__(
        self,
        folder: Path,
        slots: int,
        threads: int,
        options: Mapping[str, str],
        cluster: Literal["slurm", "local"] = "slurm",
    ) -> None:
        try:
            submitit = import_module("submitit")
        except ImportError as error:
            raise missing_package("submitit", "slurm") from error
        self.slots = slots
        parameters = check_options(options, submitit.SlurmExecutor)
        self._submitit: Any
        self._states: _Queue | _Processes
        if cluster == "slurm":
            self._submitit = _open_slurm(submitit, folder, threads, parameters)
            self._states = _Queue()
        else:
            self._submitit = submitit.LocalExecutor(folder)
            self._submitit.update_parameters(timeout_min=60.0 * 24 * 365)
            self._states = _Processes()
        self._jobs: dict[str, tuple[Job, Any]] = {}
        self._over: dict[str, float] = {}  # jobs that have ended without a result, since when

    def start(self, job: Job) -> None:
        """Hand a job to Slurm."""
        environment = import_module("submitit.core.utils").environment_variables
        try:
            with environment(**package_path()):  # which Slurm hands on
                submitted = self._submitit.submit(run_submitted, job)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise EinlinearError(
                what=f"Slurm does not take a job: {_last_line(str(error))}",
                rule="a sweep on Slurm hands in one job for each run",
                fix="check the settings of Slurm (partition, account, time, mem), and give the "
                "same command again: what is done is kept",
            ) from error
        self._jobs[submitted.job_id] = job, submitted
        self._states.add(submitted)

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Jobs that have ended; waits so long for one."""
        end = monotonic() + seconds
        while True:
            states = self._states.read()
            _refresh(self._submitit.folder)
            found = [(key, self._outcome(key, states[key])) for key in self._jobs]
            outcomes = [(key, outcome) for key, outcome in found if outcome is not None]
            for key, _ in outcomes:
                self._states.remove(key)
                self._over.pop(key, None)
                del self._jobs[key]
            if outcomes or monotonic() >= end:
                return [outcome for _, outcome in outcomes]
            sleep(min(self._states.pause, max(0.0, end - monotonic())))

    def close(self) -> None:
        """Cancel what is queued or runs."""
        for _, submitted in self._jobs.values():
            submitted.cancel(check=False)
        self._states.close([submitted for _, submitted in self._jobs.values()])
        self._jobs = {}

    def _outcome(self, key: str, state: str) -> Outcome | None:
        """How a job ended; None while it has not, or may yet show a result."""
        job, submitted = self._jobs[key]
        if submitted.paths.result_pickle.exists():
            return _result(job, submitted)
        if state not in _ENDED:
            self._over.pop(key, None)  # Slurm may put a job back in the queue
            return None
        if monotonic() - self._over.setdefault(key, monotonic()) < self._states.grace:
            return None
        text = f"Slurm: job {key} ended as {state}, without a result\n"
        return Outcome(job.id, "killed", text + _said(submitted.paths.stderr))


class _Queue:
    """States of jobs by squeue, which also clusters without accounting have.

    pause: seconds between two looks at the files of jobs.
    grace: seconds for which a result may take to be seen on a shared disk.
    """

    pause, grace = 0.5, 20.0

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._asked = monotonic()

    def add(self, submitted: Any) -> None:
        self._known[submitted.job_id] = ""

    def remove(self, key: str) -> None:
        del self._known[key]

    def read(self) -> Mapping[str, str]:
        """States by job, at most some seconds old."""
        if self._known and monotonic() - self._asked > _ASK_SECONDS:
            self._ask()
            self._asked = monotonic()
        return self._known

    def close(self, submitted: Sequence[Any]) -> None:
        """Slurm does the rest."""

    def _ask(self) -> None:
        command = ["squeue", f"--user={os.getuid()}", "--states=all", "--noheader"]
        try:
            asked = subprocess.run(
                [*command, "--format=%i %T"], capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            return
        if asked.returncode:
            return  # a busy controller answers the next time
        states = dict(line.split()[:2] for line in asked.stdout.splitlines() if " " in line)
        for key in self._known:
            self._known[key] = states.get(key, "GONE")


class _Processes:
    """States of jobs that are processes of this machine."""

    pause, grace = 0.05, 0.0

    def __init__(self) -> None:
        self._submitted: dict[str, Any] = {}

    def add(self, submitted: Any) -> None:
        self._submitted[submitted.job_id] = submitted

    def remove(self, key: str) -> None:
        del self._submitted[key]

    def read(self) -> Mapping[str, str]:
        states = {key: job.state for key, job in self._submitted.items()}
        return {key: "FAILED" if at == "FINISHED" else at for key, at in states.items()}

    def close(self, submitted: Sequence[Any]) -> None:
        """Wait until all have left, which they do within seconds."""
        for job in submitted:
            job.wait()


def run_submitted(job: Job) -> Outcome:
    """Run a job in the process that Slurm has started.

    When its time is over, or when it is cancelled or preempted, the process leaves and gives its
    run back. A warning that the time is nearly over is no reason to leave: another checkpoint may
    be written until then.
    """
    warning = f"SIG{import_module('submitit').JobEnvironment.USR_SIG}"
    signal.signal(signal.Signals[warning], signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    return run_away(job)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # it is sent more than once
    sys.exit(128 + number)


def check_options(options: Mapping[str, str], executor: Any) -> dict[str, Any]:
    """Options as submitit has them; an error that names the nearest one it knows."""
    known = sorted(executor._valid_parameters() - _OURS | _MORE)
    checked: dict[str, Any] = {}
    more: dict[str, str] = {}
    for given, value in options.items():
        name = given.replace("-", "_")
        if name not in known:
            close = get_close_matches(name, known, 1, 0.5)
            raise EinlinearError(
                what=f"unknown setting of Slurm: {quote(given)}",
                rule=f"settings of Slurm are {', '.join(known)}",
                fix=f"did you mean {close[0]!r}?" if close else 'such as partition or time="120"',
            )
        is_switch = name in ("exclusive", "stderr_to_stdout") and value.lower() in ("true", "1")
        if name in _MORE:
            more[name] = value
        else:
            checked[name] = [value] if name == "setup" else True if is_switch else value
    return checked | {"additional_parameters": more}


def _open_slurm(submitit: Any, folder: Path, threads: int, parameters: dict[str, Any]) -> Any:
    try:
        executor = submitit.SlurmExecutor(folder)
    except RuntimeError as error:
        raise EinlinearError(
            what="there is no Slurm on this machine: it has no command srun",
            rule="a sweep on Slurm is started on a machine of the cluster",
            fix="give the command on a login node, or choose another executor",
        ) from error
    cpus = parameters.get("cpus_per_task", str(threads))
    own = {
        "job_name": "einlinear",
        "time": None,  # that of the partition, where submitit has five minutes
        "cpus_per_task": cpus,
        "srun_args": [f"--cpus-per-task={cpus}"],  # srun does not take it over from sbatch
    }
    executor.update_parameters(**own | parameters)
    return executor


def _result(job: Job, submitted: Any) -> Outcome:
    """The outcome that a job has left; text where it could not even begin."""
    try:
        outcome: Outcome = submitted.result()
        return outcome
    except Exception as error:
        return Outcome(job.id, "error", f"a job of Slurm cannot run: {error}\n")


def _said(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return f"{text[-_LAST_CHARACTERS:]}\n" if text else ""


def _refresh(folder: Path) -> None:
    """Ask a shared disk for what is in a folder now: a change, which changes nothing, does so."""
    try:
        folder.chmod(folder.stat().st_mode)
    except OSError:
        pass  # it is seen some seconds later


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
