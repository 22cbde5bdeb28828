"""Read what a report is about: a folder of runs, packed records, or a table of observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from einlinear.errors import EinlinearError, quote
from einlinear.files.whole import parse_object
from einlinear.laws.observations import (
    Compute,
    Observations,
    StructureLabel,
    group_of,
    spent_at,
    structure_label,
)
from einlinear.laws.read import read_observations
from einlinear.reports.searching import SEARCH_FILES, read_searched
from einlinear.reports.shown import (
    LEAST,
    MOST,
    Gathered,
    RunState,
    ShownRun,
    ShownStudy,
    SourceKind,
    check_shown_config,
    check_shown_curve,
    check_shown_record,
    is_shown,
)
from einlinear.runs.config import RunConfig
from einlinear.runs.config_file import read_config
from einlinear.runs.directory import RunDirectory, read_metrics, read_record
from einlinear.runs.packed import is_packed, read_packed
from einlinear.runs.record import Counts, Point, RunRecord
from einlinear.runs.sources import run_folders
from einlinear.show.numbers import counted
from einlinear.structures.taxonomy import Taxonomy, taxonomy
from einlinear.structures.text import parse_structure
from einlinear.sweeps.claims import Watch, claimed

LIVE_SECONDS = 60.0  # an older claim belongs to a process that is gone
_LOG_BYTES = 4000
_SPENT: tuple[Compute, ...] = ("flops", "linear_flops", "seconds", "params", "units")
_SPENT_SO_FAR: tuple[Compute, ...] = ("seconds", "units", "flops")  # known without a record
_FIX = "give the --out of einlinear sweep, train or pack, or a .csv or .jsonl file"
_READ = ("config.json", "record.json", "metrics.jsonl", "failures.jsonl")


def gather(source: str | Path) -> Gathered:
    """Read the runs of a sweep, a folder of runs, a single run, packed records, or a table."""
    source = Path(source)
    if source.is_file():
        return _gather_packed(source) if is_packed(source) else _gather_table(source)
    kind, folders = _run_folders(source)
    problems: list[tuple[str, str]] = []
    spelling: dict[str, str] = {}
    runs = tuple(run for folder in folders for run in _read_run(folder, spelling, problems))
    if not runs and not problems:
        raise EinlinearError(
            what=f"there are no runs in {source}",
            rule="a report reads a sweep's directory, a folder of runs, a single run, packed "
            "records, or a table",
            fix=_FIX,
        )
    runs, search = read_searched(source, runs, problems)
    studies = tuple(_read_studies(source / "studies", problems)) if kind == "sweep" else ()
    names = list(dict.fromkeys(study.name for study in studies if study.name))
    title = ", ".join(names) or source.resolve().name
    return Gathered(source, kind, title, runs, studies, tuple(problems), search)


def _gather_packed(source: Path) -> Gathered:
    """Read packed records; runs that a report cannot show are left out."""
    problems: list[tuple[str, str]] = []
    spelling: dict[str, str] = {}
    runs = []
    for record in read_packed(source):
        try:
            runs.append(_of_record(record, None, spelling))
        except Exception as error:  # whatever is wrong with it, show the other runs
            problems.append((f"{source}, run {record.id}", _reason(error)))
    return Gathered(source, "runs", source.stem, tuple(runs), problems=tuple(problems))


def _gather_table(source: Path) -> Gathered:
    """Read a table; points that a report cannot show are left out."""
    table = read_observations(source)
    pairs = zip(table.compute, table.loss, strict=True)
    keep = np.array([is_shown(compute) and is_shown(loss) for compute, loss in pairs])
    if keep.all():
        return Gathered(source, "table", source.stem, _runs_of_table(table))
    first, count = int(keep.argmin()), int((~keep).sum())
    why = (
        f"left out {counted(count, 'point')} with a compute or loss outside {LEAST:g} to {MOST:g}"
        f"{'' if count == 1 else ', the first'} of run {quote(table.run[first])} "
        f"(compute {table.compute[first]:g}, loss {table.loss[first]:g})"
    )
    runs = _runs_of_table(table.take(keep))
    return Gathered(source, "table", source.stem, runs, problems=((str(source), why),))


def fingerprint(source: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that a report reads; changes when the report would."""
    folders = [] if source.is_file() else _run_folders(source)[1]
    files = [folder / name for folder in folders for name in _READ]
    files += [source] if source.is_file() else sorted((source / "studies").glob("*.toml"))
    files += [source / name for name in SEARCH_FILES]
    found = []
    for file in files:
        with suppress(OSError):  # there is no such file
            facts = file.stat()
            found.append((str(file), facts.st_size, facts.st_mtime_ns))
    # A process that dies does not change its files.
    found += [(str(folder), int(_is_left(folder)), 0) for folder in _without_records(folders)]
    return tuple(found)


