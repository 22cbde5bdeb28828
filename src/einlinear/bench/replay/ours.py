"""Our search on a table: the decisions of `searches`, with losses looked up instead of trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np

from einlinear.bench.replay.optuna_methods import gp_proposal
from einlinear.bench.replay.tables import RunTable, Session
from einlinear.laws.observations import Floats, Ints
from einlinear.searches.decide import (
    COMPARE_EVERY,
    LARGEST_SHARE,
    OPENING_RUNG,
    OVERHEAD,
    Choice,
    Outlook,
    best_option,
    draw_rival,
    look_ahead,
)
from einlinear.searches.space import FIRST_TRIED
from einlinear.searches.surrogate import Belief

Proposer = Callable[[Floats, Outlook, Collection[int], int], int]
"""Features and outlook of all candidates, those without a run, and a seed -> one of the latter."""

_PROPOSALS = 4  # of so many runs, one is of a new structure that a proposer names


def run_search(
    table: RunTable, budget: float, seed: int, proposer: Proposer | None = None
) -> Session:
    """Search a table until the budget is spent.

    proposer: names a new structure every few runs, which is then tried; without one, the search
    itself decides when a new structure is worth a run, and which.
    """
    session = Session(table, budget)
    random = np.random.default_rng(seed)
    for candidate in range(min(1 + len(FIRST_TRIED), len(table.candidates))):
        _try_first(session, candidate)
    belief: Belief | None = None
    if 0 not in session.order:
        return session  # the budget does not even pay for dense
    for turn in range(1, table.loss.size):
        trained = np.arange(len(session.order))
        order = [*session.order, *sorted(set(range(len(table.candidates))) - {*session.order})]
        belief = table.fit(order, session.reached, belief)
        view = look_ahead(belief, table.target, random, trained)
        session.choose(order[view.leader])
        if proposer is not None:
            untried = range(len(trained), len(order))
            if turn % _PROPOSALS == 0 and untried:
                new = proposer(table.features[order], view, untried, seed + turn)
                _try_first(session, order[new])
                continue
            view = _without(view, len(trained))
        found = _next(session, belief, view, order, turn, random)
        if found is None:
            break
        session.train(order[found.candidate], found.level, found.rung, found.seed)
    return session


def _next(
    session: Session,
    belief: Belief,
    view: Outlook,
    order: list[int],
    turn: int,
    random: np.random.Generator,
) -> Choice | None:
    """The run that narrows the decision between the leader and a rival most."""
    table = session.table
    rival = draw_rival(view, np.arange(len(session.order)), random)
    if turn % COMPARE_EVERY == 0 and view.leader != 0:
        rival = 0  # how much better than dense the leader is counts, too
    runs = table.run_numbers(session.order, session.reached)
    pair = dict.fromkeys((view.leader, rival, 0))
    options = [choice for k in pair for choice in _options(session, k, order[k], runs)]
    overhead = max(float(table.cost[0, 0, 0]), OVERHEAD * session.spent)
    return best_option(belief, table.target, (view.leader, rival), options, (), overhead)


def _without(view: Outlook, count: int) -> Outlook:
    """What is believed of the first candidates only."""
    return replace(
        view,
        middle=view.middle[:count],
        log_loss=view.log_loss[:, :count],
        wins=view.wins[:count],
    )


def propose_by_surrogate(
    features: Floats, view: Outlook, untried: Collection[int], seed: int
) -> int:
    """The structure that is most likely better than the leader."""
    return max(untried, key=lambda k: float(view.chances[k]))


def propose_at_random(features: Floats, view: Outlook, untried: Collection[int], seed: int) -> int:
    """Any structure."""
    return int(np.random.default_rng(seed).choice(sorted(untried)))


def propose_by_gp(features: Floats, view: Outlook, untried: Collection[int], seed: int) -> int:
    """The structure nearest to what Optuna's GPSampler proposes after those that were tried."""
    return gp_proposal(features, view.middle[: len(features) - len(untried)], untried, seed)


def _try_first(session: Session, candidate: int) -> None:
    """The first runs of a structure: dense at every size, others at two."""
    table = session.table
    for level in range(table.levels if candidate == 0 else min(2, table.levels)):
        for seed in np.flatnonzero(table.last[candidate, level] >= 0)[:1]:
            top = int(table.last[candidate, level, seed])
            rung = OPENING_RUNG if level == 0 or candidate == 0 else 0
            session.train(candidate, level, min(rung, top), int(seed))


def _options(session: Session, k: int, candidate: int, runs: Ints) -> Iterator[Choice]:
    """Longer runs and new runs of a candidate, which the search numbers k."""
    table = session.table
    for level in range(table.levels):
        for seed in map(int, np.flatnonzero(table.last[candidate, level] >= 0)):
            held = session.reached[candidate, level, seed]
            m, run = float(table.m[candidate, level]), int(runs[candidate, level, seed])
            for rung in range(held + 1, int(table.last[candidate, level, seed]) + 1):
                price = session.price(candidate, level, rung, seed)
                if price <= LARGEST_SHARE * session.left:
                    yield Choice(k, level, rung, seed, price, m, float(table.t[rung]), run)
            if held < 0:
                break  # seeds are used in turn, so that they are those of dense too
