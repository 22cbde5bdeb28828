"""Is a structured layer ever slower than nn.Linear? Times both over widths, tokens and structures.

    python tests/bench_grid.py FOLDER [--seconds 50] [--check]

Every case is one structure, width and number of tokens, forward alone or forward + backward, with
bias and weight normalisation. nn.Linear and the layer, with each variant in turn, are timed in one
process, in turns. Results are appended to FOLDER/grid.jsonl; run it again to go on after
--seconds. --check prints how often the cost model's choice, and the best variant, take more than
1.05 times as long as nn.Linear: for the half of the cases that the model is fitted to, and for the
other half.
"""

import argparse
import itertools
import json
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import einlinear as el
from einlinear.layers.variants import choose_variant, situation

STRUCTURES = ("btt", "btt(rank=4)", "kronecker", "theta(1/2,1/4,1/4,1/4,1/2,1/4,0)", "low_rank")
WIDTHS = (16, 32, 64, 128, 256, 1024, 4096, 8192)
TOKENS = (1, 8, 64, 512, 2048, 8192)
VARIANTS = ("engine", "dense", "einsum", "strided")
MOST_MACS = 20e9  # of nn.Linear, forward: larger cases only take longer
BOUND = 1.05


def cases():
    """All cases; those of the smallest numbers of multiply-adds first."""
    found = [
        (structure, width, tokens, both)
        for structure, width, tokens in itertools.product(STRUCTURES, WIDTHS, TOKENS)
        for both in (False, True)
        if width**2 * tokens <= MOST_MACS
    ]
    return sorted(found, key=lambda case: case[1] ** 2 * case[2])


def is_held_out(structure, width, tokens):
    """Whether the cost model has not seen a case: a chessboard over the grid."""
    place = STRUCTURES.index(structure) + WIDTHS.index(width) + TOKENS.index(tokens)
    return place % 2 == 1


def action(module, x, both):
    """One call; with gradients of input and parameters if `both`."""
    if not both:
        return lambda: module(x)
    tensors, grad = [x, *module.parameters()], torch.ones_like(module(x))
    return lambda: torch.autograd.grad(module(x), tensors, grad)


def seconds(run, count):
    run()
    start = perf_counter()
    for _ in range(count):
        run()
    return (perf_counter() - start) / count


def measure(structure, width, tokens, both, rounds=9):
    """The best seconds by name, rounds taking turns: others on the machine only add time."""
    torch.manual_seed(0)
    layer = el.EinsumLinear(width, width, structure=structure)
    x = torch.randn(tokens, width, requires_grad=both)
    modules = {"nn.Linear": nn.Linear(width, width)}
    for variant in VARIANTS:
        modules[variant] = el.EinsumLinear(width, width, structure=structure)
        modules[variant].load_state_dict(layer.state_dict())
        modules[variant].choices = {situation(x, tokens, both): variant}
    times = {name: [] for name in modules}
    with torch.set_grad_enabled(both):
        runs = {name: action(module, x, both) for name, module in modules.items()}
        once = {name: min(seconds(run, 1) for _ in range(3)) for name, run in runs.items()}
        limit = 4 * min(once["nn.Linear"], once["engine"])
        runs = {n: r for n, r in runs.items() if n == "nn.Linear" or once[n] < max(limit, 4e-4)}
        counts = {name: max(1, min(100, int(2e-3 / once[name]))) for name in runs}
        rounds = max(3, min(rounds, int(2 / sum(once[n] * (counts[n] + 1) for n in runs))))
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(seconds(run, counts[name]))
    return {name: min(values) for name, values in times.items() if values}


def check(rows):
    """Print how many cases are slower than nn.Linear, for both halves."""
    for is_out, both in itertools.product((False, True), repeat=2):
        half = [r for r in rows if is_held_out(*r["case"][:3]) == is_out and r["case"][3] == both]
        chosen, best = [], []
        for row in half:
            structure, width, tokens, _ = row["case"]
            plan = el.make_plan(el.parse(structure), width, width)
            picked = choose_variant(plan, tokens, "cpu", torch.float32, has_backward=both)
            times = {name: t for name, t in row["seconds"].items() if name != "nn.Linear"}
            linear = row["seconds"]["nn.Linear"]
            best.append((min(times.values()) / linear, row["case"], min(times, key=times.get)))
            chosen.append((times.get(picked, 9 * linear) / linear, row["case"], picked))
        what = ("held out" if is_out else "fitted to") + (", forward + backward" * both)
        for name, found in (("chosen", chosen), ("best", best)):
            slow = sorted((r for r in found if r[0] > BOUND), reverse=True)
            print(f"{what}: {len(slow)} of {len(found)} above {BOUND}, {name} variant")
            for ratio, case, variant in slow[:12]:
                print(f"    {ratio:.2f}  {variant:8} {case[0]}, width {case[1]}, {case[2]} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    path = given.folder / "grid.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if given.check:
        return check(rows)
    given.folder.mkdir(parents=True, exist_ok=True)
    done, start = {tuple(row["case"]) for row in rows}, perf_counter()
    left = [case for case in cases() if case not in done]
    for case in left:
        if perf_counter() - start > given.seconds:
            break
        row = {"case": case, "seconds": measure(*case)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.add(case)
    print(f"{len(done)} of {len(cases())} cases are done")


if __name__ == "__main__":
    main()
