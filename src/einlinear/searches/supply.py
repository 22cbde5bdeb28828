"""Supplier: gives the driver of a search its runs, one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from time import monotonic

from einlinear.errors import EinlinearError
from einlinear.runs.config import RunConfig
from einlinear.runs.config_file import load_config
from einlinear.runs.directory import CONFIG, RunDirectory
from einlinear.runs.record import RunRecord
from einlinear.searches.answer import MadeChoice, add_choice
from einlinear.searches.ladder import Ladder
from einlinear.searches.next_run import NextRun, chosen_label, next_run, resumed, stop_changes
from einlinear.searches.space import Candidate
from einlinear.searches.spec import SearchSpec
from einlinear.searches.state import SearchState
from einlinear.searches.stops import add_stops, read_stops
from einlinear.sweeps.claims import Watch
from einlinear.sweeps.driver import Failure
from einlinear.sweeps.job import RUNS, Job, finished
from einlinear.sweeps.plan import PlannedRun


@dataclass(frozen=True, slots=True)
class Found:
    """The runs in the directory of a search: finished, in training somewhere, interrupted."""

    records: tuple[RunRecord, ...]
    running: tuple[RunConfig, ...]
    interrupted: tuple[RunConfig, ...]


class RunFolder:
    """Reads the runs of a search; records are read once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._records: dict[str, RunRecord] = {}
        self._watch = Watch()

    def read(self) -> Found:
        """What is there now."""
        running: list[RunConfig] = []
        interrupted: list[RunConfig] = []
        for path in sorted((self.out / RUNS).glob("*")):
            if path.name in self._records:
                continue
            record = finished(path)
            if record is not None:
                self._records[path.name] = record
                continue
            config = _config(path)
            if config is not None:
                is_free = self._watch.free(path) is not None
                (interrupted if is_free else running).append(config)
        records = tuple(self._records[name] for name in sorted(self._records))
        return Found(records, tuple(running), tuple(interrupted))


class Supplier:
    """Decides on the next run whenever a place is free.

    seconds: that the search may still take; None if only its FLOPs are limited.
    """

    def __init__(
        self,
        spec: SearchSpec,
        ladder: Ladder,
        out: Path,
        threads: int | None,
        seconds: float | None,
        slots: Callable[[], int],
        on_choice: Callable[[NextRun, SearchState], None] | None = None,
    ) -> None:
        self.spec, self.ladder, self.out = spec, ladder, out
        self.folder = RunFolder(out)
        self._threads, self._slots, self._on_choice = threads, slots, on_choice
        self._given: dict[str, RunConfig] = {}
        self._stopped = set(read_stops(out))
        self._end = None if seconds is None else monotonic() + seconds

    def state(self) -> tuple[SearchState, Found]:
        """The search as it stands."""
        found = self.folder.read()
        return SearchState(self.spec, self.ladder, found.records), found

    def __call__(self, failures: Mapping[str, Failure]) -> tuple[PlannedRun, Job] | None:
        """The next run: one that was interrupted, or the one that is worth most."""
        state, found = self.state()
        self._remove_passed(state)
        state.exclude(self._given[name] for name in failures if name in self._given)
        done = {record.id for record in found.records}
        running = {config.id: config for config in found.running}
        running |= {k: c for k, c in self._given.items() if k not in done and k not in failures}
        if self._end is not None and monotonic() >= self._end:
            return None
        for config in found.interrupted:
            if config.id not in self._given and state.place(config) is not None:
                return self._made(resumed(state, config), state)
        choice = next_run(state, list(running.values()), self._left(state))
        return None if choice is None else self._made(choice, state)

    def _remove_passed(self, state: SearchState) -> None:
        """Remove the states of runs that a finished longer run has passed."""
        kept = {record.id for _, record in state.tally.longest.values()}
        for record in state.records:
            frozen = RunDirectory(self.out / RUNS / record.id).frozen
            if record.id not in kept and frozen.exists():
                rmtree(frozen, ignore_errors=True)

    def _left(self, state: SearchState) -> float:
        """FLOPs that the search may still spend, by its budget and by the clock."""
        left = self.spec.flops - state.tally.spent
        if self._end is None:
            return left
        return min(left, max(0.0, self._end - monotonic()) * self._slots() * state.speed)

    def _made(self, choice: NextRun, state: SearchState) -> tuple[PlannedRun, Job]:
        config = choice.config
        self._given[config.id] = config
        with suppress(OSError):  # a full disk must not end the search here
            made = MadeChoice(config.id, choice.source, choice.why, choice.flops, state.tally.spent)
            add_choice(made, self.out)
            stops = stop_changes(state, choice, self._stopped)
            self._stopped ^= {stop.label for stop in stops}
            add_stops(stops, self.out)
        if self._on_choice is not None:
            self._on_choice(choice, state)
        candidate = Candidate.of(config)
        macs = self.ladder.counter.macs(candidate, config.width)
        macs *= self.ladder.counter.units_per_step
        run = PlannedRun(config, macs, 0, chosen_label(state, config), choice.flops / state.speed)
        job = Job(
            config.id,
            str(self.out),
            config.as_dict(),
            self._threads,
            os.getcwd(),
            thaw=choice.source,
        )
        return run, job


def _config(path: Path) -> RunConfig | None:
    try:
        config = load_config(path / CONFIG)
    except EinlinearError:
        return None
    return config if config.id == path.name else None
