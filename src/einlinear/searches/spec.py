"""SearchSpec: everything that decides a search, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from einlinear.errors import EinlinearError, quote, reason
from einlinear.files.whole import parse_object, write_whole
from einlinear.runs.config import RunConfig
from einlinear.searches.ladder import Rungs
from einlinear.searches.space import SPEC, SearchSpace
from einlinear.show.numbers import short
from einlinear.structures.values import one_of, whole_number
from einlinear.sweeps.job import RUNS

Objective = Literal["flops", "seconds"]

_TIMES = 10.0  # the default target, relative to the largest run of the ladder
_RESERVED = ("structure", "width", "steps", "seed", "num_experts", "num_active", "head_aligned")


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """A search: two searches with equal specs and one worker make the same decisions.

    settings: of all runs: fields of RunConfig.
    space: the candidates.
    rungs: the sizes and numbers of steps.
    flops: the budget.
    target: the FLOPs of the run whose loss is predicted.
    speed: FLOPs per second of a run, as measured before the first.
    objective: what a run costs: FLOPs, or seconds of this machine.
    seeds: at most this many runs differ only in their seed.
    seed: of all random decisions.
    """

    settings: Mapping[str, Any]
    space: SearchSpace
    rungs: Rungs
    flops: float
    target: float
    speed: float = 1e10
    objective: Objective = "flops"
    seeds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(self.objective, "objective", ("flops", "seconds"))
        whole_number(self.seeds, "seeds", 1, 1000)
        whole_number(self.seed, "seed", 0)
        for name in ("flops", "target"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
                raise EinlinearError(
                    what=f"{name} is {quote(value)}",
                    rule="a budget and a target are numbers of FLOPs above 0",
                    fix=f"give {name} as a number, for example 1e14",
                )

    def as_dict(self) -> dict[str, Any]:
        """The spec as a JSON object."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        rungs = {"widths": list(self.rungs.widths), "steps": list(self.rungs.steps)}
        return values | {
            "settings": dict(self.settings),
            "space": self.space.as_dict(),
            "rungs": rungs,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchSpec:
        """Read a spec from what `as_dict` returns."""
        rungs = Rungs(tuple(values["rungs"]["widths"]), tuple(values["rungs"]["steps"]))
        space = SearchSpace.from_dict(values["space"])
        return cls(**{**values, "rungs": rungs, "space": space})


def check_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all runs; refuses what the search decides."""
    for name in _RESERVED:
        if name in settings:
            raise EinlinearError(
                what=f"{name} is {quote(settings[name])} in the settings of a search",
                rule="the search chooses it for every run",
                fix="put structures and experts into the space, sizes into widths and steps",
            )
    RunConfig.from_dict(settings, "a search")
    return dict(settings)


def check_target(target: float | None, largest: float) -> float:
    """The target: ten times the largest run of the ladder if it is not given."""
    if target is None:
        return _TIMES * largest
    if not isinstance(target, int | float) or isinstance(target, bool):
        raise EinlinearError(
            what=f"the target is {quote(target)}",
            rule="a target is a number of FLOPs",
            fix="give a number, for example 1e15",
        )
    if target < largest:
        raise EinlinearError(
            what=f"a target of {short(target)} FLOPs",
            rule=f"a search predicts beyond its largest run, of {short(largest)} FLOPs",
            fix=f"give a target of {short(largest)} FLOPs or more, or a smaller budget",
        )
    return float(target)


def has_runs(out: Path) -> bool:
    """Whether any run of a search has begun."""
    return any((out / RUNS).glob("*"))


def keep_spec(spec: SearchSpec, out: Path) -> SearchSpec:
    """Write the spec of a search; one that has runs may change its budget only."""
    path = out / SPEC
    if path.exists() and has_runs(out):
        old = read_spec(out)
        for name in ("settings", "space", "rungs", "target", "objective", "seeds", "seed"):
            if getattr(old, name) != getattr(spec, name):
                what = {"rungs": "widths or steps"}.get(name, name)
                raise EinlinearError(
                    what=f"{path} is of a search with another {what}",
                    rule="one directory holds one search; only its budget may change",
                    fix="give the same command as before, or choose another directory",
                )
    write_whole(path, json.dumps(spec.as_dict(), indent=1).encode())
    return spec


def read_spec(out: Path) -> SearchSpec:
    """Read the spec of a search."""
    path = out / SPEC
    try:
        return SearchSpec.from_dict(parse_object(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule="a search keeps its settings in its directory",
            fix="delete the file and give the command of the search again; its runs are kept",
        ) from error
