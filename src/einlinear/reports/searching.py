"""The search that trained the runs of a directory: its answer, its candidates, their runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

from einlinear.errors import EinlinearError
from einlinear.reports.shown import ChosenRun, Lane, LaneState, ShownRun, ShownSearch
from einlinear.runs.config import RunConfig
from einlinear.searches.answer import (
    ANSWER,
    CHOICES,
    Answer,
    LeaderboardRow,
    MadeChoice,
    read_answer,
    read_choices,
)
from einlinear.searches.space import Candidate, read_names
from einlinear.searches.stops import STOPS, Stop, read_stops
from einlinear.show.numbers import between, counted, short
from einlinear.structures.text import parse_structure

SEARCH_FILES = (ANSWER, CHOICES, STOPS)
"""What a search adds to its directory of runs."""

_Key = tuple[str, int, int, bool, bool]


def read_searched(
    source: Path, runs: tuple[ShownRun, ...], problems: list[tuple[str, str]]
) -> tuple[tuple[ShownRun, ...], ShownSearch | None]:
    """The runs that a report analyses, and the search that chose them, if one did.

    A run of a search goes on from shorter ones, whose points it repeats: only the longest counts.
    """
    if not any((source / name).is_file() for name in SEARCH_FILES):
        return runs, None
    answer = _read(source, problems)
    if answer is None:
        return longest_runs(runs), None
    rows = _rows_by_key(answer)
    named = tuple(_named(runs, rows, source))
    choices: dict[str, MadeChoice] = {}
    for choice in read_choices(source):
        choices.setdefault(choice.id, choice)  # later ones only go on with an interrupted run
    lanes = _lanes(answer, rows, _chosen(named, choices), read_stops(source))
    return longest_runs(named), ShownSearch(answer, lanes)


def _read(source: Path, problems: list[tuple[str, str]]) -> Answer | None:
    path = source / ANSWER
    if not path.exists():
        return None
    try:
        answer = read_answer(source)
    except EinlinearError as error:
        problems.append((str(path), error.what.removeprefix(f"cannot read {path}: ")))
        return None
    if not answer.rows:
        problems.append((str(path), "its leaderboard is empty"))
    return answer if answer.rows else None


def longest_runs(runs: Sequence[ShownRun]) -> tuple[ShownRun, ...]:
    """All runs but those with a result that a longer one with a result goes on from."""
    longest: dict[str, int] = {}
    chains = [_chain(run) if run.has_result else run.id for run in runs]
    for run, chain in zip(runs, chains, strict=True):
        longest[chain] = max(longest.get(chain, 0), run.steps_done or 0)
    pairs = zip(runs, chains, strict=True)
    return tuple(run for run, chain in pairs if (run.steps_done or 0) >= longest[chain])


def _chain(run: ShownRun) -> str:
    """The same for runs that differ in nothing but their steps."""
    return run.id if run.config is None else replace(run.config, steps=1).id


def _rows_by_key(answer: Answer) -> dict[_Key, tuple[str, LeaderboardRow]]:
    """Rows and their names: their labels, or the structures if two have the same label."""
    counts = Counter(row.label for row in answer.rows)
    found = {}
    for row in answer.rows:
        is_ffn = bool(row.num_experts) and row.experts == "ffn"
        key = _key(row.structure, row.num_experts, row.num_active, is_ffn, row.head_aligned)
        found[key] = (row.label if counts[row.label] == 1 else row.structure, row)
    return found


def _key(structure: str, num_experts: int, num_active: int, is_ffn: bool, is_aligned: bool) -> _Key:
    """The same for all spellings of a candidate."""
    try:
        structure = str(parse_structure(structure))
    except EinlinearError:
        pass  # an answer that somebody wrote by hand
    return structure, num_experts, num_active if num_experts else 0, is_ffn, is_aligned


def _key_of(config: RunConfig) -> _Key:
    is_ffn = bool(config.num_experts) and config.experts == "ffn"
    numbers = config.num_experts, config.num_active
    return _key(config.structure, *numbers, is_ffn, bool(config.head_aligned))


def _named(
    runs: Iterable[ShownRun], rows: Mapping[_Key, tuple[str, LeaderboardRow]], source: Path
) -> Iterator[ShownRun]:
    """The runs with the names of their rows, or else those that the space of the search gives."""
    others: dict[str, str] | None = None
    for run in runs:
        name = run.name
        if run.config is not None:
            found = rows.get(_key_of(run.config))
            if found is None and others is None:
                others = read_names(source)  # takes a while
            key = Candidate.of(run.config).key
            name = found[0] if found else (others or {}).get(key, name)
        yield replace(run, name=name)


def _chosen(runs: Iterable[ShownRun], choices: Mapping[str, MadeChoice]) -> list[ChosenRun]:
    """All runs in the order in which they were chosen, or else in which they were written."""
    place = {name: k for k, name in enumerate(choices)}
    ordered = sorted(runs, key=lambda run: (place.get(run.id, inf), run.written or inf, run.id))
    done: dict[str, float] = {}
    spent, found = 0.0, []
    for number, run in enumerate(ordered, 1):
        choice, chain = choices.get(run.id), _chain(run)
        flops = max(0.0, run.total("flops") - done.get(chain, 0.0))
        if choice is not None and not run.has_result:
            flops = choice.flops
        done[chain] = max(done.get(chain, 0.0), run.total("flops"))
        why = "" if choice is None else choice.why
        found.append(ChosenRun(run, number, why, flops, spent))
        spent += flops
    return found


def _lanes(
    answer: Answer,
    rows: Mapping[_Key, tuple[str, LeaderboardRow]],
    chosen: Sequence[ChosenRun],
    stops: Mapping[str, Stop],
) -> tuple[Lane, ...]:
    """Candidates in the order of the leaderboard, then those that are not in it."""
    by_name: dict[str, list[ChosenRun]] = {name: [] for name, _ in rows.values()}
    for one in chosen:
        by_name.setdefault(one.run.structure, []).append(one)
    known = {name: row for name, row in rows.values()}
    numbers = {one.run.id: one.number for one in chosen}
    lanes = []
    for name, runs in by_name.items():
        row, with_rates = known.get(name), _with_rates(runs)
        state = _state(row, runs)
        stop = stops.get(row.label) if row is not None and state == "stopped" else None
        number = None if stop is None else numbers.get(stop.before)
        known_stop = None if stop is None or number is None else (number - 1, stop)
        ending = _ending(answer, row, state, runs, len(chosen), known_stop)
        after = None
        if runs and state not in ("leader", "open"):
            after = runs[-1].number if known_stop is None else known_stop[0]
        lanes.append(Lane(name, row, state, with_rates, ending, after))
    return tuple(lanes)


def _with_rates(runs: Sequence[ChosenRun]) -> tuple[ChosenRun, ...]:
    """The rate that most runs have is the usual one."""
    rates = [one.run.config.lr for one in runs if one.run.config is not None]
    if not rates:
        return tuple(runs)
    usual = max(rates, key=rates.count)
    return tuple(
        replace(one, rate=one.run.config.lr / usual) if one.run.config is not None else one
        for one in runs
    )


def _state(row: LeaderboardRow | None, runs: Sequence[ChosenRun]) -> LaneState:
    if row is not None:
        return "leader" if row.state == "leader" else "open" if row.state == "open" else "stopped"
    return "diverged" if any(one.run.state == "diverged" for one in runs) else "failed"


def _ending(
    answer: Answer,
    row: LeaderboardRow | None,
    state: LaneState,
    runs: Sequence[ChosenRun],
    total: int,
    stop: tuple[int, Stop] | None,
) -> str:
    """When and why a candidate was stopped, as a sentence or two.

    stop: the number of the last run before, and the decision.
    """
    if not runs:
        return "Its runs are not in this directory."
    last = runs[-1]
    if row is None:
        why = "diverged" if state == "diverged" else "did not finish"
        spent = last.spent + last.flops
        return f"Stopped {_when(last.number, total, spent, answer)}: a run {why}."
    loss = f"its predicted loss is {short(row.predicted_loss)}"
    loss += f" ({ends})" if (ends := between(row.loss_interval)) else ""
    if state == "leader":
        return f"It leads after {counted(len(runs), 'run')}; {loss}."
    if state == "open":
        return (
            f"It may still win ({row.wins:.0%}); its last run was number {last.number:,}; {loss}."
        )
    if stop is None:
        return f"Its last run was number {last.number:,} of {total:,}; it can hardly win; {loss}."
    number, made = stop
    later = sum(one.number > number for one in runs)
    more = f" It got {counted(later, 'more run')}." if later else ""
    why = f"it beat {made.leader} in {made.chance:.1%} of draws"
    return f"Stopped {_when(number, total, made.spent, answer)}: {why}; {loss}.{more}"


def _when(number: int, total: int, spent: float, answer: Answer) -> str:
    words = f"after run {number:,} of {total:,}"
    if answer.spent > 0:
        words += f", with {min(1.0, spent / answer.spent):.0%} of the FLOPs spent"
    return words
