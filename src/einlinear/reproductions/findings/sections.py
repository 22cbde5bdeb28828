"""The sections of the page: for each finding its claim, its numbers and its verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from markupsafe import Markup

from einlinear.reproductions.findings.effects import Effect, effects
from einlinear.reproductions.findings.evidence import Evidence, label_of, plain_structure
from einlinear.reproductions.findings.findings import MISFIT, Comparisons, Finding, Findings
from einlinear.reproductions.findings.layers import (
    DENSE,
    NAMES,
    STRUCTURES,
)
from einlinear.reproductions.findings.page import (
    Section,
    comparison_table,
    in_brackets,
    table,
    why,
)
from einlinear.show.numbers import between, counted, listed, short

_TITLES = {"unit": "unit weights, one rate", "naive": "usual weights, one rate", "mup": "µP"}


def power_laws(found: Findings) -> Section:
    """Finding 1: the law of every structure."""
    rows = []
    for law in found.laws.laws:
        end = found.overtaking[law.structure]
        early = f"{end.sizes - 1 - len(end.early)} of {end.sizes - 1}"
        rows.append(
            [
                NAMES[law.structure],
                f"{short(law.a)} ({between(law.a_interval)})",
                f"{100 * law.rms:.2f} %",
                "yes" if law.is_systematic else "no",
                f"{law.decades:.1f}",
                early,
            ]
        )
    head = ["structure", "exponent a", "residuals", "bend", "decades", "overtaken"]
    first = found.laws.laws[0]
    exponents = [law.a for law in found.laws.laws]
    text = Markup(
        "All laws share one limit, $L_\\infty$ = {} ({}). *Residuals* are root mean squares, in percent of the loss; *bend* says whether they bend more than noise explains; "
        "*overtaken* counts the widths that trained until the next larger one overtook them, of all but the largest.\n\n{}"
    ).format(short(first.linf), between(first.linf_interval), table(head, rows))
    worst = max(law.rms for law in found.laws.laws)
    return Section(
        "Every structure follows a power law",
        text,
        "the frontier of every structure follows $L = L_\\infty + b C^{-a}$",
        f"a from {short(min(exponents), 2)} to {short(max(exponents), 2)}; residuals of at most "
        f"{100 * worst:.1f} %",
        found.power_law,
        f"A law counts as reproduced if its residuals are below {100 * MISFIT:.0f} % of the loss.",
        "laws.svg",
        "Frontiers of all structures and their power laws, by kind",
    )


def comparison(
    finding: Finding, number: str, more: str = "", figure: str = "", caption: str = ""
) -> Section:
    """A finding that compares layers."""
    text = comparison_table(finding.rows)
    if more:
        text = Markup("{}\n\n{}").format(text, Markup(more))
    return Section(
        finding.title, text, finding.claim, number, finding.verdict, why(finding), figure, caption
    )


def ratio_list(finding: Finding) -> str:
    """All ratios of a finding, for the summary."""
    return "; ".join(f"{NAMES[row.name]} {in_brackets(row.judged.ratio)}" for row in finding.rows)


def rates(found: Findings, evidence: Evidence) -> Section:
    """Finding 6: whether one learning rate serves all widths."""
    rows = [
        [
            _TITLES[name],
            f"{drift.mean:.1f} ({drift.low:.1f} to {drift.high:.1f})",
            f"{drift.most}, {NAMES.get(drift.where, drift.where)}",
            f"{drift.one_rate:.1f} %" if isfinite(drift.one_rate) else "diverges",
            short(drift.best_loss),
            f"{drift.num_open} of {drift.num_cells}",
        ]
        for name, drift in found.drifts.items()
    ]
    head = ["parametrization", "drift", "largest", "cost of one rate", "best loss", "open"]
    text = Markup(
        "Best learning rates of MLPs on CIFAR-10 images, by width. *Drift*: how many doublings the best rate moves from width 64 to 1,024, mean over structures, and the range "
        "over single seeds. *Largest*: the largest span of best rates of one structure. *Cost of one rate*: how much higher the loss is if all cells use the best rate of dense "
        "at width 64. *Best loss*: mean over cells, each at its best rate. *Open*: cells whose best rate is at an end of the grid.\n\n{}"
    ).format(table(head, rows))
    number = "; ".join(f"{_TITLES[n]} {d.mean:.1f} doublings" for n, d in found.drifts.items())
    return Section(
        "Learning rates transfer under µP",
        text,
        "under µP the best learning rate stays where it is, and losses are lower than with unit "
        "weights and one rate",
        number,
        found.transfer,
        "Reproduced means that under µP the best rate moves less than without, for every seed.",
        "rates.svg",
        "Best learning rate by width, for each parametrization",
    )


def exponent_effects(found: Findings) -> tuple[Section, tuple[Effect, ...]]:
    """What ω, ψ and ν do, all structures together."""
    plain = {name: plain_structure(name) for name in STRUCTURES if name != DENSE}
    parts = []
    for measure, ratios in found.ratios.items():
        parts.append((measure, effects(ratios, {DENSE: DENSE} | plain)))
    head = ["exponent", *(_MEASURES[measure] for measure, _ in parts)]
    rows = [
        [_CHANGES[effect.exponent], *(_effect(column[k]) for _, column in parts)]
        for k, effect in enumerate(parts[0][1])
    ]
    text = Markup(
        "A fit of the logarithm of all multipliers over dense to the three exponents: the factor on the multiplier when one exponent changes and the others stay.\n\n{}"
    ).format(table(head, rows))
    return Section("What ω, ψ and ν cost", text), parts[0][1]


_MEASURES = {
    "flops": "by FLOPs",
    "linear_flops": "by FLOPs of linear layers",
    "seconds": "by seconds",
}
_CHANGES = {"omega": "ω from 0 to ½", "psi": "ψ from 1 to ½", "nu": "ν from 1 to ½"}


def _effect(effect: Effect) -> str:
    return f"{short(effect.factor, 2)} ({short(effect.low, 2)} to {short(effect.high, 2)})"


def in_seconds(found: Findings, evidence: Evidence) -> Section:
    """Whether any structure saves time at equal loss."""
    ratios = found.ratios["seconds"]
    saved = [name for name, ratio in ratios.items() if ratio.low > 1]
    slower = [name for name, ratio in ratios.items() if ratio.high < 1]
    names = [NAMES[name] for name in saved]
    assert evidence.times is not None, "seconds need the times of steps"
    text = (
        f"Seconds are steps × the time of a step, {evidence.times.origin}. "
        + (
            f"{listed(names)} {'saves' if len(names) == 1 else 'save'} time at equal loss. "
            if saved
            else "No structure saves time at equal loss at these widths (16 to 224). "
        )
        + f"{counted(len(slower), 'structure')} of {len(ratios)} {'is' if len(slower) == 1 else 'are'} slower than dense, the whole interval below 1."
    )
    rows = [
        [NAMES[name], in_brackets(found.ratios["flops"][name]), in_brackets(ratio)]
        for name, ratio in ratios.items()
    ]
    shown = table(["structure", "multiplier by FLOPs", "by seconds"], rows)
    return Section("Does any structure save time?", Markup("{}\n\n{}").format(Markup(text), shown))


def variations(
    evidence: Evidence,
    study: str,
    names: Mapping[str, str],
    references: Sequence[str],
    title: str,
    intro: str,
) -> Section:
    """Layers of a study against others, without a claim."""
    compared = Comparisons(evidence, study)
    held = {label_of(record) for record in evidence.records[study]}
    measures = compared.measures
    rows = []
    for reference in references:
        for name in names:
            if name in held and name != reference:
                found = [compared.ratio(name, reference, measure) for measure in measures]
                rows.append([f"{NAMES[name]} over {NAMES[reference]}", *map(in_brackets, found)])
    head = ["compared", *(_MEASURES[m] for m in measures)]
    return Section(title, Markup("{}\n\n{}").format(Markup(intro), table(head, rows)))
