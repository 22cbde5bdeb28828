"""Synthetic tables: laws of structures drawn at random, with the noise that real runs have."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from einlinear.bench.replay.tables import TARGET_TIMES, RunTable
from einlinear.laws.observations import Floats
from einlinear.searches.draws import Cost, Draws, target_beyond
from einlinear.searches.space import Candidate, SearchSpace, features_of

_EFFECTS_A = (0.6, 0.4, 0.0, 0.0), (0.15, 0.15, 0.12, 0.0)  # means and spreads, per feature
_EFFECTS_B = (0.1, 0.1, -0.1, 0.0), (0.1, 0.1, 0.1, 0.0)
_CHANCE = 0.85, 0.95  # the best multiplier if dense is to win


@dataclass(frozen=True, slots=True)
class Family:
    """How tables are drawn; every table draws its own laws and sizes of noise.

    noise: multiplies all noise of losses.
    bend: how far the curves of a structure leave the law, as a share of the loss one doubling of
        size or steps from the middle; four times that at two doublings.
    memory: the correlation of the noise of a run at a length with that at twice the length.
    dense_wins: whether no structure is better than dense.
    """

    name: str
    noise: float = 1.0
    bend: float = 0.0
    memory: float = 1.0
    dense_wins: bool = False
    levels: int = 4
    rungs: int = 7
    seeds: int = 3
    sample: int = 36


FAMILIES = (
    Family("usual"),
    Family("noisy", noise=2.0),
    Family("bent", bend=0.0005, memory=0.7),
    Family("very bent", bend=0.001, memory=0.7),
    Family("dense wins", dense_wins=True),
)


def synthetic_table(family: Family, seed: int) -> RunTable:
    """Draw a table; the same seed draws the same laws in all families."""
    random = np.random.default_rng(seed)
    candidates = pool(family.sample, seed)
    levels, rungs = family.levels, family.rungs
    m, t = (
        np.asarray(log(2) * (np.arange(count) - count // 2), np.float64)
        for count in (levels, rungs)
    )
    middle = 2.0 ** (levels // 2 + rungs // 2)
    cost = 2.0 ** np.add.outer(np.arange(levels), np.arange(rungs))
    target = target_beyond(log(TARGET_TIMES * cost[-1, -1] / middle), m, t)
    laws = _laws(random, candidates)
    if family.dense_wins:
        laws = _worse_than_dense(laws, target, random.uniform(*_CHANCE))
    count = len(candidates)
    noise = _noise(random, family, count)
    laws = laws._replace(own_bend=_bends(random, family, count))
    places = [one.ravel() for one in np.meshgrid(m, t, indexing="ij")]
    loss = np.array([laws.at(np.full(count, x), np.full(count, y))[0]
                     for x, y in zip(*places, strict=True)])  # fmt: skip
    loss = loss.T.reshape(count, levels, rungs, 1) * np.exp(noise)
    return RunTable(
        candidates,
        np.tile(m, (count, 1)),
        t,
        loss,
        np.tile(cost, (count, 1, 1)),
        target,
        laws.multipliers(target)[0],
    )


def pool(sample: int, seed: int) -> tuple[Candidate, ...]:
    """Dense, named structures, structures of any kind, and some of full rank without sharing."""
    some = SearchSpace(sample=sample - sample // 3, seed=seed)
    good = SearchSpace(sample=max(1, sample // 3), omega=0, psi=1, seed=seed)
    found = {candidate.key: candidate for candidate in (*some.candidates, *good.candidates)}
    return tuple(found.values())


def _laws(random: np.random.Generator, candidates: tuple[Candidate, ...]) -> Draws:
    """Laws as one draw."""
    at, count = features_of(candidates), len(candidates)
    length, own = random.uniform(0.25, 0.6), random.uniform(0.2, 0.6)
    apart = ((at[:, None] - at[None]) ** 2).sum(-1)
    alike = (1 - own) * np.exp(-apart / (2 * length**2)) + (own + 1e-9) * np.eye(count)
    root = np.linalg.cholesky(alike)
    spread = random.uniform(0.035, 0.065, size=2)
    bend = random.uniform(0.02, 0.04)
    alpha, beta = random.uniform(0.25, 0.4), random.uniform(0.3, 0.5)

    def offsets(level: float, effects: tuple[tuple[float, ...], ...], spread: float) -> Floats:
        slope = random.normal(*map(np.array, effects))
        return np.asarray(level + at @ slope + spread * (root @ random.standard_normal(count)))

    return Draws(
        linf=np.array([random.uniform(0.6, 1.1)]),
        anchor=np.zeros((1, 2)),
        centre=np.zeros((1, 2)),
        bend=np.zeros((1, 3)),
        a=offsets(log(random.uniform(0.35, 0.55)), _EFFECTS_A, spread[0])[None],
        b=offsets(log(random.uniform(0.25, 0.45)), _EFFECTS_B, spread[1])[None],
        alpha=alpha * np.exp(bend * random.standard_normal((1, count))),
        beta=beta * np.exp(bend * random.standard_normal((1, count))),
        own_bend=np.zeros((1, count, 3)),
    )


def _worse_than_dense(laws: Draws, target: Cost, best: float) -> Draws:
    """Raise the offsets of all others alike until their best multiplier is `best`."""
    low, high = 0.0, 2.0
    for _ in range(40):
        shift = (low + high) / 2
        a, b = laws.a + shift, laws.b + shift
        a[:, 0], b[:, 0] = laws.a[:, 0], laws.b[:, 0]
        moved = laws._replace(a=a, b=b)
        loss = moved.best(target)[0][:, 1:].min()
        found = moved.take([0]).cost_of(np.array([[loss]]), target)[0, 0] - target.log_total
        low, high = (shift, high) if found > log(best) else (low, shift)
    return moved


def _bends(random: np.random.Generator, family: Family, count: int) -> Floats:
    """Curvature of log losses that no run can average away: three numbers for each structure."""
    unit = family.bend / log(2) ** 2
    return np.asarray(unit * random.standard_normal((3, count)).T[None])


def _noise(random: np.random.Generator, family: Family, count: int) -> Floats:
    """Of log losses: common to a seed, to a run, and of single evaluations."""
    levels, rungs, seeds = family.levels, family.rungs, family.seeds
    common, drift, run, single = (
        family.noise * size * random.uniform(0.8, 1.25) for size in (0.003, 0.001, 0.003, 0.0015)
    )
    of_run = random.standard_normal((count, levels, 1, seeds))
    steps = [of_run]
    for _ in range(rungs - 1):
        fresh = random.standard_normal(of_run.shape)
        steps.append(family.memory * steps[-1] + (1 - family.memory**2) ** 0.5 * fresh)
    return np.asarray(
        common * random.standard_normal(seeds)
        + drift * random.standard_normal((rungs, seeds))
        + run * np.concatenate(steps, axis=2)
        + single * random.standard_normal((count, levels, rungs, seeds))
    )
