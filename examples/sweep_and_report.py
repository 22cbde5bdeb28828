"""Compare structures properly: train a grid of runs, then build a report.

A study is a table of settings; every combination is one run. Interrupt the script at any time and
run it again with the same --out: finished runs are kept, the others resume. This study takes
seconds and is far too small to conclude anything, and the report says so.

    python examples/sweep_and_report.py --out sweep
"""

import argparse
import tempfile

import einlinear as el

BASE = {"task": "text", "context": 32, "depth": 1, "steps": 12, "eval_points": 4, "eval_size": 32}
GRID = {"structure": ["dense", "btt"], "width": [16, 32]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="where to keep the runs; a temporary folder unless given")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or temporary
        study = el.Study("btt against dense", BASE, (GRID,))
        result = el.sweep(study, out, executor="inline")
        print(f"{'structure':<12}{'width':>6}{'parameters':>12}{'loss':>8}")
        for record in result.records:
            config = record.config
            row = f"{config.structure:<12}{config.width:>6}{record.counts.params:>12,}"
            print(f"{row}{record.final_loss:>8.3f}")

        files = el.report(out, resamples=50)
        print(f"\n{files.words.headline}")
        print(f"{files.page}: the page; {len(files.figures)} figures, {len(files.tables)} tables")


if __name__ == "__main__":
    main()
