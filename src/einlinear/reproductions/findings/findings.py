"""The findings of the paper, each with its numbers, as far as the records go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from einlinear.laws.fit import Fit
from einlinear.reproductions.findings.evidence import COMPARED_BY, Evidence, Measure
from einlinear.reproductions.findings.layers import (
    BTT,
    DENSE_LAYERS,
    EXPERTS,
    FULL_RANK,
    HEADS,
    LOW,
    MIXTURES,
    NAMES,
    SHARING,
    mixture,
    standard_mixture,
)
from einlinear.reproductions.findings.rates import RateDrift, drifts
from einlinear.reproductions.findings.ratios import (
    Overtaking,
    fit_all,
    log_line_residuals,
    other_fits,
    overtakings,
)
from einlinear.reproductions.findings.samples import LawSamples, draw_laws
from einlinear.reproductions.findings.verdicts import (
    ClaimVerdict,
    Judged,
    Ratio,
    Sense,
    any_of,
    judge,
    overall,
)

GOOD_FIT = 0.01
"""A law fits if its residuals are below this share of the loss."""

PAPER = {mixture(BTT, 16): 5.3, standard_mixture(16): 4.1} | dict.fromkeys(HEADS, 1.17)
"""Multipliers that the paper gives: of mixtures over dense, of aligned BTT over plain BTT."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: what is compared, in all measures, and how it moves with the fit.

    over_dense: the ratio over dense layers, if the comparison is with others.
    fits: the lowest and highest ratio with other values of linf and other points.
    """

    name: str
    text: str
    judged: Judged
    by_measure: Mapping[Measure, Ratio]
    fits: tuple[float, float]
    over_dense: Ratio | None = None
    paper: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim of the paper, the comparisons that test it, and the verdict.

    num_seeds: how many seeds the runs of the comparisons have, at least.
    """

    key: str
    title: str
    claim: str
    rows: tuple[Row, ...]
    verdict: ClaimVerdict
    num_seeds: int


@dataclass(frozen=True, slots=True)
class Findings:
    """All findings, and what else the page shows.

    lines: residuals of straight lines in log C, which the laws are compared with.
    samples: of the study of structures, by measure.
    """

    laws: Fit
    lines: Mapping[str, float]
    power_law: ClaimVerdict
    overtaking: Mapping[str, Overtaking]
    samples: Mapping[Measure, LawSamples]
    judged: Mapping[str, Finding]
    drifts: Mapping[str, RateDrift] = field(default_factory=dict)
    transfer: ClaimVerdict = "not resolved"


class Comparisons:
    """Ratios of one study, by measure."""

    def __init__(self, evidence: Evidence, study: str) -> None:
        self.evidence, self.study = evidence, study
        data = {measure: evidence.observations(study, measure) for measure in self.measures}
        self.samples = {measure: draw_laws(found) for measure, found in data.items()}
        self._others = other_fits(data["flops"])

    @property
    def measures(self) -> Sequence[Measure]:
        """Seconds only where steps have been timed."""
        return [m for m in COMPARED_BY if m != "seconds" or self.evidence.times is not None]

    @property
    def names(self) -> tuple[str, ...]:
        """All layers that have runs."""
        return self.samples["flops"].names

    def ratios(self, name: str, reference: str) -> dict[Measure, Ratio]:
        """The compute that the reference needs over that of `name`, in all measures."""
        return {measure: laws.ratio(name, reference) for measure, laws in self.samples.items()}

    def rows(
        self, pairs: Iterable[tuple[str, str]], sense: Sense, bound: float | None = None
    ) -> list[Row]:
        """Comparisons in all measures, judged by FLOPs; layers without runs are left out."""
        return [
            self._row(name, reference, sense, bound)
            for name, reference in pairs
            if {name, reference} <= set(self.names)
        ]

    def _row(self, name: str, reference: str, sense: Sense, bound: float | None) -> Row:
        found = self.ratios(name, reference)
        others = [laws.ratio(name, reference).value for laws in self._others]
        has_dense = DENSE_LAYERS in self.names and DENSE_LAYERS not in (name, reference)
        return Row(
            name,
            f"{NAMES[name]} over {NAMES[reference]}",
            judge(found["flops"], sense, bound),
            found,
            (min(others), max(others)),
            self.samples["flops"].ratio(name, DENSE_LAYERS) if has_dense else None,
            PAPER.get(name) if reference in (DENSE_LAYERS, BTT) else None,
        )

    def finding(self, key: str, title: str, claim: str, rows: Sequence[Row]) -> Finding:
        """The finding that these comparisons make."""
        verdict = overall(row.judged for row in rows) if rows else "not resolved"
        used = {name for row in rows for name in (row.name, row.judged.ratio.reference)}
        return Finding(
            key, title, claim, tuple(rows), verdict, self.evidence.seeds(self.study, used)
        )


