"""Make the page of findings from its records: `python -m einlinear.reproductions.findings.make`.

Writes findings.md, findings.json and the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import cast

from markupsafe import Markup

from einlinear.bench.replay.summary import SUMMARY, read_summary, replay_summary, write_summary
from einlinear.bench.replay.tables import RunTable
from einlinear.files.whole import write_whole
from einlinear.reproductions.findings.evidence import (
    TUNING_FILES,
    Evidence,
    label_of,
    read_evidence,
)
from einlinear.reproductions.findings.figures import (
    CurvePanel,
    ForestRow,
    draw_curves,
    draw_forest,
    draw_rates,
)
from einlinear.reproductions.findings.findings import Findings, find_all
from einlinear.reproductions.findings.layers import (
    BTT,
    DENSE_LAYERS,
    FULL_RANK,
    LOW,
    MIXTURES,
    NAMES,
    PLACES,
    SHARING,
)
from einlinear.reproductions.findings.page import Section, table
from einlinear.reproductions.findings.ratios import fit_all
from einlinear.reproductions.findings.sections import (
    PARAMETRIZATIONS,
    comparison,
    exponent_effects,
    in_seconds,
    learning_rates,
    meetings,
    power_laws,
    ratio_list,
    replayed,
    variations,
)
from einlinear.reproductions.findings.verdicts import SAME
from einlinear.runs.config import RunConfig
from einlinear.show.numbers import FLOPS_PER_MAC, amount, counted, short
from einlinear.show.pages import finite, render


def make_findings(folder: Path, out: Path) -> Path:
    """Write the page, its figures and its numbers; return the path of the page."""
    evidence = read_evidence(folder)
    found = find_all(evidence)
    out.mkdir(parents=True, exist_ok=True)
    _draw(evidence, found, out)
    sections = _sections(evidence, found)
    page = render(
        "einlinear.reproductions",
        "findings.md",
        runs=f"{len(evidence.all_records):,}",
        tuning=sum(len(evidence.records.get(name, ())) for name in TUNING_FILES),
        minutes=f"{evidence.core_minutes:,.0f}",
        flops=short(sum(FLOPS_PER_MAC * r.curve[-1].macs for r in evidence.all_records)),
        same=f"{SAME:g}",
        sections=sections,
        beyond=_beyond(evidence, found, folder),
        setting=_setting(evidence),
        rates=_rates_table(evidence),
    )
    write_whole(out / "findings.md", page.encode())
    write_whole(
        out / "findings.json", (json.dumps(_numbers(evidence, found), indent=1) + "\n").encode()
    )
    return out / "findings.md"


def _sections(evidence: Evidence, found: Findings) -> list[Section]:
    """The findings of the paper, in its order, as far as there are records."""
    judged = found.judged
    sections = [power_laws(found)]
    sections += [comparison(judged[key], ratio_list(judged[key])) for key in ("omega", "psi")]
    sections.append(comparison(judged["nu"], ratio_list(judged["nu"]), meetings(found)))
    if "moe" in judged:
        sections += [
            comparison(judged[k], ratio_list(judged[k])) for k in ("moe", "moe-structures")
        ]
    if found.drifts:
        sections.append(learning_rates(found))
    if "heads" in judged:
        sections.append(comparison(judged["heads"], ratio_list(judged["heads"])))
    return sections


def _beyond(evidence: Evidence, found: Findings, folder: Path) -> list[Section]:
    """What the paper does not have."""
    sections = [exponent_effects(found)]
    if evidence.times is not None:
        sections.insert(0, in_seconds(found, evidence))
    if set(PLACES) <= set(map(label_of, evidence.records.get("places", ()))):
        pairs = [(name, DENSE_LAYERS) for name in PLACES]
        title = "Which layers should have experts?"
        intro = "Two active experts of 8, BTT in all layers; the experts in some of them only."
        sections.append(variations(evidence, "places", pairs, title, intro))
    if "muon" in evidence.records:
        pairs = [(f"{name} muon", name) for name in (DENSE_LAYERS, BTT)]
        pairs += [(f"{BTT} muon", f"{DENSE_LAYERS} muon")]
        title = "Muon against AdamW"
        intro = "Each with the best of the learning rates below, tuned alike."
        sections.append(variations(evidence, "muon", pairs, title, intro))
    for task, title in (("pixels", "On pixels"), ("regression", "On a random teacher")):
        if task in evidence.records:
            names = dict.fromkeys(map(label_of, evidence.records[task]))
            pairs = [(name, DENSE_LAYERS) for name in names if name != DENSE_LAYERS]
            sections.append(variations(evidence, task, pairs, title))
    if (folder / SUMMARY).exists():
        sections.append(replayed(read_summary(folder / SUMMARY), NAMES))
    return sections


def _draw(evidence: Evidence, found: Findings, out: Path) -> None:
    data, laws = evidence.observations("structures", "flops"), found.laws
    panels = [
        CurvePanel("full rank, ω = 0", "full", _named(FULL_RANK), data, laws),
        CurvePanel("sharing, ω > 0", "shared", _named(SHARING), data, laws),
        CurvePanel("low rank, ψ < 1", "low", _named(LOW), data, laws),
    ]
    if "moe" in evidence.records:
        mixed = evidence.observations("moe", "flops")
        names = {name: text for name, text in MIXTURES.items() if name.endswith("/16")}
        panels.append(CurvePanel("2 active of 16 experts", "experts", names, mixed, fit_all(mixed)))
    draw_curves(panels, DENSE_LAYERS, out / "laws.svg")
    draw_forest(_forest(found), _AXIS, out / "findings.svg")
    if evidence.cells:
        held = {cell.parametrization for cell in evidence.cells}
        titles = {str(name): PARAMETRIZATIONS[name] for name in PARAMETRIZATIONS if name in held}
        draw_rates(evidence.cells, titles, NAMES, out / "rates.svg")


_AXIS = "compute that dense layers need for the same loss, relative to these layers"


def _named(names: Iterable[str]) -> dict[str, str]:
    return {name: NAMES[name] for name in names}


def _forest(found: Findings) -> dict[str, list[ForestRow]]:
    """The ratios of all layers over dense, by kind."""
    kinds = {"full rank": ("full", FULL_RANK), "ω > 0": ("shared", SHARING), "ψ < 1": ("low", LOW)}
    seconds = found.samples.get("seconds")
    groups = {
        heading: [
            ForestRow(
                NAMES[name],
                kind,
                found.samples["flops"].ratio(name, DENSE_LAYERS),
                seconds.ratio(name, DENSE_LAYERS) if seconds is not None else None,
            )
            for name in names
            if name in found.samples["flops"].names
        ]
        for heading, (kind, names) in kinds.items()
    }
    if "moe" in found.judged:
        groups["experts"] = [
            ForestRow(
                NAMES[row.name],
                "experts",
                row.by_measure["flops"],
                row.by_measure.get("seconds"),
                row.paper,
            )
            for key in ("moe", "moe-structures")
            for row in found.judged[key].rows
            if row.judged.ratio.reference == DENSE_LAYERS
        ]
    return groups


def _setting(evidence: Evidence) -> Markup:
    """What all runs of the study of structures share, from their configs."""
    records = evidence.records["structures"]
    config = records[0].config
    warmup = max(record.config.warmup for record in records)
    macs = [record.counts.macs for record in records]
    tokens = [record.curve[-1].units for record in records]
    seeds = sorted({record.config.seed for record in records})
    facts = {
        "task": "the next symbol of English Wikipedia in 96 symbols, 60 million for training",
        "model": f"GPT of {config.depth} blocks, context {config.context}, heads of "
        f"{config.head_size}, {config.positions} positions, widths "
        f"{min(r.config.width for r in records)} to {max(r.config.width for r in records)}",
        "training": f"{config.batch_size * (config.context or 1):,} tokens a step, AdamW, "
        f"{config.schedule} rate after at most {warmup} steps of warm-up, losses of weights "
        f"averaged over the last {100 * config.ema:.0f} % of the steps",
        "size": f"{amount(min(macs))} to {amount(max(macs))} multiply-adds per token, "
        f"{amount(min(tokens))} to {amount(max(tokens))} tokens, {counted(len(seeds), 'seed')}",
        "validation": f"{config.eval_size * (config.context or 1):,} tokens",
    }
    return table(["", ""], [[name, text] for name, text in facts.items()])


def _rates_table(evidence: Evidence) -> Markup:
    """The losses of all rates that were tried, and the best."""
    rows = []
    for study, task in TUNING_FILES.items():
        found: dict[str, dict[float, float | None]] = {}
        for record in evidence.records.get(study, ()):
            found.setdefault(label_of(record), {})[record.config.lr] = record.final_loss
        for name in NAMES:
            if name in found:
                losses = dict(sorted(found[name].items()))
                best = min(losses, key=lambda rate: losses[rate] or inf)
                star = "\\*" if best in (min(losses), max(losses)) else ""
                shown = [f"{rate:g}: {short(loss, 4)}" for rate, loss in losses.items()]
                title = f"{NAMES[name]}, {task}" if task else NAMES[name]
                rows.append([title, "; ".join(shown), f"{best:g}{star}"])
    return table(["layers", "learning rate: loss", "best"], rows)


def _numbers(evidence: Evidence, found: Findings) -> dict[str, object]:
    """The numbers behind the page, as plain JSON values; null where there is none."""
    names = [name for name in found.samples["flops"].names if name != DENSE_LAYERS]
    plain = {
        "runs": len(evidence.all_records),
        "core_minutes": evidence.core_minutes,
        "laws": [asdict(law) for law in found.laws.laws],
        "over_dense": {
            measure: [asdict(laws.ratio(name, DENSE_LAYERS)) for name in names]
            for measure, laws in found.samples.items()
        },
        "findings": {
            key: {"verdict": finding.verdict, "rows": [asdict(row) for row in finding.rows]}
            for key, finding in found.judged.items()
        },
        "drifts": {name: asdict(drift) for name, drift in found.drifts.items()},
        "overtaking": [asdict(end) for end in found.overtaking.values()],
    }
    return cast(dict[str, object], finite(plain))


def replay_study(folder: Path, seeds: int) -> None:
    """Replay the search on the structures of the study, and keep the result beside the records.

    Layers with another start than the default are left out: a search does not know them.
    """
    records = read_evidence(folder).records["structures"]
    usual = RunConfig().factor_init
    table = RunTable.from_records(r for r in records if r.config.factor_init == usual)
    write_summary(replay_summary(table, seeds), folder / SUMMARY)


def main() -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="packed records and what else was measured")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replay", type=int, metavar="SEEDS", help="replay the search first")
    given = parser.parse_args()
    if given.replay is not None:
        replay_study(given.folder, given.replay)
    print(make_findings(given.folder, given.out))


if __name__ == "__main__":
    main()
