"""The seven findings of the paper, each with its numbers, as far as the records go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    Limits,
    Overtaking,
    fit_all,
    over_limits,
    overtakings,
    ratios,
)
from einlinear.reproductions.findings.verdicts import (
    ClaimVerdict,
    Judged,
    Ratio,
    Sense,
    judge,
    overall,
)

GOOD_FIT = 0.01
"""A law fits if its residuals are below this share of the loss."""

PAPER = {
    (mixture(BTT, 16)): "5.3 ± 0.3",
    (standard_mixture(16)): "4.1 ± 0.3",
}
"""Multipliers over dense that the paper gives [P24 §5]."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: what is compared, in all measures, and how it moves with linf."""

    name: str
    text: str
    judged: Judged
    by_measure: Mapping[Measure, Ratio]
    limits: Limits
    paper: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim of the paper, the comparisons that test it, and the verdict."""

    key: str
    title: str
    claim: str
    rows: tuple[Row, ...]
    verdict: ClaimVerdict


@dataclass(frozen=True, slots=True)
class Findings:
    """All findings, and what else the page shows."""

    laws: Fit
    power_law: ClaimVerdict
    overtaking: Mapping[str, Overtaking]
    ratios: Mapping[Measure, Mapping[str, Ratio]]
    judged: Mapping[str, Finding]
    drifts: Mapping[str, RateDrift] = field(default_factory=dict)
    transfer: ClaimVerdict = "not resolved"


class Comparisons:
    """Ratios of one study by measure and reference, each computed once."""

    def __init__(self, evidence: Evidence, study: str) -> None:
        self.evidence, self.study = evidence, study
        self._ratios: dict[tuple[Measure, str], dict[str, Ratio]] = {}
        self._limits: dict[str, dict[str, Limits]] = {}

    def ratio(self, name: str, reference: str, measure: Measure) -> Ratio:
        """The compute that the reference needs over that of `name`."""
        return self.all(reference, measure)[name]

    def all(self, reference: str, measure: Measure) -> dict[str, Ratio]:
        """All layers of the study against a reference."""
        key = measure, reference
        if key not in self._ratios:
            data = self.evidence.observations(self.study, measure)
            self._ratios[key] = ratios(data, data.structures, reference)
        return self._ratios[key]

    def row(self, name: str, reference: str, sense: Sense, bound: float | None = None) -> Row:
        """One comparison in all measures, judged by FLOPs."""
        if reference not in self._limits:
            data = self.evidence.observations(self.study, "flops")
            self._limits[reference] = over_limits(data, data.structures, reference)
        found = {measure: self.ratio(name, reference, measure) for measure in self.measures}
        text = f"{NAMES[name]} over {NAMES[reference]}"
        limits = self._limits[reference][name]
        judged = judge(found["flops"], sense, bound)
        return Row(
            name, text, judged, found, limits, PAPER.get(name, "") * (reference == DENSE_LAYERS)
        )

    @property
    def measures(self) -> Sequence[Measure]:
        """Seconds only where steps have been timed."""
        return [m for m in COMPARED_BY if m != "seconds" or self.evidence.times is not None]


def find_all(evidence: Evidence) -> Findings:
    """Judge everything that the records allow."""
    structures = Comparisons(evidence, "structures")
    data = evidence.observations("structures", "flops")
    laws = fit_all(data)
    found = [_sharing(structures), _rank(structures), _compute(structures)]
    if "moe" in evidence.records:
        found.append(_mixtures(Comparisons(evidence, "moe")))
    if "heads" in evidence.records:
        found.append(_heads(Comparisons(evidence, "heads")))
    moved = drifts(evidence.cells)
    return Findings(
        laws,
        _power_law(laws),
        overtakings(data),
        {measure: structures.all(DENSE_LAYERS, measure) for measure in structures.measures},
        {finding.key: finding for finding in found},
        moved,
        _transfer(moved),
    )


def _power_law(laws: Fit) -> ClaimVerdict:
    """Whether all laws fit, without a bend that noise does not explain."""
    fits = [law.rms < GOOD_FIT for law in laws.laws]
    if all(fits):
        return "reproduced"
    return "contradicted" if not any(fits) else "not resolved"


def _finding(key: str, title: str, claim: str, rows: Sequence[Row]) -> Finding:
    return Finding(key, title, claim, tuple(rows), overall(row.judged for row in rows))


def _sharing(table: Comparisons) -> Finding:
    return _finding(
        "omega",
        "Sharing parameters hurts",
        "structures that use a parameter more than once per input (ω > 0) scale worse",
        [table.row(name, like, "less") for name, like in SHARING],
    )


def _rank(table: Comparisons) -> Finding:
    return _finding(
        "psi",
        "A lower rank hurts",
        "among structures without sharing, those of full rank (ψ = 1) scale better than those of "
        "low rank",
        [table.row(name, like, "less") for name, like in LOW],
    )


def _compute(table: Comparisons) -> Finding:
    return _finding(
        "nu",
        "Full-rank BTT equals dense",
        "structures with ω = 0 and ψ = 1 have the same scaling law as dense, whatever their ν",
        [table.row(name, DENSE_LAYERS, "same") for name in FULL_RANK],
    )


def _mixtures(table: Comparisons) -> Finding:
    rows = [table.row(name, DENSE_LAYERS, "more") for name in MIXTURES]
    rows += [table.row(mixture(BTT, n), standard_mixture(n), "more") for n in EXPERTS]
    return _finding(
        "moe",
        "Experts of BTT beat the standard mixture, which beats dense",
        "with 16 experts, BTT-MoE needs 5.3 ± 0.3 times less compute than dense, the standard MoE "
        "4.1 ± 0.3; low-rank-MoE and dense-MoE about 2",
        rows,
    )


def _heads(table: Comparisons) -> Finding:
    return _finding(
        "heads",
        "Axes that follow attention heads help",
        "BTT aligned with the heads needs 17 % less compute than plain BTT",
        [table.row(name, BTT, "more") for name in HEADS],
    )


def _transfer(moved: Mapping[str, RateDrift]) -> ClaimVerdict:
    """µP transfers if its best rates move by one doubling at most, and the baselines' by more."""
    if "mup" not in moved or len(moved) < 2:
        return "not resolved"
    own, others = moved["mup"], [drift for name, drift in moved.items() if name != "mup"]
    if own.low > min(drift.high for drift in others):
        return "contradicted"
    is_less = all(own.high < drift.low for drift in others)
    return "reproduced" if is_less else "not resolved"