def under_way(source: Path) -> tuple[int, float | None]:
    """How many runs are being trained now, and how many seconds the longest still needs."""
    if not source.is_dir():
        return 0, None
    live = [folder for folder in _without_records(_run_folders(source)[1]) if _is_live(folder)]
    left = [_number(claimed(folder).get("seconds_left")) for folder in live]
    return len(live), max((seconds for seconds in left if seconds is not None), default=None)


def _run_folders(source: Path) -> tuple[SourceKind, list[Path]]:
    if not source.is_dir():
        raise EinlinearError(
            what=f"there is no {source}",
            rule="a report reads a directory of runs, packed records, or a table",
            fix=_FIX,
        )
    return run_folders(source)


def _without_records(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if not (folder / "record.json").exists()]


def _read_studies(folder: Path, problems: list[tuple[str, str]]) -> Iterable[ShownStudy]:
    for path in sorted(folder.glob("*.toml")):
        try:
            name = str(read_config(path).get("name") or "")
            yield ShownStudy(name, path.name, path.read_text(encoding="utf-8"))
        except Exception as error:  # one bad file must not stop the report
            problems.append((str(path), _reason(error)))


def _reason(error: Exception) -> str:
    if isinstance(error, EinlinearError):
        return error.what
    return str(error) if type(error) is ValueError else quote(error)


def _read_run(
    folder: Path, spelling: dict[str, str], problems: list[tuple[str, str]]
) -> list[ShownRun]:
    """The run in a folder; if not even its config can be read, a problem and no run.

    `spelling` remembers how each structure was first spelled; all runs use that.
    """
    path = folder / "record.json"
    is_unreadable = False
    if path.exists():
        try:
            return [_of_record(read_record(path), path.stat().st_mtime, spelling)]
        except Exception as error:  # whatever is wrong with it, show the other runs
            problems.append((str(path), _reason(error).removeprefix(f"cannot read {path}: ")))
            is_unreadable = True
    try:
        config = RunDirectory(folder).read_config()
        if config is None:
            return []
        check_shown_config(config)
        # metrics without a readable record are incomplete, but that is not a second problem
        others = [] if is_unreadable else problems
        run = _without_record(folder, _of_config(config, spelling), others)
        return [replace(run, state="unreadable", seconds_left=None) if is_unreadable else run]
    except Exception as error:
        problems.append((str(folder / "config.json"), _reason(error)))
        return []


def _of_record(record: RunRecord, written: float | None, spelling: dict[str, str]) -> ShownRun:
    check_shown_record(record)
    return ShownRun(
        **_of_config(record.config, spelling),
        size=str(record.counts.params),
        state=record.status,
        curve=record.curve,
        spent=_spent(record.curve, _SPENT, record.counts),
        unit=quote_plain(record.unit),
        params=record.counts.params,
        macs=record.counts.macs,
        steps_done=record.steps_done,
        seconds=record.seconds,
        units_per_second=record.units_per_second,
        peak_bytes=record.peak_bytes,
        written=written,
        environment={quote_plain(name): quote_plain(v) for name, v in record.environment.items()},
        record=record,
    )


def _of_config(config: RunConfig, spelling: dict[str, str]) -> dict[str, Any]:
    kind = "ffn " if config.experts == "ffn" else ""
    has_experts = bool(config.num_experts)
    return {
        "id": config.id,
        "label": structure_label(config, spelling),
        "exponents": taxonomy(parse_structure(config.structure)),
        "group": group_of(config),
        "seed": config.seed,
        "task": config.task,
        "width": config.width,
        "depth": config.depth,
        "experts": f"{kind}{config.num_active} of {config.num_experts}" if has_experts else "",
        "config": config,
    }


def _spent(
    curve: Sequence[Point], measures: Sequence[Compute], counts: Counts | None = None
) -> dict[str, tuple[float, ...]]:
    """What had been spent at each point, by measure."""
    return {name: tuple(spent_at(point, name, counts) for point in curve) for name in measures}


