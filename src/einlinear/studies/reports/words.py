"""What the numbers say, in sentences; names of structures stand in backquotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isinf, isnan
from typing import Literal, get_args

import numpy as np

from einlinear.studies.multiplier import Multiplier
from einlinear.studies.numbers import between, count, duration, listed, short
from einlinear.studies.reports.analyse import (
    Analysis,
    Measured,
    compare_exponents,
    is_wrong,
)
from einlinear.studies.reports.cautions import (
    cautions,
    code,
    codes,
    few_sizes,
    has_one_seed,
    has_single_points,
    level,
)
from einlinear.studies.reports.shown import State

Verdict = Literal["better", "worse", "alike"]

_STEEP = 1.3  # a multiplier that changes so much over the losses is not one number


@dataclass(frozen=True, slots=True)
class Words:
    """The conclusion, what it rests on, and what the data cannot say."""

    headline: str
    results: tuple[str, ...]
    cautions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The loss at which a structure and the reference need the same, and where it needs less."""

    loss: float
    is_better_above: bool


def conclude(analysis: Analysis) -> Words:
    """The sentences of a report."""
    return Words(
        headline=_headline(analysis),
        results=tuple(_results(analysis)),
        cautions=tuple(cautions(analysis)),
    )


def verdict(multiplier: Multiplier) -> Verdict:
    """Whether the interval of the median excludes 1, and on which side."""
    low, high = multiplier.median_interval
    if isinf(multiplier.median) and not low <= 1:
        return "better"  # the reference never gets there
    if isnan(low) or isnan(high) or low <= 1 <= high:
        return "alike"
    return "better" if low > 1 else "worse"


def facts(analysis: Analysis) -> list[str]:
    """What was run, in a few words each."""
    runs = analysis.gathered.runs
    states = Counter(run.state for run in runs)
    named = [f"{states[state]:,} {state}" for state in get_args(State) if states[state]]
    found = [f"{count(len(runs), 'run')}: {', '.join(named)}"]
    tasks = [task for task in analysis.gathered.tasks if task]
    widths = sorted({run.width for run in runs if run.width is not None})
    found += [f"{'task' if len(tasks) == 1 else 'tasks'}: {listed(tasks)}"] if tasks else []
    if widths:
        found.append(f"widths {widths[0]} to {widths[-1]}" if widths[1:] else f"width {widths[0]}")
    found.append(count(len({run.seed for run in runs}), "seed"))
    flops = sum(run.spent("flops") for run in runs)
    seconds = sum(run.spent("seconds") for run in runs)
    found += [f"{short(flops)} FLOPs"] if flops else []
    found += [f"{duration(seconds)} in training steps"] if seconds else []
    return found


def _headline(analysis: Analysis) -> str:
    main, reference = analysis.main, analysis.reference
    if main is None or reference is None:
        return _nothing(analysis)
    if len(main.data.structures) == 1:
        return (
            f"Only {code(main.data.structures[0])} has results: there is nothing to compare it "
            f"with. {_lowest(main)}"
        )
    known = {n: m for n, m in main.multipliers.items() if not isnan(m.median)}
    if not known:
        return f"The runs do not suffice to compare structures. {_lowest(main)}"
    better = [name for name, m in known.items() if verdict(m) == "better"]
    alike = [name for name, m in known.items() if verdict(m) == "alike"]
    if not better and alike:
        return _undecided({name: known[name] for name in alike}) + _doubts(analysis, alike)
    if not better:
        return f"{code(reference)} needs the least compute for a loss.{_doubts(analysis, known)}"
    return _praise(analysis, known, max(better, key=lambda name: known[name].median))


def _nothing(analysis: Analysis) -> str:
    """Why there is nothing to conclude."""
    runs = analysis.gathered.runs
    if analysis.gathered.problems and all(run.state == "unreadable" for run in runs):
        return "No run can be read, so there is nothing to conclude: see below."
    return "No run has come to a result yet, so there is nothing to conclude."


def _undecided(alike: dict[str, Multiplier]) -> str:
    """That no structure needs less than the reference, or where each of the two does."""
    reference = code(next(iter(alike.values())).reference)
    turns = {name: turn for name, m in alike.items() if (turn := crossing(m)) is not None}
    same = [name for name in alike if name not in turns]
    text = f"No structure was shown to need less compute than {reference} at all losses: "
    parts = [f"{code(name)} {_turns(turn)}" for name, turn in turns.items()]
    if not parts:
        text = f"No structure was shown to need less compute than {reference}: "
    if same:
        parts.append(f"{codes(same)} cannot be told apart from it")
    return text + "; ".join(parts) + "."


