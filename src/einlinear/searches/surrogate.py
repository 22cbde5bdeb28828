"""Surrogate: one law of loss for all candidates, which share as much of it as the data say.

    L = linf + exp(A_c - alpha_c m) + exp(B_c - beta_c t)

where m is the logarithm of multiply-adds per unit of data, and t that of the steps; c is a
candidate. Along the best sizes this is a power law of compute with exponent alpha beta / (alpha +
beta). All candidates share linf. Their exponents are close to common ones; their offsets A and B
depend on omega, psi and nu, and vary around that, less so for candidates that are alike. How close
and how much is estimated too, so a candidate without a run is predicted from all others.

No curve is a power law everywhere. Log losses bend by quadratics in m and t: one that all
candidates share, which is 0 at the target, where the law is meant to hold; and a smaller one of
each, which is 0 at a centre, by default the middle of the runs, and grows from there. Runs far from
the target thus say less about it, and intervals widen with the distance.
Ref: [H22] for the law.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from einlinear.laws.observations import Floats, Ints
from einlinear.searches.draws import Draws

_BENDS = 3  # of log losses, by the squares of the distances to the target in m and t, and both
_LOCAL = 4 + _BENDS  # A, B, the logarithms of the factors of alpha and beta, own bends
_FIRST_BEND = 5  # after the logit of linf, log alpha, log beta, A, B
_GLOBAL = _FIRST_BEND + _BENDS
_ALPHA, _BETA, _EXPONENT_SPREAD = 0.3, 0.4, 0.4
_LINF_SPREAD = 1.2  # of the logit of linf as a share of the lowest loss
_EFFECT_SPREAD = 0.5  # of the effects of omega, psi and nu on offsets
_GUESS_WEIGHT = 4.0  # observations that a first guess of a spread is worth
_ROUNDS, _ROUNDS_AGAIN, _STEPS = 4, 1, 30  # fewer rounds after a start
_SETTLED = 1e-5


SizeAndSteps = tuple[float, float]
"""m and t."""

BEND = 0.02
"""The usual standard deviation of the common bend."""

BENDS = 0.005, 0.05
"""How much all curves may bend alike: nobody knows, so an answer mixes beliefs with both."""


class Idea(NamedTuple):
    """How much all curves bend alike, and from where each bends on its own; see `fit_surrogate`."""

    bend: float
    centre: SizeAndSteps


def mixed_ideas(anchor: SizeAndSteps) -> tuple[Idea, ...]:
    """The ideas that an answer mixes.

    Do candidates differ most in short runs, so that differences settle towards the target, or do
    they drift apart from where they were trained on? The centre is at the target or in the middle
    of the runs.
    """
    return tuple(Idea(bend, centre) for bend in BENDS for centre in ((0.0, 0.0), anchor))


class Trials(NamedTuple):
    """Observed losses: candidate, run and seed by number; m and t relative to a middle."""

    candidate: Ints
    run: Ints
    seed: Ints
    m: Floats
    t: Floats
    loss: Floats


@dataclass(frozen=True, slots=True)
class Spreads:
    """Standard deviations of log losses (noise, runs, seeds), offsets, log exponents and bends."""

    noise: float = 0.003
    run: float = 0.003
    seed: float = 0.003
    offset: float = 0.15
    exponent: float = 0.05
    bend: float = 0.001


class RunNoise(NamedTuple):
    """What is known of the noise that all losses of a run share, given the other parameters.

    row: runs x parameters, the mean of the derivatives over the run's losses.
    weight: which share of the mean residual of a run is noise of the run.
    variance: what remains unknown of it.
    """

    row: Floats
    weight: Floats
    variance: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Belief:
    """What the trials say about all candidates: a normal distribution of all parameters.

    features: candidates x effects. top: the lowest loss. anchor: m and t from which all bend alike;
    centre: the same for own bends. The first parameters are those that all share, then follow those
    of each candidate, and one of each seed. Noise of runs is integrated out.
    """

    features: Floats
    top: float
    anchor: SizeAndSteps
    centre: SizeAndSteps
    mean: Floats
    covariance: Floats
    spreads: Spreads
    seeds: int
    runs: RunNoise

    @property
    def _model(self) -> _Model:
        return _Model(self.features, self.top, self.anchor, self.centre, self.seeds)

    def loss(self, candidate: Ints, m: Floats, t: Floats) -> Floats:
        """The most likely losses of runs, which bend away from the law."""
        return np.exp(self._model.look(self.mean, candidate, m, t)[0])

    def rows(self, candidate: Ints, m: Floats, t: Floats) -> Floats:
        """Derivatives of the log loss by all parameters; those by seeds are 0."""
        return self._model.look(self.mean, candidate, m, t)[1]

    def draws(self, count: int, random: np.random.Generator) -> Draws:
        """Draw laws of all candidates."""
        return self._model.laws(self._drawn(self._model.first_seed, count, random))

    def shared_draws(
        self, count: int, random: np.random.Generator
    ) -> tuple[Draws, tuple[Floats, Floats]]:
        """Draw laws of a candidate like dense, and effects of the features on its A and B."""
        drawn = self._drawn(self._model.first_local, count, random)
        alone = self._model._replace(features=np.zeros((1, self.features.shape[1])), seeds=0)
        laws = alone.laws(np.pad(drawn, ((0, 0), (0, _LOCAL))))
        by_a, by_b = np.split(drawn[:, _GLOBAL:], 2, axis=1)
        return laws, (by_a, by_b)

    def _drawn(self, end: int, count: int, random: np.random.Generator) -> Floats:
        root = np.linalg.cholesky(self.covariance[:end, :end] + 1e-12 * np.eye(end))
        return np.asarray(self.mean[:end] + random.standard_normal((count, end)) @ root.T)

    def middle(self) -> Draws:
        """The most likely laws, as one draw."""
        return self._model.laws(self.mean[None])


class _Model(NamedTuple):
    """Where each parameter is, and what the law gives."""

    features: Floats
    top: float
    anchor: SizeAndSteps
    centre: SizeAndSteps
    seeds: int

    @property
    def first_local(self) -> int:
        return _GLOBAL + 2 * int(self.features.shape[1])

    @property
    def first_seed(self) -> int:
        return int(self.first_local + _LOCAL * len(self.features))

    @property
    def size(self) -> int:
        return self.first_seed + self.seeds

    def places(self, *kinds: int) -> Ints:
        """Where A (0), B (1), factors of alpha (2) and beta (3), and bends of candidates are."""
        starts = [np.arange(self.first_local + k, self.first_seed, _LOCAL) for k in kinds]
        return np.concatenate(starts)

    @property
    def own_bends(self) -> Ints:
        return self.places(*range(_LOCAL - _BENDS, _LOCAL))

    def laws(self, values: Floats) -> Draws:
        """The laws of rows of parameters."""
        effects = self.features.shape[1]
        local = values[:, self.first_local : self.first_seed].reshape(
            len(values), len(self.features), _LOCAL
        )
        by_a = values[:, _GLOBAL : _GLOBAL + effects] @ self.features.T
        by_b = values[:, _GLOBAL + effects : self.first_local] @ self.features.T
        return Draws(
            linf=self.top * _sigmoid(values[:, 0]),
            anchor=np.tile(self.anchor, (len(values), 1)),
            centre=np.tile(self.centre, (len(values), 1)),
            bend=values[:, _FIRST_BEND:_GLOBAL],
            a=values[:, 3, None] + by_a + local[..., 0],
            b=values[:, 4, None] + by_b + local[..., 1],
            alpha=np.exp(values[:, 1, None] + local[..., 2]),
            beta=np.exp(values[:, 2, None] + local[..., 3]),
            own_bend=local[..., _LOCAL - _BENDS :],
        )

    def look(self, values: Floats, candidate: Ints, m: Floats, t: Floats) -> tuple[Floats, Floats]:
        """The log loss without the effects of seeds, and its derivatives."""
        laws = self.laws(values[None])
        linf, share = laws.linf[0], _sigmoid(values[0])
        alpha, beta = laws.alpha[0, candidate], laws.beta[0, candidate]
        first = np.exp(np.minimum(laws.a[0, candidate] - alpha * m, 50.0))
        second = np.exp(np.minimum(laws.b[0, candidate] - beta * t, 50.0))
        loss = linf + first + second
        wa, wb = first / loss, second / loss
        rows = np.zeros((len(candidate), self.size))
        rows[:, 0] = linf * (1 - share) / loss
        rows[:, 1], rows[:, 2] = -alpha * m * wa, -beta * t * wb
        rows[:, 3], rows[:, 4] = wa, wb
        effects = self.features.shape[1]
        rows[:, _GLOBAL : _GLOBAL + effects] = wa[:, None] * self.features[candidate]
        rows[:, _GLOBAL + effects : self.first_local] = wb[:, None] * self.features[candidate]
        place = np.arange(len(candidate))
        own = self.first_local + _LOCAL * candidate
        for k, column in enumerate((wa, wb, rows[:, 1], rows[:, 2])):
            rows[place, own + k] = column
        far_m, far_t = m - self.anchor[0], t - self.anchor[1]
        bend = np.zeros(len(candidate))
        own_m, own_t = m - self.centre[0], t - self.centre[1]
        common = far_m**2, far_m * far_t, far_t**2
        single = own_m**2, own_m * own_t, own_t**2
        for k in range(_BENDS):
            at = own + _LOCAL - _BENDS + k
            rows[:, _FIRST_BEND + k], rows[place, at] = common[k], single[k]
            bend += values[_FIRST_BEND + k] * common[k] + values[at] * single[k]
        return np.log(loss) + bend, rows


class _Data(NamedTuple):
    """Trials sorted by run, and where each run starts."""

    model: _Model
    trials: Trials
    log_loss: Floats
    begin: Ints
    sizes: Ints

    @classmethod
    def of(cls, model: _Model, trials: Trials) -> _Data:
        order = np.argsort(trials.run, kind="stable")
        candidate, run, seed = (column[order] for column in trials[:3])
        m, t, loss = (column[order] for column in trials[3:])
        _, begin, sizes = np.unique(run, return_index=True, return_counts=True)
        return cls(model, Trials(candidate, run, seed, m, t, loss), np.log(loss), begin, sizes)

    def look(self, values: Floats) -> tuple[Floats, Floats]:
        """Residuals, and the derivatives of what was predicted."""
        _, _, seed, m, t, _ = self.trials
        log_loss, rows = self.model.look(values, self.trials.candidate, m, t)
        rows[np.arange(len(seed)), self.model.first_seed + seed] = 1.0
        return self.log_loss - log_loss - values[self.model.first_seed + seed], rows

    def means(self, columns: Floats) -> Floats:
        """The mean over each run."""
        total = np.add.reduceat(columns, self.begin, axis=0)
        return np.asarray((total.T / self.sizes).T)

    def without_run(self, columns: Floats, weight: Floats) -> Floats:
        """Columns without the part `weight` of the means of runs."""
        means = (self.means(columns).T * weight).T
        return np.asarray(columns - np.repeat(means, self.sizes, axis=0))

    def known(self, spreads: Spreads) -> tuple[Floats, Floats]:
        """The share of the mean residual that is noise of the run, and its variance then."""
        total = spreads.noise**2 + self.sizes * spreads.run**2
        variance = (spreads.run * spreads.noise) ** 2 / total
        return np.asarray(1 - spreads.noise**2 / total), np.asarray(variance)

    def white(self, columns: Floats, spreads: Spreads) -> Floats:
        """Columns in units in which the noise of all losses is independent, and 1."""
        total = spreads.noise**2 + self.sizes * spreads.run**2
        return self.without_run(columns, 1 - spreads.noise / np.sqrt(total)) / spreads.noise


def fit_surrogate(
    trials: Trials,
    features: Floats,
    kernel: Floats,
    anchor: SizeAndSteps,
    start: Belief | None = None,
    *,
    centre: SizeAndSteps = (0.0, 0.0),
    bend: float = BEND,
) -> Belief:
    """The belief after trials of the first candidates.

    kernel: how alike all candidates are. Those without trials are predicted from the others.
    anchor: m and t near the target, from which all curves bend alike.
    start: a belief about the same candidates in the same order; it saves time, and changes the
        result by little.
    centre: from where the curves of each candidate bend, too.
    bend: how much all curves may bend alike, as a standard deviation.
    """
    seen, seeds = int(trials.candidate.max()) + 1, int(trials.seed.max()) + 1
    model = _Model(features[:seen], float(trials.loss.min()), anchor, centre, seeds)
    data = _Data.of(model, trials)
    inverse = np.asarray(np.linalg.inv(kernel[:seen, :seen]), np.float64)
    prior = _first_values(model)
    values = prior if start is None else _values_again(model, start)
    spreads = Spreads() if start is None else start.spreads
    for _ in range(_ROUNDS if start is None else _ROUNDS_AGAIN):
        precision = _precision(model, inverse, spreads, bend)
        values, matrix = _climb(data, values, prior, precision, spreads)
        covariance = np.asarray(np.linalg.inv(matrix), np.float64)
        used, spreads = spreads, _new_spreads(data, inverse, values, covariance, spreads)
    runs = RunNoise(data.means(data.look(values)[1]), *data.known(used))
    belief = Belief(*model[:4], values, covariance, spreads, seeds, runs)
    return _extend(belief, features, kernel) if seen < len(features) else belief


def _first_values(model: _Model) -> Floats:
    values = np.zeros(model.size)
    values[1:_FIRST_BEND] = np.log([_ALPHA, _BETA, 0.25 * model.top, 0.25 * model.top])
    return values


def _values_again(model: _Model, start: Belief) -> Floats:
    """Parameters to start from: those of an earlier belief, as far as it has them."""
    values = _first_values(model)
    share = min(0.999, float(start.middle().linf[0]) / model.top)
    count = model.first_local + _LOCAL * min(len(model.features), len(start.features))
    values[:count] = start.mean[:count]
    values[0] = np.log(share / (1 - share))
    return values


def _precision(model: _Model, inverse: Floats, spreads: Spreads, bend: float) -> Floats:
    """The precision of all parameters before any trial."""
    matrix = np.zeros((model.size, model.size))
    spread = np.full(model.size, _EFFECT_SPREAD)
    spread[:_FIRST_BEND] = _LINF_SPREAD, _EXPONENT_SPREAD, _EXPONENT_SPREAD, 1.5, 1.5
    spread[_FIRST_BEND:_GLOBAL] = bend
    spread[model.places(2, 3)] = spreads.exponent
    spread[model.own_bends] = spreads.bend
    spread[model.first_seed :] = spreads.seed
    matrix[np.diag_indices(model.size)] = spread**-2
    for k in range(2):
        index = model.places(k)
        matrix[np.ix_(index, index)] = inverse / spreads.offset**2
    return matrix


def _climb(
    data: _Data, values: Floats, centre: Floats, precision: Floats, spreads: Spreads
) -> tuple[Floats, Floats]:
    """Find the most likely parameters by damped Gauss-Newton; returns the precision there too."""

    def look(at: Floats) -> tuple[Floats, Floats, float]:
        residual, rows = (data.white(part, spreads) for part in data.look(at))
        away = at - centre
        return residual, rows, float(residual @ residual + away @ precision @ away)

    residual, rows, cost = look(values)
    matrix, damping = rows.T @ rows + precision, 1e-3
    for _ in range(_STEPS):
        slope = rows.T @ residual - precision @ (values - centre)
        damped = matrix + damping * np.diag(np.diag(matrix))
        new = values + np.clip(np.linalg.solve(damped, slope), -1.0, 1.0)
        new_residual, new_rows, new_cost = look(new)
        if new_cost < cost:
            gain = cost - new_cost
            values, residual, rows, cost = new, new_residual, new_rows, new_cost
            matrix = rows.T @ rows + precision
            damping = max(damping / 8, 1e-9)
            if gain < _SETTLED * max(1.0, cost):
                break
        else:
            damping *= 6
            if damping > 1e6:
                break
    return values, matrix


def _new_spreads(
    data: _Data, inverse: Floats, values: Floats, covariance: Floats, old: Spreads
) -> Spreads:
    """Standard deviations that make the parameters likely (one step of EM)."""
    guess, model = Spreads(), data.model
    residual, rows = data.look(values)
    weight, variance = data.known(old)

    def pooled(total: float, count: float, first: float) -> float:
        return float(np.sqrt((total + _GUESS_WEIGHT * first**2) / (count + _GUESS_WEIGHT)))

    def own(index: Ints) -> float:
        return float(values[index] @ values[index] + covariance[index, index].sum())

    def spread_of(rows: Floats) -> Floats:
        return np.asarray(np.einsum("ij,ij->i", rows @ covariance, rows))

    offsets = 0.0
    for k in range(2):
        index = model.places(k)
        part = values[index]
        offsets += float(part @ inverse @ part)
        offsets += float(np.sum(inverse * covariance[np.ix_(index, index)]))
    exponents, seeds = model.places(2, 3), np.arange(model.first_seed, model.size)
    alone = data.without_run(residual, weight)
    noise = float(alone @ alone + spread_of(data.without_run(rows, weight)).sum())
    noise += float(data.sizes @ variance)
    shared = (weight * data.means(residual)) ** 2 + weight**2 * spread_of(data.means(rows))
    return Spreads(
        noise=pooled(noise, len(residual), guess.noise),
        run=pooled(float((shared + variance).sum()), len(shared), guess.run),
        seed=pooled(own(seeds), len(seeds), guess.seed),
        offset=pooled(offsets, 2 * len(model.features), guess.offset),
        exponent=pooled(own(exponents), len(exponents), guess.exponent),
        bend=pooled(own(model.own_bends), len(model.own_bends), guess.bend),
    )


def _extend(belief: Belief, features: Floats, kernel: Floats) -> Belief:
    """Add candidates without trials: what the others say of them, and what they do not."""
    seen = len(belief.features)
    old = _Model(belief.features, belief.top, belief.anchor, belief.centre, belief.seeds)
    new = old._replace(features=features)
    spreads = belief.spreads
    weights = np.linalg.solve(kernel[:seen, :seen], kernel[:seen, seen:]).T
    rest = kernel[seen:, seen:] - weights @ kernel[:seen, seen:]
    move = np.zeros((new.size, old.size))
    before, after = old.first_seed, new.first_seed
    move[:before, :before] = np.eye(before)
    move[after:, before:] = np.eye(old.seeds)
    extra = np.zeros((new.size, new.size))
    for k in range(2):
        index = new.places(k)[seen:]
        move[np.ix_(index, old.places(k))] = weights
        extra[np.ix_(index, index)] = rest * spreads.offset**2
    for k in range(2, _LOCAL):
        index = new.places(k)[seen:]
        extra[index, index] = (spreads.exponent if k < _LOCAL - _BENDS else spreads.bend) ** 2
    run_rows = np.zeros((len(belief.runs.row), new.size))
    run_rows[:, :before] = belief.runs.row[:, :before]
    run_rows[:, after:] = belief.runs.row[:, before:]
    return replace(
        belief,
        features=features,
        mean=move @ belief.mean,
        covariance=move @ belief.covariance @ move.T + extra,
        runs=belief.runs._replace(row=run_rows),
    )


def _sigmoid(value: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.asarray(value))))
