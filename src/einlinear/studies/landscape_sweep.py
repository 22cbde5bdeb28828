"""landscape: all runs of a landscape in processes of one thread, resumed where they stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

import torch

from einlinear.errors import EinlinearError, cannot_write, quote, reason
from einlinear.files import parse_object
from einlinear.studies.images import load_images
from einlinear.studies.landscape import Landscape, make_landscape
from einlinear.studies.landscape_runs import LandscapeConfig, Run, RunResult, cost, plan_runs
from einlinear.studies.landscape_train import TensorImages, check_memory, train_run
from einlinear.studies.workers import Progress, count_processes, worker_pool

RESULTS = "landscape.jsonl"
_SCHEMA = 1


def landscape(
    config: LandscapeConfig,
    *,
    out: str | Path,
    data: str | Path | None = None,
    processes: int = 2,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Landscape:
    """Train perceptrons over widths, rates, structures and seeds, naively and under muP.

    Every result is a line of out/landscape.jsonl as soon as it is there. The same call again does
    only the runs that are missing. A script that calls this must guard its own work with
    `if __name__ == "__main__":`, because the processes import it. Ref: [P24 §4].

    Args:
        config: what to run.
        out: folder of landscape.jsonl.
        data: an .npz file of images, see `load_images`; the patches of the package unless given.
        processes: how many runs at once, on one thread each.
        on_progress: called at the start and after every run.
    """
    processes = count_processes(processes)
    images = load_images(data, config.pool)
    runs = plan_runs(config, images.fingerprint)
    costs = {run: cost(run, images.train_x.shape[1]) for run in runs}
    with _opened(Path(out) / RESULTS) as (file, held):
        known = {run: result for run, result in held.items() if run in costs}
        missing = sorted((run for run in runs if run not in known), key=lambda run: -costs[run])
        check_memory(missing, images)
        total = sum(costs.values())

        def report() -> None:
            share = sum(costs[run] for run in known) / total
            on_progress(Progress(len(known), len(runs), share))

        report()
        source = _Source(data, config.pool, images.fingerprint)
        for result in _results(missing, source, processes):
            _append(file, result)
            known[result.run] = result
            report()
    return make_landscape(config, known.values(), images.fingerprint, images.name)


def read_results(path: Path) -> dict[Run, RunResult]:
    """The results in a file, by run; a last line that was cut off is left out."""
    results = {}
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            held = parse_object(line)
            if held["schema"] != _SCHEMA:
                raise ValueError(f"its schema is {quote(held['schema'])}, not {_SCHEMA}")
            result = RunResult(run=Run(**held["run"]), **held["result"])
            result.check()
            results[result.run] = result
        except (ValueError, KeyError, TypeError) as error:
            raise EinlinearError(
                what=f"cannot read line {number} of {path}: {reason(error)}",
                rule="every line is one result, as einlinear landscape writes it",
                fix="delete that line, and its run is done again; or choose another folder",
            ) from error
    return results


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], dict[Run, RunResult]]]:
    """The file of results, to append to, and what is in it; a cut last line is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise cannot_write(path, error) from error
    with file:
        results = read_results(path)
        file.truncate(path.read_bytes().rfind(b"\n") + 1)
        yield file, results


def _append(file: IO[bytes], result: RunResult) -> None:
    """One line, on the disk before the next run is reported."""
    held = asdict(result)
    run = held.pop("run")
    file.write(json.dumps({"schema": _SCHEMA, "run": run, "result": held}).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a process finds the images: small, as what starts a worker must be."""

    data: str | Path | None
    pool: int
    fingerprint: str


def _results(runs: Sequence[Run], source: _Source, processes: int) -> Iterator[RunResult]:
    """The results as they finish."""
    if not runs:
        return
    count = min(processes, len(runs))
    needs = "a run needs memory for its data, its weights and their gradients"
    with worker_pool(count, _start, (source,), does="trains", needs=needs) as pool:
        for future in as_completed([pool.submit(_work, run) for run in runs]):
            yield future.result()


_sources: list[_Source] = []  # of a worker, set once at its start


def _start(source: _Source) -> None:
    """Make a process ready for runs: one thread, and it knows where the data is."""
    torch.set_num_threads(1)
    _sources.append(source)


@cache
def _images(source: _Source) -> TensorImages:
    images = load_images(source.data, source.pool)
    if images.fingerprint != source.fingerprint:
        raise EinlinearError(
            what=f"the images in {source.data} have changed since the command began",
            rule="all runs of a landscape see the same images",
            fix="restore the file and give the same command again, or choose another --out",
        )
    return TensorImages.of(images)


def _work(run: Run) -> RunResult:
    return train_run(run, _images(_sources[0]))
