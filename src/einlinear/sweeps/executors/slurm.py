"""SlurmExecutor: one Slurm job for each run, through submitit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any, Literal

from einlinear.errors import EinlinearError, did_you_mean, quote
from einlinear.sweeps.executors.child import package_path
from einlinear.sweeps.executors.executor import missing_package, run_remotely
from einlinear.sweeps.job import Job, Outcome

_ASK_SECONDS = 10.0  # between two calls of squeue; results are found sooner, by their files
_LAST_CHARACTERS = 1000  # of a dead job's standard error
_ENDED = set(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED GONE INTERRUPTED NODE_FAIL OUT_OF_MEMORY "
    "PREEMPTED REVOKED TIMEOUT".split()
)
_MORE = {"begin", "gpus", "licenses", "nice", "reservation"}  # sbatch options
_OURS = set(  # set by the sweep, or more than a text
    "additional_parameters array_parallelism dependency job_name nodes ntasks_per_node num_gpus "
    "srun_args teardown use_srun".split()
)


class SlurmExecutor:
    """Runs each job as a Slurm job, which outlives this process unless `close` is called.

    Args:
        folder: for the scripts, arguments, results and logs of submitit; on a shared disk.
        slots: how many jobs are queued or running at once.
        threads: CPUs of a job.
        gpus: to request for a job, unless the options request some.
        options: of sbatch, for example {"partition": "cpu", "time": "120", "mem": "4GB"}; time in
            minutes, by default that of the partition.
        cluster: "local" runs the same jobs as processes of this machine, without Slurm.
    """

    def __init__(
        self,
        folder: Path,
        slots: int,
        threads: int,
        options: Mapping[str, str],
        cluster: Literal["slurm", "local"] = "slurm",
        *,
        gpus: int = 0,
    ) -> None:
        try:
            submitit = import_module("submitit")
        except ImportError as error:
            raise missing_package("submitit", "slurm") from error
        self.slots = slots
        parameters = check_options(options, submitit.SlurmExecutor)
        if gpus and not any(word in name for name in options for word in ("gpus", "gres")):
            parameters["gpus_per_node"] = gpus  # a job is one task on one node
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
        self._over: dict[str, float] = {}  # when each job was found ended without a result

    def start(self, job: Job) -> None:
        """Submit a job to Slurm."""
        environment = import_module("submitit.core.utils").environment_variables
        try:
            with environment(**package_path()):  # Slurm passes it on
                submitted = self._submitit.submit(run_submitted, job)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise EinlinearError(
                what=f"Slurm rejected a job: {_last_line(str(error))}",
                rule="a sweep on Slurm submits one job for each run",
                fix="check the settings of Slurm (partition, account, time, mem), and run the same "
                "command again to resume",
            ) from error
        self._jobs[submitted.job_id] = job, submitted

    def ended(self, seconds: float) -> Sequence[Outcome]:
        """Return jobs that have ended, waiting up to `seconds` for the first."""
        end = monotonic() + seconds
        while True:
            states = self._states.read(self._submitted())
            _refresh(self._submitit.folder)
            found = [(key, self._outcome(key, states.get(key, ""))) for key in self._jobs]
            outcomes = [(key, outcome) for key, outcome in found if outcome is not None]
            for key, _ in outcomes:
                self._over.pop(key, None)
                del self._jobs[key]
            if outcomes or monotonic() >= end:
                return [outcome for _, outcome in outcomes]
            sleep(min(self._states.pause, max(0.0, end - monotonic())))

    def close(self) -> None:
        """Cancel queued and running jobs."""
        submitted = self._submitted()
        for job in submitted.values():
            job.cancel(check=False)
        self._states.close(submitted)
        self._jobs = {}

    def _submitted(self) -> dict[str, Any]:
        return {key: submitted for key, (_, submitted) in self._jobs.items()}

    def _outcome(self, key: str, state: str) -> Outcome | None:
        """The outcome of a job; None while it runs, or while its result may still appear."""
        job, submitted = self._jobs[key]
        if submitted.paths.result_pickle.exists():
            return _result(job, submitted)
        if state not in _ENDED:
            self._over.pop(key, None)  # Slurm may requeue a job
            return None
        if monotonic() - self._over.setdefault(key, monotonic()) < self._states.grace:
            return None
        text = f"Slurm: job {key} ended as {state}, without a result\n"
        return Outcome(job.id, "killed", text + _said(submitted.paths.stderr))


class _Queue:
    """States of jobs by squeue, which works on clusters without accounting, too.

    pause: seconds between two looks at the files of jobs.
    grace: seconds that a result may take to appear on a shared disk.
    """

    pause, grace = 0.5, 20.0

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._asked = monotonic()

    def read(self, jobs: Mapping[str, Any]) -> Mapping[str, str]:
        """States by job, a few seconds old at most; jobs that are younger have none."""
        if jobs and monotonic() - self._asked > _ASK_SECONDS:
            self._ask(jobs)
            self._asked = monotonic()
        return self._known

    def close(self, jobs: Mapping[str, Any]) -> None:
        """Do nothing: Slurm ends the jobs."""

    def _ask(self, jobs: Mapping[str, Any]) -> None:
        command = ["squeue", f"--user={os.getuid()}", "--states=all", "--noheader"]
        try:
            asked = subprocess.run(
                [*command, "--format=%i %T"], capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError):
            return
        if asked.returncode:
            return  # the controller is busy: ask again later
        states = dict(line.split()[:2] for line in asked.stdout.splitlines() if " " in line)
        self._known = {key: states.get(key, "GONE") for key in jobs}


class _Processes:
    """States of jobs that run as processes of this machine."""

    pause, grace = 0.05, 0.0

    def read(self, jobs: Mapping[str, Any]) -> Mapping[str, str]:
        states = {key: job.state for key, job in jobs.items()}
        return {key: "FAILED" if at == "FINISHED" else at for key, at in states.items()}

    def close(self, jobs: Mapping[str, Any]) -> None:
        """Wait until all have exited, which takes seconds."""
        for job in jobs.values():
            job.wait()


def run_submitted(job: Job) -> Outcome:
    """Run a job in the process that Slurm has started.

    When its time is up, or it is cancelled or preempted, the process exits and releases its run.
    It ignores the warning that its time is nearly up: it may still write another checkpoint.
    """
    warning = f"SIG{import_module('submitit').JobEnvironment.USR_SIG}"
    signal.signal(signal.Signals[warning], signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    return run_remotely(job)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # it is sent more than once
    sys.exit(128 + number)


def check_options(options: Mapping[str, str], executor: Any) -> dict[str, Any]:
    """Return options as submitit takes them; refuse an unknown one and name the nearest."""
    known = sorted(executor._valid_parameters() - _OURS | _MORE)
    checked: dict[str, Any] = {}
    more: dict[str, str] = {}
    for given, value in options.items():
        name = given.replace("-", "_")
        if name not in known:
            raise EinlinearError(
                what=f"unknown setting of Slurm: {quote(given)}",
                rule=f"settings of Slurm are {', '.join(known)}",
                fix=did_you_mean(name, known, "for example time=120"),
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
            fix="run the command on a login node, or choose another executor",
        ) from error
    cpus = parameters.get("cpus_per_task", str(threads))
    own = {
        "job_name": "einlinear",
        "time": None,  # of the partition; the default of submitit is five minutes
        "cpus_per_task": cpus,
        "srun_args": [f"--cpus-per-task={cpus}"],  # srun does not inherit it from sbatch
    }
    executor.update_parameters(**own | parameters)
    return executor


def _result(job: Job, submitted: Any) -> Outcome:
    """The outcome that a job has left, or why it could not start."""
    try:
        outcome: Outcome = submitted.result()
        return outcome
    except Exception as error:
        return Outcome(job.id, "error", f"a Slurm job cannot run: {error}\n")


def _said(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return f"{text[-_LAST_CHARACTERS:]}\n" if text else ""


def _refresh(folder: Path) -> None:
    """Make a shared disk show the current files of a folder, by a change that changes nothing."""
    with suppress(OSError):  # the files appear some seconds later
        folder.chmod(folder.stat().st_mode)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
