"""What the runs of a report cannot say, in sentences; names of structures stand in backquotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite

from einlinear.studies.fit import PowerLaw, is_overshot, is_undercut, percent
from einlinear.studies.numbers import between, count, listed, short
from einlinear.studies.reports.analyse import MISFIT, Analysis, Measured

_FEW_SIZES = 7  # below so many sizes intervals without the ends of a frontier are too narrow
NAMED = 3  # files that could not be read, in the terminal
_WIDE = 0.2  # an interval of linf that is so wide, as a share of the lowest loss, says little


def code(name: str) -> str:
    """A name in backquotes."""
    return f"`{name}`"


def codes(names: list[str]) -> str:
    """Names in backquotes, as a sentence has them."""
    return listed([code(name) for name in names])


def level(analysis: Analysis) -> str:
    """What an interval is called."""
    return f"{100 * analysis.settings.level:.3g} % interval"


def cautions(analysis: Analysis) -> Iterator[str]:
    """All of them, about the runs first, then about what is made of them."""
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
                f"There is no dense run. The reference is {code(analysis.reference)}, which has "
                "the most runs; --reference names another."
            )
    diverged = [run for run in runs if run.state == "diverged"]
    if diverged:
        names = Counter(run.structure for run in diverged)
        which = listed([f"{number} of {code(name)}" for name, number in names.items()])
        yield f"{count(len(diverged), 'run')} diverged ({which}); points before that count."
    for state, words in (
        ("failed", "failed"),
        ("running", "under way"),
        ("stopped", "stopped"),
        ("unreadable", "with a record that cannot be read"),
    ):
        number = sum(run.state == state for run in runs)
        if number:
            them = "it" if number == 1 else "them"
            yield f"{count(number, 'run')} {words}: no fit counts {them}."
    for name in ("device", "processor", "threads"):
        found = {str(run.environment[name]) for run in runs if name in run.environment}
        if len(found) > 1:
            yield f"The runs differ in their {name}, so their seconds may not compare."
    problems = analysis.gathered.problems
    for path, why in problems[:NAMED]:
        yield f"{code(path)}: {why.rstrip('.')}."
    if problems[NAMED:]:
        yield f"{count(len(problems) - NAMED, 'more file')} could not be read; the page names all."
    if has_one_seed(analysis):
        yield "Every setting has one seed: frontiers are made of lucky runs, intervals too narrow."


def has_one_seed(analysis: Analysis) -> bool:
    """Whether no setting was run with two seeds."""
    groups = Counter((run.structure, run.group) for run in analysis.runs if run.has_result)
    return bool(groups) and max(groups.values()) == 1


def few_sizes(main: Measured) -> dict[str, int]:
    """How many sizes structures have of which there are few."""
    sizes = {name: len(set(main.data.of(name).size.tolist())) for name in main.data.structures}
    return {name: number for name, number in sizes.items() if number < _FEW_SIZES}


def has_single_points(analysis: Analysis) -> bool:
    """Whether no run has two points, so that how runs ended is not known."""
    runs = [run for run in analysis.runs if run.has_result]
    return all(sum(point.loss is not None for point in run.curve) < 2 for run in runs)


def _about_ends(analysis: Analysis) -> Iterator[str]:
    if has_single_points(analysis):
        yield "Every run has one point, so whether runs were long enough cannot be checked."
        return
    capped = [ends for ends in analysis.ends if ends.are_early]
    if capped:
        which = listed([f"{code(e.structure)} ({e.early} of {e.sizes})" for e in capped])
        yield (
            f"The frontier of {which} is made of ends of runs: these sizes stopped while no other "
            "had overtaken them. Longer runs would move the frontier, so multipliers may be far "
            "off; a cap on steps can double them."
        )


def _about_range(main: Measured) -> Iterator[str]:
    narrow = [r.structure for r in main.laws.values() if r.law is not None and r.law.decades < 1]
    if narrow:
        yield (
            f"The points of {codes(narrow)} span less than one decade of compute: laws say little "
            "beyond it."
        )
    few = few_sizes(main)
    if few and main.multipliers:
        which = listed([f"{code(name)} ({number})" for name, number in few.items()])
        yield f"There are few sizes of {which}: with fewer than seven, intervals mislead."
    laws = [row.law for row in main.laws.values() if row.law is not None]
    systematic = [law for law in laws if law.is_systematic]
    if systematic:
        parts = [f"{code(law.structure)} ({percent_thirds(law)})" for law in systematic]
        yield (
            "Points are off their laws at both ends or between them, by more than their noise: "
            f"{listed(parts)} in the first, middle and last third. They do not follow a power law "
            "with this linf, and intervals do not tell."
        )
    below = [law for law in laws if is_undercut(law)]
    if below:
        parts = [f"{code(law.structure)} by up to {-percent(-law.undercut):.2g} %" for law in below]
        yield (
            f"Losses were reached that are below the law: of {listed(parts)}. It cannot hold there."
        )
    above = [law for law in laws if is_overshot(law)]
    if above:
        parts = [f"{code(law.structure)} by up to {percent(law.overshoot):.2g} %" for law in above]
        yield (
            f"Beyond the points of the fit, losses stay above the law: of {listed(parts)}. It does "
            "not hold there."
        )
    for law in laws:
        if law.stray:
            yield (
                f"Run {code(law.stray)} is far below the law of {code(law.structure)} and what its "
                "other runs have reached: check it. No bound of linf counts it."
            )
    bent = {law.structure: law.rms for law in laws if law.rms > MISFIT and law not in systematic}
    if bent:
        which = listed([f"{code(name)} by {100 * rms:.2g} %" for name, rms in bent.items()])
        yield (
            f"Laws miss the points they are fitted to: that of {which} (rms). Such points do not "
            "follow a power law, and intervals do not tell."
        )
    missing = [row for row in main.laws.values() if row.law is None]
    for row in missing:
        yield f"{code(row.structure)} has no law: {row.note}."


def _about_linf(analysis: Analysis, main: Measured) -> Iterator[str]:
    laws = [row.law for row in main.laws.values() if row.law is not None]
    if not laws:
        return
    if isinstance(analysis.settings.linf, float | int):
        yield f"linf was given as {short(analysis.settings.linf)}; the laws hold for that value."
    else:
        lowest = float(main.data.loss.min())
        yield from _about_bounds(laws)
        unsure = [a for a in laws if not a.linf_interval[1] - a.linf_interval[0] <= _WIDE * lowest]
        if unsure:
            ends = between(unsure[0].linf_interval) or "unknown"
            yield f"The data do not say what linf is ({level(analysis)} {ends})."
    turning = _turning(analysis)
    if turning:
        yield (
            f"Whether {codes(turning)} {'needs' if len(turning) == 1 else 'need'} less compute "
            f"than {code(analysis.reference or '')} changes with linf, among values that fit "
            "about as well."
        )


def _about_bounds(laws: list[PowerLaw]) -> Iterator[str]:
    """Which linf are not measured because they sit on a bound."""
    high = [law for law in laws if law.at_bound == "lowest loss"]
    if high:
        yield (
            f"The fit puts linf of {codes([law.structure for law in high])} on its upper bound, "
            f"the lowest loss observed ({short(high[0].linf, 5)}): the points flatten more than a "
            "power law does, or that loss was luck. Neither linf nor the exponent is measured."
        )
    zero = [law.structure for law in laws if law.at_bound == "zero"]
    if zero:
        yield (
            f"The fit puts linf of {codes(zero)} on its lower bound, 0: over this range the "
            "points show no limit."
        )


def percent_thirds(law: PowerLaw) -> str:
    """The mean residuals in the three thirds of the points of a law."""
    return ", ".join(f"{percent(value):+.1f} %" for value in law.thirds)


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
