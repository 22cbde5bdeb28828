"""make_answer: rank the candidates of a search by what its runs say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from einlinear.laws.observations import Floats
from einlinear.searches.answer import Answer, Effect, LeaderboardRow
from einlinear.searches.decide import HOPELESS
from einlinear.searches.draws import Draws, interval_of
from einlinear.searches.state import RATES, SearchState, flops_of
from einlinear.searches.surrogate import Belief, mixed_ideas
from einlinear.show.numbers import FLOPS_PER_MAC

_DRAWS = 800  # of each belief
_SURE = 1.645  # standard deviations: one is better in 95 % of draws
_MOST_TIMES = 100.0
_STEP = {"omega": 0.5, "psi": -0.5, "nu": -0.5}  # changes whose effect is told
_GAIN_SPREAD = 0.02  # of what another learning rate changes in log losses


def make_answer(state: SearchState) -> Answer:
    """Rank the candidates that were trained."""
    order = state.order[: len(state.trained)]
    random = np.random.default_rng((state.spec.seed, 1))
    beliefs = [state.belief_with(*idea) for idea in mixed_ideas(state.flops_target.anchor)]
    draws = Draws.joined(belief.draws(_DRAWS, random) for belief in beliefs)
    draws = _tuned(state, draws.take(slice(len(order))), random)
    slow = state.relative_times()
    target = state.flops_target
    loss = draws.best(target)[0]
    ratio = draws.multipliers(target, order.index(0))
    by_time = np.array([slow.get(number, np.nan) for number in order])
    score = np.log(loss) if state.spec.objective == "flops" else -np.log(ratio / by_time)
    wins = np.bincount(np.nanargmin(score, 1), minlength=len(order)) / len(score)
    middle = np.median(score, 0)
    ranked = [int(k) for k in np.argsort(np.where(np.isnan(middle), np.inf, middle))]
    rows = []
    for k in ranked:
        chance = float((score[:, k] < score[:, ranked[0]]).mean())
        found = "leader" if k == ranked[0] else "stopped" if chance < HOPELESS else "open"
        rows.append(_row(state, order[k], loss[:, k], ratio[:, k], slow, float(wins[k]), found))
    return Answer(
        rows=tuple(rows),
        effects=_effects(state, beliefs),
        target=state.spec.target,
        objective=state.spec.objective,
        spent=state.tally.spent,
        largest=max(flops_of(record) for _, record in state.tally.longest.values()),
        linf=float(np.median(draws.linf)),
        linf_interval=interval_of(draws.linf),
        more_budget=_more_budget(score, ranked),
        diverged=tuple(state.candidates[k].label for k in sorted(state.diverged)),
        failed=tuple(state.candidates[k].label for k in sorted(state.failed)),
    )


@dataclass(frozen=True, slots=True)
class RateGain:
    """The best learning rate of the final check, relative to the usual one.

    gain: by how much it lowers the log loss, and how sure that is, as a standard deviation.
    usual: the loss at the usual rate.
    """

    rate: float
    gain: float
    spread: float
    usual: float


def best_rate(state: SearchState, number: int) -> RateGain | None:
    """What the final check says of a candidate; None if it was not checked.

    Each rate was tried once, so gains are shrunk: the lowest of three losses is low by luck, too.
    """
    found = [(rate, state.tally.tuned.get((number, rate))) for rate in RATES]
    held = [(rate, record) for rate, record in found if record is not None]
    usual = state.usual_loss(number, held[0][1].config) if held else None
    if usual is None:
        return None
    spreads = state.belief.spreads
    noise, prior = 2 * (spreads.run**2 + spreads.noise**2), _GAIN_SPREAD**2
    gains = [
        (prior / (prior + noise) * float(np.log(usual / record.final_loss)), rate)
        for rate, record in held
        if record.status == "finished" and record.final_loss
    ]
    gain, rate = max([(0.0, 1.0), *gains])
    spread = 0.0 if rate == 1.0 else float(np.sqrt(prior * noise / (prior + noise)))
    return RateGain(rate, gain, spread, usual)


def _tuned(state: SearchState, laws: Draws, random: np.random.Generator) -> Draws:
    """The laws at the best learning rate of the final check: losses above linf shrink alike."""
    a, b = laws.a.copy(), laws.b.copy()
    for k, number in enumerate(state.order[: len(state.trained)]):
        found = best_rate(state, number)
        if found is not None and found.rate != 1.0:
            gain = found.gain + found.spread * random.standard_normal(len(laws.linf))
            above = np.maximum(found.usual * np.exp(-gain) - laws.linf, 1e-9)
            shift = np.log(above / (found.usual - laws.linf))
            a[:, k] += shift
            b[:, k] += shift
    return laws._replace(a=a, b=b)


def _row(
    state: SearchState,
    number: int,
    loss: Floats,
    ratio: Floats,
    slow: dict[int, float],
    wins: float,
    found: str,
) -> LeaderboardRow:
    candidate = state.candidates[number]
    omega, psi, nu = candidate.taxonomy
    own = [record for chain, (_, record) in state.tally.longest.items() if chain[0] == number]
    (low, high), middle = interval_of(ratio), float(np.median(ratio))
    rate, speed = best_rate(state, number), slow.get(number)
    seen = seen_multiplier(state, number)
    return LeaderboardRow(
        structure=candidate.structure,
        num_experts=candidate.num_experts,
        num_active=candidate.num_active,
        experts=candidate.experts,
        head_aligned=candidate.head_aligned,
        label=candidate.label,
        predicted_loss=float(np.median(loss)),
        loss_interval=interval_of(loss),
        multiplier=middle,
        low=low,
        high=high,
        seen=None if seen is None else seen.multiplier,
        seen_flops=None if seen is None else seen.flops,
        seconds_multiplier=None if speed is None else middle / speed,
        seconds_interval=None if speed is None else (low / speed, high / speed),
        speed=speed,
        params=max(record.counts.params for record in own),
        omega=omega,
        psi=psi,
        nu=nu,
        wins=wins,
        runs=len(own),
        flops=sum(map(flops_of, own)),
        rate=None if rate is None else rate.rate,
        rate_gain=None if rate is None else rate.gain,
        rate_spread=None if rate is None else rate.spread,
        state=found,
    )


class Seen(NamedTuple):
    """A multiplier, and the FLOPs of the candidate at which it was seen."""

    multiplier: float
    flops: float


def seen_multiplier(state: SearchState, number: int) -> Seen | None:
    """The FLOPs of dense over those of a candidate, for the lowest loss that both reached.

    None if they have no loss in common.
    """
    own, dense = _best_losses(state, number), _best_losses(state, 0)
    loss = max(own[1][-1], dense[1][-1])
    if loss > min(own[1][0], dense[1][0]):
        return None
    flops = _flops_for(own, loss)
    return Seen(_flops_for(dense, loss) / flops, flops)


def _best_losses(state: SearchState, number: int) -> tuple[Floats, Floats]:
    """Growing FLOPs, and the lowest mean loss over seeds up to each."""
    points: dict[float, list[float]] = {}
    for chain, (_, record) in state.tally.longest.items():
        for point in record.curve if chain[0] == number else ():
            if point.step >= state.spec.rungs.steps[0] and point.loss is not None:
                points.setdefault(float(FLOPS_PER_MAC * point.macs), []).append(point.loss)
    flops = np.array(sorted(points))
    losses = np.minimum.accumulate([np.mean(points[at]) for at in sorted(points)])
    is_new = np.append(True, losses[1:] < losses[:-1])
    return flops[is_new], losses[is_new]


def _flops_for(curve: tuple[Floats, Floats], loss: float) -> float:
    """The FLOPs at which a curve of falling losses reaches a loss."""
    flops, losses = curve
    return float(np.exp(np.interp(-loss, -losses, np.log(flops))))


def _effects(state: SearchState, beliefs: list[Belief]) -> tuple[Effect, ...]:
    """The effects of omega, psi and nu, of those in which the trained candidates differ."""
    used = beliefs[0].features[: len(state.trained)]
    random = np.random.default_rng((state.spec.seed, 2))
    drawn = [belief.shared_draws(_DRAWS, random) for belief in beliefs]
    base = Draws.joined(laws for laws, _ in drawn)
    by_a, by_b = (np.concatenate(parts) for parts in zip(*(by for _, by in drawn), strict=True))
    found = []
    for k, (name, change) in enumerate(_STEP.items()):
        if np.ptp(used[:, k]) < 0.1:
            continue
        pair = Draws(
            *base[:4],
            np.column_stack([base.a, base.a[:, 0] + abs(change) * by_a[:, k]]),
            np.column_stack([base.b, base.b[:, 0] + abs(change) * by_b[:, k]]),
            np.tile(base.alpha, 2),
            np.tile(base.beta, 2),
            np.tile(base.own_bend, (1, 2, 1)),
        )
        ratio = pair.multipliers(state.flops_target)[:, 1]
        low, high = interval_of(ratio)
        found.append(Effect(name, change, float(np.median(ratio)), low, high))
    return tuple(found)


def _more_budget(score: Floats, ranked: list[int]) -> float | None:
    """How many times this budget tells the leaders apart, if variance falls with the budget."""
    if len(ranked) < 2:
        return 1.0
    apart = score[:, ranked[1]] - score[:, ranked[0]]
    times = float((_SURE * apart.std() / max(1e-12, abs(apart.mean()))) ** 2)
    return None if times > _MOST_TIMES else max(1.0, times)
