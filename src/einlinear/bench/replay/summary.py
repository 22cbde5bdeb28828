"""replay_summary: all methods on one table of real runs, as a value that a page can read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np

from einlinear.bench.replay.calibrate import HIDDEN, Calibration, calibrate
from einlinear.bench.replay.optuna_methods import has_optuna, tpe_hyperband
from einlinear.bench.replay.ours import run_search
from einlinear.bench.replay.score import (
    BUDGETS,
    BY_LAW,
    OURS,
    RIVALS,
    Rival,
    choices_of,
    mean_interval,
    regrets_of,
    rival_sessions,
)
from einlinear.bench.replay.tables import RunTable, Session
from einlinear.errors import EinlinearError, reason
from einlinear.files.fields import typed
from einlinear.files.whole import parse_object, write_whole
from einlinear.laws.observations import Floats
from einlinear.searches.draws import Draws, interval_of
from einlinear.searches.surrogate import mixed_ideas

SUMMARY = "replay-table.json"
"""The name of the file."""

_DRAWS = 800  # of each belief


@dataclass(frozen=True, slots=True)
class Standing:
    """A structure by all runs of the table: its multiplier at the target.

    multiplier: by the most likely law, which regrets are counted by. middle, low, high: the median
        and the 90 % interval over the beliefs that the answer of a search mixes.
    wins: the share of draws in which it is the best.
    """

    structure: str
    multiplier: float
    middle: float
    low: float
    high: float
    wins: float


@dataclass(frozen=True, slots=True)
class MethodScore:
    """A method at a budget, over seeds.

    share: of the compute of the grid; flops: the same in FLOPs, of which `spent` were used on
        the mean. regret: the mean, with its 95 % interval from low to high.
    picks, regrets: by seed.
    """

    method: str
    share: float
    flops: float
    spent: float
    regret: float
    low: float
    high: float
    picks: tuple[str, ...]
    regrets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PathPick:
    """What the search took to be the best from some FLOPs on, when it had that many runs."""

    flops: float
    structure: str
    runs: int


@dataclass(frozen=True, slots=True)
class SearchPath:
    """One search of the table, with the largest budget.

    picks: whenever its choice changed. first: when it first chose what it chose in the end.
    settled: since when it chose that throughout. flops, runs: of the whole search.
    regret: of the final choice. The rest is by draws of what all runs say:
    chance: the share in which the final choice is at least as good as the best.
    low, high: the 90 % interval of its multiplier relative to that of the best.
    """

    seed: int
    picks: tuple[PathPick, ...]
    first: PathPick
    settled: PathPick
    flops: float
    runs: int
    regret: float
    chance: float
    low: float
    high: float

    @property
    def is_within(self) -> bool:
        """Whether all runs of the table do not tell the final choice from the best."""
        return self.high >= 1.0


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """All methods on one table of runs.

    The truth is unknown, so regrets are against the multipliers by all runs of the table, which are
    uncertain themselves: see `standings`, the best first.
    target_flops: the compute at which structures are compared.
    grid_flops, grid_runs: of all runs of the table, each up to its highest rung.
    paths: of the search, by seed; none if the budget did not pay for a run of dense.
    """

    seeds: int
    best: str
    target_flops: float
    grid_flops: float
    grid_runs: int
    standings: tuple[Standing, ...]
    methods: tuple[MethodScore, ...]
    paths: tuple[SearchPath, ...]
    calibrations: tuple[Calibration, ...]


def replay_summary(table: RunTable, seeds: int) -> ReplaySummary:
    """Run all methods on a table; seeds change what they draw at random.

    Methods of Optuna are left out if it is not installed.
    """
    multipliers = table.full_analysis()
    regret, best = regrets_of(multipliers), int(multipliers.argmax())
    draws = _mixture(table)
    ratio, loss = draws.multipliers(table.target), draws.best(table.target)[0]
    rivals = {k: v for k, v in RIVALS.items() if v is not tpe_hyperband or has_optuna()}
    searches = [run_search(table, max(BUDGETS) * table.grid_cost, s) for s in range(seeds)]
    relative = ratio / ratio[:, [best]]
    paths = [
        _path(seed, search, float(regret[search.path[-1].candidate]), relative)
        for seed, search in enumerate(searches)
        if search.path
    ]
    return ReplaySummary(
        seeds=seeds,
        best=table.candidates[best].label,
        target_flops=table.target_flops,
        grid_flops=table.grid_cost,
        grid_runs=table.num_runs,
        standings=_standings(table, multipliers, ratio, loss),
        methods=_methods(table, searches, rivals, regret),
        paths=tuple(paths),
        calibrations=tuple(row for hidden in HIDDEN for row in calibrate(table, hidden)),
    )


def _mixture(table: RunTable) -> Draws:
    """Laws of all structures by all runs, as the answer of a search mixes beliefs."""
    random = np.random.default_rng(0)
    everyone = range(len(table.candidates))
    return Draws.joined(
        table.fit(everyone, table.last, **idea._asdict()).draws(_DRAWS, random)
        for idea in mixed_ideas(table.target.anchor)
    )


def _standings(
    table: RunTable, multipliers: Floats, ratio: Floats, loss: Floats
) -> tuple[Standing, ...]:
    wins = np.bincount(loss.argmin(1), minlength=len(multipliers)) / len(loss)
    return tuple(
        Standing(
            table.candidates[c].label,
            float(multipliers[c]),
            float(np.median(ratio[:, c])),
            *interval_of(ratio[:, c]),
            float(wins[c]),
        )
        for c in np.argsort(-multipliers)
    )


def _methods(
    table: RunTable, searches: Sequence[Session], rivals: dict[str, Rival], regret: Floats
) -> tuple[MethodScore, ...]:
    chosen, spent = [], []
    for seed, ours in enumerate(searches):
        sessions = rival_sessions(table, seed, rivals)
        choices = choices_of(ours, sessions)
        along = [min(ours.spent, share * table.grid_cost) for share in BUDGETS]
        paid = {OURS: along} | {k: [one.spent for one in own] for k, own in sessions.items()}
        chosen.append(choices)
        spent.append({name: paid[name.removesuffix(BY_LAW)] for name in choices})
    found = []
    for method in chosen[0]:
        for k, share in enumerate(BUDGETS):
            picks = [choices[method][k] for choices in chosen]
            found.append(
                MethodScore(
                    method,
                    share,
                    share * table.grid_cost,
                    float(np.mean([one[method][k] for one in spent])),
                    float(regret[picks].mean()),
                    *mean_interval(regret[picks]),
                    tuple(table.candidates[c].label for c in picks),
                    tuple(float(regret[c]) for c in picks),
                )
            )
    return tuple(found)


def _path(seed: int, session: Session, regret: float, relative: Floats) -> SearchPath:
    labels = [candidate.label for candidate in session.table.candidates]
    drawn = relative[:, session.path[-1].candidate]
    low, high = interval_of(drawn)
    picks = tuple(PathPick(pick.spent, labels[pick.candidate], pick.runs) for pick in session.path)
    return SearchPath(
        seed=seed,
        picks=picks,
        first=next(pick for pick in picks if pick.structure == picks[-1].structure),
        settled=picks[-1],
        flops=session.spent,
        runs=int((session.reached >= 0).sum()),
        regret=regret,
        chance=float((drawn >= 1.0).mean()),
        low=low,
        high=high,
    )


def write_summary(summary: ReplaySummary, path: Path) -> None:
    """Write a summary as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(asdict(summary), separators=(",", ":")) + "\n").encode())


def read_summary(path: Path) -> ReplaySummary:
    """Read what `write_summary` wrote."""
    try:
        values = parse_object(path.read_bytes())
        return cast(ReplaySummary, typed(ReplaySummary, values, "the summary"))
    except (OSError, ValueError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule="a summary is the file that the replay of a table has written",
            fix="python -m einlinear.bench.replay.compare --table RUNS --out DIR",
        ) from error
