"""How long an analysis takes: 10,000 runs of 50 points, ten structures, three seeds of each size.

python tests/bench_fits.py [--rounds 3]
"""

import argparse
from time import perf_counter

import numpy as np

import einlinear as el

STRUCTURES, RUNS, SEEDS, POINTS = 10, 1000, 3, 50


def made_up(random, number):
    """The columns of one structure, which needs 1 / (1 + number / 10) of the compute of dense."""
    size = np.arange(RUNS) // SEEDS
    macs = np.geomspace(1e4, 1e7, size[-1] + 1)[size][:, None]
    units = macs * np.geomspace(1 / 30, 30, POINTS)
    loss = 1.5 + 60 * (macs**-0.5 + units**-0.5)
    loss = loss * np.exp(0.005 * random.normal(size=(RUNS, 1)))
    name = "dense" if number == 0 else f"s{number}"
    run = np.repeat([f"{name} {k}" for k in range(RUNS)], POINTS)
    group = np.repeat([f"{name} {k}" for k in size], POINTS)
    compute = macs * units / (1 + number / 10)
    seed = np.repeat(np.arange(RUNS) % SEEDS, POINTS)
    return run, compute.ravel(), loss.ravel(), np.full(run.shape, name, object), seed, group


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    random = np.random.default_rng(0)
    parts = [made_up(random, number) for number in range(STRUCTURES)]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    for _ in range(parser.parse_args().rounds):
        times = [perf_counter()]
        data = el.Observations(*columns)
        times.append(perf_counter())
        el.fit_power_law(data)
        times.append(perf_counter())
        el.compute_multiplier(data)
        times.append(perf_counter())
        table, laws, multipliers = np.diff(times)
        print(
            f"{len(data)} points: table {table:.2f} s, laws {laws:.2f}, multipliers "
            f"{multipliers:.2f}, all {times[-1] - times[0]:.2f}"
        )


if __name__ == "__main__":
    main()
