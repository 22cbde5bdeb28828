"""decide: which run is worth its cost next, and which candidates cannot win any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from einlinear.laws.observations import Floats, Ints
from einlinear.searches.draws import Cost
from einlinear.searches.surrogate import Belief

OVERHEAD = 0.02
"""Of what was spent so far, the least that a run counts as: for less, deciding is not worth it."""

OPENING_RUNG = 1
"""The rung of the first runs."""

LARGEST_SHARE = 0.5
"""The most that one run may cost, of what is left."""

COMPARE_EVERY = 3
"""Of so many runs, one is chosen to compare the leader with dense."""

HOPELESS = 0.01  # a candidate that is better than the leader in fewer draws is stopped
_DRAWS = 400


@dataclass(frozen=True, slots=True)
class Choice:
    """Train a candidate, by number, at a level up to a rung, with a seed.

    run: the number in the trials of the run that it goes on from; -1 for a new run.
    """

    candidate: int
    level: int
    rung: int
    seed: int
    cost: float
    m: float
    t: float
    run: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """What is believed of each candidate at the target.

    middle: the most likely log losses. log_loss: draws x candidates.
    wins: the share of draws in which a candidate is the best of all.
    leader: the best of those that have been trained.
    """

    middle: Floats
    log_loss: Floats
    wins: Floats
    leader: int

    @property
    def chances(self) -> Floats:
        """The share of draws in which a candidate is better than the leader."""
        return np.asarray((self.log_loss < self.log_loss[:, [self.leader]]).mean(0))

    @property
    def hopeless(self) -> NDArray[np.bool_]:
        """Which candidates are better than the leader in hardly any draw."""
        found = self.chances < HOPELESS
        found[self.leader] = False
        return np.asarray(found)


def look_ahead(belief: Belief, target: Cost, random: np.random.Generator, trained: Ints) -> Outlook:
    """The losses at the target; `trained` are candidates by number."""
    middle = np.log(belief.middle().best(target)[0][0])
    log_loss = np.log(belief.draws(_DRAWS, random).best(target)[0])
    wins = np.bincount(log_loss.argmin(1), minlength=len(middle)) / _DRAWS
    leader = int(trained[middle[trained].argmin()])
    return Outlook(middle, log_loss, wins, leader)


def draw_rival(view: Outlook, trained: Ints, random: np.random.Generator) -> int:
    """A candidate that may be better than the leader, drawn by how likely that is.

    At most one that has never been trained takes part: of many unknown ones, some would look best
    in every draw.
    """
    is_in = np.zeros(len(view.middle), dtype=bool)
    is_in[trained] = True
    new = np.flatnonzero(~is_in)
    if len(new):
        is_in[new[view.chances[new].argmax()]] = True
    is_in[view.leader] = False
    if (is_in & ~view.hopeless).any():
        is_in &= ~view.hopeless
    losses = np.where(is_in, view.log_loss[random.integers(len(view.log_loss))], np.inf)
    return int(losses.argmin())


def best_option(
    belief: Belief,
    target: Cost,
    pair: tuple[int, int],
    options: Sequence[Choice],
    running: Sequence[Choice],
    overhead: float,
) -> Choice | None:
    """The option that narrows the difference of two candidates at the target most for its cost.

    options: of a run, every rung from the first that it has not reached. A long run is seen at
    all rungs on its way.
    overhead: what starting any run costs. Runs that are still running count as if they were done:
    how much a run narrows does not depend on its loss.
    """
    if not options:
        return None
    cost = np.array([option.cost for option in options]) + overhead
    return options[int((narrowing(belief, target, pair, options, running) / cost).argmax())]


def narrowing(
    belief: Belief,
    target: Cost,
    pair: tuple[int, int],
    options: Sequence[Choice],
    running: Sequence[Choice] = (),
) -> Floats:
    """By how much each option lowers the variance of the difference of two log losses."""
    goal = _derivatives(belief, target, pair[0]) - _derivatives(belief, target, pair[1])
    covariance = belief.covariance
    for chain in _chains(running):
        rows, noise = views(belief, [running[k] for k in chain])
        spread = rows @ covariance
        covariance = covariance - spread.T @ np.linalg.solve(spread @ rows.T + noise, spread)
    rows, noise = views(belief, options)
    spread = rows @ covariance
    both, told = spread @ rows.T + noise, spread @ goal
    gain = np.zeros(len(options))
    for chain in _chains(options):
        # The gain of going on to an option is that of all losses up to it together.
        root = np.linalg.cholesky(both[np.ix_(chain, chain)])
        gain[chain] = np.cumsum(np.linalg.solve(root, told[chain]) ** 2)
    return gain


def _chains(options: Sequence[Choice]) -> Iterator[list[int]]:
    """The places of the options of each run, the shortest first."""

    def run_of(k: int) -> tuple[int, int, int]:
        return _run_of(options[k])

    for _, group in groupby(
        sorted(range(len(options)), key=lambda k: (*run_of(k), options[k].rung)), run_of
    ):
        yield list(group)


def _run_of(option: Choice) -> tuple[int, int, int]:
    return option.candidate, option.level, option.seed


def views(belief: Belief, options: Sequence[Choice]) -> tuple[Floats, Floats]:
    """Derivatives of the losses of options, and the covariance of their noise."""
    whole = np.array([(*_run_of(option), option.run) for option in options])
    candidate, _, seed, run = whole.T
    m, t = np.array([(option.m, option.t) for option in options]).T
    spreads, runs = belief.spreads, belief.runs
    rows = belief.rows(candidate, m, t)
    known = np.flatnonzero(seed < belief.seeds)
    rows[known, len(belief.mean) - belief.seeds + seed[known]] = 1.0
    shared = np.where(seed < belief.seeds, 0.0, spreads.seed**2) + spreads.run**2
    old = np.flatnonzero(run >= 0)  # what a run has shown so far tells much of its noise
    rows[old] -= runs.weight[run[old], None] * runs.row[run[old]]
    shared[old] = runs.variance[run[old]]
    is_same = (whole[:, None] == whole[None]).all(-1)
    return rows, np.where(is_same, shared, 0.0) + spreads.noise**2 * np.eye(len(options))


def _derivatives(belief: Belief, target: Cost, candidate: int) -> Floats:
    """Derivatives of a candidate's log loss at the target, at the size that is best now."""
    _, m = belief.middle().best(target)
    steps = np.broadcast_to(target.steps(m), m.shape)
    at = np.array([candidate])
    return np.asarray(belief.rows(at, m[0, at], steps[0, at])[0])
