"""Compare checkouts of einlinear, each in a process of its own, all taking turns in one run.

    python tests/bench_versions.py old=../einlinear-old now=. [--widths 1024 4096] [--rounds 9]

Each checkout needs its engine: run `python setup.py build_ext --inplace` there. NAME=FOLDER@avx2
runs a checkout with that instruction set. The table shows the median speed of whole layers (bias,
weight normalisation, through autograd) over nn.Linear in the same process, with the middle four
fifths, and the speed over the first checkout. All processes keep their memory as with
`el.keep_memory`, unless --plain is given.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

GENERIC = "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)"
NAMES = ["btt", "btt(rank=4)", "kronecker", GENERIC, "low_rank", "btt(num_factors=3)"]
NAMES += ["btt: 16 experts", "btt: 64 experts"]
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def make_calls(name, width, tokens):
    """The forward pass and both passes of a layer."""
    import torch

    import einlinear as el

    torch.manual_seed(0)
    structure, _, experts = name.partition(": ")
    if name == "nn.Linear":
        layer = torch.nn.Linear(width, width)
    elif experts:
        number = int(experts.split()[0])
        layer = el.MoELinear(width, width, structure=el.parse(structure), num_experts=number)
        for parameter_name, parameter in layer.named_parameters():
            if "gate" in parameter_name:
                torch.nn.init.normal_(parameter, std=width**-0.5)
    else:
        layer = el.EinsumLinear(width, width, structure=structure)
    x = torch.randn(tokens, width, requires_grad=True)
    grad = torch.randn(tokens, width)
    wanted = [x, *layer.parameters()]

    def forward():
        with torch.no_grad():
            layer(x)

    return {"forward": forward, "both": lambda: torch.autograd.grad(layer(x), wanted, grad)}


def work():
    """Answer requests [name, width, tokens, passes, calls]: the seconds of the best call."""
    calls = {}
    for line in sys.stdin:
        name, width, tokens, passes, count = json.loads(line)
        key = name, width, tokens
        if key not in calls:
            calls = {k: v for k, v in calls.items() if k[1:] == key[1:]} | {key: make_calls(*key)}
        run = calls[key][passes]
        run()
        best = float("inf")
        for _ in range(count):
            start = perf_counter()
            run()
            best = min(best, perf_counter() - start)
        print(json.dumps(best), flush=True)


class Worker:
    """A process that runs one checkout."""

    def __init__(self, folder, is_plain):
        folder, _, target = folder.partition("@")
        env = {**os.environ, "PYTHONPATH": str(Path(folder, "src").resolve())}
        env |= ({} if is_plain else KEPT) | ({"EINLINEAR_TARGET": target} if target else {})
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, *request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def spread(values):
    if len(values) < 3:
        return f"{median(values):6.2f}"
    tenths = quantiles(values, n=10, method="inclusive")
    return f"{median(values):6.2f} ({tenths[0]:.2f}-{tenths[-1]:.2f})"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", metavar="NAME=FOLDER[@TARGET]")
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--rounds", type=int, default=9)
    # The threads of the process before spin for some milliseconds, so a single call may be slow.
    parser.add_argument("--calls", type=int, default=5, help="per turn; the best counts")
    parser.add_argument("--plain", action="store_true", help="do not keep memory")
    given = parser.parse_args()
    folders = dict(each.split("=", 1) for each in given.checkouts)
    workers = {name: Worker(folder, given.plain) for name, folder in folders.items()}
    for width in given.widths:
        names = [n for n in given.names if width < 4096 or n != "btt: 64 experts"]
        times = {(w, n, p): [] for w in workers for n in ["nn.Linear", *names] for p in PASSES}
        for round_number in range(given.rounds):
            print(f"width {width}, round {round_number + 1} of {given.rounds}", file=sys.stderr)
            for name in ["nn.Linear", *names]:
                for passes in PASSES:
                    for worker in workers:
                        request = name, width, given.tokens, passes, given.calls
                        times[worker, name, passes].append(workers[worker].seconds(*request))
        for passes in PASSES:
            print(f"\nwidth {width}, {given.tokens} tokens, {passes}: speed over nn.Linear")
            for name in names:
                cells = []
                for worker in workers:
                    pairs = zip(
                        times[worker, "nn.Linear", passes],
                        times[worker, name, passes],
                        strict=True,
                    )
                    cells.append(f"{worker} {spread([a / b for a, b in pairs])}")
                first = times[next(iter(workers)), name, passes]
                for worker in list(workers)[1:]:
                    ratios = zip(first, times[worker, name, passes], strict=True)
                    cells.append(f"{worker}: {spread([a / b for a, b in ratios])} x the first")
                print(f"  {name:34} {'   '.join(cells)}", flush=True)
    for worker in workers.values():
        worker.end()


PASSES = ("forward", "both")

if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main()