def _without_record(
    folder: Path, known: dict[str, Any], problems: list[tuple[str, str]]
) -> ShownRun:
    """A run that is running, was stopped, or has failed."""
    path = folder / "metrics.jsonl"
    try:
        lines = read_metrics(folder) if path.exists() else []
        points = [Point.from_dict(line) for line in lines if line.pop("kind") == "point"]
        check_shown_curve(points)
    except Exception as error:
        points = []
        problems.append((str(path), _reason(error)))
    claim, failure = claimed(folder), _last_failure(folder)
    state: RunState = "running"
    if not _is_live(folder):
        state = "failed" if failure is not None else "stopped" if _is_left(folder) else "running"
    log = _tail(folder / "log.txt") or (failure or "")
    last = points[-1] if points else None
    rate = last.units / last.seconds if last and last.units and last.seconds else None
    return ShownRun(
        **known,
        state=state,
        curve=tuple(points),
        spent=_spent(points, _SPENT_SO_FAR),
        macs=round(last.macs / last.units) if last and last.units else None,
        steps_done=last.step if last else 0,
        seconds=last.seconds if last else None,
        units_per_second=rate,
        seconds_left=_number(claim.get("seconds_left")) if state == "running" else None,
        message=(log.strip().splitlines() or [""])[-1] if state == "failed" else "",
        log=log if state == "failed" else "",
        written=path.stat().st_mtime if path.exists() else None,
    )


def _number(value: object) -> float | None:
    """A time that a claim holds; None if it is not a time."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= MOST else None


def quote_plain(value: object) -> str:
    """Any value as text of limited length."""
    return value[:_LOG_BYTES] if isinstance(value, str) else quote(value)


def _is_live(folder: Path) -> bool:
    """Whether a process is training the run, as far as one look can tell."""
    try:
        written = max(path.stat().st_mtime for path in folder.glob("claim-*"))
    except (OSError, ValueError):  # there is none, or it is being rewritten right now
        written = 0.0
    return Watch().free(folder) is None and time() - written < LIVE_SECONDS


def _is_left(folder: Path) -> bool:
    """Whether a process was training the run and is gone."""
    return any(folder.glob("claim-*")) and not _is_live(folder)


def _last_failure(folder: Path) -> str | None:
    """The error of the last failed attempt; None if none failed."""
    try:
        lines = (folder / "failures.jsonl").read_text(encoding="utf-8").splitlines()
        return str(parse_object(lines[-1]).get("error", "")) if lines else None
    except FileNotFoundError:
        return None
    except Exception:
        return "an attempt failed; failures.jsonl cannot be read"


def _tail(path: Path) -> str:
    """The end of a text file; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _runs_of_table(table: Observations) -> tuple[ShownRun, ...]:
    """The runs of observations, whose only measure is compute.

    Runs with the same name but different seeds or structures are different runs.
    """
    order: dict[tuple[str, str, int], list[int]] = {}
    columns = (table.run.tolist(), table.structure.tolist(), table.seed.tolist())
    for place, (name, structure, seed) in enumerate(zip(*columns, strict=True)):
        order.setdefault((str(name), str(structure), seed), []).append(place)
    runs = []
    for name, places in zip(_run_names(list(order)), order.values(), strict=True):
        places = sorted(places, key=lambda place: float(table.compute[place]))
        first = places[0]
        label = _label(table, first)
        steps = [_whole(table, "step", place) for place in places]
        runs.append(
            ShownRun(
                id=name,
                label=label,
                exponents=_exponents(label.structure),
                state="finished",
                curve=tuple(
                    Point(step or 0, 0, 0, 0.0, 0.0, float(table.loss[k]), None, 0.0)
                    for step, k in zip(steps, places, strict=True)
                ),
                spent={"compute": tuple(table.compute[places].tolist())},
                group=str(table.group[first]),
                size=str(table.size[first]),
                seed=int(table.seed[first]),
                width=_whole(table, "width", first),
                depth=_whole(table, "depth", first),
                steps_done=None if None in steps else steps[-1],
            )
        )
    return tuple(runs)


def _label(table: Observations, place: int) -> StructureLabel:
    """The label of a row: its own columns if they agree with the structure, or the structure."""
    columns = [table.more.get(name) for name in ("base_structure", "variant")]
    label = StructureLabel(*("" if c is None else str(c[place] or "") for c in columns))
    structure = str(table.structure[place])
    return label if str(label) == structure else StructureLabel(structure)


def _run_names(keys: Sequence[tuple[str, str, int]]) -> list[str]:
    """A unique name for each run, with its structure or seed where it needs them."""
    seeds = Counter((name, structure) for name, structure, _ in keys)
    structures = Counter(name for name, _ in seeds)
    return [
        name
        + (f" {structure}" if structures[name] > 1 else "")
        + (f" seed {seed}" if seeds[name, structure] > 1 else "")
        for name, structure, seed in keys
    ]


def _whole(table: Observations, name: str, place: int) -> int | None:
    try:
        return int(table.more[name][place])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _exponents(structure: str) -> Taxonomy | None:
    """The taxonomy of a structure of a table; None if it is not one."""
    try:
        return taxonomy(parse_structure(structure))
    except EinlinearError:
        return None
