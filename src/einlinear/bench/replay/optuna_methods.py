"""Methods of Optuna on a table: TPE with Hyperband, and its Gaussian process as a proposer."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import numpy as np

from einlinear.bench.replay.rivals import ETA, go_on, halving_level, levels_from, rungs_of
from einlinear.bench.replay.tables import RunTable, Session
from einlinear.errors import EinlinearError
from einlinear.laws.observations import Floats

_NAMES = ("omega", "psi", "nu")


def tpe_hyperband(table: RunTable, budget: float, seed: int) -> Session:
    """TPE proposes omega, psi and nu; Hyperband stops runs.

    A proposal stands for the nearest structure that has no run of the size and the seed yet. When
    none is left at any size, stopped runs go on.
    """
    session = Session(table, budget)
    for level in levels_from(halving_level(table, budget), table.levels):
        study = _hyperband(len(rungs_of(table, level)), seed)
        for again in range(table.seeds):
            left = {int(k) for k in np.flatnonzero(table.last[:, level, again] >= 0)}
            while left:
                trial = study.ask()
                candidate = _nearest(table.features, _suggested(trial), left)
                left.remove(candidate)
                if not _train(session, study, trial, (candidate, level, again)):
                    return session
    go_on(session)
    return session


def _hyperband(rungs: int, seed: int) -> Any:
    optuna = _optuna()
    return optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True),
        pruner=optuna.pruners.HyperbandPruner(1, ETA ** (rungs - 1), reduction_factor=ETA),
        study_name="replay",  # Hyperband hashes it to draw brackets
    )


def _train(session: Session, study: Any, trial: Any, place: tuple[int, int, int]) -> bool:
    """Train until Hyperband stops the run, or to its end; False when the budget is spent."""
    candidate, level, seed = place
    top = int(session.table.last[place])
    for k, rung in enumerate(rungs_of(session.table, level)):
        loss = session.train(candidate, level, min(rung, top), seed)
        if loss is None:
            return False
        trial.report(loss, ETA**k)
        if rung >= top:
            break
        if trial.should_prune():
            study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
            return True
    study.tell(trial, loss)
    return True


def gp_proposal(features: Floats, values: Floats, left: Collection[int], seed: int) -> int:
    """The candidate of `left` nearest to what GPSampler proposes, given values of the first ones.

    values: of the first candidates; the lowest is the best.
    """
    optuna = _optuna()
    study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=seed, n_startup_trials=1))
    space = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in _NAMES}
    for at, value in zip(_exponents(features), values, strict=False):
        params = dict(zip(_NAMES, map(float, at), strict=True))
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=space, value=float(value))
        )
    return _nearest(features, _suggested(study.ask()), left)


def _suggested(trial: Any) -> Floats:
    return np.array([trial.suggest_float(name, 0.0, 1.0) for name in _NAMES])


def _exponents(features: Floats) -> Floats:
    """omega, psi and nu, each from 0 to 1."""
    return np.clip(np.stack([features[:, 0], 1 - features[:, 1], 1 - features[:, 2]], 1), 0, 1)


def _nearest(features: Floats, at: Floats, left: Collection[int]) -> int:
    places = sorted(left)
    apart = ((_exponents(features[places]) - at) ** 2).sum(1)
    return places[int(apart.argmin())]


def has_optuna() -> bool:
    """Whether Optuna is installed."""
    return find_spec("optuna") is not None


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise EinlinearError(
            what="this benchmark needs Optuna, which is not installed",
            rule="Optuna is compared with, not used by the package",
            fix='pip install "optuna>=5"',
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
