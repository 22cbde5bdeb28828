"""Everything the findings are computed from: records of studies, times of steps, a landscape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from einlinear.errors import EinlinearError
from einlinear.files.whole import parse_object
from einlinear.landscapes.cells import LandscapeCell
from einlinear.laws.observations import Observations, structure_label
from einlinear.reproductions.findings.layers import BTT, DENSE_LAYERS, MIXTURES, PLACES
from einlinear.reproductions.findings.rates import read_cells
from einlinear.runs.record import RunRecord
from einlinear.runs.sources import read_records
from einlinear.runs.step_times import StepTimes, read_step_times

Measure = Literal["flops", "linear_flops", "seconds"]
COMPARED_BY: tuple[Measure, ...] = ("flops", "linear_flops", "seconds")

TUNING_FILES = {"tuning": "", "pixels-tuning": "pixels", "regression-tuning": "a random teacher"}
"""Files of packed records that only tuned learning rates, with the name of their task, if not text.
"""

STUDY_FILES = (*TUNING_FILES, "structures", "moe", "heads", "muon", "pixels", "regression")
"""Files of packed records, by the name of the study."""

_ALSO = {
    "moe": (DENSE_LAYERS,),
    "places": (DENSE_LAYERS,),
    "heads": (BTT,),
    "muon": (DENSE_LAYERS, BTT),
}
"""Layers of the study of structures that another study is compared with."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """The records of all studies by name, and what was measured besides.

    times: the time of a step of every model; None if it was not measured.
    cells: of the landscapes of learning rates.
    """

    records: Mapping[str, tuple[RunRecord, ...]]
    times: StepTimes | None = None
    cells: tuple[LandscapeCell, ...] = ()

    def observations(self, study: str, measure: Measure) -> Observations:
        """The curves of a study, with those that it is compared with, by one measure of compute."""
        key = study, measure
        if key not in self._observed:
            times = self.times if measure == "seconds" else None
            found = Observations.from_records(self.compared(study), compute=measure, times=times)
            self._observed[key] = found
        return self._observed[key]

    def compared(self, study: str) -> tuple[RunRecord, ...]:
        """The records of a study and of what it is compared with, each once."""
        also = _ALSO.get(study, ())
        base = [r for r in self.records["structures"] if label_of(r) in also] if also else []
        found = {record.id: record for record in (*base, *self.records[study])}
        return tuple(found.values())

    def seeds(self, study: str, names: Collection[str]) -> int:
        """The least number of seeds that a width of these layers has."""
        seeds: dict[tuple[str, int], set[int]] = {}
        for record in self.compared(study):
            if (name := label_of(record)) in names:
                seeds.setdefault((name, record.config.width), set()).add(record.config.seed)
        return min(map(len, seeds.values()), default=0)

    @cached_property
    def _observed(self) -> dict[tuple[str, Measure], Observations]:
        return {}

    @property
    def all_records(self) -> tuple[RunRecord, ...]:
        """The records of all studies, each once."""
        return tuple({r.id: r for found in self.records.values() for r in found}.values())

    @property
    def core_minutes(self) -> float:
        """Time in steps of all runs; each had one core."""
        return sum(record.seconds for record in self.all_records) / 60


def label_of(record: RunRecord) -> str:
    """The layers of a run as records name them."""
    return str(structure_label(record.config, {}))


def read_evidence(folder: Path) -> Evidence:
    """Read what is in a folder; studies that are not there are left out.

    Landscapes may also be beside the folder, where they have a page of their own.
    """
    records = {
        name: read_records(path)
        for name in STUDY_FILES
        if (path := folder / f"{name}.jsonl").exists()
    }
    if "moe" in records:
        records |= _without_places(records["moe"])
    if "structures" not in records:
        raise EinlinearError(
            what=f"there is no structures.jsonl in {folder}",
            rule="findings compare everything with the structures of that study",
            fix="einlinear pack the sweep of structures.toml into it",
        )
    times = folder / "steps.json"
    cells = [
        cell
        for place in (folder, folder.parent)
        for path in sorted(place.glob("landscape*.json"))
        for cell in read_cells(parse_object(path.read_text(encoding="utf-8")))
    ]
    return Evidence(records, read_step_times(times) if times.exists() else None, tuple(cells))


def _without_places(records: Collection[RunRecord]) -> dict[str, tuple[RunRecord, ...]]:
    """The mixtures, and apart from them the experts in some of the layers, which have few widths.

    Laws are fitted to the inner widths of all layers of a study, or of none.
    """
    some = set(PLACES) - set(MIXTURES)
    return {
        "moe": tuple(r for r in records if label_of(r) not in some),
        "places": tuple(r for r in records if label_of(r) in PLACES),
    }
