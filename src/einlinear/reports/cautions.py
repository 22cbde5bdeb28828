"""Sentences about what the runs cannot show; names of structures are in backquotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import isfinite

from einlinear.laws.fit import PowerLaw, is_overshot, is_undercut, percent_of_loss, percent_thirds
from einlinear.reports.analyse import MISFIT, Analysis, Measured
from einlinear.show.numbers import between, counted, listed, short

MOST_NAMED = 3  # unreadable files that the terminal names
_FEW_SIZES = 7  # with fewer sizes, intervals without the ends of a frontier are too narrow
_WIDE = 0.2  # an interval of linf wider than this share of the lowest loss says little
_DIFFERENT = {"device": "devices", "processor": "processors", "threads": "numbers of threads"}


def code(name: str) -> str:
    """A name in backquotes."""
    return f"`{name}`"


def codes(names: list[str]) -> str:
    """Names in backquotes, listed as in a sentence."""
    return listed([code(name) for name in names])


def level(analysis: Analysis) -> str:
    """The name of an interval."""
    return f"{100 * analysis.settings.level:.3g} % interval"


def cautions(analysis: Analysis) -> Iterator[str]:
    """All cautions: about the runs first, then about the results."""
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
        yield (
            f"Not included: {counted(number, 'run')} of the task {task}. Losses of different tasks "
            "cannot be compared."
        )
    elsewhere = len(everything) - len(runs) - other.total()
    if elsewhere:
        yield (
            f"Not included: {counted(elsewhere, 'run')} on other data. Losses on different data "
            "cannot be compared; move those runs to another folder to get a report on them."
        )
    if analysis.reference is not None and analysis.settings.reference is None:
        if analysis.reference != "dense" and len(analysis.structures) > 1:
            yield (
                f"There is no dense run, so the reference is {code(analysis.reference)}, which has "
                "the most runs; choose another with --reference."
            )
    diverged = [run for run in runs if run.state == "diverged"]
    if diverged:
        names = Counter(run.structure for run in diverged)
        which = listed([f"{number} of {code(name)}" for name, number in names.items()])
        amount = counted(len(diverged), "run")
        yield f"{amount} diverged ({which}); fits use the points before that."
    for state, words in (
        ("failed", "failed"),
        ("running", "still running"),
        ("stopped", "stopped early"),
        ("unreadable", "with an unreadable record"),
    ):
        number = sum(run.state == state for run in runs)
        if number:
            yield f"{counted(number, 'run')} {words}: not used in fits."
    for name, what in _DIFFERENT.items():
        found = {str(run.environment[name]) for run in runs if name in run.environment}
        if len(found) > 1 and analysis.gathered.times is None:
            yield f"The runs used different {what}, so their seconds may not be comparable."
    problems = analysis.gathered.problems
    for path, why in problems[:MOST_NAMED]:
        yield f"{code(path)}: {why.rstrip('.')}."
    if problems[MOST_NAMED:]:
        more = counted(len(problems) - MOST_NAMED, "more file")
        yield f"{more} could not be read; the page lists all of them."
    if has_one_seed(analysis):
        yield (
            "Each setting has only one seed: the frontier consists of lucky runs, and intervals "
            "are too narrow."
        )


def has_one_seed(analysis: Analysis) -> bool:
    """Whether no setting has two seeds."""
    groups = Counter((run.structure, run.group) for run in analysis.runs if run.has_result)
    return bool(groups) and max(groups.values()) == 1


def few_sizes(main: Measured) -> dict[str, int]:
    """The number of sizes of each structure that has only a few."""
    sizes = {name: len(set(main.data.of(name).size.tolist())) for name in main.data.structures}
    return {name: number for name, number in sizes.items() if number < _FEW_SIZES}


def has_single_points(analysis: Analysis) -> bool:
    """Whether no run has two points, so that it is unknown how runs ended."""
    runs = [run for run in analysis.runs if run.has_result]
    return all(sum(point.loss is not None for point in run.curve) < 2 for run in runs)


def _about_ends(analysis: Analysis) -> Iterator[str]:
    if has_single_points(analysis):
        yield "Each run has only one point, so nothing shows whether runs were long enough."
        return
    capped = [ends for ends in analysis.ends if ends.are_early]
    if capped:
        which = _each({e.structure: f"({e.early} of {e.sizes})" for e in capped})
        yield (
            f"The frontier of {which} consists of ends of runs: these sizes stopped before another "
            "size overtook them. Longer runs would move the frontier, so multipliers may be far "
            "off; a cap on steps can double them."
        )


def _each(texts: Mapping[str, str]) -> str:
    """Structures in backquotes, each with a text about it, listed as in a sentence."""
    return listed([f"{code(name)} {text}" for name, text in texts.items()])


def _about_range(main: Measured) -> Iterator[str]:
    laws = [row.law for row in main.laws.values() if row.law is not None]
    narrow = [law.structure for law in laws if law.decades < 1]
    if narrow:
        yield (
            f"The points of {codes(narrow)} span less than one decade of compute; do not rely on "
            "the laws beyond it."
        )
    few = {name: f"({number})" for name, number in few_sizes(main).items()}
    if few and main.multipliers:
        yield (
            f"There are few model sizes of {_each(few)}: with fewer than {_FEW_SIZES}, intervals "
            "are unreliable."
        )
    bent = {law.structure: f"({percent_thirds(law)})" for law in laws if law.is_systematic}
    if bent:
        yield (
            "Points are off their law at both ends or in the middle, by more than noise explains: "
            f"{_each(bent)} in the first, middle and last third. They do not follow a power law "
            "with this L∞, and the intervals do not show that."
        )
    below = {law.structure: -percent_of_loss(-law.undercut) for law in laws if is_undercut(law)}
    if below:
        which = _each({name: f"by up to {most:.2g} %" for name, most in below.items()})
        yield f"Some losses are below the law: those of {which}. The law cannot hold there."
    above = {law.structure: percent_of_loss(law.overshoot) for law in laws if is_overshot(law)}
    if above:
        which = _each({name: f"by up to {most:.2g} %" for name, most in above.items()})
        yield (
            f"Beyond the fitted points, losses stay above the law: those of {which}. The law does "
            "not hold there."
        )
    for law in laws:
        if law.stray:
            yield (
                f"Run {code(law.stray)} is far below the law of {code(law.structure)} and below "
                "all other runs: check it. The bounds of L∞ ignore it."
            )
    off = {a.structure: f"by {100 * a.rms:.2g} %" for a in laws if a.rms > MISFIT}
    off = {name: text for name, text in off.items() if name not in bent}
    if off:
        yield (
            f"Laws miss the points they are fitted to: that of {_each(off)} (rms). These points do "
            "not follow a power law, and the intervals do not show that."
        )
    for row in main.laws.values():
        if row.law is None:
            yield f"There is no law for {code(row.structure)}: {row.note}."


def _about_linf(analysis: Analysis, main: Measured) -> Iterator[str]:
    laws = [row.law for row in main.laws.values() if row.law is not None]
    if not laws:
        return
    if isinstance(analysis.settings.linf, float | int):
        yield f"L∞ was set to {short(analysis.settings.linf)}; the laws hold for that value."
    else:
        lowest = float(main.data.loss.min())
        yield from _about_bounds(laws)
        unsure = [a for a in laws if not a.linf_interval[1] - a.linf_interval[0] <= _WIDE * lowest]
        if unsure:
            ends = between(unsure[0].linf_interval) or "unknown"
            yield f"The data do not determine L∞ ({level(analysis)} {ends})."
    turning = _turning(analysis)
    if turning:
        yield (
            f"Whether {codes(turning)} {'needs' if len(turning) == 1 else 'need'} less compute "
            f"than {code(analysis.reference or '')} depends on L∞, among values that fit about "
            "equally well."
        )


def _about_bounds(laws: list[PowerLaw]) -> Iterator[str]:
    """Which linf are not measured because they hit a bound."""
    high = [law for law in laws if law.at_bound == "lowest loss"]
    if high:
        yield (
            f"The fit puts L∞ of {codes([law.structure for law in high])} at its upper bound, the "
            f"lowest observed loss ({short(high[0].linf, 5)}): the points flatten more than a "
            "power law does, or that loss was luck. Neither L∞ nor the exponent is measured."
        )
    zero = [law.structure for law in laws if law.at_bound == "zero"]
    if zero:
        yield (
            f"The fit puts L∞ of {codes(zero)} at its lower bound, 0: the points show no limit in "
            "this range."
        )


def _turning(analysis: Analysis) -> list[str]:
    """Structures with multipliers above and below 1 at values of linf that fit equally well."""
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
