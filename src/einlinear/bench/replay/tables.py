"""RunTable: losses of finished runs, and Session, which pays for looking at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError
from einlinear.laws.observations import Floats, Ints
from einlinear.runs.directory import RunDirectory
from einlinear.runs.record import RunRecord
from einlinear.searches.draws import Cost, target_beyond
from einlinear.searches.space import Candidate, features_of, kernel_of
from einlinear.searches.surrogate import Belief, Trials, fit_surrogate
from einlinear.show.numbers import FLOPS_PER_MAC

TARGET_TIMES = 10.0
"""The target, relative to the largest run of dense layers."""

_DOUBLING = 1.9  # rungs are at least this factor apart


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """Losses of every candidate at every level, rung and seed; the first candidate is dense.

    m: candidates x levels, the logarithm of the size. t: rungs, that of the steps.
    loss: candidates x levels x rungs x seeds.
    cost: candidates x levels x rungs, of a run from its start to a rung.
    truth: the multipliers of the laws that a synthetic table was drawn from.
    """

    candidates: tuple[Candidate, ...]
    m: Floats
    t: Floats
    loss: Floats
    cost: Floats
    target: Cost
    truth: Floats | None = None
    features: Floats = field(init=False)
    kernel: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", features_of(self.candidates))
        object.__setattr__(self, "kernel", kernel_of(self.candidates))

    @property
    def levels(self) -> int:
        """How many sizes there are."""
        return int(self.loss.shape[1])

    @property
    def rungs(self) -> int:
        """How many numbers of steps there are."""
        return int(self.loss.shape[2])

    @property
    def seeds(self) -> int:
        """How many runs differ only in their seed."""
        return int(self.loss.shape[3])

    @property
    def grid_cost(self) -> float:
        """What all runs of the table cost."""
        return float(self.seeds * self.cost[:, :, -1].sum())

    def fit(
        self, order: Sequence[int], reached: Ints, start: Belief | None = None, **ideas: Any
    ) -> Belief:
        """What runs up to the rungs `reached` (-1 for none) say.

        order: candidates as the belief numbers them, those that have runs first.
        ideas: of how curves bend, as of `fit_surrogate`.
        """
        order = list(order)
        shown = reached[order][:, :, None] >= np.arange(self.rungs)[None, None, :, None]
        place, level, rung, seed = np.nonzero(shown)
        number = np.array(order)[place]
        chain = np.ravel_multi_index((place, level, seed), (len(order), self.levels, self.seeds))
        run = np.unique(chain, return_inverse=True)[1]
        trials = Trials(
            place,
            run,
            seed,
            self.m[number, level],
            self.t[rung],
            self.loss[number, level, rung, seed],
        )
        features, kernel = self.features[order], self.kernel[np.ix_(order, order)]
        return fit_surrogate(trials, features, kernel, self.target.anchor, start, **ideas)

    def full_analysis(self) -> Floats:
        """The multipliers that all runs of the table together give: what a search should find."""
        whole = np.full((len(self.candidates), self.levels, self.seeds), self.rungs - 1)
        belief = self.fit(range(len(self.candidates)), whole)
        return np.asarray(belief.middle().multipliers(self.target)[0])

    @classmethod
    def from_records(cls, records: Iterable[RunRecord]) -> RunTable:
        """Build a table from runs; candidates that lack a run of the grid are left out.

        Every candidate's runs are sorted by their size; all need as many sizes as dense has.
        """
        chains: dict[Candidate, dict[tuple[int, int], RunRecord]] = {}
        for record in records:
            if record.status == "finished":
                held = chains.setdefault(Candidate.of(record.config), {})
                key = record.counts.macs, record.config.seed
                if key not in held or held[key].steps_done < record.steps_done:
                    held[key] = record
        dense = chains.get(Candidate(), {})
        seeds = sorted({seed for _, seed in dense})
        levels = len({macs for macs, _ in dense})
        whole = {
            candidate: held
            for candidate, held in chains.items()
            if len({macs for macs, _ in held}) == levels
            and all((macs, seed) in held for macs, _ in held for seed in seeds)
        }
        steps = _common_steps([record for held in whole.values() for record in held.values()])
        if Candidate() not in whole or len(whole) < 2 or len(steps) < 2:
            raise EinlinearError(
                what=f"a table of {len(whole)} structures at {levels} sizes, {len(steps)} lengths",
                rule="a replay needs dense and other structures, each at all sizes with all seeds",
                fix="finish the sweep, or add dense to it",
            )
        order = (Candidate(), *sorted(set(whole) - {Candidate()}))
        sizes = np.array([sorted({macs for macs, _ in whole[c]}) for c in order])
        runs = [[[whole[c][int(macs), s] for s in seeds] for macs in row]
                for c, row in zip(order, sizes, strict=True)]  # fmt: skip
        loss = np.array(
            [
                [[[_at(run, k)[0] for run in runs_] for k in steps] for runs_ in rows]
                for rows in runs
            ]
        )
        cost = np.array([[[_at(runs_[0], k)[1] for k in steps] for runs_ in rows] for rows in runs])
        m = np.log(sizes / sizes[0, levels // 2])
        t = np.log(np.array(steps) / steps[len(steps) // 2])
        middle = cost[0, levels // 2, len(steps) // 2]
        target = target_beyond(log(TARGET_TIMES * cost[0, -1, -1] / middle), m[0], t)
        return cls(order, m, t, loss, cost, target)

    @classmethod
    def from_folder(cls, folder: Path) -> RunTable:
        """Build a table from the finished runs in a folder, at any depth."""
        found = sorted(path.parent for path in folder.rglob("record.json"))
        records = (RunDirectory(path).read_record() for path in found)
        return cls.from_records(record for record in records if record is not None)


def _common_steps(records: Sequence[RunRecord]) -> list[int]:
    """Steps at which all runs were evaluated, from the last down by about halves."""
    sets = [{p.step for p in record.curve if p.step and p.loss is not None} for record in records]
    kept: list[int] = []
    for step in sorted(set.intersection(*sets), reverse=True) if sets else ():
        if not kept or kept[-1] >= _DOUBLING * step:
            kept.append(step)
    return kept[::-1]


def _at(record: RunRecord, step: int) -> tuple[float, float]:
    """Loss and FLOPs of a run after some steps."""
    point = next(point for point in record.curve if point.step == step)
    assert point.loss is not None, "steps are common to all runs"
    return point.loss, float(FLOPS_PER_MAC * point.macs)


class Session:
    """One method at work on a table: it pays for every run, and never more than its budget."""

    def __init__(self, table: RunTable, budget: float) -> None:
        self.table, self.budget, self.spent = table, budget, 0.0
        self.reached = np.full((len(table.candidates), table.levels, table.seeds), -1)
        self.order: list[int] = []
        self.path: list[tuple[float, int]] = []

    @property
    def left(self) -> float:
        """What can still be spent."""
        return self.budget - self.spent

    def price(self, candidate: int, level: int, rung: int, seed: int) -> float:
        """What it costs to go on with a run, from the start or from where it ended."""
        held = self.reached[candidate, level, seed]
        cost = self.table.cost[candidate, level]
        if held >= rung:
            return 0.0
        return float(cost[rung] - (cost[held] if held >= 0 else 0.0))

    def train(self, candidate: int, level: int, rung: int, seed: int) -> float | None:
        """Train up to a rung, and see its loss; None if the budget cannot pay for it."""
        price = self.price(candidate, level, rung, seed)
        if price > self.left * (1 + 1e-9):
            return None
        self.spent += price
        if candidate not in self.order:
            self.order.append(candidate)
        self.reached[candidate, level, seed] = max(rung, self.reached[candidate, level, seed])
        return float(self.table.loss[candidate, level, rung, seed])

    def choose(self, candidate: int) -> None:
        """Say which candidate is the best by now."""
        if not self.path or self.path[-1][1] != candidate:
            self.path.append((self.spent, candidate))

    def choice_at(self, spent: float) -> int | None:
        """What was the best when this much had been spent; None if nothing had been trained."""
        found = [candidate for at, candidate in self.path if at <= spent * (1 + 1e-9)]
        return found[-1] if found else None

    def best_by_law(self) -> int:
        """The candidate that the law of all runs so far predicts to be the best; 0 if none ran."""
        if not self.order:
            return 0
        loss, _ = self.table.fit(self.order, self.reached).middle().best(self.table.target)
        return self.order[int(loss[0].argmin())]

    def best_by_loss(self) -> int:
        """The candidate with the lowest loss in the dearest runs, on the mean over seeds."""
        if not self.order:
            return 0
        level = int(np.flatnonzero((self.reached >= 0).any((0, 2)))[-1])
        rung = int(self.reached[:, level].max())
        shown = self.reached[:, level] >= rung
        losses = np.where(shown, self.table.loss[:, level, rung], 0.0).sum(1)
        mean = np.where(shown.any(1), losses / np.maximum(1, shown.sum(1)), np.inf)
        return int(mean.argmin())
