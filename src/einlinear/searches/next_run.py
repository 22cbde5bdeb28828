"""next_run: the run that a search trains next, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from einlinear.runs.config import RunConfig
from einlinear.searches.decide import (
    COMPARE_EVERY,
    LARGEST_SHARE,
    OPENING_RUNG,
    OVERHEAD,
    Choice,
    Outlook,
    best_option,
    draw_rival,
)
from einlinear.searches.state import RATES, SearchState, flops_of
from einlinear.searches.stops import Stop

RESERVED = 0.15
"""The share of the budget for the final check of learning rates."""

_FINALISTS = 3


@dataclass(frozen=True, slots=True)
class NextRun:
    """A run to train: what it costs, the run that it goes on from, and why it is worth it.

    view: what was believed when it was chosen; None if that did not matter.
    """

    config: RunConfig
    flops: float
    source: str | None
    why: str
    view: Outlook | None = field(default=None, repr=False, compare=False)


_Place = tuple[int, int, int, int]  # candidate, level, rung, seed


def next_run(
    state: SearchState, running: Collection[RunConfig], total_left: float
) -> NextRun | None:
    """The next run; None when the budget, of which `total_left` is left, is used up.

    running: runs that other workers train now.
    """
    if 0 in state.left_out:
        return None  # nothing can be compared with dense layers
    busy = [place for config in running if (place := state.place(config)) is not None]
    total_left -= sum(
        state.cost(c, level, rung, None if rate != 1.0 else seed)
        for c, level, rung, seed, rate in busy
    )
    reserve = RESERVED * (state.tally.spent + max(0.0, total_left))
    tuned = sum(flops_of(record) for record in state.tally.tuned.values())
    left = total_left - max(0.0, reserve - tuned)
    places = [place[:4] for place in busy if place[4] == 1.0]
    for first, why in _opening(state):
        if first not in places and state.cost(*first) <= left:
            return _made(state, first, why)
    if state.trained:
        found = _informed(state, places, left)
        if found is not None:
            return found
        return _final_check(state, [p for p in busy if p[4] != 1.0], reserve, total_left)
    return None


def _opening(state: SearchState) -> Iterator[tuple[_Place, str]]:
    """The first runs: dense at every size, every listed candidate at two."""
    listed = state.spec.space.num_listed
    levels = range(len(state.spec.rungs.widths))
    for level in levels:
        yield from _first(state, 0, level, "dense is the reference")
    for candidate in range(1, min(listed, len(state.candidates))):
        for level in levels[:2]:
            yield from _first(state, candidate, level, "listed")


def _first(state: SearchState, c: int, level: int, why: str) -> Iterator[tuple[_Place, str]]:
    if (c, level, 0) not in state.tally.longest and c not in state.left_out:
        yield (c, level, OPENING_RUNG - min(level, OPENING_RUNG) * (c > 0), 0), why


def _informed(state: SearchState, busy: list[_Place], left: float) -> NextRun | None:
    """The run that narrows the decision between the leader and a rival most."""
    view, belief = state.outlook(), state.belief
    random = np.random.default_rng((state.spec.seed, len(state.records), len(busy)))
    trained = np.arange(len(state.trained))
    rival = draw_rival(view, trained, random)
    reference = state.order.index(0)
    if len(state.records) % COMPARE_EVERY == 0 and view.leader != reference:
        rival = reference  # how much better than dense the leader is counts, too
    most = LARGEST_SHARE * left
    pair = dict.fromkeys((view.leader, rival, reference))
    options = [option for k in pair for option in _options(state, k, busy, most)]
    running = [_option(state, state.order.index(p[0]), *p[1:]) for p in busy if p[0] in state.order]
    overhead = max(state.cost(0, 0, 0, None), OVERHEAD * state.tally.spent)
    found = best_option(belief, state.target, (view.leader, rival), options, running, overhead)
    if found is None:
        return None
    place = state.order[found.candidate], found.level, found.rung, found.seed
    return replace(_made(state, place, _reason(state, view, rival, found)), view=view)


def _reason(state: SearchState, view: Outlook, rival: int, found: Choice) -> str:
    leader, other = (state.candidates[state.order[k]].label for k in (view.leader, rival))
    if rival >= len(state.trained):
        return f"{other} is new and may beat {leader} ({view.chances[rival]:.0%})"
    return f"{leader} leads; {other} may beat it ({view.chances[rival]:.0%})"


def _options(state: SearchState, k: int, busy: list[_Place], most: float) -> Iterator[Choice]:
    """Longer runs and new runs of a candidate that cost at most `most`."""
    candidate = state.order[k]
    for level in range(len(state.spec.rungs.widths)):
        for seed in range(state.spec.seeds):
            chain = candidate, level, seed
            if any((p[0], p[1], p[3]) == chain for p in busy):
                break
            held = state.tally.longest.get(chain)
            for rung in range(held[0] + 1 if held else 0, len(state.spec.rungs.steps)):
                option = _option(state, k, level, rung, seed)
                if option.cost <= most:
                    yield option
            if held is None:
                break  # seeds are used in turn, so that they are those of dense too


def _option(state: SearchState, k: int, level: int, rung: int, seed: int) -> Choice:
    candidate = state.order[k]
    m, t = state.position(candidate, level, rung)
    run = state.run_numbers.get((candidate, level, seed), -1)
    return Choice(k, level, rung, seed, state.cost(candidate, level, rung, seed), m, t, run)


def _final_check(
    state: SearchState,
    busy: list[tuple[int, int, int, int, float]],
    reserve: float,
    left: float,
) -> NextRun | None:
    """Runs of the leaders and dense with half and twice the learning rate, each the same budget."""
    view = state.outlook()
    leaders = [state.order[k] for k in np.argsort(view.middle[: len(state.trained)])]
    chosen = [0, *[k for k in leaders if k][:_FINALISTS]]
    share = reserve / (len(chosen) * len(RATES))
    cell = _check_cell(state, chosen, share)
    if cell is None:
        return None
    level, rung = cell
    for candidate in chosen:
        for rate in RATES:
            if (candidate, rate) in state.tally.tuned:
                continue
            if any((p[0], p[4]) == (candidate, rate) for p in busy):
                continue
            cost = state.cost(candidate, level, rung, None)
            if cost <= left:
                label = state.candidates[candidate].label
                config = state.ladder.config(state.candidates[candidate], level, rung, 0, rate)
                why = f"{rate:g} times the learning rate for {label}"
                return NextRun(config, cost, None, why, view)
    return None


def _check_cell(state: SearchState, chosen: list[int], share: float) -> tuple[int, int] | None:
    """The dearest run at the usual rate that all have, of those that the share can pay for."""
    best = None
    for level in range(len(state.spec.rungs.widths)):
        for rung, steps in enumerate(state.spec.rungs.steps):
            if any(state.loss_at((c, level, 0), steps) is None for c in chosen):
                continue
            cost = max(state.cost(c, level, rung, None) for c in chosen)
            if cost <= share and (best is None or cost > best[0]):
                best = cost, (level, rung)
    return None if best is None else best[1]


def _made(state: SearchState, place: _Place, why: str) -> NextRun:
    candidate, level, rung, seed = place
    config = state.ladder.config(state.candidates[candidate], level, rung, seed)
    held = state.tally.longest.get((candidate, level, seed))
    return NextRun(config, state.cost(*place), held[1].id if held else None, why)


def resumed(state: SearchState, config: RunConfig) -> NextRun:
    """A run that was interrupted."""
    place = state.place(config)
    assert place is not None, "the run is of this search"
    if place[4] == 1.0:
        return _made(state, place[:4], "goes on where it was interrupted")
    cost = state.cost(*place[:3], None)
    return NextRun(config, cost, None, "goes on where it was interrupted")


def chosen_label(state: SearchState, config: RunConfig) -> str:
    """What a run is, in a few words, by the name that the space gives its candidate."""
    place = state.place(config)
    assert place is not None, "the run is of this search"
    label = state.candidates[place[0]].label
    words = f"{label}, width {config.width}, steps {config.steps}"
    words += f", seed {config.seed}" if config.seed else ""
    return words + (f", rate x {place[4]:g}" if place[4] != 1.0 else "")


def stop_changes(state: SearchState, choice: NextRun, stopped: Collection[str]) -> tuple[Stop, ...]:
    """Which candidates a choice stops or takes up again, given the labels of those stopped."""
    view, found = choice.view, []
    if view is None:
        return ()
    labels = [state.candidates[number].label for number in state.order[: len(state.trained)]]
    leader, next_id, spent = labels[view.leader], choice.config.id, state.tally.spent
    for label, chance, is_hopeless in zip(labels, view.chances, view.hopeless, strict=False):
        if is_hopeless != (label in stopped):
            now: Literal["stopped", "open"] = "stopped" if is_hopeless else "open"
            found.append(Stop(label, now, leader, float(chance), next_id, spent))
    return tuple(found)
