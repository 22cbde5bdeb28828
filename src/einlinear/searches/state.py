"""SearchState: what the runs of a search say so far, as the surrogate sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import log
from statistics import median

import numpy as np

from einlinear.runs.config import RunConfig
from einlinear.runs.record import RunRecord
from einlinear.searches.decide import Outlook, look_ahead
from einlinear.searches.draws import Cost, target_beyond
from einlinear.searches.ladder import Ladder
from einlinear.searches.space import Candidate, features_of, kernel_of
from einlinear.searches.spec import SearchSpec
from einlinear.searches.surrogate import BEND, Belief, SizeAndSteps, Trials, fit_surrogate
from einlinear.show.numbers import FLOPS_PER_MAC

RATES = (0.5, 2.0)
"""The learning rates of the final check, relative to the usual one."""

Chain = tuple[int, int, int]
"""Candidate, level and seed: runs of one chain go on from each other."""


@dataclass(slots=True)
class Tally:
    """Records of a search by what they are of.

    longest: the longest finished run of each chain, with its rung. tuned: runs of the final check.
    """

    longest: dict[Chain, tuple[int, RunRecord]] = field(default_factory=dict)
    tuned: dict[tuple[int, float], RunRecord] = field(default_factory=dict)
    spent: float = 0.0


class SearchState:
    """A search after some runs. Everything follows from the spec and the records."""

    def __init__(self, spec: SearchSpec, ladder: Ladder, records: Iterable[RunRecord]) -> None:
        self.spec, self.ladder = spec, ladder
        self.candidates = spec.space.candidates
        self._number = {candidate.key: k for k, candidate in enumerate(self.candidates)}
        self.records = sorted(records, key=lambda record: record.id)
        self.tally = self._count()
        self.diverged = self._diverged()
        self.failed: set[int] = set()
        found = {chain[0] for chain in self.tally.longest} - self.diverged
        self.trained = sorted(found)
        self._belief: Belief | None = None
        self._order: list[int] = []

    def _count(self) -> Tally:
        tally = Tally()
        for record in self.records:
            place = self.place(record.config)
            if place is None:
                continue
            candidate, level, rung, seed, rate = place
            if rate != 1.0:
                tally.tuned[candidate, rate] = record
                tally.spent += flops_of(record)
                continue
            chain = candidate, level, seed
            held = tally.longest.get(chain)
            if held is None or rung > held[0]:
                tally.longest[chain] = rung, record
        tally.spent += sum(flops_of(record) for _, record in tally.longest.values())
        return tally

    def _diverged(self) -> set[int]:
        """Candidates of which any run diverged at the usual rate: they are out."""
        return {
            chain[0]
            for chain, (_, record) in self.tally.longest.items()
            if record.status == "diverged"
        }

    @property
    def left_out(self) -> set[int]:
        """Candidates of which a run diverged or failed."""
        return self.diverged | self.failed

    def exclude(self, configs: Iterable[RunConfig]) -> None:
        """Leave out the candidates of runs that failed."""
        for config in configs:
            place = self.place(config)
            if place is not None:
                self.failed.add(place[0])
        self.trained = [k for k in self.trained if k not in self.failed]
        self._belief, self._order = None, []

    def place(self, config: RunConfig) -> tuple[int, int, int, int, float] | None:
        """Candidate, level, rung, seed and rate of a run; None if it is not of this search."""
        if config.id not in self.ladder.places:
            self.ladder.places[config.id] = self._place(config)
        return self.ladder.places[config.id]

    def _place(self, config: RunConfig) -> tuple[int, int, int, int, float] | None:
        candidate = Candidate.of(config)
        number = self._number.get(candidate.key)
        if number is None or config.steps not in self.spec.rungs.steps:
            return None
        level = self.ladder.level_of(self.candidates[number], config.width)
        if level is None:
            return None
        rung = self.spec.rungs.steps.index(config.steps)
        for rate in (1.0, *RATES):
            same = self.ladder.config(self.candidates[number], level, rung, config.seed, rate)
            if same.id == config.id:
                return number, level, rung, config.seed, rate
        return None

    @property
    def order(self) -> list[int]:
        """Candidates as the surrogate numbers them: those that were trained come first."""
        if not self._order:
            known = {*self.trained, *self.left_out}
            rest = [k for k in range(len(self.candidates)) if k not in known]
            self._order = [*self.trained, *rest]
        return self._order

    @property
    def belief(self) -> Belief:
        """What the runs say about all candidates, numbered by `order`."""
        if self._belief is None:
            self._belief = self.belief_with(BEND, (0.0, 0.0))
        return self._belief

    def belief_with(self, bend: float, centre: SizeAndSteps) -> Belief:
        """The same for another idea of how much curves bend, and from where."""
        chosen = tuple(self.candidates[k] for k in self.order)
        features, kernel = features_of(chosen), kernel_of(chosen)
        anchor = self.flops_target.anchor
        return fit_surrogate(self._trials(), features, kernel, anchor, centre=centre, bend=bend)

    @property
    def run_numbers(self) -> dict[Chain, int]:
        """The number that the surrogate gives to the run of each chain."""
        known = set(self.order)
        chains = [chain for chain in sorted(self.tally.longest) if chain[0] in known]
        return {chain: number for number, chain in enumerate(chains)}

    def _trials(self) -> Trials:
        """The losses of all runs, from the steps of the lowest rung on."""
        at = {number: k for k, number in enumerate(self.order)}
        rows = []
        for chain, run in self.run_numbers.items():
            _, record = self.tally.longest[chain]
            for point in record.curve:
                if point.step >= self.spec.rungs.steps[0] and point.loss is not None:
                    m, t = self._m(record.counts.macs), self._t(point.step)
                    rows.append((at[chain[0]], run, chain[2], m, t, point.loss))
        table = np.array(rows)
        whole = table[:, :3].astype(np.int64)
        return Trials(*whole.T, *table[:, 3:].T)

    def _m(self, macs: float) -> float:
        return log(macs / self.ladder.macs[len(self.ladder.macs) // 2])

    def _t(self, steps: float) -> float:
        return log(steps / self.spec.rungs.steps[len(self.spec.rungs.steps) // 2])

    @property
    def flops_target(self) -> Cost:
        """The target in the units of the surrogate, by FLOPs."""
        middle = self.ladder.macs[len(self.ladder.macs) // 2]
        step = FLOPS_PER_MAC * middle * self.ladder.counter.units_per_step
        steps = self.spec.rungs.steps[len(self.spec.rungs.steps) // 2]
        m = np.array([self._m(macs) for macs in self.ladder.macs])
        t = np.array([self._t(steps) for steps in self.spec.rungs.steps])
        return target_beyond(log(self.spec.target / (step * steps)), m, t)

    @property
    def target(self) -> Cost:
        """The target by the objective: by seconds, slower candidates get fewer FLOPs."""
        found = self.flops_target
        if self.spec.objective == "flops":
            return found
        times = self.relative_times()
        usual = median([time for number, time in times.items() if number] or [1.0])
        return replace(found, log_step=np.log([times.get(k, usual) for k in self.order]))

    def relative_times(self) -> dict[int, float]:
        """Time per FLOP relative to dense, at the largest size that both were trained at."""
        times: dict[tuple[int, int], list[float]] = {}
        for (number, level, _), (_, record) in self.tally.longest.items():
            point = record.curve[-1]
            if point.seconds > 0 and point.macs:
                times.setdefault((number, level), []).append(point.seconds / point.macs)
        return {
            number: median(times[number, level]) / median(times[0, level])
            for number, level in sorted(times)
            if (0, level) in times
        }

    def outlook(self) -> Outlook:
        """What is believed at the target."""
        random = np.random.default_rng((self.spec.seed, len(self.records)))
        return look_ahead(self.belief, self.target, random, np.arange(len(self.trained)))

    def usual_loss(self, number: int, config: RunConfig) -> float | None:
        """The loss at the usual rate of a run that has another one."""
        level = self.ladder.level_of(self.candidates[number], config.width)
        assert level is not None, "the run is of this search"
        return self.loss_at((number, level, config.seed), config.steps)

    def loss_at(self, chain: Chain, steps: int) -> float | None:
        """The loss of a chain after some steps, if it was evaluated then."""
        held = self.tally.longest.get(chain)
        points = () if held is None else held[1].curve
        return next((point.loss for point in points if point.step == steps), None)

    @property
    def speed(self) -> float:
        """FLOPs per second of a run: the median of the runs so far, or a guess."""
        longest = [record for _, record in self.tally.longest.values()]
        speeds = [flops_of(r) / r.curve[-1].seconds for r in longest if r.curve[-1].seconds > 0]
        return median(speeds) if speeds else self.spec.speed

    def cost(self, candidate: int, level: int, rung: int, seed: int | None) -> float:
        """FLOPs of a run that goes on from the longest finished one of its chain, if it has one."""
        step = self.ladder.step_flops(self.candidates[candidate], level)
        held = None if seed is None else self.tally.longest.get((candidate, level, seed))
        done = self.spec.rungs.steps[held[0]] if held else 0
        return step * (self.spec.rungs.steps[rung] - done)

    def position(self, candidate: int, level: int, rung: int) -> tuple[float, float]:
        """Where the surrogate sees a run: the logarithms of its size and its steps."""
        wide = self.candidates[candidate]
        macs = self.ladder.counter.macs(wide, self.ladder.width(wide, level))
        return self._m(macs), self._t(self.spec.rungs.steps[rung])


def flops_of(record: RunRecord) -> float:
    """FLOPs of a run, from its first step on."""
    return float(FLOPS_PER_MAC * record.curve[-1].macs)
