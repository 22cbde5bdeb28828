"""The sections of the page: each finding, and what goes beyond the paper, in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from einlinear.bench.replay.summary import ReplaySummary
from einlinear.reproductions.findings.effects import ExponentEffect, effects
from einlinear.reproductions.findings.evidence import Evidence, label_of, plain_structure
from einlinear.reproductions.findings.findings import GOOD_FIT, Comparisons, Finding, Findings
from einlinear.reproductions.findings.layers import (
    DENSE_LAYERS,
    FULL_RANK,
    NAMES,
    STRUCTURES,
)
from einlinear.reproductions.findings.page import (
    MEASURE_TITLES,
    Section,
    comparison_table,
    in_brackets,
    paragraphs,
    table,
    why,
    with_ends,
)
from einlinear.reproductions.findings.ratios import LEVEL_LOSS, crossing
from einlinear.show.numbers import between, counted, listed, short

PARAMETRIZATIONS = {
    "unit": "unit weights, one rate",
    "naive": "usual weights, one rate",
    "mup": "µP",
}
_CHANGES = {"omega": "ω from 0 to ½", "psi": "ψ from 1 to ½", "nu": "ν from 1 to ½"}


def power_laws(found: Findings) -> Section:
    """The law of every structure."""
    rows = []
    laws = [found.laws[name] for name in STRUCTURES]
    for law in laws:
        end = found.overtaking[law.structure]
        rows.append(
            [
                NAMES[law.structure],
                f"{short(law.a)} ({between(law.a_interval)})",
                f"{100 * law.rms:.2f} %",
                "yes" if law.is_systematic else "no",
                f"{law.decades:.1f}",
                f"{end.sizes - 1 - len(end.early)} of {end.sizes - 1}",
            ]
        )
    text = paragraphs(
        f"All laws share one limit, $L_\\infty$ = {short(laws[0].linf)} "
        f"({between(laws[0].linf_interval)}).\n"
        "*Residuals* are root mean squares, in percent of the loss. *Bend* says whether they bend\n"
        "more than the noise of runs explains. *Overtaken* counts the widths that trained until\n"
        f"a larger one overtook them (within {100 * LEVEL_LOSS:g} % of the loss), of all but the\n"
        "largest.",
        table(["structure", "exponent a", "residuals", "bend", "decades", "overtaken"], rows),
    )
    low, high = (end(law.a for law in laws) for end in (min, max))
    worst = max(law.rms for law in laws)
    return Section(
        "Every structure follows a power law",
        text,
        "the frontier of every structure follows $L = L_\\infty + b C^{-a}$",
        f"a = {short(low, 2)} to {short(high, 2)}, residuals of at most {100 * worst:.1f} %",
        found.power_law,
        f"A law is reproduced if its residuals are below {100 * GOOD_FIT:.0f} % of the loss.",
        "laws.svg",
        "Frontiers of all structures and their power laws, by kind",
    )


def comparison(finding: Finding, number: str, *more: str) -> Section:
    """A finding that compares layers."""
    text = paragraphs(comparison_table(finding.rows), *more)
    return Section(finding.title, text, finding.claim, number, finding.verdict, why(finding))


def meetings(found: Findings) -> str:
    """Where the laws of full-rank structures meet that of dense."""
    parts = []
    for name in FULL_RANK:
        at = crossing(found.laws, name, DENSE_LAYERS)
        where = "do not meet" if at is None else f"meet at {short(at, 2)} FLOPs"
        parts.append(f"{where} ({NAMES[name]})")
    most = max(law.compute_range[1] for law in found.laws.laws)
    return (
        "The ratio falls with compute: dense layers gain more from it at this scale. By the laws\n"
        f"of dense and of each structure, they {'; '.join(parts)}. The largest run\n"
        f"of the fit has {short(most, 2)}."
    )


def ratio_list(finding: Finding) -> str:
    """The ratios of a finding, for the summary."""
    return "; ".join(f"{NAMES[row.name]} {in_brackets(row.judged.ratio)}" for row in finding.rows)


def learning_rates(found: Findings) -> Section:
    """Whether one learning rate serves all widths."""
    rows = [
        [
            PARAMETRIZATIONS[name],
            f"{drift.mean:.1f} ({drift.low:.1f} to {drift.high:.1f})",
            f"{drift.most}, {NAMES.get(drift.where, drift.where)}",
            f"{drift.one_rate:.1f} %" if isfinite(drift.one_rate) else "diverges",
            short(drift.best_loss),
            f"{drift.num_open} of {drift.num_cells}",
        ]
        for name, drift in found.drifts.items()
    ]
    head = ["parametrization", "drift", "largest", "cost of one rate", "best loss", "open"]
    text = paragraphs(
        "Best learning rates of multilayer perceptrons on CIFAR-10. *Drift* says how many\n"
        "doublings the best rate moves from the narrowest to the widest model: the mean over\n"
        "structures, and its range over single seeds. *Largest* is the largest span of best rates\n"
        "of one structure. *Cost of one rate* says how much higher the loss is, on average, if\n"
        "all cells use the best rate of dense at the smallest width. *Best loss* is the mean over\n"
        "cells, each at its best rate. *Open* counts cells whose best rate is at an end of the\n"
        "grid, so that a better one may lie beyond.",
        table(head, rows),
    )
    number = "best rates move by " + ", ".join(
        f"{drift.mean:.1f} doublings ({PARAMETRIZATIONS[name]})"
        for name, drift in found.drifts.items()
    )
    return Section(
        "Learning rates transfer under µP",
        text,
        "under µP the best learning rate stays where it is, and losses are lower than with unit "
        "weights and one rate for all",
        number,
        found.transfer,
        "Reproduced means that the best rate moves less under µP than in both baselines, for every "
        "seed.",
        "rates.svg",
        "Best learning rate by width, for each parametrization",
    )


def exponent_effects(found: Findings) -> Section:
    """What ω, ψ and ν do to the multiplier, over all structures."""
    plain = {DENSE_LAYERS: DENSE_LAYERS} | {name: plain_structure(name) for name in STRUCTURES}
    by_measure = {name: effects(ratios, plain) for name, ratios in found.ratios.items()}
    head = ["change", *(MEASURE_TITLES[measure] for measure in by_measure)]
    rows = [
        [text, *(_effect(column[k]) for column in by_measure.values())]
        for k, text in enumerate(_CHANGES.values())
    ]
    return Section(
        "What ω, ψ and ν cost",
        paragraphs(
            "The logarithms of all multipliers over dense, fitted by the three exponents: the\n"
            "factor on the multiplier if one exponent changes and the others stay.",
            table(head, rows),
        ),
    )


def _effect(effect: ExponentEffect) -> str:
    return with_ends(effect.factor, effect.low, effect.high)


def in_seconds(found: Findings, evidence: Evidence) -> Section:
    """Whether any structure saves time at equal loss."""
    assert evidence.times is not None, "seconds need the times of steps"
    ratios = found.ratios["seconds"]
    saved = [NAMES[name] for name, ratio in ratios.items() if ratio.low > 1]
    slower = [name for name, ratio in ratios.items() if ratio.high < 1]
    verb = "saves" if len(saved) == 1 else "save"
    first = f"{listed(saved)} {verb} time at equal loss" if saved else "No structure saves time"
    widths = [record.config.width for record in evidence.records["structures"]]
    rows = [
        [NAMES[name], in_brackets(found.ratios["flops"][name]), in_brackets(ratio)]
        for name, ratio in sorted(ratios.items(), key=lambda item: -item[1].value)
    ]
    return Section(
        "Does any structure save time?",
        paragraphs(
            f"**{first}** at these widths, {min(widths)} to {max(widths)}; "
            f"{counted(len(slower), 'structure')} of {len(ratios)} "
            f"{'takes' if len(slower) == 1 else 'take'} longer than dense.",
            f"Seconds are steps × the time of a step on one core, {evidence.times.origin}.",
            table(["over dense", "multiplier by FLOPs", "by seconds"], rows),
        ),
    )


def variations(
    evidence: Evidence, study: str, pairs: Sequence[tuple[str, str]], title: str, *intro: str
) -> Section:
    """Layers of a study against others, without a claim of the paper."""
    compared = Comparisons(evidence, study)
    held = {label_of(record) for record in evidence.compared(study)}
    rows = [
        [
            f"{NAMES[name]} over {NAMES[other]}",
            *(in_brackets(compared.ratio(name, other, m)) for m in compared.measures),
        ]
        for name, other in pairs
        if {name, other} <= held
    ]
    head = ["compared", *(MEASURE_TITLES[m] for m in compared.measures)]
    return Section(title, paragraphs(*intro, table(head, rows)))


def replayed(summary: ReplaySummary, names: Mapping[str, str]) -> Section:
    """What the search would have picked from these curves."""
    last = max(method.share for method in summary.methods)
    rows = [
        [
            method.method,
            f"{100 * method.spent / summary.grid_flops:.0f} %",
            f"{100 * method.regret:.1f} % ({100 * method.low:.1f} to {100 * method.high:.1f})",
            _picks(method.picks, names),
        ]
        for method in summary.methods
        if method.share == last
    ]
    leaders = listed(
        [
            f"{names.get(s.structure, s.structure)} {short(s.middle, 2)} "
            f"({short(s.low, 2)} to {short(s.high, 2)})"
            for s in summary.standings[:3]
        ]
    )
    settled = sorted(path.settled.flops / summary.grid_flops for path in summary.paths)
    middle = settled[len(settled) // 2]
    within = sum(path.is_within for path in summary.paths)
    return Section(
        "What the search would have found",
        paragraphs(
            f"A [replay](search.md) of the search on these {summary.grid_runs} runs, which cost\n"
            f"{short(summary.grid_flops)} FLOPs in all: it looks losses up and pays for each what\n"
            "training it cost. All runs together predict, at\n"
            f"{short(summary.target_flops)} FLOPs, the multipliers {leaders}.\n"
            "With a quarter of the compute the search settles on its\n"
            f"choice after {100 * middle:.0f} % of the grid (median of {len(settled)} searches),\n"
            f"and in {within} of them its choice cannot be told from the best.",
            table(["method", "compute spent", "regret", "picks"], rows),
            *_calibrated(summary),
        ),
    )


def _picks(picks: Sequence[str], names: Mapping[str, str]) -> str:
    counts = {pick: picks.count(pick) for pick in dict.fromkeys(picks)}
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{names.get(pick, pick)} ({count})" for pick, count in ordered[:3])


def _calibrated(summary: ReplaySummary) -> list[str]:
    """How often hidden losses were within the intervals of the surrogate."""
    found = []
    for row in summary.calibrations:
        if row.bend is None:
            found.append(
                f"Hidden from it, the {row.hidden} of all structures: {row.held} of {row.count} "
                f"losses ({100 * row.held / row.count:.0f} %) are within its 90 % intervals; on "
                f"average losses are {100 * row.bias:+.2f} % off."
            )
    return found
