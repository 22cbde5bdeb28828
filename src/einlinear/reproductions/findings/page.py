"""The page of the findings in Markdown: its sections, tables and the words of verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup

from einlinear.reproductions.findings.findings import Finding, Row
from einlinear.reproductions.findings.verdicts import Judged, Ratio, runs_in_words
from einlinear.show.numbers import NONE, short

MEASURE_TITLES = {
    "flops": "by FLOPs",
    "linear_flops": "by FLOPs of linear layers",
    "seconds": "by seconds",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page; those about a claim of the paper end in a verdict."""

    title: str
    text: Markup
    claim: str = ""
    number: str = ""
    verdict: str = ""
    why: str = ""
    figure: str = ""
    caption: str = ""

    @property
    def anchor(self) -> str:
        """The anchor that the site and GitHub make of the title."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


def paragraphs(*parts: str) -> Markup:
    """Parts of a section, as Markdown."""
    return Markup("\n\n".join(parts))


def in_brackets(ratio: Ratio, digits: int = 2) -> str:
    """A ratio with its interval, such as 0.54 (0.48 to 0.61)."""
    return with_ends(ratio.value, ratio.low, ratio.high, digits)


def with_ends(value: float, low: float, high: float, digits: int = 2) -> str:
    """A number with its interval."""
    if not (isfinite(low) and isfinite(high)):
        return f"{short(value, digits)} (no interval)"
    return f"{short(value, digits)} ({short(low, digits)} to {short(high, digits)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return Markup("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def comparison_table(rows: Sequence[Row]) -> Markup:
    """All comparisons of a finding, in every measure."""
    measures = list(rows[0].by_measure)
    has_paper = any(row.paper is not None for row in rows)
    has_dense = any(row.over_dense is not None for row in rows)
    head = ["compared", "at a tenth of the compute", *(MEASURE_TITLES[m] for m in measures)]
    head += ["with other fits"] + ["over dense"] * has_dense + ["paper"] * has_paper + ["verdict"]
    found = []
    for row in rows:
        before = row.judged.ratio.before
        cells = [row.text, NONE if before is None else with_ends(*before)]
        cells += [in_brackets(row.by_measure[m]) for m in measures]
        cells.append(f"{short(row.fits[0], 2)} to {short(row.fits[1], 2)}")
        if has_dense:
            cells.append(NONE if row.over_dense is None else in_brackets(row.over_dense))
        cells += [short(row.paper, 3) if row.paper is not None else NONE] * has_paper
        found.append([*cells, in_words(row.judged)])
    return table(head, found)


def in_words(judged: Judged) -> str:
    """The verdict on one comparison; how many runs would resolve it, if it is not."""
    if judged.verdict != "not resolved":
        return judged.verdict
    return f"not resolved; {runs_in_words(judged)}"


def why(finding: Finding) -> str:
    """How many of the comparisons agree with the claim, and on how many seeds."""
    if not finding.rows:
        return "There are no runs yet."
    counts = {
        name: sum(row.judged.verdict == name for row in finding.rows)
        for name in ("reproduced", "contradicted", "not resolved")
    }
    told = [f"{number} {name}" for name, number in counts.items() if number]
    text = f"Of {len(finding.rows)} comparisons by FLOPs: {', '.join(told)}."
    if finding.num_seeds == 1:
        text += (
            " **Preliminary**: the runs have one seed, and intervals of one seed are too narrow."
        )
    return text


def verdict_of(finding: Finding) -> str:
    """The verdict in the summary, marked if it rests on one seed."""
    return f"{finding.verdict}{' (one seed)' * (finding.num_seeds == 1)}"
