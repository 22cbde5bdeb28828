"""What a reproduction costs: its runs and their FLOPs, stored beside the studies.

Counting takes half a minute, so that lists read the stored numbers. `python -m
einlinear.reproductions.costs` counts again and stores; tests compare.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from einlinear.files.whole import parse_json, write_whole
from einlinear.landscapes.config import make_study
from einlinear.reproductions.catalogue import REPRODUCTIONS, SCALES, Reproduction, Scale
from einlinear.reproductions.shipped import shipped_landscape, shipped_study, study_file
from einlinear.sweeps.study import Study


@dataclass(frozen=True, slots=True)
class ReproductionCost:
    """Runs of a study, and their training FLOPs; study is the id of what was counted."""

    study: str
    runs: int
    flops: int


def cost_file() -> Path:
    """The file of all costs."""
    return study_file("", "cpu").parent / "costs.json"


def stored_costs() -> dict[tuple[str, Scale], ReproductionCost]:
    """The stored costs by name and scale; a figure without runs has none."""
    values = parse_json(cost_file().read_text(encoding="utf-8"))
    return {
        (name, scale): ReproductionCost(**values[name][scale])
        for name in values
        for scale in SCALES
    }


def runs_of(reproduction: Reproduction, scale: Scale) -> Study | None:
    """All runs of a figure; None for the atlas, which trains nothing."""
    if reproduction.kind == "atlas":
        return None
    if reproduction.kind == "landscape":
        return make_study(shipped_landscape(scale))
    return shipped_study(reproduction, scale)


def count_costs(study: Study) -> ReproductionCost:
    """Count the runs of a study and their FLOPs, from shapes alone."""
    from einlinear.sweeps.planner import expand_study  # loads torch

    runs = expand_study(study)
    return ReproductionCost(study.id, len(runs), sum(run.flops for run in runs))


def main() -> None:
    """Count all studies and store the costs."""
    found: dict[str, dict[str, object]] = {}
    for name, reproduction in REPRODUCTIONS.items():
        for scale in SCALES:
            study = runs_of(reproduction, scale)
            if study is not None:
                found.setdefault(name, {})[scale] = asdict(count_costs(study))
    write_whole(cost_file(), (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
