"""The driver of a sweep: gives runs to an executor until each has a record or has failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from einlinear.studies.record import RunRecord
from einlinear.studies.sweeps.claims import Watch, claimed
from einlinear.studies.sweeps.executor import Executor
from einlinear.studies.sweeps.job import Job, Outcome, finished, keep_failure
from einlinear.studies.sweeps.plan import PlannedRun, makespan
from einlinear.studies.sweeps.progress import Failure, OnProgress, Running, SweepProgress

_ATTEMPTS = 2
_HUGE = 1e18  # no number of a claim is so large
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_LEAVE_IT = 5.0  # to who was quicker, or holds a run without a claim


@dataclass(slots=True)
class _State:
    """What is known of one run while a sweep goes on."""

    run: PlannedRun
    job: Job
    attempts: int = 0
    step: int = 0  # of the last checkpoint when it was last started
    record: RunRecord | None = None
    failure: Failure | None = None


class Driver:
    """Runs jobs in the order given; see `to_the_end`.

    Args:
        runs: the runs, and their jobs.
        executor: where they run.
        on_progress: called twice a second.
        records: of runs that are known to have one, by id.
    """

    def __init__(
        self,
        runs: Sequence[tuple[PlannedRun, Job]],
        executor: Executor,
        on_progress: OnProgress,
        records: Mapping[str, RunRecord] | None = None,
    ) -> None:
        known = records or {}
        self._states = {job.id: _State(run, job, record=known.get(job.id)) for run, job in runs}
        self._executor, self._on_progress = executor, on_progress
        self._watch = Watch()
        longest = sorted(self._states.values(), key=lambda state: -state.run.seconds)
        self._waiting = [state.job.id for state in longest]
        self._running: list[str] = []
        self._elsewhere: dict[str, float] = {}  # and when each may be taken over, at the soonest
        self._told: list[RunRecord | Failure] = []
        self._pace = _Pace()

    def to_the_end(self) -> tuple[dict[str, RunRecord], dict[str, Failure]]:
        """Run everything that has no record; gives all records, and what failed."""
        for name in list(self._waiting):
            if self._has_record(name):
                self._waiting.remove(name)
        self._told.clear()
        self._report()
        while self._waiting or self._running or self._elsewhere:
            self._fill()
            is_over = not (self._waiting or self._running or self._elsewhere)
            for outcome in self._executor.ended(0.0 if is_over else _SECONDS_BETWEEN_LOOKS):
                self._take(outcome)
            self._look_elsewhere()
            self._report()
        states = self._states.items()
        return (
            {name: state.record for name, state in states if state.record is not None},
            {name: state.failure for name, state in states if state.failure is not None},
        )

    def _fill(self) -> None:
        """Start runs while there is room; what others have is left to them."""
        while self._waiting and len(self._running) < self._executor.slots:
            name = self._waiting.pop(0)
            if self._has_record(name):
                continue
            state = self._states[name]
            seen = self._watch.free(state.job.directory)
            if seen is None:
                self._elsewhere[name] = 0.0
                continue
            state.step = _last_step(state.job.directory)
            self._executor.start(replace(state.job, after=astuple(seen)))
            self._pace.start(name)
            self._running.append(name)

    def _look_elsewhere(self) -> None:
        """Runs of others: done, or to be taken over, or left to them."""
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
            self._pace.end(name, state.run.seconds)
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
        """One more attempt; none for a run that was killed after it had got further."""
        directory = state.job.directory
        if outcome.end == "killed":
            keep_failure(directory, "killed", outcome.text)
            if _last_step(directory) > state.step:
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
        """The share of the work that is done, and how long the rest takes at today's pace."""
        lefts = []
        for at in running:
            left = self._states[at.id].run.seconds * (1 - at.done / at.total)
            lefts.append(left if at.seconds_left is None else at.seconds_left / self._pace.factor)
        lefts += [self._states[name].run.seconds for name in self._waiting]
        total = sum(state.run.seconds for state in self._states.values())
        share = 1 - min(1.0, sum(lefts) / total) if total else 1.0
        return share, makespan(lefts, self._executor.slots) * self._pace.factor


@dataclass(slots=True)
class _Pace:
    """How long runs take against what was expected, learned from those that have ended."""

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


def _last_step(directory: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    steps = (path.stem.partition("-")[2] for path in directory.glob("checkpoints/step-*.json"))
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """What a claim says under a name, if it is a number of 0 or more; claims may be damaged."""
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _HUGE:
        return None
    return float(value)
