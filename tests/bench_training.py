"""How fast models train, relative to the rate of matrix multiplies in the same run.

    python tests/bench_training.py [width] [steps] [structures]

A GPT of 3 layers, context 128, batch 32, on the embedded text, by the loop of `einlinear train`. The
model's work is 6 x multiply-adds per token (forward and backward); the rate of multiplies is that of
a float32 product (tokens x d) (d x 4d), as large as the model's largest, measured between the steps.
The last columns: what batches cost, and what all else but the steps' own work costs in a run.
"""

import sys
from statistics import median
from time import perf_counter

import torch

import einlinear as el
from einlinear.studies.distributed import Place
from einlinear.studies.plan_run import plan_run
from einlinear.studies.loop import Run


def timed(function):
    start = perf_counter()
    function()
    return perf_counter() - start


def make_run(structure, width, steps):
    config = el.RunConfig(
        task="text", structure=structure, width=width, depth=3, context=128, batch_size=32,
        head_size=64, steps=steps, eval_points=2, eval_size=32,
    )  # fmt: skip
    place = Place(0, 1, torch.device("cpu"))
    torch.manual_seed(0)
    return Run(config, place, plan_run(config, is_checked=False), None, ())


def main(width=256, steps=12, *structures):
    width, steps = int(width), int(steps)
    structures = structures or ("dense", "btt", "low_rank", "kronecker")
    runs = {name: make_run(name, width, steps) for name in structures}
    x, w = torch.randn(32 * 128, width), torch.randn(width, 4 * width)
    out = torch.empty(32 * 128, 4 * width)
    rates, seconds = [], {name: [] for name in runs}
    for step in range(steps):
        for name, run in runs.items():
            rates.append(x.numel() * w.shape[1] / timed(lambda: torch.mm(x, w, out=out)))
            seconds[name].append(timed(lambda run=run: run.state.step(step)))
    best, usual = max(rates), median(rates)
    print(f"float32 multiplies: {best / 1e9:.1f} GMAC/s at best, {usual / 1e9:.1f} usually")
    for name, run in runs.items():
        macs = 3 * run.plan.counts.macs * run.plan.units_per_step
        step = median(seconds[name][2:])
        rate = macs / step
        data = run.state.data_seconds / sum(seconds[name])
        print(
            f"{name:12s} {step * 1e3:7.1f} ms a step ({min(seconds[name]) * 1e3:.1f} at best)  "
            f"{rate / 1e9:6.1f} GMAC/s, {rate / usual:.0%} of the usual, {rate / best:.0%} of the "
            f"best   {median(seconds['dense']) / step:5.2f} x dense   batches {data:.2%}"
            if "dense" in seconds
            else f"{name:12s} {step * 1e3:7.1f} ms a step, {rate / usual:.0%} of the usual"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
