"""Driver: gives runs to an executor until each has a record or has failed; reports progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from einlinear.runs.record import RunRecord
from einlinear.sweeps.claims import Watch, claimed
from einlinear.sweeps.executors.executor import Executor
from einlinear.sweeps.job import Job, Outcome, finished, keep_failure, last_step
from einlinear.sweeps.plan import PlannedRun, makespan

_ATTEMPTS = 2
_HUGE = 1e18  # larger than any number in a claim
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_LEAVE_IT = 5.0  # how long a busy run is left to another process


@dataclass(frozen=True, slots=True)
class Running:
    """A running run; loss and seconds_left are None until it reports them."""

    id: str
    label: str
    done: int
    total: int
    loss: float | None
    seconds_left: float | None
    is_elsewhere: bool


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """Progress of a sweep.

    finished, diverged: runs that have a record.
    share: of the work that is done, by time.
    last: runs that ended since the last report.
    """

    total: int
    finished: int
    diverged: int
    failed: int
    running: tuple[Running, ...]
    share: float
    seconds_left: float
    last: tuple[RunRecord | Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that failed on every attempt: the error of the last attempt, and its directory."""

    id: str
    label: str
    text: str
    directory: Path

    @property
    def reason(self) -> str:
        """The error in one line: the end of a traceback, the beginning of anything else."""
        lines = self.text.strip().splitlines() or [""]
        return lines[-1 if lines[0].startswith("Traceback") else 0]


OnSweepProgress = Callable[[SweepProgress], None]
Supply = Callable[[Mapping[str, Failure]], "tuple[PlannedRun, Job] | None"]
"""Gives the next run, knowing those that failed; None if there is none for now."""


@dataclass(slots=True)
class _State:
    """What is known about one run during a sweep."""

    run: PlannedRun
    job: Job
    attempts: int = 0
    step: int = 0  # of the last checkpoint at its last start
    record: RunRecord | None = None
    failure: Failure | None = None

    @property
    def seconds(self) -> float:
        """Estimated time from that checkpoint to the end."""
        return self.run.seconds_from(self.step)


