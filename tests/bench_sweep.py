"""What a sweep costs beside training: `einlinear sweep` against plain loops over the same runs.

    python tests/bench_sweep.py [--seconds 10] [--runs 12] [--rounds 2]

Both use as many processes as there are cores, with one thread each, all runs of one size. A plain
loop is a process that imports einlinear and calls el.train for its share of the runs, each in a
directory of its own. Sweep and loops take turns. Printed are the time of both, how much of it the
processes spend beside training steps (loading torch most of all), and the difference of the two:
what a sweep costs. Times of steps vary on a busy machine; the share beside them varies less.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

import einlinear as el

LOOP = """
import json, sys, torch
import einlinear as el
torch.set_num_threads(1)
for settings, out in json.loads(sys.stdin.read()):
    el.train(el.RunConfig.from_dict(settings), out)
"""
BASE = {"task": "text", "width": 32, "device": "cpu"}


def steps_of(seconds):
    """Steps that take so long while all cores are busy, by a short run."""
    torch.set_num_threads(1)
    record = el.train(el.RunConfig(**BASE, steps=60))
    return max(10, round(60 * seconds / record.seconds))


def timed(commands, inputs):
    """Seconds until all processes have ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    begin = perf_counter()
    processes = [
        subprocess.Popen(c, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        for c in commands
    ]
    for process, text in zip(processes, inputs, strict=True):
        process.stdin.write(text.encode())
        process.stdin.close()
    for process in processes:
        assert process.wait() == 0
    return perf_counter() - begin


def trained(folder):
    """Seconds in steps of all runs in a folder."""
    return sum(el.read_record(path).seconds for path in folder.iterdir())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    base = BASE | {"steps": steps_of(given.seconds)}
    seeds = list(range(given.runs))
    extra = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            study = out / "study.json"
            study.write_text(json.dumps({"base": base, "grid": {"seed": seeds}}))
            command = [sys.executable, "-m", "einlinear", "sweep", str(study), "--out"]
            sweep = timed([[*command, str(out / "sweep"), "--threads", "1"]], [""])
            steps = trained(out / "sweep" / "runs")
            shares = [
                [(base | {"seed": s}, str(out / "loop" / str(s))) for s in seeds[core::cores]]
                for core in range(cores)
            ]
            loop = timed([[sys.executable, "-c", LOOP]] * cores, map(json.dumps, shares))
            loop_steps = trained(out / "loop")
        beside, loop_beside = cores * sweep / steps - 1, cores * loop / loop_steps - 1
        extra.append(beside - loop_beside)
        print(
            f"sweep {sweep:.1f} s, steps {steps:.1f} of {cores * sweep:.1f} process seconds, "
            f"beside steps {beside:.1%}\n"
            f"loops {loop:.1f} s, steps {loop_steps:.1f} of {cores * loop:.1f} process seconds, "
            f"beside steps {loop_beside:.1%}\n"
            f"the sweep costs {extra[-1]:.1%} of the training time more than loops"
        )
    print(f"{given.runs} runs of about {given.seconds:g} s: {median(extra):.1%} in the median")


if __name__ == "__main__":
    main()