def _turns(turn: Crossing) -> str:
    less, more = ("above", "below") if turn.is_better_above else ("below", "above")
    return f"needs less {less} loss {short(turn.loss)}, more {more} it"


def crossing(found: Multiplier) -> Crossing | None:
    """Where two laws cross, if each is the better one somewhere by the intervals there."""
    inside = ~found.is_extrapolated & np.isfinite(found.values) & (found.values > 0)
    if not inside.any():
        return None
    order = np.argsort(found.losses[inside])
    losses, values, low, high = (
        v[inside][order] for v in (found.losses, found.values, found.low, found.high)
    )
    better, worse = losses[low > 1], losses[high < 1]
    if not len(better) or not len(worse):
        return None
    is_above = bool(better.min() > worse.max())
    if not is_above and not better.max() < worse.min():
        return None
    sign = 1 if is_above else -1  # values must rise for an interpolation
    loss = np.interp(0.0, np.log(values)[::sign], np.log(losses)[::sign])
    return Crossing(float(np.exp(loss)), is_above)


def _praise(analysis: Analysis, known: dict[str, Multiplier], best: str) -> str:
    """The structure that needs least, and those that may be as good."""
    mine = known[best]
    if isinf(mine.median):
        return _unreached(analysis, known)
    text = (
        f"{code(best)} needs the least compute for a loss: {code(mine.reference)} needs "
        f"{short(mine.median)} times as much ({level(analysis)} {between(mine.median_interval)})."
    )
    if mine.mean_is_extrapolated:
        text += " That is extrapolated: the two have no losses in common."
    low = mine.median_interval[0]
    rivals = [n for n, m in known.items() if n != best and not m.median_interval[1] < low]
    if rivals:
        text += f" {codes(rivals)} may be as good: the intervals overlap."
    return text + _doubts(analysis, [best])


def _unreached(analysis: Analysis, known: dict[str, Multiplier]) -> str:
    """The structures whose losses the law of the reference never reaches."""
    names = [n for n, m in known.items() if isinf(m.median) and verdict(m) == "better"]
    text = (
        f"{codes(names)} {'reaches' if len(names) == 1 else 'reach'} losses that "
        f"{code(known[names[0]].reference)} does not, by its law, however much compute it gets."
    )
    return text + _doubts(analysis, names)


def _doubts(analysis: Analysis, names: Collection[str]) -> str:
    """A warning if the frontiers or laws of these, or of the reference, cannot be trusted."""
    about = {analysis.reference or "", *names}
    are_early = any(ends.are_early for ends in analysis.ends if ends.structure in about)
    why = ["runs ended early"] if are_early and not has_single_points(analysis) else []
    main = analysis.main
    rows = [] if main is None else [main.laws[name] for name in about if name in main.laws]
    laws = [row.law for row in rows if row.law is not None]
    if any(map(is_wrong, laws)):
        why.append("the points do not follow the laws")
    elif any(law.at_bound == "lowest loss" for law in laws):
        why.append("the limit of the laws sits on its bound")
    if why:
        return f" But {listed(why)}, so this may be far off: see below."
    if main is not None and set(few_sizes(main)) & about:
        why.append("there are few sizes")
    if has_one_seed(analysis):
        why.append("every setting has one seed")
    return f" But {listed(why)}, so intervals mislead: see below." if why else ""


def _lowest(main: Measured) -> str:
    place = int(main.data.loss.argmin())
    loss, name = float(main.data.loss[place]), str(main.data.structure[place])
    return f"The lowest loss is {short(loss, 4)}, of {code(name)}."


def _results(analysis: Analysis) -> Iterator[str]:
    main = analysis.main
    if main is None:
        return
    for name in analysis.structures:
        if name in main.multipliers:
            yield _result(analysis, main, name)
    yield from _exponents(analysis, main)


