"""What the numbers say, in sentences; names of structures stand in backquotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import isfinite, isinf, isnan
from typing import Literal, get_args

from einlinear.studies.multiplier import Multiplier
from einlinear.studies.numbers import amount, between, count, duration, listed, short
from einlinear.studies.reports.analyse import Analysis, Measured
from einlinear.studies.reports.shown import State

Verdict = Literal["better", "worse", "alike"]

_FEW_SIZES = 7  # below so many sizes intervals without the ends of a frontier are too narrow
_MISFIT = 0.02  # of a law, in log loss; noise of seeds is a tenth to a half of it
_STEEP = 1.3  # a multiplier that changes so much over the losses is not one number
_WIDE = 0.2  # an interval of linf that is so wide, as a share of the lowest loss, says little


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
        cautions=tuple(_cautions(analysis)),
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
    macs = sum(run.spent("macs") for run in runs)
    seconds = sum(run.spent("seconds") for run in runs)
    found += [f"{amount(macs)} multiply-adds"] if macs else []
    found += [f"{duration(seconds)} in training steps"] if seconds else []
    return found


def _code(name: str) -> str:
    return f"`{name}`"


def _codes(names: list[str]) -> str:
    return listed([_code(name) for name in names])


def _level(analysis: Analysis) -> str:
    return f"{100 * analysis.settings.level:.3g} % interval"


def _headline(analysis: Analysis) -> str:
    main, reference = analysis.main, analysis.reference
    if main is None or reference is None:
        return "No run has come to a result yet, so there is nothing to conclude."
    if len(main.data.structures) == 1:
        return (
            f"Only {_code(main.data.structures[0])} has results: there is nothing to compare it "
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
            f"No structure was shown to need less compute than {_code(reference)}: "
            f"{_codes(alike)} {is_are}."
        )
    if not better:
        return f"{_code(reference)} needs the least compute for a loss.{_early(analysis, known)}"
    return _praise(analysis, known, max(better, key=lambda name: known[name].median))


def _praise(analysis: Analysis, known: dict[str, Multiplier], best: str) -> str:
    """The structure that needs least, and those that may be as good."""
    mine = known[best]
    text = (
        f"{_code(best)} needs the least compute for a loss: {_code(mine.reference)} needs "
        f"{short(mine.median)} times as much ({_level(analysis)} {between(mine.median_interval)})."
    )
    if mine.mean_is_extrapolated:
        text += " That is extrapolated: the two have no losses in common."
    low = mine.median_interval[0]
    rivals = [n for n, m in known.items() if n != best and not m.median_interval[1] < low]
    if rivals:
        text += f" {_codes(rivals)} may be as good: the intervals overlap."
    return text + _early(analysis, [best])


def _early(analysis: Analysis, names: Collection[str]) -> str:
    """A warning if frontiers of these or of the reference are made of ends of runs."""
    about = {analysis.reference, *names}
    are_early = any(ends.are_early for ends in analysis.ends if ends.structure in about)
    if not are_early or _has_single_points(analysis):
        return ""
    return " But runs ended early, so this may be far off: see below."


def _lowest(main: Measured) -> str:
    place = int(main.data.loss.argmin())
    loss, name = float(main.data.loss[place]), str(main.data.structure[place])
    return f"The lowest loss is {short(loss, 4)}, of {_code(name)}."


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
    reference, kind = _code(found.reference), verdict(found)
    if isnan(found.median):
        return f"{_code(name)} never reaches losses of {reference}, so it has no multiplier."
    if isinf(found.median):
        return f"{_code(name)}: {reference} never reaches its losses, by its law."
    ends = between(found.median_interval)
    interval = f"{_level(analysis)} {ends}" if ends else "no interval"
    numbers = f"multiplier {short(found.median)}, {interval}"
    if kind == "better":
        text = f"{_code(name)}: {reference} needs {short(found.median)} times its compute"
        numbers = interval
    elif kind == "worse":
        text = f"{_code(name)} needs {short(1 / found.median)} times the compute of {reference}"
    else:
        text = f"{_code(name)} cannot be told apart from {reference} by compute"
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
    ours = f"{short(here.a)}, {_level(analysis)} {between(here.a_interval) or 'unknown'}"
    for names, word in ((faster, "faster"), (slower, "more slowly")):
        if names:
            values = listed([f"{short(laws[n].a)} ({between(laws[n].a_interval)})" for n in names])
            yield (
                f"The loss of {_codes(names)} falls {word} with compute than that of "
                f"{_code(here.structure)}: exponent {values}, not {ours}."
            )
    if not faster and not slower:
        yield (
            f"The exponents cannot be told apart: {short(min(law.a for law in laws.values()))} to "
            f"{short(max(law.a for law in laws.values()))}, {_code(here.structure)} has {ours}."
        )


def _cautions(analysis: Analysis) -> Iterator[str]:
    yield from _about_runs(analysis)
    main = analysis.main
    if main is None:
        return
    yield from _about_ends(analysis)
    yield from _about_range(main)
    yield from _about_linf(analysis, main)


def _about_runs(analysis: Analysis) -> Iterator[str]:
    runs, everything = analysis.runs, analysis.gathered.runs
    other = Counter(run.task for run in everything if run.task != analysis.task)
    for task, number in other.items():
        yield f"{count(number, 'run')} of the task {task} not counted here: losses of tasks differ."
    elsewhere = len(everything) - len(runs) - other.total()
    if elsewhere:
        yield (
            f"{count(elsewhere, 'run')} on other data not counted here: losses do not compare. "
            "A folder with those alone has a report of its own."
        )
    if analysis.reference is not None and analysis.settings.reference is None:
        if analysis.reference != "dense" and len(analysis.structures) > 1:
            yield (
                f"There is no dense run. The reference is {_code(analysis.reference)}, which has "
                "the most runs; --reference names another."
            )
    diverged = [run for run in runs if run.state == "diverged"]
    if diverged:
        names = Counter(run.structure for run in diverged)
        which = listed([f"{number} of {_code(name)}" for name, number in names.items()])
        yield f"{count(len(diverged), 'run')} diverged ({which}); points before that count."
    for state, words in (("failed", "failed"), ("running", "under way"), ("stopped", "stopped")):
        number = sum(run.state == state for run in runs)
        if number:
            them = "it" if number == 1 else "them"
            yield f"{count(number, 'run')} {words}: no fit counts {them}."
    for name in ("device", "processor", "threads"):
        found = {str(run.environment[name]) for run in runs if name in run.environment}
        if len(found) > 1:
            yield f"The runs differ in their {name}, so their seconds may not compare."
    groups = Counter((run.structure, run.group) for run in runs if run.has_result)
    if groups and max(groups.values()) == 1:
        yield "Every setting has one seed: frontiers are made of lucky runs, intervals too narrow."


def _has_single_points(analysis: Analysis) -> bool:
    """Whether no run has two points, so that how runs ended is not known."""
    runs = [run for run in analysis.runs if run.has_result]
    return all(sum(point.loss is not None for point in run.curve) < 2 for run in runs)


def _about_ends(analysis: Analysis) -> Iterator[str]:
    if _has_single_points(analysis):
        yield "Every run has one point, so whether runs were long enough cannot be checked."
        return
    capped = [ends for ends in analysis.ends if ends.are_early]
    if capped:
        which = listed([f"{_code(e.structure)} ({e.early} of {e.sizes})" for e in capped])
        yield (
            f"The frontier of {which} is made of ends of runs: these sizes stopped while no other "
            "had overtaken them. Longer runs would move the frontier, so multipliers may be far "
            "off; a cap on steps can double them."
        )


def _about_range(main: Measured) -> Iterator[str]:
    narrow = [r.structure for r in main.laws.values() if r.law is not None and r.law.decades < 1]
    if narrow:
        yield (
            f"The points of {_codes(narrow)} span less than one decade of compute: laws say little "
            "beyond it."
        )
    sizes = {name: len(set(main.data.of(name).size.tolist())) for name in main.data.structures}
    few = [name for name, number in sizes.items() if number < _FEW_SIZES]
    if few and main.multipliers:
        which = listed([f"{_code(name)} ({sizes[name]})" for name in few])
        yield f"There are few sizes of {which}: with fewer than seven, intervals mislead."
    bent = {r.structure: r.law.rms for r in main.laws.values() if r.law and r.law.rms > _MISFIT}
    if bent:
        which = listed([f"{_code(name)} by {100 * rms:.2g} %" for name, rms in bent.items()])
        yield (
            f"Laws miss the points they are fitted to: that of {which} (rms). Such points do not "
            "follow a power law, and intervals do not tell."
        )
    missing = [row for row in main.laws.values() if row.law is None]
    for row in missing:
        yield f"{_code(row.structure)} has no law: {row.note}."


def _about_linf(analysis: Analysis, main: Measured) -> Iterator[str]:
    laws = [row.law for row in main.laws.values() if row.law is not None]
    if not laws:
        return
    if isinstance(analysis.settings.linf, float | int):
        yield f"linf was given as {short(analysis.settings.linf)}; the laws hold for that value."
    else:
        lowest = float(main.data.loss.min())
        unsure = [a for a in laws if not a.linf_interval[1] - a.linf_interval[0] <= _WIDE * lowest]
        if unsure:
            ends = between(unsure[0].linf_interval) or "unknown"
            yield f"The data do not say what linf is ({_level(analysis)} {ends})."
    turning = _turning(analysis)
    if turning:
        yield (
            f"Whether {_codes(turning)} {'needs' if len(turning) == 1 else 'need'} less compute "
            f"than {_code(analysis.reference or '')} changes with linf, among values that fit "
            "about as well."
        )


def _turning(analysis: Analysis) -> list[str]:
    """Structures whose multiplier is above 1 at one linf and below at another that fits alike."""
    total: dict[float, float] = {}
    for row in analysis.linf_rows:
        total[row.linf] = total.get(row.linf, 0.0) + row.rms**2
    near = {linf for linf, cost in total.items() if cost <= 2 * min(total.values())}
    found = []
    for name in analysis.structures:
        values = [
            r.multiplier for r in analysis.linf_rows if r.structure == name and r.linf in near
        ]
        known = [value for value in values if isfinite(value)]
        if known and min(known) < 1 / 1.1 and max(known) > 1.1:
            found.append(name)
    return found
