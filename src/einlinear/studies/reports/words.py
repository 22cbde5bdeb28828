"""What the numbers say, in sentences; names of structures stand in backquotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isfinite, isinf, isnan
from typing import Literal, get_args

from einlinear.studies.multiplier import Multiplier
from einlinear.studies.numbers import between, count, duration, listed, short
from einlinear.studies.reports.analyse import Analysis, Measured, is_wrong
from einlinear.studies.reports.cautions import cautions, code, codes, has_single_points, level
from einlinear.studies.reports.shown import State

Verdict = Literal["better", "worse", "alike"]

_STEEP = 1.3  # a multiplier that changes so much over the losses is not one number


@dataclass(frozen=True, slots=True)
class Words:
    """The conclusion, what it rests on, and what the data cannot say."""

    headline: str
    results: tuple[str, ...]
    cautions: tuple[str, ...]


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
        return "No run has come to a result yet, so there is nothing to conclude."
    if len(main.data.structures) == 1:
        return (
            f"Only {code(main.data.structures[0])} has results: there is nothing to compare it "
            f"with. {_lowest(main)}"
        )
    known = {n: m for n, m in main.multipliers.items() if isfinite(m.median)}
    if not known:
        return f"The runs do not suffice to compare structures. {_lowest(main)}"
    better = [name for name, m in known.items() if verdict(m) == "better"]
    alike = [name for name, m in known.items() if verdict(m) == "alike"]
    if not better and alike:
        is_are = "cannot be told apart from it"
        return (
            f"No structure was shown to need less compute than {code(reference)}: "
            f"{codes(alike)} {is_are}."
        )
    if not better:
        return f"{code(reference)} needs the least compute for a loss.{_early(analysis, known)}"
    return _praise(analysis, known, max(better, key=lambda name: known[name].median))


def _praise(analysis: Analysis, known: dict[str, Multiplier], best: str) -> str:
    """The structure that needs least, and those that may be as good."""
    mine = known[best]
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
    return text + _early(analysis, [best])


def _early(analysis: Analysis, names: Collection[str]) -> str:
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
    return f" But {' and '.join(why)}, so this may be far off: see below." if why else ""


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
    else:
        text = f"{code(name)} cannot be told apart from {reference} by compute"
    text += f" ({numbers})"
    if found.mean_is_extrapolated:
        text += ", extrapolated: the two have no losses in common"
    return text + _by_seconds(analysis, name, kind) + "." + _trend(found)


def _trend(found: Multiplier) -> str:
    """How the multiplier changes over the losses that both have reached, if it does much."""
    inside = ~found.is_extrapolated & (found.values > 0)
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
    says = {
        "better": "it needs less time",
        "worse": "it needs more time",
        "alike": "the two cannot be told apart",
    }
    now = verdict(found)
    by = "by seconds" if now == kind else "by seconds, however,"
    return f"; {by} {says[now]} ({numbers})"


def _exponents(analysis: Analysis, main: Measured) -> Iterator[str]:
    """How fast losses fall with compute, against the reference."""
    laws = {n: row.law for n, row in main.laws.items() if row.law is not None}
    here = laws.get(analysis.reference or "")
    others = [laws[name] for name in analysis.structures if name in laws and laws[name] is not here]
    if here is None or not others:
        return
    low, high = here.a_interval
    faster = [law.structure for law in others if law.a_interval[0] > high]
    slower = [law.structure for law in others if law.a_interval[1] < low]
    ours = f"{short(here.a)}, {level(analysis)} {between(here.a_interval) or 'unknown'}"
    for names, word in ((faster, "faster"), (slower, "more slowly")):
        if names:
            values = listed([f"{short(laws[n].a)} ({between(laws[n].a_interval)})" for n in names])
            yield (
                f"The loss of {codes(names)} falls {word} with compute than that of "
                f"{code(here.structure)}: exponent {values}, not {ours}."
            )
    if not faster and not slower:
        yield (
            f"The exponents cannot be told apart: {short(min(law.a for law in laws.values()))} to "
            f"{short(max(law.a for law in laws.values()))}, {code(here.structure)} has {ours}."
        )
