"""Answer: what a search found, as plain data: its leaderboard, and effects of omega, psi and nu."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from einlinear.errors import EinlinearError, reason
from einlinear.files.fields import typed
from einlinear.files.whole import parse_object, write_whole

ANSWER = "answer.json"
CHOICES = "choices.jsonl"


@dataclass(frozen=True, slots=True)
class LeaderboardRow:
    """One candidate.

    predicted_loss: at the target, with its interval.
    multiplier: how many times the FLOPs dense needs for that loss, with its interval, low to high.
    seen: the same for the lowest loss that runs of both have reached, without any law, and
        seen_flops, the FLOPs of the candidate there; None if they have no loss in common.
    seconds_multiplier: the same in seconds of this machine; None without measured speed.
    speed: time per FLOP relative to dense, at the largest size that both were trained at.
    wins: how likely it is the best of all that were trained.
    rate: the learning rate that was best in the final check, relative to the usual one; None if it
        was not checked.
    rate_gain: by how much that rate lowers the log loss; rate_spread: its standard deviation.
    state: "leader", "open" (may still win), or "stopped" (cannot win, by its interval).
    """

    structure: str
    num_experts: int
    num_active: int
    experts: str
    head_aligned: bool
    label: str
    predicted_loss: float
    loss_interval: tuple[float, float]
    multiplier: float
    low: float
    high: float
    seen: float | None
    seen_flops: float | None
    seconds_multiplier: float | None
    seconds_interval: tuple[float, float] | None
    speed: float | None
    params: int
    omega: float
    psi: float
    nu: float
    wins: float
    runs: int
    flops: float
    rate: float | None
    rate_gain: float | None
    rate_spread: float | None
    state: str


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change of omega, psi or nu does to the multiplier, the other two held."""

    name: str
    change: float
    factor: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search in numbers.

    more_budget: how many times this budget would tell the two leaders apart; 1 if they are apart,
        None if it would take more than a hundred times.
    """

    rows: tuple[LeaderboardRow, ...]
    effects: tuple[Effect, ...]
    target: float
    objective: str
    spent: float
    largest: float
    linf: float
    linf_interval: tuple[float, float]
    more_budget: float | None
    diverged: tuple[str, ...]
    failed: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MadeChoice:
    """A decision of a search: the run, the one it goes on from, why, and FLOPs spent before."""

    id: str
    source: str | None
    why: str
    flops: float
    spent: float


def write_answer(answer: Answer, out: Path) -> None:
    """Write answer.json."""
    write_whole(out / ANSWER, json.dumps(answer.as_dict(), indent=1).encode())


def read_answer(out: str | Path) -> Answer:
    """Read the answer of a search from its directory."""
    path = Path(out) / ANSWER
    try:
        values = parse_object(path.read_bytes())
        return cast(Answer, typed(Answer, values, "an answer"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EinlinearError(
            what=f"cannot read {path}: {reason(error)}",
            rule="a search writes its answer into its directory",
            fix="give the command of the search again",
        ) from error


def add_choice(choice: MadeChoice, out: Path) -> None:
    """Append a decision to choices.jsonl, which only pictures need."""
    with (out / CHOICES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(choice)) + "\n")


def read_choices(out: str | Path) -> tuple[MadeChoice, ...]:
    """The decisions of a search, as far as they can be read."""
    found = []
    try:
        lines = (Path(out) / CHOICES).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        try:
            found.append(cast(MadeChoice, typed(MadeChoice, parse_object(line), "a choice")))
        except (ValueError, TypeError, KeyError):
            continue  # cut off when a search was killed
    return tuple(found)
