"""Conclusions from the numbers, as sentences; names of structures are in backquotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isinf, isnan
from typing import Literal, get_args

import numpy as np

from einlinear.laws.multiplier import Multiplier
from einlinear.laws.observations import Floats
from einlinear.reports.analyse import Analysis, Measured, compare_exponents, is_wrong
from einlinear.reports.cautions import (
    cautions,
    code,
    codes,
    few_sizes,
    has_one_seed,
    has_single_points,
    level,
)
from einlinear.reports.shown import RunState
from einlinear.reports.timed import about_times
from einlinear.searches.words import conclusions
from einlinear.show.numbers import between, counted, duration, listed, short

Verdict = Literal["better", "worse", "alike"]

_TIMES: dict[Verdict, str] = {
    "better": "it needs less time",
    "worse": "it needs more time",
    "alike": "the two cannot be distinguished",
}
_STEEP = 1.3  # a multiplier that changes by more over the losses is not one number


@dataclass(frozen=True, slots=True)
class Words:
    """The conclusion, the results behind it, and what the data cannot show.

    search: what else a search found, if the runs are those of one.
    """

    headline: str
    results: tuple[str, ...]
    cautions: tuple[str, ...]
    search: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Crossing:
    """The loss at which a structure and the reference are equal, and where it needs less."""

    loss: float
    is_better_above: bool


def conclude(analysis: Analysis) -> Words:
    """Write the sentences of a report."""
    headline = _headline(analysis)
    results = [*_results(analysis), *about_times(analysis.gathered)]
    limits, search = tuple(cautions(analysis)), analysis.gathered.search
    if search is None:
        return Words(headline, tuple(results), limits)
    first, *others = conclusions(search.answer)
    alone = f"Power laws fitted to the runs of each structure alone: {headline}"
    return Words(first, (alone, *results), limits, tuple(others))


def verdict(multiplier: Multiplier) -> Verdict:
    """Which side of 1 the interval of the median is on, or "alike" if it includes 1."""
    low, high = multiplier.median_interval
    if isinf(multiplier.median) and not low <= 1:
        return "better"  # the reference never reaches the loss
    if isnan(low) or isnan(high) or low <= 1 <= high:
        return "alike"
    return "better" if low > 1 else "worse"


def facts(analysis: Analysis) -> list[str]:
    """What was run, as short facts."""
    runs = analysis.gathered.runs
    states = Counter(run.state for run in runs)
    named = [f"{states[state]:,} {state}" for state in get_args(RunState) if states[state]]
    found = [f"{counted(len(runs), 'run')}: {', '.join(named)}"]
    tasks = [task for task in analysis.gathered.tasks if task]
    widths = sorted({run.width for run in runs if run.width is not None})
    found += [f"{'task' if len(tasks) == 1 else 'tasks'}: {listed(tasks)}"] if tasks else []
    if widths:
        found.append(f"widths {widths[0]} to {widths[-1]}" if widths[1:] else f"width {widths[0]}")
    found.append(counted(len({run.seed for run in runs}), "seed"))
    flops = sum(run.total("flops") for run in runs)
    seconds = sum(run.total("seconds") for run in runs)
    found += [f"{short(flops)} FLOPs"] if flops else []
    found += [f"{duration(seconds)} in training steps"] if seconds else []
    return found


def _headline(analysis: Analysis) -> str:
    main, reference = analysis.main, analysis.reference
    if main is None or reference is None:
        runs = analysis.gathered.runs
        if analysis.gathered.problems and all(run.state == "unreadable" for run in runs):
            return "No run could be read, so there are no conclusions; see below."
        return "No run has a result yet, so there are no conclusions."
    if len(main.data.structures) == 1:
        return (
            f"Only {code(main.data.structures[0])} has results, so there is nothing to compare it "
            f"with. {_lowest(main)}"
        )
    known = {n: m for n, m in main.multipliers.items() if not isnan(m.median)}
    if not known:
        return f"There are not enough runs to compare structures. {_lowest(main)}"
    better = [name for name, m in known.items() if verdict(m) == "better"]
    alike = [name for name, m in known.items() if verdict(m) == "alike"]
    if not better and alike:
        return _undecided({name: known[name] for name in alike}) + _doubts(analysis, alike)
    if not better:
        doubts = _doubts(analysis, known)
        return f"{code(reference)} needs the least compute to reach a given loss.{doubts}"
    return _praise(analysis, known, max(better, key=lambda name: known[name].median))


def _undecided(alike: dict[str, Multiplier]) -> str:
    """Say that no structure beats the reference, or at which losses each one does."""
    reference = code(next(iter(alike.values())).reference)
    turns = {name: turn for name, m in alike.items() if (turn := crossing(m)) is not None}
    same = [name for name in alike if name not in turns]
    parts = [f"{code(name)} needs {_turns(turn)}" for name, turn in turns.items()]
    if same:
        parts.append(f"{codes(same)} cannot be distinguished from it")
    where = " at every loss" if turns else ""
    return f"No structure clearly needs less compute than {reference}{where}: {'; '.join(parts)}."


def _turns(turn: Crossing) -> str:
    less, more = ("above", "below") if turn.is_better_above else ("below", "above")
    return f"less {less} loss {short(turn.loss)} and more {more} it"


def _measured_part(found: Multiplier) -> Floats:
    """Losses, multipliers and intervals where both laws have points, by rising loss."""
    inside = ~found.is_extrapolated & np.isfinite(found.values) & (found.values > 0)
    columns = np.array([found.losses, found.values, found.low, found.high])[:, inside]
    return columns[:, np.argsort(columns[0])]


def crossing(found: Multiplier) -> Crossing | None:
    """Where two laws cross, if each is clearly better on one side."""
    losses, values, low, high = _measured_part(found)
    better, worse = losses[low > 1], losses[high < 1]
    if not len(better) or not len(worse):
        return None
    is_above = bool(better.min() > worse.max())
    if not is_above and not better.max() < worse.min():
        return None
    sign = 1 if is_above else -1  # np.interp needs increasing values
    loss = np.interp(0.0, np.log(values)[::sign], np.log(losses)[::sign])
    return Crossing(float(np.exp(loss)), is_above)


def _praise(analysis: Analysis, known: dict[str, Multiplier], best: str) -> str:
    """Name the structure that needs the least compute, and those that may be as good."""
    mine = known[best]
    if isinf(mine.median):
        return _unreached(analysis, known)
    text = (
        f"{code(best)} needs the least compute to reach a given loss: {code(mine.reference)} needs "
        f"{short(mine.median)} times as much ({level(analysis)} {between(mine.median_interval)})."
    )
    if mine.mean_is_extrapolated:
        text += " This is extrapolated: their losses do not overlap."
    low = mine.median_interval[0]
    rivals = [n for n, m in known.items() if n != best and not m.median_interval[1] < low]
    if rivals:
        text += f" {codes(rivals)} may be as good: the intervals overlap."
    return text + _doubts(analysis, [best])


def _unreached(analysis: Analysis, known: dict[str, Multiplier]) -> str:
    """Name the structures whose losses the law of the reference never reaches."""
    names = [n for n, m in known.items() if isinf(m.median) and verdict(m) == "better"]
    text = (
        f"{codes(names)} {'reaches' if len(names) == 1 else 'reach'} losses that "
        f"{code(known[names[0]].reference)}, by its law, never reaches with any amount of compute."
    )
    return text + _doubts(analysis, names)


def _doubts(analysis: Analysis, names: Collection[str]) -> str:
    """Warn if the frontiers or laws of these structures or the reference are unreliable."""
    about = {analysis.reference or "", *names}
    are_early = any(ends.are_early for ends in analysis.ends if ends.structure in about)
    why = ["runs ended early"] if are_early and not has_single_points(analysis) else []
    main = analysis.main
    rows = [] if main is None else [main.laws[name] for name in about if name in main.laws]
    laws = [row.law for row in rows if row.law is not None]
    if any(map(is_wrong, laws)):
        why.append("the points do not follow the laws")
    elif any(law.at_bound == "lowest loss" for law in laws):
        why.append("L∞ is at its bound")
    if why:
        return f" However, {listed(why)}, so this may be far off; see below."
    if main is not None and set(few_sizes(main)) & about:
        why.append("there are few sizes")
    if has_one_seed(analysis):
        why.append("each setting has only one seed")
    return f" However, {listed(why)}, so intervals are unreliable; see below." if why else ""


def _lowest(main: Measured) -> str:
    place = int(main.data.loss.argmin())
    loss, name = float(main.data.loss[place]), str(main.data.structure[place])
    return f"The lowest loss is {short(loss, 4)}, reached by {code(name)}."


def _results(analysis: Analysis) -> list[str]:
    main = analysis.main
    if main is None:
        return []
    names = [name for name in analysis.structures if name in main.multipliers]
    return [*(_result(analysis, main, name) for name in names), *_exponents(analysis, main)]


def _result(analysis: Analysis, main: Measured, name: str) -> str:
    """The multiplier of one structure, by compute and by seconds."""
    found = main.multipliers[name]
    reference, kind = code(found.reference), verdict(found)
    if isnan(found.median):
        return f"{code(name)} never reaches the losses of {reference}, so it has no multiplier."
    if isinf(found.median):
        return f"{code(name)}: by its law, {reference} never reaches the same losses."
    ends = between(found.median_interval)
    interval = f"{level(analysis)} {ends}" if ends else "no interval"
    numbers = f"multiplier {short(found.median)}, {interval}"
    if kind == "better":
        text = f"{code(name)}: {reference} needs {short(found.median)} times as much compute"
        numbers = interval
    elif kind == "worse":
        text = f"{code(name)} needs {short(1 / found.median)} times the compute of {reference}"
    elif (turn := crossing(found)) is not None:
        text = f"{code(name)} needs {_turns(turn)}, compared with {reference} by compute"
    else:
        text = f"{code(name)} cannot be distinguished from {reference} by compute"
    text += f" ({numbers})"
    if found.mean_is_extrapolated:
        text += ", extrapolated because their losses do not overlap"
    return text + _by_seconds(analysis, name, kind) + "." + _trend(found)


def _trend(found: Multiplier) -> str:
    """How the multiplier changes over the losses that both have reached, if it changes much."""
    losses, values, _, _ = _measured_part(found).tolist()
    if not losses or 1 / _STEEP < values[0] / values[-1] < _STEEP:
        return ""
    (low, *_, high), (last, *_, first) = losses, values
    return (
        f" By the two laws, the multiplier {'falls' if last < first else 'rises'} from "
        f"{short(first)} at loss {short(high)} to {short(last)} at loss {short(low)}."
    )


def _by_seconds(analysis: Analysis, name: str, kind: Verdict) -> str:
    seconds = analysis.measured.get("seconds")
    found = None if seconds is None else seconds.multipliers.get(name)
    if found is None or isnan(found.median):
        return ""
    numbers = f"{short(found.median)}, {between(found.median_interval) or 'no interval'}"
    if isinf(found.median):
        numbers = "the reference never reaches the same losses"
    now = verdict(found)
    by = "in seconds," if now == kind else "in seconds, however,"
    return f"; {by} {_TIMES[now]} ({numbers})"


def _exponents(analysis: Analysis, main: Measured) -> Iterator[str]:
    """How fast losses fall with compute compared with the reference, where that is measured."""
    laws = {n: row.law for n, row in main.laws.items() if row.law is not None}
    here = laws.get(analysis.reference or "")
    if here is None or len(laws) < 2:
        return
    sound = {n: law for n, law in laws.items() if not law.at_bound and not is_wrong(law)}
    others = [n for n in analysis.structures if n in sound and laws[n] is not here]
    if here.structure not in sound or not others:
        yield (
            "The exponents cannot be compared: the points do not follow the laws, or L∞ is at its "
            "bound."
        )
        return
    apart = {name: compare_exponents(sound[name], here) for name in others}
    ours = f"{short(here.a)} ({level(analysis)} {between(here.a_interval) or 'unknown'})"
    by = "With a shared L∞, the" if main.is_shared else "The"
    for way, word in ((1, "faster"), (-1, "more slowly")):
        names = [name for name in others if apart[name] == way]
        doubted = [name for name in names if main.is_shared and main.own_order.get(name) != way]
        names = [name for name in names if name not in doubted]
        if names:
            values = listed([f"{short(laws[n].a)} ({between(laws[n].a_interval)})" for n in names])
            yield (
                f"{by} loss of {codes(names)} falls {word} with compute than that of "
                f"{code(here.structure)}: exponent {values} against {ours}."
            )
        if doubted:
            yield (
                f"Whether the loss of {codes(doubted)} falls {word} with compute than that of "
                f"{code(here.structure)} is unclear: it does with a shared L∞, but not if each "
                "structure has its own."
            )
    if not any(apart.values()):
        found = [law.a for law in sound.values()]
        yield (
            f"The exponents cannot be distinguished: they range from {short(min(found))} to "
            f"{short(max(found))}, and that of {code(here.structure)} is {ours}."
        )
