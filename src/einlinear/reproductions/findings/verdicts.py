"""Ratios of compute with intervals, and what they say about a claim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, isfinite, log, nan
from typing import Literal

ClaimVerdict = Literal["reproduced", "contradicted", "not resolved"]
Sense = Literal["more", "less", "same"]
"""What a claim says of a ratio: above its bound, below it, or within a factor of it."""

SAME = 1.25
"""Two structures count as the same if their compute differs by less than this factor."""


MOST_RUNS = 30
"""Beyond this many times the runs, other errors than noise decide."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times less compute some layers need than others for the same loss.

    low, high: the 90 % interval.
    before: the same three at a higher loss, for which the reference needs a tenth of the compute.
    loss: the loss; compute: what the reference spends for it.
    """

    name: str
    reference: str
    value: float
    low: float
    high: float
    before: tuple[float, float, float] | None = None
    loss: float = nan
    compute: float = nan

    @property
    def half_width(self) -> float:
        """Half of the interval, in logarithms; infinite if there is none."""
        if not (0 < self.low <= self.high < inf):
            return inf
        return log(self.high / self.low) / 2


@dataclass(frozen=True, slots=True)
class Judged:
    """A ratio, what the paper says of it, and the verdict.

    bound: what the ratio is compared with; for "same", the factor within which it must be.
    more_runs: how many times as many runs would resolve it, if the ratio stays what it is: the
        interval shrinks as the square root of the runs. 1 if it is resolved; inf if no number of
        runs resolves it.
    """

    ratio: Ratio
    sense: Sense
    bound: float
    verdict: ClaimVerdict
    more_runs: float


def judge(ratio: Ratio, sense: Sense, bound: float | None = None) -> Judged:
    """Compare a ratio and its interval with a claim."""
    at = bound if bound is not None else SAME if sense == "same" else 1.0
    verdict = _verdict(ratio, sense, at)
    return Judged(
        ratio, sense, at, verdict, 1.0 if verdict != "not resolved" else _more(ratio, at, sense)
    )


def _verdict(ratio: Ratio, sense: Sense, bound: float) -> ClaimVerdict:
    if not isfinite(ratio.half_width):
        return "not resolved"
    if sense == "same":
        if 1 / bound <= ratio.low and ratio.high <= bound:
            return "reproduced"
        return "contradicted" if ratio.low > bound or ratio.high < 1 / bound else "not resolved"
    is_above, is_below = ratio.low > bound, ratio.high < bound
    if sense == "less":
        is_above, is_below = is_below, is_above
    return "reproduced" if is_above else "contradicted" if is_below else "not resolved"


def _more(ratio: Ratio, bound: float, sense: Sense) -> float:
    """The square of the interval's half width over the distance that it would have to fit into."""
    half, value = ratio.half_width, ratio.value
    if not (isfinite(half) and value > 0):
        return inf
    apart = log(bound) - abs(log(value)) if sense == "same" else log(value / bound)
    return max(1.0, (half / apart) ** 2) if apart else inf


def overall(parts: Iterable[Judged]) -> ClaimVerdict:
    """The verdict of a finding: all of its parts must be reproduced; one can contradict it."""
    verdicts = {part.verdict for part in parts}
    if "contradicted" in verdicts:
        return "contradicted"
    return "reproduced" if verdicts == {"reproduced"} else "not resolved"


def any_of(parts: Iterable[Judged]) -> ClaimVerdict:
    """The verdict of a finding whose parts are readings of one claim: one must be reproduced."""
    verdicts = {part.verdict for part in parts}
    if "reproduced" in verdicts:
        return "reproduced"
    return "contradicted" if verdicts == {"contradicted"} else "not resolved"


def runs_in_words(judged: Judged) -> str:
    """How many times as many runs would resolve a ratio."""
    if not isfinite(judged.ratio.half_width):
        return "no interval"
    if judged.more_runs > MOST_RUNS:
        return "too close to the bound for more seeds to resolve"
    return f"about {max(2, ceil(judged.more_runs))} times the runs would resolve it"
