"""Compare methods on many tables, and write the result: `python -m einlinear.bench.replay.compare`.

Writes search.json, search.md and search.svg. With --table, a sweep or packed records, it writes
replay-table.json instead.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from einlinear.bench.replay.families import FAMILIES, Family
from einlinear.bench.replay.page import draw_regrets, search_page
from einlinear.bench.replay.score import (
    BUDGETS,
    PROPOSER_BUDGETS,
    Score,
    replay_seed,
    scores_of,
)
from einlinear.bench.replay.summary import SUMMARY, replay_summary, write_summary
from einlinear.bench.replay.tables import RunTable
from einlinear.files.whole import write_whole
from einlinear.runs.sources import collect_records

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_DIGITS = 5


def compare(
    seeds: int, workers: int, families: Sequence[Family] = FAMILIES
) -> tuple[list[Score], list[Score]]:
    """Scores of methods on tables of all families, and of proposers on tables of the first."""
    jobs = [(family, seed, True) for family in families for seed in range(seeds)]
    jobs += [(families[0], seed, False) for seed in range(seeds)]
    if workers > 1:
        with get_context("spawn").Pool(workers) as processes:
            results = processes.map(replay_seed, jobs, chunksize=1)
    else:
        results = [replay_seed(job) for job in jobs]
    parts = [results[k : k + seeds] for k in range(0, len(results), seeds)]
    methods = [
        score
        for family, part in zip(families, parts, strict=False)
        for score in scores_of(family.name, part, BUDGETS)
    ]
    return methods, scores_of(families[0].name, parts[-1], PROPOSER_BUDGETS)


def write_results(methods: Sequence[Score], proposers: Sequence[Score], out: Path) -> None:
    """Write search.json, search.md and search.svg."""
    out.mkdir(parents=True, exist_ok=True)
    values = {"methods": _plain(methods), "proposers": _plain(proposers)}
    write_whole(out / "search.json", (json.dumps(values, separators=(",", ":")) + "\n").encode())
    write_whole(out / "search.md", search_page(methods, proposers).encode())
    draw_regrets(methods, out / "search.svg")


def read_results(path: Path) -> tuple[list[Score], list[Score]]:
    """Read what `write_results` wrote to search.json."""
    values = json.loads(path.read_bytes())
    methods, proposers = (
        [
            Score(
                row["family"],
                row["method"],
                row["share"],
                tuple(row["regrets"]),
                tuple(row["true_regrets"]),
            )
            for row in values[name]
        ]
        for name in ("methods", "proposers")
    )
    return methods, proposers


def _plain(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [
        {
            "family": score.family,
            "method": score.method,
            "share": score.share,
            "regrets": [round(regret, _DIGITS) for regret in score.regrets],
            "true_regrets": [round(regret, _DIGITS) for regret in score.true_regrets],
        }
        for score in scores
    ]


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--table", type=Path, help="a sweep, or a file of packed records, to replay"
    )
    parser.add_argument("--redraw", action="store_true", help="page and picture of search.json")
    given = parser.parse_args()
    os.environ.update(dict.fromkeys(_THREADS, "1"))  # read when a worker loads numpy
    if given.table is not None:
        path = given.out / SUMMARY
        write_summary(
            replay_summary(RunTable.from_records(collect_records(given.table)), given.seeds), path
        )
        print(path)
        return
    if given.redraw:
        found = read_results(given.out / "search.json")
    else:
        found = compare(given.seeds, given.workers)
    write_results(*found, given.out)
    print(given.out / "search.md")


if __name__ == "__main__":
    main()