def _result(analysis: Analysis, main: Measured, name: str) -> str:
    """The multiplier of one structure, by compute and by seconds."""
    found = main.multipliers[name]
    reference, kind = code(found.reference), verdict(found)
    if isnan(found.median):
        return f"{code(name)} never reaches losses of {reference}, so it has no multiplier."
    if isinf(found.median):
        return f"{code(name)}: {reference} never reaches its losses, by its law."
    ends = between(found.median_interval)
    interval = f"{level(analysis)} {ends}" if ends else "no interval"
    numbers = f"multiplier {short(found.median)}, {interval}"
    if kind == "better":
        text = f"{code(name)}: {reference} needs {short(found.median)} times its compute"
        numbers = interval
    elif kind == "worse":
        text = f"{code(name)} needs {short(1 / found.median)} times the compute of {reference}"
    elif (turn := crossing(found)) is not None:
        text = f"{code(name)} {_turns(turn)}, than {reference} by compute"
    else:
        text = f"{code(name)} cannot be told apart from {reference} by compute"
    text += f" ({numbers})"
    if found.mean_is_extrapolated:
        text += ", extrapolated: the two have no losses in common"
    return text + _by_seconds(analysis, name, kind) + "." + _trend(found)


def _trend(found: Multiplier) -> str:
    """How the multiplier changes over the losses that both have reached, if it does much."""
    inside = ~found.is_extrapolated & (found.values > 0) & np.isfinite(found.values)
    losses, values = found.losses[inside].tolist(), found.values[inside].tolist()
    ends = sorted(zip(losses, values, strict=True))
    if not ends or 1 / _STEEP < ends[0][1] / ends[-1][1] < _STEEP:
        return ""
    (low, last), (high, first) = ends[0], ends[-1]
    return (
        f" The multiplier {'falls' if last < first else 'rises'} from {short(first)} at loss "
        f"{short(high)} to {short(last)} at loss {short(low)}, by the two laws."
    )


def _by_seconds(analysis: Analysis, name: str, kind: Verdict) -> str:
    seconds = analysis.measured.get("seconds")
    found = None if seconds is None else seconds.multipliers.get(name)
    if found is None or isnan(found.median):
        return ""
    numbers = f"{short(found.median)}, {between(found.median_interval) or 'no interval'}"
    if isinf(found.median):
        numbers = "the reference never reaches its losses"
    says = {
        "better": "it needs less time",
        "worse": "it needs more time",
        "alike": "the two cannot be told apart",
    }
    now = verdict(found)
    by = "by seconds" if now == kind else "by seconds, however,"
    return f"; {by} {says[now]} ({numbers})"


def _exponents(analysis: Analysis, main: Measured) -> Iterator[str]:
    """How fast losses fall with compute, against the reference, where that is measured."""
    laws = {n: row.law for n, row in main.laws.items() if row.law is not None}
    here = laws.get(analysis.reference or "")
    if here is None or len(laws) < 2:
        return
    sound = {n: law for n, law in laws.items() if not law.at_bound and not is_wrong(law)}
    others = [n for n in analysis.structures if n in sound and laws[n] is not here]
    if here.structure not in sound or not others:
        yield (
            "How the exponents compare cannot be told: the points do not follow the laws, or their "
            "limit is on its bound."
        )
        return
    apart = {name: compare_exponents(sound[name], here) for name in others}
    ours = f"{short(here.a)}, {level(analysis)} {between(here.a_interval) or 'unknown'}"
    by = "With a shared linf, the" if main.is_shared else "The"
    for way, word in ((1, "faster"), (-1, "more slowly")):
        names = [name for name in others if apart[name] == way]
        doubted = [name for name in names if main.is_shared and main.own_order.get(name) != way]
        names = [name for name in names if name not in doubted]
        if names:
            values = listed([f"{short(laws[n].a)} ({between(laws[n].a_interval)})" for n in names])
            yield (
                f"{by} loss of {codes(names)} falls {word} with compute than that of "
                f"{code(here.structure)}: exponent {values}, not {ours}."
            )
        if doubted:
            yield (
                f"Whether the loss of {codes(doubted)} falls {word} with compute than that of "
                f"{code(here.structure)} cannot be told: with a shared linf it does, but not if "
                "each has its own."
            )
    if not any(apart.values()):
        found = [law.a for law in sound.values()]
        yield (
            f"The exponents cannot be told apart: {short(min(found))} to {short(max(found))}, "
            f"{code(here.structure)} has {ours}."
        )