def find_all(evidence: Evidence) -> Findings:
    """Judge everything that the records allow."""
    structures = Comparisons(evidence, "structures")
    data = evidence.observations("structures", "flops")
    laws, lines = fit_all(data), log_line_residuals(data)
    found = [_sharing(structures), _rank(structures), _compute(structures)]
    if "moe" in evidence.records:
        found += _mixtures(Comparisons(evidence, "moe"))
    if "heads" in evidence.records:
        found.append(_heads(Comparisons(evidence, "heads")))
    moved = drifts(evidence.cells)
    return Findings(
        laws,
        lines,
        _power_law(laws, lines),
        overtakings(data),
        structures.samples,
        {finding.key: finding for finding in found},
        moved,
        transfer_verdict(moved),
    )


def _power_law(laws: Fit, lines: Mapping[str, float]) -> ClaimVerdict:
    """Whether all laws fit, and better than straight lines in log C on the whole."""
    fits = [law.rms < GOOD_FIT for law in laws.laws]
    is_better = sum(law.rms**2 for law in laws.laws) < sum(rms**2 for rms in lines.values())
    if all(fits) and is_better:
        return "reproduced"
    return "contradicted" if not any(fits) else "not resolved"


def _pairs(partners: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(name, other) for name, others in partners.items() for other in others]


def _sharing(table: Comparisons) -> Finding:
    return table.finding(
        "omega",
        "Sharing parameters hurts",
        "structures that use a parameter more than once per input (ω > 0) scale worse",
        table.rows(_pairs(SHARING), "less"),
    )


def _rank(table: Comparisons) -> Finding:
    return table.finding(
        "psi",
        "A lower rank hurts",
        "among structures without sharing, those of full rank (ψ = 1) scale better than those of "
        "low rank",
        table.rows(_pairs(LOW), "less"),
    )


def _compute(table: Comparisons) -> Finding:
    return table.finding(
        "nu",
        "Full-rank structures equal dense",
        "structures with ω = 0 and ψ = 1 have nearly the same scaling law as dense, whatever "
        "their ν",
        table.rows([(name, DENSE_LAYERS) for name in FULL_RANK], "same"),
    )


def _mixtures(table: Comparisons) -> tuple[Finding, Finding]:
    """BTT-MoE and the standard mixture, and experts of other structures."""
    kinds = [(mixture(BTT, n), standard_mixture(n)) for n in EXPERTS]
    main = [name for pair in kinds for name in pair]
    pairs = [(name, DENSE_LAYERS) for name in main]
    others = [(name, DENSE_LAYERS) for name in MIXTURES if name not in main]
    return (
        table.finding(
            "moe",
            "Experts of BTT beat the standard mixture, which beats dense",
            "BTT-MoE needs less compute than the standard mixture, and both less than dense: with "
            "16 experts 5.3 ± 0.3 and 4.1 ± 0.3 times less",
            table.rows([*pairs, *kinds], "more"),
        ),
        table.finding(
            "moe-structures",
            "Experts of other structures beat dense, too",
            "low-rank-MoE and dense-MoE need about half the compute of dense, which is "
            "significantly more than BTT-MoE needs",
            table.rows(others, "more"),
        ),
    )


def _heads(table: Comparisons) -> Finding:
    rows = table.rows([(name, BTT) for name in HEADS], "more")
    found = table.finding(
        "heads",
        "Axes that follow attention heads help",
        "BTT aligned with the heads is 17 % more efficient than plain BTT, on average; the text "
        "can be read in two ways",
        rows,
    )
    return replace(found, verdict=any_of(row.judged for row in rows))


def transfer_verdict(moved: Mapping[str, RateDrift]) -> ClaimVerdict:
    """µP transfers if its best rates move less than those of every baseline, for every seed.

    A baseline that does not learn at both ends has no drift; then µP must have the lower losses.
    """
    if "mup" not in moved or len(moved) < 2:
        return "not resolved"
    own, others = moved["mup"], [drift for name, drift in moved.items() if name != "mup"]
    if any(own.low > drift.high for drift in others):
        return "contradicted"
    is_less = all(
        own.high < drift.low if isfinite(drift.mean) else own.best_loss < drift.best_loss
        for drift in others
    )
    return "reproduced" if is_less else "not resolved"
