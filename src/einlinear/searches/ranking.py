"""make_answer: rank the candidates of a search by what its runs say."""

from __future__ import annotations

import numpy as np

from einlinear.laws.fit import Interval
from einlinear.laws.observations import Floats
from einlinear.searches.answer import Answer, Effect, LeaderboardRow
from einlinear.searches.decide import HOPELESS
from einlinear.searches.state import RATES, SearchState, flops_of
from einlinear.searches.surrogate import Cost, Draws

LEVEL = 0.9
"""Of all intervals."""

_DRAWS = 2000
_SURE = 1.645  # standard deviations: one is better in 95 % of draws
_MOST_TIMES = 100.0
_STEP = {"omega": 0.5, "psi": -0.5, "nu": -0.5}  # changes whose effect is told


def make_answer(state: SearchState) -> Answer:
    """Rank the candidates that were trained."""
    order = state.order[: len(state.trained)]
    random = np.random.default_rng((state.spec.seed, 1))
    draws = _first(_tuned(state, state.belief.draws(_DRAWS, random)), len(order))
    middle = _first(_tuned(state, state.belief.middle()), len(order))
    slow = state.relative_times()
    target = state.flops_target
    loss, best = draws.best(target)[0], middle.best(target)[0][0]
    dense = order.index(0)
    ratio, ratio_middle = _multiplier(draws, target, dense), _multiplier(middle, target, dense)[0]
    by_time = np.array([slow.get(number, np.nan) for number in order])
    score = loss if state.spec.objective == "flops" else -ratio / by_time
    wins = np.bincount(np.nanargmin(score, 1), minlength=len(order)) / _DRAWS
    ranks = best if state.spec.objective == "flops" else -ratio_middle / by_time
    ranked = [int(k) for k in np.argsort(np.where(np.isnan(ranks), np.inf, ranks))]
    rows = []
    for k in ranked:
        number = order[k]
        chance = float((score[:, k] < score[:, ranked[0]]).mean())
        found = "leader" if k == ranked[0] else "stopped" if chance < HOPELESS else "open"
        rows.append(
            _row(
                state,
                number,
                loss[:, k],
                float(best[k]),
                ratio[:, k],
                float(ratio_middle[k]),
                slow.get(number),
                float(wins[k]),
                found,
            )
        )
    return Answer(
        rows=tuple(rows),
        effects=_effects(state, draws),
        target=state.spec.target,
        objective=state.spec.objective,
        spent=state.tally.spent,
        largest=max(flops_of(record) for _, record in state.tally.longest.values()),
        linf=float(middle.linf[0]),
        linf_interval=_interval(draws.linf),
        more_budget=_more_budget(
            np.log(loss) if state.spec.objective == "flops" else score, ranked
        ),
        diverged=tuple(state.candidates[k].label for k in sorted(state.diverged)),
        failed=tuple(state.candidates[k].label for k in sorted(state.failed)),
    )


def _tuned(state: SearchState, laws: Draws) -> Draws:
    """The laws at the best learning rate of the final check: losses above linf shrink alike."""
    a, b = laws.a.copy(), laws.b.copy()
    for k, number in enumerate(state.order[: len(state.trained)]):
        gain = best_rate(state, number)
        if gain is not None and gain[0] != 1.0:
            _, tuned, usual = gain
            shift = np.log(np.maximum(tuned - laws.linf, 1e-9) / (usual - laws.linf))
            a[:, k] += shift
            b[:, k] += shift
    return laws._replace(a=a, b=b)


def best_rate(state: SearchState, number: int) -> tuple[float, float, float] | None:
    """The best rate of the final check, the loss there, and that at the usual rate."""
    found = [(rate, state.tally.tuned.get((number, rate))) for rate in RATES]
    held = [(rate, record) for rate, record in found if record is not None]
    if not held:
        return None
    config = held[0][1].config
    usual = state.usual_loss(number, config)
    if usual is None:
        return None
    losses = [(record.final_loss, rate) for rate, record in held if record.status == "finished"]
    lowest, rate = min([(usual, 1.0), *((x, r) for x, r in losses if x is not None)])
    return rate, lowest, usual


def _row(
    state: SearchState,
    number: int,
    loss: Floats,
    middle: float,
    ratio: Floats,
    ratio_middle: float,
    slow: float | None,
    wins: float,
    found: str,
) -> LeaderboardRow:
    candidate = state.candidates[number]
    omega, psi, nu = candidate.exponents
    own = [record for chain, (_, record) in state.tally.longest.items() if chain[0] == number]
    low, high = _interval(ratio)
    rate = best_rate(state, number)
    return LeaderboardRow(
        structure=candidate.structure,
        num_experts=candidate.num_experts,
        num_active=candidate.num_active,
        label=candidate.label,
        predicted_loss=middle,
        loss_interval=_interval(loss),
        multiplier=ratio_middle,
        low=low,
        high=high,
        seconds_multiplier=None if slow is None else ratio_middle / slow,
        seconds_interval=None if slow is None else (low / slow, high / slow),
        speed=slow,
        params=max(record.counts.params for record in own),
        omega=omega,
        psi=psi,
        nu=nu,
        wins=wins,
        runs=len(own),
        flops=sum(map(flops_of, own)),
        rate=None if rate is None else rate[0],
        state=found,
    )


def _multiplier(laws: Draws, target: Cost, dense: int) -> Floats:
    """The compute of dense for the losses of all candidates at the target, relative to it."""
    loss, _ = laws.best(target)
    reference = Draws(laws.linf, *(column[:, [dense]] for column in laws[1:]))
    return np.asarray(np.exp(reference.cost_of(loss, target) - target.log_total))


def _effects(state: SearchState, draws: Draws) -> tuple[Effect, ...]:
    """The effects of omega, psi and nu, of those in which the trained candidates differ."""
    belief = state.belief
    used = belief.features[: len(state.trained)]
    random = np.random.default_rng((state.spec.seed, 2))
    found = []
    base, effects = belief.shared_draws(_DRAWS, random)
    plain = _at(base, effects, np.zeros(used.shape[1]))
    for k, (name, change) in enumerate(_STEP.items()):
        if np.ptp(used[:, k]) < 0.1:
            continue
        move = np.zeros(used.shape[1])
        move[k] = abs(change)
        moved = _at(base, effects, move)
        pair = Draws(
            plain.linf, *(np.concatenate(two, 1) for two in zip(plain[1:], moved[1:], strict=True))
        )
        ratio = _multiplier(pair, state.flops_target, 0)[:, 1]
        low, high = _interval(ratio)
        found.append(Effect(name, change, float(np.median(ratio)), low, high))
    return tuple(found)


def _at(base: Draws, effects: tuple[Floats, Floats], move: Floats) -> Draws:
    return base._replace(
        a=base.a + (effects[0] @ move)[:, None], b=base.b + (effects[1] @ move)[:, None]
    )


def _more_budget(log_loss: Floats, ranked: list[int]) -> float | None:
    """How many times this budget tells the leaders apart, if variance falls with the budget."""
    if len(ranked) < 2:
        return 1.0
    apart = log_loss[:, ranked[1]] - log_loss[:, ranked[0]]
    times = float((_SURE * apart.std() / max(1e-12, abs(apart.mean()))) ** 2)
    return None if times > _MOST_TIMES else max(1.0, times)


def _first(laws: Draws, count: int) -> Draws:
    return Draws(laws.linf, *(column[:, :count] for column in laws[1:]))


def _interval(values: Floats) -> Interval:
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
