"""The sections of the page: each finding, and what goes beyond the paper, in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from einlinear.bench.replay.summary import ReplaySummary
from einlinear.reproductions.findings.effects import ExponentEffect, effects
from einlinear.reproductions.findings.evidence import Evidence
from einlinear.reproductions.findings.findings import GOOD_FIT, Comparisons, Finding, Findings
from einlinear.reproductions.findings.layers import (
    DENSE_LAYERS,
    FULL_RANK,
    LOW_RANK_FAN_IN,
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
    verdict_of,
    why,
    with_ends,
)
from einlinear.reproductions.findings.ratios import LEVEL_LOSS
from einlinear.show.numbers import NONE, counted, listed, short

PARAMETRIZATIONS = {
    "unit": "unit weights, one rate",
    "naive": "usual weights, one rate",
    "mup": "µP",
}
_HIDDEN = {
    "largest size": "the largest size of each structure is",
    "last rungs": "the ends of all runs are",
}
_CHANGES = {"omega": "ω from 0 to ½", "psi": "ψ from 1 to ½", "nu": "ν from 1 to ½"}


def power_laws(found: Findings) -> Section:
    """The law of every structure."""
    laws = [found.laws[name] for name in STRUCTURES if name in found.overtaking]
    rows = []
    for law in laws:
        end = found.overtaking[law.structure]
        rows.append(
            [
                NAMES[law.structure],
                with_ends(law.a, *law.a_interval, digits=3),
                f"{100 * law.rms:.2f} %",
                f"{100 * found.lines[law.structure]:.2f} %",
                f"{law.decades:.1f}",
                f"{end.sizes - 1 - len(end.early)} of {end.sizes - 1}",
            ]
        )
    head = ["structure", "exponent a", "residuals", "of a line", "decades", "overtaken"]
    text = paragraphs(
        f"All laws share one limit, $L_\\infty$ = "
        f"{with_ends(laws[0].linf, *laws[0].linf_interval, digits=3)}, which so few decades\n"
        "do not determine. *Residuals* are root mean squares, in percent of the loss; *of a line*\n"
        "are those of $L = p - q \\log C$, which has as many parameters. *Overtaken* counts the\n"
        "widths that trained until a larger one overtook them, within "
        f"{100 * LEVEL_LOSS:g} % of the loss, of all but\nthe largest.",
        table(head, rows),
    )
    low, high = (end(law.a for law in laws) for end in (min, max))
    worst = max(law.rms for law in laws)
    return Section(
        "Every structure follows a power law",
        text,
        "the frontier of every structure follows $L = L_\\infty + b C^{-a}$",
        f"a = {short(low, 2)} to {short(high, 2)}, residuals of at most {100 * worst:.1f} %",
        found.power_law,
        f"Reproduced means that all residuals are below {100 * GOOD_FIT:.0f} % of the loss, and on "
        "the whole smaller than those of straight lines.",
        "laws.svg",
        "Frontiers of all structures and their power laws, by kind",
    )


def comparison(finding: Finding, number: str, *more: str) -> Section:
    """A finding that compares layers."""
    shown = [comparison_table(finding.rows)] if finding.rows else []
    return Section(
        finding.title,
        paragraphs(*shown, *more),
        finding.claim,
        number,
        verdict_of(finding),
        why(finding),
    )


def meetings(found: Findings) -> str:
    """How the laws of full-rank structures compare with that of dense."""
    laws = found.samples["flops"]
    lines = []
    for name in FULL_RANK:
        if name in laws.names:
            apart = with_ends(*laws.exponents_apart(name, DENSE_LAYERS), digits=2)
            at = laws.crossing(name, DENSE_LAYERS)
            most = short(float(laws.most[laws.names.index(name)]), 2)
            meet = "do not meet" if at is None else f"meet at {short(at, 2)} FLOPs"
            lines.append(
                f"- {NAMES[name]}: its exponent minus that of dense is {apart}; the laws {meet}. "
                f"Its points end at {most}."
            )
    return "\n".join(lines)


def ratio_list(finding: Finding) -> str:
    """The ratios of a finding, a line for each, for the summary."""
    return "<br>".join(f"{row.text}: {in_brackets(row.judged.ratio)}" for row in finding.rows)


def learning_rates(found: Findings) -> Section:
    """Whether one learning rate serves all widths."""
    rows = [
        [
            PARAMETRIZATIONS[name],
            f"{drift.num_learned} of {drift.num_cells}",
            f"{drift.mean:.1f} ({drift.low:.1f} to {drift.high:.1f})"
            if isfinite(drift.mean)
            else NONE,
            f"{drift.most}, {NAMES.get(drift.where, drift.where)}" if drift.most else "0",
            f"{drift.one_rate:.1f} %" if isfinite(drift.one_rate) else "diverges",
            short(drift.best_loss),
            f"{drift.num_open} of {drift.num_cells}",
        ]
        for name, drift in found.drifts.items()
    ]
    head = ["parametrization", "learn", "drift", "largest", "cost of one rate", "best loss", "open"]
    text = paragraphs(
        "Best learning rates of multilayer perceptrons on CIFAR-10. A cell is a structure at a\n"
        "width; *learn* counts those that do better than guessing at some rate. *Drift* says how\n"
        "many doublings the best rate moves from the narrowest to the widest model: the mean over\n"
        "structures that learn at both, and its range over single seeds. *Largest* is the\n"
        "largest span of best rates of one structure. *Cost of one rate* says how much higher the\n"
        "loss is, on average, if all cells use the best rate of dense at the smallest width.\n"
        "*Best loss* is the mean over cells, each at its best rate. *Open* counts cells whose\n"
        "best rate is at an end of the grid, so that a better one may lie beyond.",
        table(head, rows),
    )
    number = "best rates move by " + ", ".join(
        f"{drift.mean:.1f} doublings ({PARAMETRIZATIONS[name]})"
        for name, drift in found.drifts.items()
        if isfinite(drift.mean)
    )
    number += "".join(
        f"; {PARAMETRIZATIONS[name]}: only {drift.num_learned} of {drift.num_cells} cells learn"
        for name, drift in found.drifts.items()
        if not isfinite(drift.mean)
    )
    return Section(
        "Learning rates transfer under µP",
        text,
        "under µP the best learning rate stays where it is, and losses are lower than with unit "
        "weights and one rate for all",
        number,
        found.transfer,
        "Reproduced means that the best rate moves less under µP than in every baseline, for every "
        "seed; or that the loss is lower, if a baseline does not learn at all widths. The column "
        "*best loss* tells whether losses are lower, too.",
        "rates.svg",
        "Best learning rate by width, for each parametrization",
    )


def exponent_effects(found: Findings) -> Section:
    """What ω, ψ and ν do to the multiplier, over all structures, at one loss."""
    used = {name: name for name in STRUCTURES if name != LOW_RANK_FAN_IN}
    losses = {name: laws.common_loss() for name, laws in found.samples.items()}
    by_measure = {
        name: effects(laws, used, DENSE_LAYERS, losses[name])
        for name, laws in found.samples.items()
    }
    head = ["change", *(MEASURE_TITLES[measure] for measure in by_measure)]
    rows = [
        [text, *(_effect(column[k]) for column in by_measure.values())]
        for k, text in enumerate(_CHANGES.values())
    ]
    return Section(
        "What ω, ψ and ν cost",
        paragraphs(
            "The logarithms of all multipliers over dense, fitted by the three exponents: the\n"
            "factor on the multiplier if one exponent changes and the others stay. All\n"
            f"multipliers are taken at one loss, {short(losses['flops'])}, the lowest that all\n"
            "fitted structures have. Low rank has its default start.",
            table(head, rows),
        ),
    )


def _effect(effect: ExponentEffect) -> str:
    return with_ends(effect.factor, effect.low, effect.high)


def in_seconds(found: Findings, evidence: Evidence) -> Section:
    """Whether any structure saves time at equal loss."""
    assert evidence.times is not None, "seconds need the times of steps"
    names = [name for name in found.samples["seconds"].names if name != DENSE_LAYERS]
    ratios = {name: found.samples["seconds"].ratio(name, DENSE_LAYERS) for name in names}
    saved = [NAMES[name] for name, ratio in ratios.items() if ratio.low > 1]
    slower = [name for name, ratio in ratios.items() if ratio.high < 1]
    verb = "saves" if len(saved) == 1 else "save"
    first = f"{listed(saved)} {verb} time at equal loss" if saved else "No structure saves time"
    widths = [record.config.width for record in evidence.records["structures"]]
    rows = [
        [
            NAMES[name],
            in_brackets(found.samples["flops"].ratio(name, DENSE_LAYERS)),
            in_brackets(ratio),
        ]
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
    rows = [
        [
            f"{NAMES[name]} over {NAMES[other]}",
            *map(in_brackets, compared.ratios(name, other).values()),
        ]
        for name, other in pairs
        if {name, other} <= set(compared.names)
    ]
    head = ["compared", *(MEASURE_TITLES[m] for m in compared.measures)]
    seeds = evidence.seeds(study, {name for pair in pairs for name in pair})
    note = f"The runs have {counted(seeds, 'seed')}."
    return Section(title, paragraphs(*intro, table(head, rows), note))


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
            side = "higher" if row.bias > 0 else "lower"
            found.append(
                f"If {_HIDDEN[row.hidden]} hidden from the law of the search, {row.held} of "
                f"{row.count} hidden losses ({100 * row.held / row.count:.0f} %) are within its "
                f"90 % intervals; on average they are {100 * abs(row.bias):.1f} % {side} than "
                "predicted."
            )
    return found
