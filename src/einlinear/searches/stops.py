"""When a search stopped candidates, and when it took them up again: stops.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from einlinear.files.fields import typed
from einlinear.files.whole import parse_object

STOPS = "stops.jsonl"


@dataclass(frozen=True, slots=True)
class Stop:
    """A decision of a search to train a candidate no further, or again.

    label: of the candidate, and the leader's.
    state: "stopped", or "open" if the candidate may win again.
    chance: the share of draws in which it beats the leader.
    before: the id of the run that was chosen next.
    spent: FLOPs of the search before that run.
    """

    label: str
    state: Literal["stopped", "open"]
    leader: str
    chance: float
    before: str
    spent: float


def add_stops(stops: Iterable[Stop], out: Path) -> None:
    """Append to stops.jsonl, which only pictures need."""
    lines = [json.dumps(asdict(stop)) + "\n" for stop in stops]
    if lines:
        with (out / STOPS).open("a", encoding="utf-8") as file:
            file.writelines(lines)


def read_stops(out: str | Path) -> dict[str, Stop]:
    """Candidates that are stopped, by label, each with the decision since which it has been."""
    found: dict[str, Stop] = {}
    try:
        lines = (Path(out) / STOPS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            stop = cast(Stop, typed(Stop, parse_object(line), "a stop"))
        except ValueError:
            continue  # cut off when a search was killed
        if stop.state == "stopped":
            found.setdefault(stop.label, stop)  # others on the directory write the same
        else:
            found.pop(stop.label, None)
    return found