class Driver:
    """Runs jobs, the longest first, except those whose records are known; then those of `supply`.

    `on_progress` is called twice a second.
    """

    def __init__(
        self,
        runs: Sequence[tuple[PlannedRun, Job]],
        executor: Executor,
        on_progress: OnSweepProgress,
        records: Mapping[str, RunRecord] | None = None,
        supply: Supply | None = None,
    ) -> None:
        known = records or {}
        self._supply = supply
        self._states = {job.id: _State(run, job, record=known.get(job.id)) for run, job in runs}
        for state in self._states.values():
            state.step = 0 if state.record else last_step(state.job.directory)
        self._executor, self._on_progress = executor, on_progress
        self._watch = Watch()
        longest = sorted(self._states.values(), key=lambda state: -state.run.seconds)
        self._waiting = [state.job.id for state in longest]
        self._running: list[str] = []
        self._elsewhere: dict[str, float] = {}  # and when each may be taken over
        self._told: list[RunRecord | Failure] = []
        self._pace = _Pace()

    def to_the_end(self) -> tuple[dict[str, RunRecord], dict[str, Failure]]:
        """Run everything that has no record; return all records and failures by id."""
        for name in list(self._waiting):
            if self._has_record(name):
                self._waiting.remove(name)
        self._told.clear()
        self._report()
        self._fill()
        while self._waiting or self._running or self._elsewhere:
            for outcome in self._executor.ended(_SECONDS_BETWEEN_LOOKS):
                self._take(outcome)
            self._look_elsewhere()
            self._report()
            self._fill()
        states = self._states.items()
        return (
            {name: state.record for name, state in states if state.record is not None},
            {name: state.failure for name, state in states if state.failure is not None},
        )

    def _fill(self) -> None:
        """Start runs while there is room, leaving those that other processes have."""
        while len(self._running) < self._executor.slots and (self._waiting or self._ask()):
            name = self._waiting.pop(0)
            if self._has_record(name):
                continue
            state = self._states[name]
            seen = self._watch.free(state.job.directory)
            if seen is None:
                self._elsewhere[name] = 0.0
                continue
            state.step = last_step(state.job.directory)
            self._executor.start(replace(state.job, after=astuple(seen)))
            self._pace.start(name)
            self._running.append(name)

    def _ask(self) -> bool:
        """Ask for another run; returns whether there is a new one."""
        failures = {k: s.failure for k, s in self._states.items() if s.failure is not None}
        found = None if self._supply is None else self._supply(failures)
        if found is None or found[1].id in self._states:
            return False
        run, job = found
        self._states[job.id] = _State(run, job)
        self._waiting.append(job.id)
        return True

    def _look_elsewhere(self) -> None:
        """Check on the runs of others: finished, to be taken over, or still theirs."""
        for name, soonest in list(self._elsewhere.items()):
            if self._has_record(name):
                del self._elsewhere[name]
            elif monotonic() >= soonest and self._watch.free(self._states[name].job.directory):
                del self._elsewhere[name]
                self._waiting.insert(0, name)

    def _take(self, outcome: Outcome) -> None:
        name, state = outcome.id, self._states[outcome.id]
        self._running.remove(name)
        if self._has_record(name):
            self._pace.end(name, state.seconds)
        elif outcome.end == "busy":
            self._elsewhere[name] = monotonic() + _SECONDS_TO_LEAVE_IT
        else:
            self._count_failure(state, outcome)
            if state.attempts < _ATTEMPTS:
                self._waiting.append(name)
            else:
                text = outcome.text or "the run ended without a record\n"
                state.failure = Failure(name, state.run.label, text, state.job.directory)
                self._told.append(state.failure)

    def _count_failure(self, state: _State, outcome: Outcome) -> None:
        """Count an attempt, unless the run was killed after it had made progress."""
        directory = state.job.directory
        if outcome.end == "killed":
            keep_failure(directory, "killed", outcome.text)
            if last_step(directory) > state.step:
                state.attempts = 0
                return
        state.attempts += 1

    def _has_record(self, name: str) -> bool:
        state = self._states[name]
        if state.record is None:
            state.record = finished(state.job.directory)
            if state.record is not None:
                self._told.append(state.record)
        return state.record is not None

    def _report(self) -> None:
        running = [self._state_of(name, is_elsewhere=False) for name in self._running]
        running += [self._state_of(name, is_elsewhere=True) for name in self._elsewhere]
        states = self._states.values()
        records = [state.record for state in states if state.record is not None]
        share, left = self._time(running)
        last, self._told = tuple(self._told), []
        self._on_progress(
            SweepProgress(
                total=len(self._states),
                finished=sum(record.status == "finished" for record in records),
                diverged=sum(record.status == "diverged" for record in records),
                failed=sum(state.failure is not None for state in states),
                running=tuple(running),
                share=share,
                seconds_left=left,
                last=last,
            )
        )

    def _state_of(self, name: str, *, is_elsewhere: bool) -> Running:
        state = self._states[name]
        claim = claimed(state.job.directory)
        total = state.run.config.steps
        return Running(
            id=name,
            label=state.run.label,
            done=min(total, int(_number(claim, "done") or 0)),
            total=total,
            loss=_number(claim, "loss"),
            seconds_left=_number(claim, "seconds_left"),
            is_elsewhere=is_elsewhere,
        )

    def _time(self, running: Sequence[Running]) -> tuple[float, float]:
        """The share of the work that is done, and the seconds that the rest takes at this pace."""
        lefts = []
        for at in running:
            left = self._states[at.id].run.seconds_from(at.done)
            lefts.append(left if at.seconds_left is None else at.seconds_left / self._pace.factor)
        lefts += [self._states[name].seconds for name in self._waiting]
        total = sum(state.run.seconds for state in self._states.values())
        share = 1 - min(1.0, sum(lefts) / total) if total else 1.0
        return share, makespan(lefts, self._executor.slots) * self._pace.factor


@dataclass(slots=True)
class _Pace:
    """How long runs take compared with their estimates, learned from those that have ended."""

    expected: float = 0.0
    taken: float = 0.0
    began: dict[str, float] = field(default_factory=dict)

    def start(self, name: str) -> None:
        self.began[name] = monotonic()

    def end(self, name: str, seconds: float) -> None:
        self.expected += seconds
        self.taken += monotonic() - self.began.pop(name)

    @property
    def factor(self) -> float:
        return self.taken / self.expected if self.taken and self.expected else 1.0


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """A number of 0 or more from a claim, which may be damaged."""
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _HUGE:
        return None
    return float(value)
