"""RunTable: losses of finished runs, and Session, which pays for looking at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field, fields
from math import inf, log
from typing import Any, NamedTuple

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.laws.observations import Floats, Ints
from einlinear.runs.config import NOT_IN_ID, RunConfig
from einlinear.runs.identity import deciding_values
from einlinear.runs.record import RunRecord
from einlinear.searches.draws import Cost, target_beyond
from einlinear.searches.space import FIRST_TRIED, Candidate, features_of, kernel_of
from einlinear.searches.surrogate import Belief, Trials, fit_surrogate
from einlinear.show.numbers import FLOPS_PER_MAC

TARGET_TIMES = 10.0
"""The target, relative to the largest run of dense layers."""

_DOUBLING = 1.7  # rungs are at least this factor apart: two of eight evaluations in a decade are
_FIRST = 1 / 8  # of the shortest run is the lowest rung, or more: earlier losses follow no law


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """Losses of every candidate at every level, rung and seed; the first candidate is dense.

    m: candidates x levels, the logarithm of the size. t: rungs, that of the steps.
    loss: candidates x levels x rungs x seeds.
    cost: candidates x levels x rungs, of a run from its start to a rung.
    truth: the multipliers of the laws that a synthetic table was drawn from.
    last: candidates x levels x seeds, the highest rung of each run, -1 if there is no such run;
        given as `ends`, by default all runs reach the highest rung. What no run reached is NaN in
        the other arrays.
    """

    candidates: tuple[Candidate, ...]
    m: Floats
    t: Floats
    loss: Floats
    cost: Floats
    target: Cost
    truth: Floats | None = None
    ends: InitVar[Ints | None] = None
    last: Ints = field(init=False)
    features: Floats = field(init=False)
    kernel: Floats = field(init=False)

    def __post_init__(self, ends: Ints | None) -> None:
        whole = np.full((len(self.candidates), self.levels, self.seeds), self.rungs - 1)
        object.__setattr__(self, "last", whole if ends is None else ends)
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
        return float(self.costs_up_to(self.last).sum())

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return int((self.last >= 0).sum())

    @property
    def longest(self) -> Ints:
        """The highest rung of each candidate at each level with any seed, -1 without a run."""
        return np.asarray(self.last.max(2))

    @property
    def target_flops(self) -> float:
        """The target, in the unit of `cost`."""
        unit = self.cost[0, 0, 0] / np.exp(self.m[0, 0] + self.t[0])
        return float(np.exp(self.target.log_total) * unit)

    def costs_up_to(self, rungs: Ints) -> Floats:
        """What runs up to some rungs cost, 0 for the rung -1; candidates x levels, also x seeds."""
        flat = rungs.reshape(len(self.candidates), self.levels, -1)
        found = np.take_along_axis(self.cost, np.maximum(flat, 0), axis=2)
        return np.where(flat >= 0, found, 0.0).reshape(rungs.shape)

    def fit(
        self, order: Sequence[int], reached: Ints, start: Belief | None = None, **ideas: Any
    ) -> Belief:
        """What runs up to the rungs `reached` (-1 for none) say.

        order: candidates as the belief numbers them, those that have runs first.
        ideas: of how curves bend, as of `fit_surrogate`.
        """
        order = list(order)
        seen = np.minimum(reached, self.last)[order]
        shown = seen[:, :, None] >= np.arange(self.rungs)[None, None, :, None]
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

    def run_numbers(self, order: Sequence[int], reached: Ints) -> Ints:
        """The number that `fit` gives to each run, -1 if it has none; candidates x levels x seeds.

        order: candidates that have runs.
        """
        numbers = np.full(reached.shape, -1)
        shown = reached[list(order)] >= 0
        numbers[list(order)] = np.where(shown, np.cumsum(shown).reshape(shown.shape) - 1, -1)
        return numbers

    def full_analysis(self) -> Floats:
        """The multipliers that all runs of the table together give: what a search should find."""
        belief = self.fit(range(len(self.candidates)), self.last)
        return np.asarray(belief.middle().multipliers(self.target)[0])

    @classmethod
    def from_records(cls, records: Iterable[RunRecord]) -> RunTable:
        """Build a table from finished runs, which may differ in length; some may be missing.

        The levels of a candidate are its own sizes, the smallest first. Rungs are steps, about
        doublings, at which all runs that are long enough were evaluated. A run ends at the highest
        rung that it reached; what it did after that is left out.

        Refuses runs that do not belong together: of other tasks or data, or of one structure with
        other settings. Of two runs that differ in length alone, the longer one is kept.
        """
        records = tuple(record for record in records if record.status == "finished")
        _check_alike(records)
        chains = _chains(records)
        runs = [run for held in chains.values() for run in held.values()]
        steps = _rung_steps(runs) if runs else []
        first = steps[0] if steps else inf
        kept = {
            candidate: long
            for candidate, held in chains.items()
            if (long := {key: run for key, run in held.items() if run.steps_done >= first})
        }
        if Candidate() not in kept or len(kept) < 2 or len(steps) < 2:
            raise EinlinearError(
                what=f"a table of {len(kept)} structures with {len(steps)} lengths of runs"
                + (", without dense" if Candidate() not in kept else ""),
                rule="a replay needs dense and other structures, evaluated at common steps",
                fix='train dense with them, all with eval_spacing="fixed"',
            )
        tried = [Candidate(text).key for text in FIRST_TRIED]
        places = {key: place for place, key in enumerate(tried)}
        others = sorted(
            kept.keys() - {Candidate()}, key=lambda c: (places.get(c.key, len(tried)), c)
        )
        return _filled((Candidate(), *others), kept, steps)


_ALL = "all runs of a table have the same task and data"
_OF_ONE = "runs of one structure are trained in one way, at all sizes"
_OF_ONE_SIZE = "runs of one structure and size differ only in seed and length"
_OF_DATA = ("task", "context", "vocabulary", "rule", "pool", "teacher_width", "teacher_depth")
_OF_A_LAW = ("parametrization", "factor_init", "weight_norm", "optimizer", "schedule")
_FREE = {"seed", "steps", "warmup", "data", "validation", *NOT_IN_ID}
_OF_A_SIZE = tuple(field.name for field in fields(RunConfig) if field.name not in _FREE)

_Size = tuple[int, int]  # multiply-adds per unit of data, and the seed


def _chains(records: Iterable[RunRecord]) -> dict[Candidate, dict[_Size, RunRecord]]:
    """The longest run of each candidate, size and seed."""
    chains: dict[Candidate, dict[_Size, RunRecord]] = {}
    for record in records:
        held = chains.setdefault(Candidate.of(record.config), {})
        key = record.counts.macs, record.config.seed
        if key not in held or held[key].steps_done < record.steps_done:
            held[key] = record
    return chains


def _check_alike(records: Iterable[RunRecord]) -> None:
    """Refuse runs that one table cannot hold, because what it calls the same is not the same."""
    seen: dict[tuple[object, ...], tuple[object, str]] = {}
    for record in records:
        candidate = Candidate.of(record.config)
        for rule, place, values in (
            (_ALL, (), _data_of(record)),
            (_OF_ONE, (candidate,), _settings_of(record, _OF_A_LAW)),
            (_OF_ONE_SIZE, (candidate, record.counts.macs), _settings_of(record, _OF_A_SIZE)),
        ):
            for name, value in values.items():
                other, run = seen.setdefault((rule, *place, name), (value, record.id))
                if other != value:
                    raise EinlinearError(
                        what=f"{name} is {quote(other)} in run {run}, and {quote(value)} in run "
                        f"{record.id}",
                        rule=rule,
                        fix=f"give the records of one {name}",
                    )


def _data_of(record: RunRecord) -> dict[str, Any]:
    """What decides the data of a run: by its fingerprint if that is known, or by its path."""
    known = record.environment.get("data")
    path = {name: getattr(record.config, name) for name in ("data", "validation")}
    return _settings_of(record, _OF_DATA) | ({"data": known} if known else path)


def _settings_of(record: RunRecord, names: Iterable[str]) -> dict[str, Any]:
    """Some settings of a run in the form in which they decide its numbers."""
    config = record.config
    values = deciding_values({field.name: getattr(config, field.name) for field in fields(config)})
    return {name: values[name] for name in names}


def _rung_steps(runs: Sequence[RunRecord]) -> list[int]:
    """About doublings of steps at which all runs that are long enough were evaluated.

    The last steps of runs differ, so one choice of rungs leaves out more than another. Of the
    choices with another highest rung, this is the one that keeps the most compute.
    """
    seen = [{p.step for p in run.curve if p.loss is not None} for run in runs]
    ends = [run.steps_done for run in runs]
    first = max(1, _FIRST * min(ends), *(run.config.warmup for run in runs))
    common = [
        step
        for step in sorted(set().union(*seen))
        if step >= first
        and all(step in own for own, end in zip(seen, ends, strict=True) if end >= step)
    ]
    per_step = [run.curve[-1].macs / run.steps_done for run in runs]

    def kept(steps: Sequence[int]) -> float:
        tops = (max((step for step in steps if step <= end), default=0) for end in ends)
        return sum(cost * top for cost, top in zip(per_step, tops, strict=True))

    tops = [step for step in common if step * _DOUBLING > common[-1]]
    choices = [_halvings([step for step in common if step <= top]) for top in tops]
    return max(choices, key=lambda steps: (kept(steps), steps[-1]), default=[])


def _halvings(steps: Sequence[int]) -> list[int]:
    """Of growing steps, the last and from there down about halves."""
    found: list[int] = []
    for step in reversed(steps):
        if not found or found[-1] >= _DOUBLING * step:
            found.append(step)
    return found[::-1]


class _Cell(NamedTuple):
    """A run of a table, and where it is."""

    candidate: int
    level: int
    seed: int
    run: RunRecord


def _cells(
    candidates: Sequence[Candidate], chains: dict[Candidate, dict[_Size, RunRecord]]
) -> list[_Cell]:
    seeds = sorted({seed for held in chains.values() for _, seed in held})
    found = []
    for number, candidate in enumerate(candidates):
        held = chains[candidate]
        sizes = sorted({macs for macs, _ in held})
        for (macs, seed), run in held.items():
            found.append(_Cell(number, sizes.index(macs), seeds.index(seed), run))
    return found


def _filled(
    candidates: tuple[Candidate, ...],
    chains: dict[Candidate, dict[_Size, RunRecord]],
    steps: Sequence[int],
) -> RunTable:
    """The table of runs, all of which reach the first of the steps."""
    cells = _cells(candidates, chains)
    levels = 1 + max(cell.level for cell in cells)
    seeds = 1 + max(cell.seed for cell in cells)
    m = np.full((len(candidates), levels), np.nan)
    cost = np.full((*m.shape, len(steps)), np.nan)
    loss = np.full((*cost.shape, seeds), np.nan)
    last = np.full((*m.shape, seeds), -1)
    for c, level, seed, run in cells:
        points = {point.step: point for point in run.curve}
        m[c, level] = run.counts.macs
        for rung, step in enumerate(steps):
            if step <= run.steps_done:
                cost[c, level, rung] = FLOPS_PER_MAC * points[step].macs
                loss[c, level, rung, seed] = points[step].loss
                last[c, level, seed] = rung
    dense = [cell for cell in cells if cell.candidate == 0]
    sizes = m[0, : 1 + max(cell.level for cell in dense)].copy()
    middle, middle_step = len(sizes) // 2, steps[len(steps) // 2]
    m = np.log(m / sizes[middle])
    t = np.log(np.array(steps) / middle_step)
    unit = cost[0, middle, 0] * middle_step / steps[0]
    largest = max(FLOPS_PER_MAC * cell.run.curve[-1].macs for cell in dense)
    top = int(last[0, len(sizes) - 1].max())
    target = target_beyond(log(TARGET_TIMES * largest / unit), m[0, : len(sizes)], t[: top + 1])
    return RunTable(candidates, m, t, loss, cost, target, ends=last)


class Pick(NamedTuple):
    """What a method held to be the best when it had spent some compute, on so many runs."""

    spent: float
    candidate: int
    runs: int


class Session:
    """One method at work on a table: it pays for every run, and never more than its budget."""

    def __init__(self, table: RunTable, budget: float) -> None:
        self.table, self.budget, self.spent = table, budget, 0.0
        self.reached = np.full((len(table.candidates), table.levels, table.seeds), -1)
        self.order: list[int] = []
        self.path: list[Pick] = []

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
        assert 0 <= rung <= self.table.last[candidate, level, seed], "no run reached this rung"
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
        if not self.path or self.path[-1].candidate != candidate:
            self.path.append(Pick(self.spent, candidate, int((self.reached >= 0).sum())))

    def choice_at(self, spent: float) -> int | None:
        """What was the best when this much had been spent; None if nothing had been trained."""
        found = [pick.candidate for pick in self.path if pick.spent <= spent * (1 + 1e-9)]
        return found[-1] if found else None

    def best_by_law(self) -> int:
        """The candidate that the law of all runs so far predicts to be the best; 0 if none ran."""
        if not self.order:
            return 0
        loss, _ = self.table.fit(self.order, self.reached).middle().best(self.table.target)
        return self.order[int(loss[0].argmin())]

    def best_by_loss(self) -> int:
        """The candidate with the lowest loss in the dearest runs, on the mean over seeds.

        Runs that ended before count as well: all are compared at the steps that they share.
        """
        if not self.order:
            return 0
        last = self.table.last
        held = (self.reached >= 0).any((0, 2))
        shared = held & (last[self.order] >= 0).any(2).all(0)
        level = int(np.flatnonzero(shared if shared.any() else held)[-1])
        reached = self.reached[:, level]
        top = np.minimum(reached.max(), last[:, level])
        shown = (reached >= top) & (reached >= 0)
        rung = int(top[shown].min())
        losses = np.where(shown, self.table.loss[:, level, rung], 0.0).sum(1)
        mean = np.where(shown.any(1), losses / np.maximum(1, shown.sum(1)), np.inf)
        return int(mean.argmin())
