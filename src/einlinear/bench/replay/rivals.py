"""Other methods on a table: the grid, random search, successive halving, TPE with Hyperband.

Each gets a table, a budget and a seed, and returns its session. A method that trains at one size
takes the largest at which its budget can see every structure, and trains more seeds after that.
Runs that a table does not have are skipped; those that end before the others are trained to their
end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from einlinear.bench.replay.tables import RunTable, Session
from einlinear.laws.observations import Floats, Ints

ETA = 4
"""Of so many runs, one goes on to the next rung."""

_GENTLER = (ETA, 2, 1)  # the same, in turn, once all structures have been seen


def full_grid(table: RunTable, budget: float, seed: int) -> Session:
    """All structures at one size after the other, from the smallest, then with the next seed."""
    session = Session(table, budget)
    order = _mixed(table, np.random.default_rng(seed))
    for again in range(table.seeds):
        for level in range(table.levels):
            if not _train_all(session, order, level, again):
                return session
    return session


def random_search(table: RunTable, budget: float, seed: int) -> Session:
    """Full runs of structures in random order, all at one size."""
    session = Session(table, budget)
    order = _mixed(table, np.random.default_rng(seed))
    start = _level(table, budget, table.costs_up_to(table.longest).sum(0))
    for level in levels_from(start, table.levels):
        for again in range(table.seeds):
            if not _train_all(session, order, level, again):
                return session
    return session


def _train_all(session: Session, order: Iterable[int], level: int, seed: int) -> bool:
    """Train candidates in turn, each to the end of its run; False when the budget is spent."""
    for candidate in order:
        top = int(session.table.last[candidate, level, seed])
        if top >= 0 and session.train(candidate, level, top, seed) is None:
            return False
    return True


def successive_halving(table: RunTable, budget: float, seed: int) -> Session:
    """ASHA: a run goes on to the next rung while it is among the best quarter there.

    When all structures have been seen, the same with the next seed; then gentler halving. A run
    that ends below the next rung goes on to its end, and no further.
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
    rungs, last = rungs_of(session.table, level), session.table.last[:, level, seed]
    seen: list[dict[int, float]] = [{} for _ in rungs]
    waiting = [candidate for candidate in order if last[candidate] >= 0]
    while True:
        job = _promotion([(rung, seen[k]) for k, rung in enumerate(rungs)], eta, last)
        if job is None and waiting:
            job = waiting.pop(), 0
        if job is None:
            return True
        candidate, k = job
        loss = session.train(candidate, level, min(rungs[k], int(last[candidate])), seed)
        if loss is None:
            return False
        seen[k][candidate] = loss


def _promotion(
    seen: list[tuple[int, dict[int, float]]], eta: int, last: Ints
) -> tuple[int, int] | None:
    """A run that may go on, from the highest rung at which there is one, and its next rung.

    seen: rungs, and the losses of candidates there. last: the rungs at which their runs end.
    """
    for k in range(len(seen) - 2, -1, -1):
        rung, losses = seen[k]
        for candidate in sorted(losses, key=losses.__getitem__)[: len(losses) // eta]:
            if candidate not in seen[k + 1][1] and last[candidate] > rung:
                return candidate, k + 1
    return None


def go_on(session: Session) -> None:
    """Finish runs at the largest size first, those of the best structures before others."""
    table = session.table
    for level in range(table.levels - 1, -1, -1):
        is_run = table.last[:, level] >= 0
        first = np.where(is_run, table.loss[:, level, 0], 0.0).sum(1)
        mean = np.where(is_run.any(1), first / np.maximum(1, is_run.sum(1)), np.inf)
        for candidate in map(int, np.argsort(mean)):
            for seed in range(table.seeds):
                if not _train_all(session, [candidate], level, seed):
                    return


def rungs_of(table: RunTable, level: int) -> list[int]:
    """The rungs of halving: the last that a run reaches, and every second one below it."""
    top = max(0, int(table.longest[:, level].max()))
    return list(range(top % 2, top + 1, 2))


def halving_level(table: RunTable, budget: float) -> int:
    """The largest level at which the budget pays for one pass of halving, about."""
    cost = np.zeros(table.levels)
    for level in range(table.levels):
        rungs = rungs_of(table, level)
        whole = [table.costs_up_to(np.minimum(rung, table.longest))[:, level] for rung in rungs]
        steps = np.diff(np.sum(whole, axis=1), prepend=0.0)
        cost[level] = steps @ float(ETA) ** -np.arange(len(rungs))
    return _level(table, budget, cost)


def levels_from(start: int, levels: int) -> tuple[int, ...]:
    """Levels in the order in which a method takes them: larger ones next, then smaller ones."""
    return (*range(start, levels), *range(start - 1, -1, -1))


def _level(table: RunTable, budget: float, cost: Floats) -> int:
    """The largest level of all structures at which the budget pays for `cost`, else the first."""
    whole = np.all(table.longest >= 0, axis=0)
    fits = [level for level in range(table.levels) if whole[level] and cost[level] <= budget]
    return max(fits, default=0)
