"""Other methods on a table: the grid, random search, successive halving, TPE with Hyperband.

Each gets a table, a budget and a seed, and returns its session. A method that trains at one size
takes the largest at which its budget can see every structure, and trains more seeds after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einlinear.bench.replay.tables import RunTable, Session
from einlinear.laws.observations import Floats

ETA = 4
"""Of so many runs, one goes on to the next rung."""

_GENTLER = (ETA, 2, 1)  # the same, in turn, once all structures have been seen


def full_grid(table: RunTable, budget: float, seed: int) -> Session:
    """All structures at one size after the other, from the smallest, then with the next seed."""
    session = Session(table, budget)
    order = _mixed(table, np.random.default_rng(seed))
    for again in range(table.seeds):
        for level in range(table.levels):
            for candidate in order:
                if session.train(candidate, level, table.rungs - 1, again) is None:
                    return session
    return session


def random_search(table: RunTable, budget: float, seed: int) -> Session:
    """Full runs of structures in random order, all at one size."""
    session = Session(table, budget)
    order = _mixed(table, np.random.default_rng(seed))
    start = _level(table, budget, table.cost[:, :, -1].sum(0))
    for level in levels_from(start, table.levels):
        for again in range(table.seeds):
            for candidate in order:
                if session.train(candidate, level, table.rungs - 1, again) is None:
                    return session
    return session


def successive_halving(table: RunTable, budget: float, seed: int) -> Session:
    """ASHA: a run goes on to the next rung while it is among the best quarter there.

    When all structures have been seen, the same with the next seed; then gentler halving.
    """
    session = Session(table, budget)
    random = np.random.default_rng(seed)
    for level in levels_from(halving_level(table, budget), table.levels):
        for eta in _GENTLER:
            for again in range(table.seeds):
                order = _mixed(table, random)
                if not _halve(session, level, again, eta, order):
                    return session
    return session


def _mixed(table: RunTable, random: np.random.Generator) -> list[int]:
    """All candidates in random order."""
    return [int(candidate) for candidate in random.permutation(len(table.candidates))]


def _halve(session: Session, level: int, seed: int, eta: int, order: Sequence[int]) -> bool:
    """One pass of asynchronous halving over all structures; False when the budget is spent."""
    table = session.table
    rungs = rungs_of(table)
    seen: list[dict[int, float]] = [{} for _ in rungs]
    waiting = list(order)
    while True:
        job = _promotion(seen, eta)
        if job is None and waiting:
            job = waiting.pop(), 0
        if job is None:
            return True
        candidate, k = job
        loss = session.train(candidate, level, rungs[k], seed)
        if loss is None:
            return False
        seen[k][candidate] = loss


def _promotion(seen: list[dict[int, float]], eta: int) -> tuple[int, int] | None:
    """A run that may go on, from the highest rung at which there is one."""
    for k in range(len(seen) - 2, -1, -1):
        best = sorted(seen[k], key=seen[k].__getitem__)[: len(seen[k]) // eta]
        for candidate in best:
            if candidate not in seen[k + 1]:
                return candidate, k + 1
    return None


def go_on(session: Session) -> None:
    """Finish runs at the largest size first, those of the best structures before others."""
    table = session.table
    for level in range(table.levels - 1, -1, -1):
        for candidate in np.argsort(table.loss[:, level, 0].mean(1)):
            for seed in range(table.seeds):
                if session.train(int(candidate), level, table.rungs - 1, seed) is None:
                    return


def rungs_of(table: RunTable) -> list[int]:
    """The rungs of halving: the last, and every second one below it."""
    return list(range((table.rungs - 1) % 2, table.rungs, 2))


def halving_level(table: RunTable, budget: float) -> int:
    """The largest level at which the budget pays for one pass of halving, about."""
    rungs = rungs_of(table)
    cost = table.cost[:, :, rungs].sum(0)
    steps = np.diff(cost, axis=1, prepend=0.0)
    return _level(table, budget, steps @ float(ETA) ** -np.arange(len(rungs)))


def levels_from(start: int, levels: int) -> tuple[int, ...]:
    """Levels in the order in which a method takes them: larger ones next, then smaller ones."""
    return (*range(start, levels), *range(start - 1, -1, -1))


def _level(table: RunTable, budget: float, cost: Floats) -> int:
    """The largest level at which the budget pays for `cost`, else the smallest."""
    return max([level for level in range(table.levels) if cost[level] <= budget], default=0)
