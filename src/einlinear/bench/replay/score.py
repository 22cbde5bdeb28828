"""Scores: how much worse than the best of a table the structure is that each method chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from einlinear.bench.replay.families import Family, synthetic_table
from einlinear.bench.replay.optuna_methods import tpe_hyperband
from einlinear.bench.replay.ours import (
    Proposer,
    propose_at_random,
    propose_by_gp,
    propose_by_surrogate,
    run_search,
)
from einlinear.bench.replay.rivals import full_grid, random_search, successive_halving
from einlinear.bench.replay.tables import RunTable, Session
from einlinear.laws.observations import Floats

BUDGETS = (1 / 256, 1 / 64, 1 / 16, 1 / 4)
"""Budgets, relative to what all runs of the table cost."""

CLOSE = 0.02
"""A structure is as good as the best if its multiplier is at most this much lower."""

OURS, SURROGATE = "search", "surrogate"
Rival = Callable[[RunTable, float, int], Session]
"""A table, a budget and a seed -> what a method did."""

RIVALS: dict[str, Rival] = {
    "full grid": full_grid,
    "random": random_search,
    "ASHA": successive_halving,
    "TPE + Hyperband": tpe_hyperband,
}
PROPOSERS: dict[str, Proposer] = {
    SURROGATE: propose_by_surrogate,
    "GPSampler": propose_by_gp,
    "random": propose_at_random,
}
BY_LAW = ", our law"
"""What is added to the name of a rival whose runs are analysed by our law, not by lowest loss."""

PROPOSER_BUDGETS = (1 / 256, 1 / 128, 1 / 64, 1 / 32)
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Score:
    """A method at a budget, over many tables.

    regrets: by table: 1 - multiplier of the choice / highest multiplier.
    true_regrets: the same by the laws that the table was drawn from; none for real runs.
    """

    family: str
    method: str
    share: float
    regrets: tuple[float, ...]
    true_regrets: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """The mean regret."""
        return float(np.mean(self.regrets))

    @property
    def close(self) -> float:
        """In which share of the tables the choice is as good as the best."""
        return float(np.mean(np.array(self.regrets) <= CLOSE))

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean regret, 95 %, by resampling tables."""
        return mean_interval(np.array(self.regrets))


def mean_interval(values: Floats) -> tuple[float, float]:
    """The 95 % interval of a mean, by resampling."""
    random = np.random.default_rng(0)
    means = values[random.integers(len(values), size=(_RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


Chosen = dict[str, list[int]]
"""The candidates that methods choose, at every budget."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What methods chose on a table, and how much worse than the best each candidate is."""

    choices: Chosen
    regret: Floats
    true_regret: Floats | None


def compare_on(table: RunTable, seed: int) -> Chosen:
    """What every method chooses on a table, at every budget of BUDGETS.

    Our search runs once, with the largest budget; the others start anew with each budget.
    """
    ours = run_search(table, max(BUDGETS) * table.grid_cost, seed)
    return choices_of(ours, rival_sessions(table, seed, RIVALS))


def rival_sessions(
    table: RunTable, seed: int, rivals: Mapping[str, Rival]
) -> dict[str, list[Session]]:
    """What other methods do on a table, with every budget of BUDGETS."""
    return {
        name: [method(table, share * table.grid_cost, seed) for share in BUDGETS]
        for name, method in rivals.items()
    }


def choices_of(ours: Session, rivals: Mapping[str, Sequence[Session]]) -> Chosen:
    """What our search and other methods choose, at every budget of BUDGETS."""
    found = {OURS: _along(ours, BUDGETS)}
    for name, sessions in rivals.items():
        found[name] = [session.best_by_loss() for session in sessions]
        found[name + BY_LAW] = [session.best_by_law() for session in sessions]
    return found


def compare_proposers_on(table: RunTable, seed: int) -> Chosen:
    """What our search chooses with every proposer, at every budget of PROPOSER_BUDGETS."""
    budget = max(PROPOSER_BUDGETS) * table.grid_cost
    return {
        name: _along(run_search(table, budget, seed, proposer), PROPOSER_BUDGETS)
        for name, proposer in PROPOSERS.items()
    }


def _along(session: Session, shares: Sequence[float]) -> list[int]:
    """What a session had chosen by the time it had spent each share; dense before any run."""
    total = session.table.grid_cost
    choices = [session.choice_at(share * total) for share in shares]
    return [0 if choice is None else choice for choice in choices]


def replay(table: RunTable, choices: Chosen) -> Replayed:
    """Chosen with their regrets."""
    truth = None if table.truth is None else regrets_of(table.truth)
    return Replayed(choices, regrets_of(table.full_analysis()), truth)


def regrets_of(multipliers: Floats) -> Floats:
    """How much lower than the highest each multiplier is, as a share of that."""
    return np.asarray(1 - multipliers / multipliers.max())


def replay_seed(job: tuple[Family, int, bool]) -> Replayed:
    """One table of a family, with methods or proposers."""
    family, seed, is_methods = job
    table = synthetic_table(family, seed)
    return replay(table, (compare_on if is_methods else compare_proposers_on)(table, seed))


def scores_of(family: str, results: Sequence[Replayed], shares: Sequence[float]) -> list[Score]:
    """Scores from what many tables gave."""
    found = []
    for method in results[0].choices:
        for k, share in enumerate(shares):
            chosen = [(result, result.choices[method][k]) for result in results]
            regrets = tuple(float(result.regret[c]) for result, c in chosen)
            true = tuple(
                float(result.true_regret[c])
                for result, c in chosen
                if result.true_regret is not None
            )
            found.append(Score(family, method, share, regrets, true))
    return found
